"""A serving run: the references, the baseline's capacity, then at each rate every method under
every controller, each pass filed as soon as it is done."""

import os
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch

from specbench import lossless, provenance
from specbench.bench import Job
from specbench.config import settings_from
from specbench.controllers import Controllers
from specbench.decode import Decoder
from specbench.depth import Choice, DepthController
from specbench.filing import shard_path
from specbench.layout import Node, most_threads, plan_layout
from specbench.plan import check_writable, go_on, open_shards, run_info
from specbench.progress import Progress
from specbench.records import BASELINE, FailureRecord, Record, ReferenceRecord
from specbench.serving import metrics
from specbench.serving.arrivals import Arrival, arrive
from specbench.serving.clock import WallClock
from specbench.serving.config import Entry, ServeConfig
from specbench.serving.records import (
    REFERENCES,
    SERVING,
    PassRecord,
    ServedRecord,
    ServingRecord,
    ServingRun,
    as_pass,
    read_serving,
)
from specbench.serving.server import Server, Visit
from specbench.shards import load_workloads
from specbench.target.loading import refuse_unsupported, resolve
from specbench.worker import Worker, hush
from specbench.workloads import Workload

_SATURATED = "saturated"
"""The shard of the pass that measures capacity."""
_NUM_BATCHES = 4
"""Requests of that pass, in largest batches."""


def serve(config: ServeConfig, folder: Path, notes: Sequence[str] = ()) -> ServingRun:
    """Serves all that the settings say.

    Args:
        folder: a new one.
        notes: what the user should know, beside what is found.

    Returns:
        The run as filed.

    Raises:
        ValueError: a setting that does not fit the target, a folder that cannot be used, or no
        prompt can be decoded.
    """
    if folder.exists() and any(folder.iterdir()):
        instead = f"go on with `{resume_command(folder)}` or " * (folder / SERVING.info).exists()
        raise ValueError(f"{folder} is not empty; {instead}choose another --out")
    return _serve(config, folder, notes)


def resume(folder: Path) -> ServingRun:
    """Goes on with a run: what is finished is kept, and what is damaged is served again.

    Raises:
        ValueError: the folder holds no serving run, or what it ran on is no more.
    """
    info = SERVING.read_info(folder)
    config = settings_from(ServeConfig, info["settings"])
    left = open_shards(SERVING, folder, info["shards"])
    if not left:
        return read_serving(folder)
    notes = [f"served again: {reason}" for reason in left.values() if reason]
    return _serve(config, folder, notes, info, list(left))


def resume_command(folder: Path) -> str:
    """What to type to go on with a run."""
    return f"specbench serve --resume {shlex.quote(str(folder))}"


def _serve(
    config: ServeConfig,
    folder: Path,
    notes: Sequence[str],
    before: dict[str, Any] | None = None,
    left: Sequence[str] = (),
) -> ServingRun:
    """Serves what is not filed yet.

    Args:
        before: if the run goes on, what was filed of its settings and provenance.
        left: likewise, the shards that are still to come.
    """
    started = provenance.collect()
    hush()
    refuse_unsupported(resolve(config.target), config.target)
    workloads = choose_prompts(load_workloads(config.workloads, None), config.requests, config.seed)
    check_writable(folder)
    node = Node(os.cpu_count() or 1, torch.cuda.device_count())
    layout = plan_layout([node], 1, 1, most_threads())
    num_passes = len(config.entries()) * len(config.loads or config.rates) * config.rounds
    num_parts = 1 + num_passes + (1 if config.loads else 0)
    with Progress(num_parts, num_parts - len(left) if before else 0) as progress:
        for note in notes:
            progress.say(note)
        progress.say("loading the target and the methods")
        worker = Worker(config.run_config(), layout.num_threads)
        serving = _Serving(config, folder, workloads, worker, progress)
        info = run_info(config.to_dict(), started, [worker.describe()], workloads, serving.shards())
        if before is not None:
            go_on(SERVING, folder, before, info)
            for shard in left:
                shard_path(folder, shard).unlink(missing_ok=True)
        SERVING.write_info(folder, info if before is None else before)
        serving.run()
    return read_serving(folder)


def choose_prompts(workloads: Sequence[Workload], count: int, seed: int) -> list[Workload]:
    """So many of all prompts, by chance and without their later turns.

    Raises:
        ValueError: there are not so many.
    """
    every = [(w, place) for w, one in enumerate(workloads) for place in range(one.num_prompts)]
    if count > len(every):
        raise ValueError(
            f"--requests {count} is out of range; valid: 1..{len(every)}, as many as the workloads "
            "have prompts"
        )
    order = np.random.default_rng(seed).permutation(len(every))[:count].tolist()
    chosen = sorted(every[i] for i in order)
    return [
        replace(
            workload,
            prompts=tuple(
                replace(prompt, turns=prompt.turns[:1])
                for place, prompt in enumerate(workload.prompts)
                if (w, place) in chosen
            ),
        )
        for w, workload in enumerate(workloads)
    ]


class _Serving:
    """One run on a worker that has loaded everything."""

    def __init__(
        self,
        config: ServeConfig,
        folder: Path,
        workloads: Sequence[Workload],
        worker: Worker,
        progress: Progress,
    ) -> None:
        self.config, self.folder, self.workloads = config, folder, workloads
        self.worker, self.progress = worker, progress
        self.entries = config.entries()
        self.sampling = worker.config.sampling_for(workloads[0].decoding)
        self.jobs: dict[tuple[str, str], Job] = {}
        """By workload and id; in the order of arrival."""
        self.controllers = Controllers(config.max_batch)
        for entry in self.entries:
            self._controller(entry)

    def _controller(self, entry: Entry) -> DepthController:
        choice = Choice.read(entry.controller)
        return self.controllers.make(self.worker.methods[entry.method], choice)

    def shards(self) -> list[str]:
        """All that will be filed."""
        saturated = [_SATURATED] if self.config.loads else []
        return [REFERENCES, *saturated, *(self._shard(*turn) for turn in self._turns())]

    def _turns(self) -> Iterator[tuple[int, int, Entry]]:
        """Round, place of the rate, and what is served with, in turns: no method always goes
        first."""
        speeds = len(self.config.loads or self.config.rates)
        for number, (round_, speed) in enumerate(product(range(self.config.rounds), range(speeds))):
            first = number % len(self.entries)
            for entry in self.entries[first:] + self.entries[:first]:
                yield round_, speed, entry

    def _shard(self, round_: int, speed: int, entry: Entry) -> str:
        return f"{round_:02d}-{speed:02d}-{self.entries.index(entry):02d}-{entry.method}"

    def run(self) -> None:
        """All of it."""
        self._refer()
        capacity = self._measure_capacity() if self.config.loads else 1.0
        for number, (round_, speed, entry) in enumerate(self._turns()):
            share = (self.config.loads or self.config.rates)[speed]
            about = PassRecord(
                method=entry.method,
                controller=entry.controller,
                load=share if self.config.loads else None,
                rate=share * capacity,
                round=round_,
                order=number % len(self.entries),
            )
            self._pass(self._shard(round_, speed, entry), about, list(self.jobs))

    def _refer(self) -> None:
        """Decodes every request alone by the baseline: what the outputs are held against."""
        self.progress.say("decoding the references")
        self.progress.start(REFERENCES)
        records: list[Record] = []
        for workload in self.workloads:
            for prompt in workload.prompts:
                jobs: list[Job] = []
                self.worker.bench.refer(workload, prompt, self.sampling, records, jobs)
                self.jobs |= {(workload.name, job.request.id): job for job in jobs}
        kept = [r for r in records if isinstance(r, ReferenceRecord | FailureRecord)]
        if not shard_path(self.folder, REFERENCES).exists():
            SERVING.write_shard(self.folder, REFERENCES, kept)
            self.progress.finish(REFERENCES)
        if not self.jobs:
            reasons = [r.reason for r in kept if isinstance(r, FailureRecord)]
            raise ValueError(
                f"no prompt could be decoded, {self.folder} says why; the first: {reasons[0]}"
            )
        names = list(self.jobs)
        order = np.random.default_rng(self.config.seed).permutation(len(names)).tolist()
        self.jobs = {names[i]: self.jobs[names[i]] for i in order}

    def _measure_capacity(self) -> float:
        """Requests per second that the baseline can do at the largest batch."""
        entry = next(entry for entry in self.entries if entry.method == BASELINE)
        about = PassRecord(
            method=entry.method,
            controller=entry.controller,
            load=None,
            rate=None,
            round=0,
            order=0,
        )
        few = list(self.jobs)[: _NUM_BATCHES * self.config.max_batch]
        done = as_pass(self._pass(_SATURATED, about, few))
        if not done.served:
            raise ValueError(f"the baseline serves nothing: {done.failures[0].reason}")
        found = metrics.capacity(done.served)
        self.progress.say(f"the baseline's capacity: {found:.3g} requests/s")
        return found

    def _pass(
        self, shard: str, about: PassRecord, names: Sequence[tuple[str, str]]
    ) -> list[ServingRecord]:
        """Serves some requests, and files what they saw; what is filed already is read."""
        filed = shard_path(self.folder, shard)
        if filed.exists():
            return SERVING.read_shard(filed)
        label = f"{shard} {about.controller}"
        self.progress.start(label)
        rate = float("inf") if about.rate is None else about.rate
        # The ids of two workloads may be the same.
        requests = [self.jobs[name].request for name in names]
        seed = (self.config.seed, about.round)
        arrivals = arrive(requests, rate, seed, self.config.swing)
        visits = self._serve(Entry(about.method, about.controller), arrivals)
        records: list[ServingRecord] = [about]
        for (workload, _), visit in zip(names, visits, strict=True):
            records.append(self._record(about.method, workload, visit))
        SERVING.write_shard(self.folder, shard, records)
        self.progress.finish(label)
        return records

    def _serve(self, entry: Entry, arrivals: Sequence[Arrival]) -> list[Visit]:
        target, method = self.worker.target, self.worker.methods[entry.method]
        controller, clock = self._controller(entry), WallClock(target.device)

        def make_decoder(max_rows: int) -> Decoder:
            return Decoder(target, method, controller, self.sampling, max_rows, clock.lap)

        return Server(make_decoder, self.config.max_batch, clock).serve(arrivals)

    def _record(self, method: str, workload: str, visit: Visit) -> ServedRecord | FailureRecord:
        request, row = visit.request, visit.row
        if visit.failure is not None or row is None:
            return FailureRecord(
                workload=workload, request=request.id, method=method, reason=str(visit.failure)
            )
        found = lossless.judge(
            self.worker.target,
            self.sampling,
            self.jobs[workload, request.id].reference,
            row,
            typical=self.worker.methods[method].typical is not None,
        )
        return ServedRecord(
            workload=workload,
            request=request.id,
            arrival_s=visit.arrival.time_s,
            start_s=visit.start_s,
            step_ends_s=visit.step_ends_s,
            batches=visit.batches,
            steps=[list(step) for step in row.steps],
            tokens=row.output,
            finish=row.finish or "",
            lossless=found.verdict,
            divergence=found.divergence,
            surprise=found.surprise,
        )
