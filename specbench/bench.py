"""Measures one shard: a reference pass for each request, then rotated timed passes of all methods.

Everything that is compared runs in one process, on one device, in turns.
"""

import contextlib
import math
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from specbench import lossless
from specbench.arithmetic import count_flops
from specbench.config import RunConfig
from specbench.controllers import Controllers
from specbench.decode import Decoder
from specbench.messages import in_one_line
from specbench.method import Method, Request, Row
from specbench.records import (
    BASELINE,
    FailureRecord,
    Flops,
    Record,
    ReferenceRecord,
    RequestRecord,
    TimingRecord,
)
from specbench.sampling import Sampling, request_key
from specbench.shards import Shard, request_ids
from specbench.stopwatch import Stopwatch
from specbench.target import Target
from specbench.workloads import Prompt, Workload, build_prompt, is_looping

_WARM_UP = (
    "The quick brown fox jumps over the lazy dog. The quick brown fox jumps over the lazy cat."
)
_WARM_UP_TOKENS, _WARM_UP_ROWS = 8, 16


@dataclass(frozen=True)
class _Pass:
    """One decoding of a batch."""

    rows: list[Row]
    seconds: dict[str, float]
    num_forwards: int


@dataclass(frozen=True)
class Job:
    """A request with its reference."""

    request: Request
    reference: list[int]


@dataclass
class _Measured:
    """What one method made of a batch: its outputs and times, or why requests failed."""

    outputs: dict[str, RequestRecord] = field(default_factory=dict)
    timings: list[TimingRecord] = field(default_factory=list)
    failures: dict[str, str] = field(default_factory=dict)
    error: str | None = None
    """Why a pass over the whole batch failed; then no time of it counts."""

    def records(self, workload: str, method: str) -> Iterator[Record]:
        """All of it, as it is filed: a request that failed has no number."""
        yield from (out for name, out in self.outputs.items() if name not in self.failures)
        if not self.error and not self.failures:
            yield from self.timings
        for request, reason in self.failures.items():
            yield FailureRecord(workload=workload, request=request, method=method, reason=reason)


class Bench:
    """Measures shards on what a worker has loaded.

    Args:
        config: the run's settings.
        target: the target.
        methods: by name, the baseline first.
    """

    def __init__(self, config: RunConfig, target: Target, methods: Mapping[str, Method]) -> None:
        self.config, self.target, self.methods = config, target, methods
        self.controllers = Controllers(config.batch_size)

    def warm_up(self) -> None:
        """Decodes a little with every method, greedily and not, in a batch."""
        prompt = self._prompt_ids([_WARM_UP], [])
        requests = [
            Request(id=f"warm-up-{row}", prompt=prompt, max_new_tokens=_WARM_UP_TOKENS)
            for row in range(min(self.config.batch_size, _WARM_UP_ROWS))
        ]
        for name in self.methods:
            for sampling in (Sampling(), Sampling(temperature=1.0, rule=self.config.sampling)):
                # A method that cannot decode fails on its prompts, where it is recorded.
                with contextlib.suppress(Exception):
                    self._decode(name, requests, sampling)

    def _prompt_ids(
        self, turns: Sequence[str], answers: Sequence[str], instruction: str = "{prompt}"
    ) -> tuple[int, ...]:
        assert self.target.tokenizer is not None
        return build_prompt(self.target.tokenizer, turns, answers, instruction)

    def measure(self, shard: Shard) -> list[Record]:
        """The records of a shard's prompts. A request that fails becomes a failure record and
        nothing else.

        Raises:
            torch.AcceleratorError: the device can no longer be used.
        """
        workload = shard.workload
        sampling = self.config.sampling_for(workload.decoding)
        records: list[Record] = []
        jobs: list[Job] = []
        for prompt in workload.prompts:
            self.refer(workload, prompt, sampling, records, jobs)
        size = self.config.batch_size
        for number, begin in enumerate(range(0, len(jobs), size)):
            batch = jobs[begin : begin + size]
            records += self._measure(workload.name, batch, sampling, first=number)
        return records

    def refer(
        self,
        workload: Workload,
        prompt: Prompt,
        sampling: Sampling,
        records: list[Record],
        jobs: list[Job],
    ) -> None:
        """Decodes a prompt's turns by the baseline, untimed; later turns see the reference's
        answers."""
        answers: list[str] = []
        ids = list(request_ids(prompt))
        for turn, request_id in enumerate(ids):
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
                reasons = [in_words(error)] + [f"turn {turn + 1} failed"] * (len(ids) - turn - 1)
                records += failures(workload.name, ids[turn:], reasons)
                return
            answers.append(record.text)
            records.append(record)
            jobs.append(Job(request, row.output))

    def _reference_record(
        self, workload: Workload, row: Row, sampling: Sampling
    ) -> ReferenceRecord:
        request, output = row.request, row.output
        logits_TV = lossless.score(self.target, request.prompt, output)
        entropy_nats = lossless.mean_entropy(logits_TV)
        if not math.isfinite(entropy_nats):
            raise ValueError("the target's logits are no numbers along its own output")
        return ReferenceRecord(
            workload=workload.name,
            workload_kind=workload.kind,
            request=request.id,
            num_prompt_tokens=len(request.prompt),
            tokens=output,
            finish=row.finish or "",
            text=self._text(row),
            # The last digits of a sum depend on how many threads it was cut up for.
            entropy_nats=round(entropy_nats, 4),
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
        watch = Stopwatch(self.target.device)
        decoder = Decoder(
            self.target,
            method,
            self.controllers.make(method),
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
        self, workload: str, jobs: Sequence[Job], sampling: Sampling, first: int
    ) -> list[Record]:
        """Every method decodes the batch once in each round, in an order that rotates with rounds
        and batches: in few rounds no method keeps to one end of it.

        Args:
            first: the place of the method that begins.
        """
        names = list(self.methods)
        measured = {name: _Measured() for name in names}
        for round_ in range(self.config.rounds):
            turn = (first + round_) % len(names)
            for order, name in enumerate(names[turn:] + names[:turn]):
                so_far = measured[name]
                if so_far.error:
                    continue
                try:
                    done = self._decode(name, [job.request for job in jobs], sampling)
                    self._take(workload, name, jobs, done, sampling, so_far)
                except Exception as error:
                    so_far.error = in_words(error)
                else:
                    so_far.timings.append(_timing(workload, name, done, round_, order))
        for name, so_far in measured.items():
            if so_far.error:
                self._find_failures(workload, name, jobs, sampling, so_far)
        return [
            record for name, so_far in measured.items() for record in so_far.records(workload, name)
        ]

    def _take(
        self,
        workload: str,
        name: str,
        jobs: Sequence[Job],
        done: _Pass,
        sampling: Sampling,
        so_far: _Measured,
    ) -> None:
        """Keeps the outputs of a method's first round, and holds those of later rounds against
        them."""
        for job, row in zip(jobs, done.rows, strict=True):
            first = so_far.outputs.get(job.request.id)
            if first is None:
                record = self._request_record(workload, name, job, row, sampling)
                so_far.outputs[job.request.id] = record
            elif first.tokens != row.output:
                so_far.failures[job.request.id] = "its output changed from one round to another"

    def _find_failures(
        self,
        workload: str,
        name: str,
        jobs: Sequence[Job],
        sampling: Sampling,
        so_far: _Measured,
    ) -> None:
        """After a batch failed: decodes its requests one by one; those that work are kept,
        untimed. If all of them do, they failed together."""
        so_far.outputs.clear()
        for job in jobs if len(jobs) > 1 else ():
            try:
                row = self._decode(name, [job.request], sampling).rows[0]
                record = self._request_record(workload, name, job, row, sampling)
                so_far.outputs[job.request.id] = record
            except Exception as error:
                so_far.failures[job.request.id] = in_words(error)
        if not so_far.failures:
            so_far.failures |= {job.request.id: str(so_far.error) for job in jobs}

    def _request_record(
        self, workload: str, name: str, job: Job, row: Row, sampling: Sampling
    ) -> RequestRecord:
        found = lossless.judge(
            self.target,
            sampling,
            job.reference,
            row,
            typical=self.methods[name].typical is not None,
        )
        return RequestRecord(
            workload=workload,
            request=job.request.id,
            method=name,
            tokens=row.output,
            finish=row.finish or "",
            steps=[list(step) for step in row.steps],
            lossless=found.verdict,
            divergence=found.divergence,
            surprise=found.surprise,
            flops=self._flops(name, row),
        )

    def _flops(self, name: str, row: Row) -> Flops | None:
        """None where the target or the method does not say what it costs."""
        method = self.methods[name]
        if method.fingerprint and type(method).draft_cost is Method.draft_cost:
            return None
        try:
            return count_flops(method, len(row.request.prompt), row.steps)
        except ValueError:
            return None


def failures(workload: str, requests: Sequence[str], reasons: Sequence[str]) -> list[Record]:
    """The records of requests that failed before any method had its turn."""
    return [
        FailureRecord(workload=workload, request=request, method=None, reason=reason)
        for request, reason in zip(requests, reasons, strict=True)
    ]


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


def in_words(error: Exception) -> str:
    """Why a request failed, in one line; what is no message of ours, with its place.

    Raises:
        torch.AcceleratorError: that very error: after it the process can do nothing more on its
        device, so it is the worker that failed.
    """
    if isinstance(error, torch.AcceleratorError):
        raise error
    text = in_one_line(error)
    if isinstance(error, ValueError):
        return text
    place = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {text} ({Path(place.filename).name}, line {place.lineno})"
