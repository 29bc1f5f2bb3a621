"""What a run writes: one file per shard with per-request, per-timing and per-failure records, and
the run's provenance.

A run's folder holds ``run.json`` (settings and provenance) and ``shards/*.jsonl``. Files appear
whole or not at all. Everything that is shown is computed from these records; nothing aggregated is
stored as the truth.
"""

import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from specbench.filing import Format, Strict, shard_path

BASELINE = "vanilla"
"""The method that every speed-up is measured against; it drafts nothing."""
LOSSLESS = ("exact", "tie", "broken", "law", "lossy")


@dataclass(frozen=True, kw_only=True)
class ReferenceRecord(Strict):
    """The untimed vanilla pass of one request."""

    workload: str
    workload_kind: str
    request: str
    """Id of the request: the prompt's id, and ``/2``, ``/3``, ... for later turns."""
    num_prompt_tokens: int
    tokens: list[int]
    finish: str
    text: str
    entropy_nats: float
    """Mean next-token entropy of the target at T=1 along the output."""
    looping: bool
    """Whether the output runs into a loop."""
    decoding: dict[str, Any]
    """temperature, top_k, top_p, rule, max_new_tokens, stop."""


@dataclass(frozen=True, kw_only=True)
class Divergence(Strict):
    """Where an output first differs from the reference, and by how much the target preferred the
    reference's token."""

    position: int
    """Index in the output."""
    expected: int | None
    """The reference's token; None where its output had ended."""
    found: int | None
    gap: float | None
    """Logit gap between the two tokens, noise included at T>0; None where only one of the outputs
    had ended, or where top-k or top-p cut one of the two tokens."""
    tolerance: float | None
    """The gap up to which it is a tie; None where only one of the outputs had ended."""
    expected_logit: float | None = None
    """The target's logit of the reference's token; None as for the tolerance, or minus infinity."""
    found_logit: float | None = None

    def __post_init__(self) -> None:
        assert self.gap is None or self.tolerance is not None, "a gap has a tolerance"


@dataclass(frozen=True, kw_only=True)
class Surprise(Strict):
    """How surprising an output's tokens were to the target, each given all before it: sums over the
    output. The more outputs, the nearer comes (nats - expected) / sqrt(variance) to a standard
    normal number, if and only if the tokens are as surprising as the target's distribution says."""

    nats: float
    """Minus the log-probabilities after temperature, top-k and top-p."""
    expected_nats: float
    """The entropies of the distributions that the tokens should come from."""
    variance: float
    """Likewise, the variances of the log-probability."""

    def __post_init__(self) -> None:
        assert self.variance >= 0, "a variance is not negative"


@dataclass(frozen=True, kw_only=True)
class Flops(Strict):
    """The arithmetic of an output, counted from the shapes of what ran (`specbench.arithmetic`)."""

    verify: float
    """Of the target's forwards."""
    draft: float
    rejected: float
    """Of both, what went into drafts that were not accepted."""
    vanilla: float
    """What the same output takes without drafts."""

    @property
    def total(self) -> float:
        """Of both, over vanilla's."""
        return (self.verify + self.draft) / self.vanilla

    @property
    def rejected_share(self) -> float:
        """Of all that was done, what went into drafts that were not accepted."""
        return self.rejected / (self.verify + self.draft)


@dataclass(frozen=True, kw_only=True)
class RequestRecord(Strict):
    """What one method made of one request; the same in every round."""

    workload: str
    request: str
    method: str
    tokens: list[int]
    finish: str
    steps: list[list[int]]
    """[nodes n, offered depth d, accepted a, committed c, matched before cutting] for each step."""
    lossless: str
    """One of `LOSSLESS`: ``exact``, ``tie`` or ``broken`` against the reference; ``law`` where only
    the distribution is the target's (rejection sampling from a draft distribution); ``lossy`` where
    the method does not claim it."""
    divergence: Divergence | None = None
    surprise: Surprise | None = None
    """Where only the distribution is the target's."""
    flops: Flops | None = None
    """None where they cannot be counted."""

    def __post_init__(self) -> None:
        check_output(self.steps, self.tokens, self.lossless)


def check_output(steps: Sequence[Sequence[int]], tokens: Sequence[int], lossless: str) -> None:
    """Holds an output and its steps to what they must be."""
    for nodes, depth, accepted, committed, matched in steps:
        assert 0 <= accepted <= depth <= nodes, "accepted tokens lie within the offered depth"
        assert 1 <= committed <= accepted + 1 and accepted <= matched <= depth, (
            "a step commits 1..accepted+1"
        )
    assert sum(step[3] for step in steps) == len(tokens), (
        "steps account for every token of the output"
    )
    assert lossless in LOSSLESS, f"losslessness is one of {', '.join(LOSSLESS)}"


@dataclass(frozen=True, kw_only=True)
class TimingRecord(Strict):
    """One timed pass of one method over one batch of requests."""

    workload: str
    requests: list[str]
    method: str
    round: int
    order: int
    """Place of the method in this round's rotation."""
    num_tokens: int
    num_forwards: int
    prefill_s: float
    decode_s: float
    draft_s: float
    forward_s: float
    bookkeeping_s: float

    def __post_init__(self) -> None:
        assert self.requests and self.num_tokens >= len(self.requests) and self.num_forwards >= 1, (
            "every request that was timed made a token, which takes a forward"
        )
        times = (self.prefill_s, self.decode_s, self.draft_s, self.forward_s, self.bookkeeping_s)
        assert min(times) >= 0, "times are not negative"


@dataclass(frozen=True, kw_only=True)
class FailureRecord(Strict):
    """A request that could not be decoded: a reason, and no number."""

    workload: str
    request: str
    method: str | None
    """None if it failed before any method had its turn."""
    reason: str


@dataclass(frozen=True, kw_only=True)
class ResourceRecord(Strict):
    """What the worker that decoded a shard had used by its end."""

    peak_memory_mib: float
    """Peak resident memory of the process; on a GPU, peak memory allocated on the device."""
    num_threads: int
    load_average: float


Record = ReferenceRecord | RequestRecord | TimingRecord | FailureRecord | ResourceRecord


@dataclass(frozen=True)
class Run:
    """A run as read from its folder."""

    folder: Path
    info: dict[str, Any]
    """``run.json``: settings, provenance, methods, workloads, shards."""
    references: list[ReferenceRecord] = field(default_factory=list)
    requests: list[RequestRecord] = field(default_factory=list)
    timings: list[TimingRecord] = field(default_factory=list)
    failures: list[FailureRecord] = field(default_factory=list)
    resources: list[ResourceRecord] = field(default_factory=list)
    missing_shards: list[str] = field(default_factory=list)
    stray_files: list[str] = field(default_factory=list)
    """Result files in the folder that the run does not list: they are no part of it."""


def _check_agreement(path: Path, records: Sequence[Record]) -> None:
    """Holds a shard's records against each other."""
    references = {r.request: r for r in records if isinstance(r, ReferenceRecord)}
    for number, record in enumerate(records, start=2):
        if isinstance(record, RequestRecord | TimingRecord):
            named = record.requests if isinstance(record, TimingRecord) else [record.request]
            for request in named:
                if request not in references or references[request].workload != record.workload:
                    raise ValueError(
                        f"{path} holds a broken record in line {number}: request {request!r} of "
                        f"workload {record.workload!r} has no reference"
                    )
        if (
            isinstance(record, RequestRecord)
            and record.lossless == "exact"
            and record.tokens != references[record.request].tokens
        ):
            raise ValueError(
                f"{path} holds a broken record in line {number}: it is called exact, but its "
                "tokens are not the reference's"
            )


RUN = Format[Record](
    "run.json",
    {
        "reference": ReferenceRecord,
        "request": RequestRecord,
        "timing": TimingRecord,
        "failure": FailureRecord,
        "resource": ResourceRecord,
    },
    _check_agreement,
)
"""How a run is filed."""


def write_run(folder: Path, info: dict[str, Any]) -> None:
    """Files a run's settings and provenance. A new run gets an id, which all its shards bear."""
    RUN.write_info(folder, info)


def read_info(folder: Path) -> dict[str, Any]:
    """A run's settings and provenance.

    Raises:
        ValueError: the folder holds no run, or one of another schema.
    """
    return RUN.read_info(folder)


def write_shard(folder: Path, shard: str, records: Sequence[Record]) -> None:
    """Files a finished shard."""
    RUN.write_shard(folder, shard, records)


def read_shard(path: Path) -> list[Record]:
    """The records of a shard.

    Raises:
        ValueError: the file is not a whole shard of this schema and of the run in its folder, or
        not as it was written; the message names the file and what is wrong.
    """
    return RUN.read_shard(path)


def read_run(folder: Path) -> Run:
    """Reads a run and all its finished shards.

    Raises:
        ValueError: the folder or one of its files cannot be read, or two of them hold the same.
    """
    info = read_info(folder)
    run = Run(folder, info)
    for shard in info["shards"]:
        path = shard_path(folder, shard)
        if path.is_file():
            _sort_in(run, _read_whole(folder, path))
        else:
            run.missing_shards.append(shard)
    listed = {shard_path(folder, shard) for shard in info["shards"]}
    files = sorted((folder / "shards").glob("*"))
    run.stray_files.extend(
        path.name for path in files if path not in listed and not path.name.startswith(".")
    )
    _check_unique(run)
    return run


def _read_whole(folder: Path, path: Path) -> list[Record]:
    """The records of a run's shard.

    Raises:
        ValueError: it is damaged; the message says what measures it again.
    """
    try:
        return read_shard(path)
    except ValueError as error:
        resume = f"specbench run --resume {shlex.quote(str(folder))}"
        raise ValueError(f"{error}; `{resume}` measures it again") from error


def _check_unique(run: Run) -> None:
    """Holds that no output and no time was recorded twice."""
    records: list[ReferenceRecord | RequestRecord | TimingRecord]
    records, seen = [*run.references, *run.requests, *run.timings], set()
    for record in records:
        method = None if isinstance(record, ReferenceRecord) else record.method
        names = record.requests if isinstance(record, TimingRecord) else [record.request]
        place = record.round if isinstance(record, TimingRecord) else None
        key = (type(record), record.workload, method, place, *names)
        if key in seen:
            what = RUN.names[type(record)]
            raise ValueError(
                f"{run.folder} holds the {method or 'target'}'s {what} record of "
                f"{record.workload}, {', '.join(names)} twice"
            )
        seen.add(key)


def _sort_in(run: Run, records: Iterable[Record]) -> None:
    for record in records:
        match record:
            case ReferenceRecord():
                run.references.append(record)
            case RequestRecord():
                run.requests.append(record)
            case TimingRecord():
                run.timings.append(record)
            case FailureRecord():
                run.failures.append(record)
            case ResourceRecord():
                run.resources.append(record)
