"""What a run writes: one file per shard with per-request, per-timing and per-failure records, and
the run's provenance.

A run's folder holds ``run.json`` (settings and provenance) and ``shards/*.jsonl``. Files appear
whole or not at all. Everything that is shown is computed from these records; nothing aggregated is
stored as the truth.
"""

import hashlib
import json
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from pydantic import ConfigDict, TypeAdapter

from specbench.files import write_atomically
from specbench.messages import in_one_line

SCHEMA_VERSION = 3
BASELINE = "vanilla"
"""The method that every speed-up is measured against; it drafts nothing."""
LOSSLESS = ("exact", "tie", "broken", "law", "lossy")


class Strict:
    """Files are read as they were written: no other type, no unknown field, no NaN."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(
        strict=True, extra="forbid", allow_inf_nan=False
    )


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
        for nodes, depth, accepted, committed, matched in self.steps:
            assert 0 <= accepted <= depth <= nodes, "accepted tokens lie within the offered depth"
            assert 1 <= committed <= accepted + 1 and accepted <= matched <= depth, (
                "a step commits 1..accepted+1"
            )
        assert sum(step[3] for step in self.steps) == len(self.tokens), (
            "steps account for every token of the output"
        )
        assert self.lossless in LOSSLESS, f"losslessness is one of {', '.join(LOSSLESS)}"


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
_KINDS: dict[str, type] = {
    "reference": ReferenceRecord,
    "request": RequestRecord,
    "timing": TimingRecord,
    "failure": FailureRecord,
    "resource": ResourceRecord,
}
_NAMES = {cls: kind for kind, cls in _KINDS.items()}
_ADAPTERS: dict[str, TypeAdapter[Any]] = {kind: TypeAdapter(cls) for kind, cls in _KINDS.items()}
_NESTED_PARTS = ("methods", "workloads")
_INFO_PARTS = ("settings", "provenance", "target", *_NESTED_PARTS)


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


def write_run(folder: Path, info: dict[str, Any]) -> None:
    """Files a run's settings and provenance. A new run gets an id, which all its shards bear."""
    whole = {"schema": SCHEMA_VERSION, "id": uuid.uuid4().hex} | info
    whole["sha256"] = _info_sha256(whole)
    write_atomically(folder / "run.json", json.dumps(whole, indent=1) + "\n")


def is_edited(info: Mapping[str, Any]) -> bool:
    """Whether ``run.json`` is not as it was written; a run in memory, without an id, never was."""
    return "id" in info and info.get("sha256") != _info_sha256(info)


def _info_sha256(info: Mapping[str, Any]) -> str:
    rest = {key: value for key, value in info.items() if key != "sha256"}
    return _sha256(json.dumps(rest, sort_keys=True))


def shard_path(folder: Path, shard: str) -> Path:
    """The file of a shard."""
    return folder / "shards" / f"{shard}.jsonl"


def write_shard(folder: Path, shard: str, records: Sequence[Record]) -> None:
    """Files a finished shard: a header line that says of which run it is and what follows, then
    the records."""
    lines = ({"kind": _NAMES[type(record)], **asdict(record)} for record in records)
    body = "".join(json.dumps(line) + "\n" for line in lines)
    header = {
        "kind": "shard",
        "schema": SCHEMA_VERSION,
        "run": run_id(folder),
        "shard": shard,
        "num_records": len(records),
        "sha256": _sha256(body),
    }
    write_atomically(shard_path(folder, shard), json.dumps(header) + "\n" + body)


def run_id(folder: Path) -> str | None:
    """The id of a folder's run; None where none has begun there."""
    if not (folder / "run.json").exists():
        return None
    return str(read_info(folder)["id"])


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def read_shard(path: Path) -> list[Record]:
    """The records of a shard.

    Raises:
        ValueError: the file is not a whole shard of this schema and of the run in its folder, or
        not as it was written; the message names the file and what is wrong.
    """
    try:
        text = path.read_text(encoding="utf-8")
        lines = [json.loads(line) for line in text.splitlines()]
        header = lines.pop(0)
        schema = header["schema"]
    except (OSError, ValueError, IndexError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{path} is not a readable result file: {in_one_line(error)}") from error
    _check_schema(path, schema)
    shard, expected = header.get("shard"), header.get("num_records")
    if shard_path(Path(), shard).name != path.name:
        raise ValueError(f"{path} holds shard {shard!r}; a shard's file bears its name")
    if expected != len(lines):
        raise ValueError(f"{path} holds {len(lines)} records, its header says {expected}")
    if header.get("run") != run_id(path.parent.parent):
        raise ValueError(f"{path} belongs to another run; it has been copied here")
    records = [_record(path, number, line) for number, line in enumerate(lines, start=2)]
    _check_agreement(path, records)
    if header.get("sha256") != _sha256(text.partition("\n")[2]):
        raise ValueError(f"{path} has been edited: its sha256 is not that of its records")
    return records


def _record(path: Path, number: int, line: Any) -> Record:
    try:
        fields = dict(line)
        adapter = _ADAPTERS[fields.pop("kind")]
        record: Record = adapter.validate_json(json.dumps(fields))
        return record
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{path} holds a broken record in line {number}: {in_one_line(error)}"
        ) from error


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


def _check_schema(path: Path, schema: Any) -> None:
    if schema != SCHEMA_VERSION:
        raise ValueError(
            f"{path} has schema version {schema}; this version of specbench reads {SCHEMA_VERSION}"
        )


def read_info(folder: Path) -> dict[str, Any]:
    """A run's settings and provenance.

    Raises:
        ValueError: the folder holds no run, or one of another schema.
    """
    try:
        info: dict[str, Any] = json.loads((folder / "run.json").read_text(encoding="utf-8"))
        schema = info["schema"]
    except FileNotFoundError:
        raise ValueError(f"{folder} holds no run: there is no run.json in it") from None
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{folder} holds no readable run: {in_one_line(error)}") from error
    _check_schema(folder / "run.json", schema)
    shards = info.get("shards")
    if not isinstance(shards, list) or not all(isinstance(shard, str) for shard in shards):
        raise ValueError(f"{folder} holds no readable run: run.json lists no shards")
    if len(set(shards)) < len(shards):
        raise ValueError(f"{folder} holds no readable run: run.json lists a shard twice")
    for part in _INFO_PARTS:
        value = info.get(part)
        nested = value.values() if isinstance(value, dict) and part in _NESTED_PARTS else ()
        if not isinstance(value, dict) or not all(isinstance(inner, dict) for inner in nested):
            raise ValueError(f"{folder} holds no readable run: run.json has no {part}")
    if not isinstance(info.get("id"), str):
        raise ValueError(f"{folder} holds no readable run: run.json has no id")
    return info


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
            _sort_in(run, read_shard(path))
        else:
            run.missing_shards.append(shard)
    listed = {shard_path(folder, shard) for shard in info["shards"]}
    files = sorted((folder / "shards").glob("*"))
    run.stray_files.extend(
        path.name for path in files if path not in listed and not path.name.startswith(".")
    )
    _check_unique(run)
    return run


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
            what = _NAMES[type(record)]
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
