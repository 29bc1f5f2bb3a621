"""Measures one shard: a reference pass for each request, then rotated timed passes of all methods.
The only clock.

A worker holds the target and all the methods, so everything that is compared runs in one process
on one device.
"""

import hashlib
import os
import resource
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from specbench import lossless, registry
from specbench.config import BASELINE, RunConfig
from specbench.decode import Decoder
from specbench.depth import Fixed
from specbench.method import Method, Request, Row
from specbench.records import (
    FailureRecord,
    Record,
    ReferenceRecord,
    RequestRecord,
    ResourceRecord,
    TimingRecord,
)
from specbench.sampling import Sampling, request_key
from specbench.target import load_target
from specbench.workloads import (
    Prompt,
    Workload,
    build_prompt,
    is_looping,
    load_workload,
    template_sha256,
)

_WARM_UP = (
    "The quick brown fox jumps over the lazy dog. The quick brown fox jumps over the lazy cat."
)


@dataclass(frozen=True)
class Shard:
    """A block of a workload's prompts, by their places in it; the unit of work, of retries and of
    result files."""

    id: str
    workload: str
    first: int
    last: int


class Stopwatch:
    """Seconds by phase. On a GPU it marks the stream and waits once, at the end."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._marks: list[tuple[str, Any]] = [("", self._mark())]

    def lap(self, phase: str) -> None:
        """Ends a phase."""
        self._marks.append((phase, self._mark()))

    def _mark(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def seconds(self) -> dict[str, float]:
        """The sum of each phase's laps."""
        if self._cuda:
            torch.cuda.synchronize()
        total: dict[str, float] = {}
        for (_, begin), (phase, end) in zip(self._marks, self._marks[1:], strict=False):
            lap = begin.elapsed_time(end) / 1e3 if self._cuda else end - begin
            total[phase] = total.get(phase, 0.0) + lap
        return total


@dataclass(frozen=True)
class _Pass:
    """One decoding of a batch."""

    rows: list[Row]
    seconds: dict[str, float]
    num_forwards: int


@dataclass(frozen=True)
class _Job:
    """A request with its reference."""

    request: Request
    reference: list[int]


class Worker:
    """Loads the target and the methods once, then measures shards.

    Args:
        config: the run's settings.
        num_threads: threads of this process; None leaves them alone.

    Raises:
        ValueError: the target or a method cannot be loaded.
    """

    def __init__(self, config: RunConfig, num_threads: int | None = None) -> None:
        if num_threads is not None:
            torch.set_num_threads(num_threads)
        self.config = config
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.target = load_target(
            config.target, dtype=config.dtype, device=device, num_devices=config.gpus_per_worker
        )
        self.methods = {name: self._load(name) for name in config.methods}
        self._workloads: dict[str, Workload] = {}
        self._warm_up()

    def _load(self, name: str) -> Method:
        cls = registry.load_method(name)
        return cls(self.target, self.config.method_config(name, cls))

    def _warm_up(self) -> None:
        prompt = self._prompt_ids([_WARM_UP], [])
        for name in self.methods:
            request = Request(id="warm-up", prompt=prompt, max_new_tokens=8)
            for sampling in (Sampling(), Sampling(temperature=1.0, rule=self.config.sampling)):
                self._decode(name, [request], sampling)

    def _prompt_ids(
        self, turns: Sequence[str], answers: Sequence[str], instruction: str = "{prompt}"
    ) -> tuple[int, ...]:
        if self.target.tokenizer is None:
            raise ValueError(f"target {self.target.name!r} has no tokenizer")
        return build_prompt(self.target.tokenizer, turns, answers, instruction)

    def describe(self) -> dict[str, Any]:
        """What is measured and on what, for the provenance."""
        target = self.target
        return {
            "target": {
                "name": target.name,
                "dtype": str(target.dtype).removeprefix("torch."),
                "num_parameters": target.num_parameters,
                "num_weight_bytes": target.num_weight_bytes,
                "packed": target.packed,
                "weights_sha256": target.fingerprint,
                "note": target.note,
            },
            "methods": {
                name: method.describe() | {"lossy": method.typical is not None}
                for name, method in self.methods.items()
            },
            "device": torch.cuda.get_device_name() if target.device.type == "cuda" else "cpu",
            "threads_per_worker": torch.get_num_threads(),
            "template_sha256": template_sha256(target.tokenizer) if target.tokenizer else None,
        }

    def run(self, shard: Shard) -> list[Record]:
        """All records of a shard. A request that fails becomes a failure record and nothing
        else."""
        workload = self._workload(shard.workload)
        sampling = self.config.sampling_for(workload.decoding)
        records: list[Record] = []
        jobs: list[_Job] = []
        for prompt in workload.prompts[shard.first : shard.last]:
            self._refer(workload, prompt, sampling, records, jobs)
        size = self.config.batch_size
        for begin in range(0, len(jobs), size):
            self._measure(workload.name, jobs[begin : begin + size], sampling, records)
        records.append(self._resources())
        return records

    def _workload(self, name: str) -> Workload:
        if name not in self._workloads:
            self._workloads[name] = load_workload(name, self.config.prompts)
        return self._workloads[name]

    def _refer(
        self,
        workload: Workload,
        prompt: Prompt,
        sampling: Sampling,
        records: list[Record],
        jobs: list[_Job],
    ) -> None:
        """Decodes a prompt's turns by the baseline, untimed; later turns see the reference's
        answers."""
        answers: list[str] = []
        for turn in range(len(prompt.turns)):
            request_id = prompt.id if turn == 0 else f"{prompt.id}/{turn + 1}"
            try:
                request = Request(
                    id=request_id,
                    prompt=self._prompt_ids(
                        prompt.turns[: turn + 1], answers, workload.instruction
                    ),
                    max_new_tokens=self.config.max_new_tokens,
                    stop=workload.decoding.stop,
                    key=request_key(self.config.seed, f"{workload.name}/{request_id}"),
                )
                row = self._decode(BASELINE, [request], sampling).rows[0]
                record = self._reference_record(workload, row, sampling)
            except Exception as error:
                reason = _reason(error)
                records += [
                    FailureRecord(
                        workload=workload.name,
                        request=prompt.id if late == 0 else f"{prompt.id}/{late + 1}",
                        method=None,
                        reason=reason if late == turn else f"turn {turn + 1} failed",
                    )
                    for late in range(turn, len(prompt.turns))
                ]
                return
            answers.append(record.text)
            records.append(record)
            jobs.append(_Job(request, row.output))

    def _reference_record(
        self, workload: Workload, row: Row, sampling: Sampling
    ) -> ReferenceRecord:
        request, output = row.request, row.output
        logits_TV = lossless.score(self.target, request.prompt, output)
        return ReferenceRecord(
            workload=workload.name,
            workload_kind=workload.kind,
            request=request.id,
            num_prompt_tokens=len(request.prompt),
            tokens=output,
            finish=row.finish or "",
            text=self._text(row),
            entropy_nats=lossless.mean_entropy(logits_TV),
            looping=is_looping(output),
            decoding={
                **asdict(sampling),
                "max_new_tokens": request.max_new_tokens,
                "stop": list(request.stop),
            },
        )

    def _text(self, row: Row) -> str:
        """The output as text, without what ended it."""
        assert self.target.tokenizer is not None
        tokens = row.output[:-1] if row.finish == "eos" else row.output
        text = str(self.target.tokenizer.decode(tokens))
        ends = [text.find(stop) for stop in row.request.stop if stop in text]
        return text[: min(ends)] if ends else text

    def _decode(self, name: str, requests: Sequence[Request], sampling: Sampling) -> _Pass:
        method = self.methods[name]
        config = method.config
        watch = Stopwatch(self.target.device)
        decoder = Decoder(
            self.target,
            method,
            Fixed(config.depth, config.max_nodes),
            sampling,
            max_rows=len(requests),
            lap=watch.lap,
        )
        rows = decoder.join(requests)
        num_forwards = 0
        while decoder.rows:
            decoder.step()
            num_forwards += 1
        return _Pass(rows, watch.seconds(), num_forwards)

    def _measure(
        self, workload: str, jobs: Sequence[_Job], sampling: Sampling, records: list[Record]
    ) -> None:
        """Every method decodes the batch once in each round, in an order that rotates."""
        names = list(self.methods)
        failed: set[str] = set()
        for round_ in range(self.config.rounds):
            turn = round_ % len(names)
            for order, name in enumerate(names[turn:] + names[:turn]):
                if name in failed:
                    continue
                try:
                    done = self._decode(name, [job.request for job in jobs], sampling)
                except Exception:
                    failed.add(name)
                    self._find_failures(workload, jobs, name, sampling, records)
                    continue
                if round_ == 0:
                    for job, row in zip(jobs, done.rows, strict=True):
                        records.append(self._request_record(workload, name, job, row, sampling))
                records.append(_timing(workload, name, done, round_, order))

    def _find_failures(
        self,
        workload: str,
        jobs: Sequence[_Job],
        name: str,
        sampling: Sampling,
        records: list[Record],
    ) -> None:
        """After a batch failed: decodes its requests one by one; those that work are kept,
        untimed."""
        done = {
            record.request
            for record in records
            if isinstance(record, RequestRecord) and record.method == name
        }
        for job in jobs:
            try:
                row = self._decode(name, [job.request], sampling).rows[0]
                if job.request.id not in done:
                    records.append(self._request_record(workload, name, job, row, sampling))
            except Exception as error:
                records.append(
                    FailureRecord(
                        workload=workload,
                        request=job.request.id,
                        method=name,
                        reason=_reason(error),
                    )
                )

    def _request_record(
        self, workload: str, name: str, job: _Job, row: Row, sampling: Sampling
    ) -> RequestRecord:
        lossy = self.methods[name].typical is not None and not sampling.greedy
        if lossy or row.drawn:
            verdict, divergence = "lossy" if lossy else "law", None
        else:
            comparison = lossless.compare(
                self.target, job.request, sampling, job.reference, row.output
            )
            verdict, divergence = comparison.verdict, comparison.divergence
        return RequestRecord(
            workload=workload,
            request=job.request.id,
            method=name,
            tokens=row.output,
            finish=row.finish or "",
            steps=[list(step) for step in row.steps],
            lossless=verdict,
            divergence=divergence,
        )

    def _resources(self) -> ResourceRecord:
        if self.target.device.type == "cuda":
            peak_mib = torch.cuda.max_memory_allocated() / 2**20
        else:
            peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
        return ResourceRecord(
            peak_memory_mib=round(peak_mib, 1),
            num_threads=torch.get_num_threads(),
            load_average=os.getloadavg()[0],
        )


def _timing(workload: str, name: str, done: _Pass, round_: int, order: int) -> TimingRecord:
    seconds = done.seconds
    phases = {phase: seconds.get(phase, 0.0) for phase in ("draft", "forward", "bookkeeping")}
    return TimingRecord(
        workload=workload,
        requests=[row.request.id for row in done.rows],
        method=name,
        round=round_,
        order=order,
        num_tokens=sum(len(row.output) for row in done.rows),
        num_forwards=done.num_forwards,
        prefill_s=seconds.get("prefill", 0.0),
        decode_s=sum(phases.values()),
        draft_s=phases["draft"],
        forward_s=phases["forward"],
        bookkeeping_s=phases["bookkeeping"],
    )


def _reason(error: Exception) -> str:
    text = str(error).strip().split("\n")[0]
    return text if isinstance(error, ValueError) else f"{type(error).__name__}: {text}"


def plan_shards(workload: str, num_prompts: int, batch_size: int) -> list[Shard]:
    """Cuts a workload into blocks of prompts; the same whatever the number of workers."""
    size = max(4, batch_size)
    name = "".join(c if c.isalnum() or c in "-_." else "-" for c in workload)
    tag = hashlib.sha256(workload.encode()).hexdigest()[:8]
    stem = name if name == workload else f"{name}-{tag}"
    return [
        Shard(f"{stem}-{first:05d}", workload, first, min(first + size, num_prompts))
        for first in range(0, num_prompts, size)
    ]
