"""What a serving run writes: one file for each pass, which is one method under one controller at
one arrival rate, and one of the references; beside them ``serving.json``, settings and provenance.

Times are seconds since the start of the pass.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from specbench.filing import Format, Strict, shard_path
from specbench.records import (
    Divergence,
    FailureRecord,
    ReferenceRecord,
    Surprise,
    check_output,
)

REFERENCES = "references"
"""The shard of the references."""


@dataclass(frozen=True, kw_only=True)
class PassRecord(Strict):
    """What was served with what."""

    method: str
    controller: str
    load: float | None
    """The arrival rate as a share of the baseline's capacity; None where it was not asked for as
    such."""
    rate: float | None
    """Arrivals per second; None where all came at once."""
    round: int
    order: int
    """Place of the pass among those at its rate in its round."""

    def __post_init__(self) -> None:
        assert self.load is None or self.load > 0, "a load is above 0"
        assert self.rate is None or self.rate > 0, "a rate is above 0"


@dataclass(frozen=True, kw_only=True)
class ServedRecord(Strict):
    """What one request saw."""

    workload: str
    request: str
    arrival_s: float
    start_s: float
    """When it left the queue; then came its prefill."""
    step_ends_s: list[float]
    """When each of its steps ended: with the first came its first tokens, with the last its end."""
    batches: list[int]
    """By step, how many rows were decoded together."""
    steps: list[list[int]]
    """As in `specbench.records.RequestRecord`."""
    tokens: list[int]
    finish: str
    lossless: str
    divergence: Divergence | None = None
    surprise: Surprise | None = None

    def __post_init__(self) -> None:
        check_output(self.steps, self.tokens, self.lossless)
        assert len(self.steps) == len(self.step_ends_s) == len(self.batches) > 0, (
            "each step has an end and a batch"
        )
        times = [self.arrival_s, self.start_s, *self.step_ends_s]
        assert times[0] >= 0 and all(a <= b for a, b in pairwise(times)), "times are in order"
        assert min(self.batches) >= 1, "a row is in its batch"

    @property
    def first_token_s(self) -> float:
        """When its first tokens were there."""
        return self.step_ends_s[0]

    @property
    def end_s(self) -> float:
        """When all were."""
        return self.step_ends_s[-1]


ServingRecord = PassRecord | ServedRecord | ReferenceRecord | FailureRecord


def _check(path: Path, records: Sequence[ServingRecord]) -> None:
    """Holds that a shard is one pass, or references, and that no request is in it twice."""
    passes = sum(isinstance(record, PassRecord) for record in records)
    if passes != (path.stem != REFERENCES):
        raise ValueError(f"{path} holds {passes} passes; valid: one, and none in {REFERENCES}")
    seen = [(r.workload, r.request) for r in records if not isinstance(r, PassRecord)]
    if len(set(seen)) < len(seen):
        raise ValueError(f"{path} holds a request twice")


SERVING = Format[ServingRecord](
    "serving.json",
    {
        "pass": PassRecord,
        "served": ServedRecord,
        "reference": ReferenceRecord,
        "failure": FailureRecord,
    },
    _check,
)
"""How a serving run is filed."""


@dataclass(frozen=True)
class Pass:
    """A pass as read from its file."""

    about: PassRecord
    served: Sequence[ServedRecord]
    failures: Sequence[FailureRecord]


@dataclass(frozen=True)
class ServingRun:
    """A serving run as read from its folder."""

    folder: Path
    info: dict[str, Any]
    references: list[ReferenceRecord] = field(default_factory=list)
    failures: list[FailureRecord] = field(default_factory=list)
    """Requests that failed before any method had its turn."""
    passes: list[Pass] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    """Shards that are not there."""


def read_serving(folder: Path) -> ServingRun:
    """Reads a serving run and all its finished passes.

    Raises:
        ValueError: the folder or one of its files cannot be read.
    """
    run = ServingRun(folder, SERVING.read_info(folder))
    for shard in run.info["shards"]:
        path = shard_path(folder, shard)
        if not path.is_file():
            run.missing.append(shard)
            continue
        records = SERVING.read_shard(path)
        failures = [record for record in records if isinstance(record, FailureRecord)]
        if shard == REFERENCES:
            run.references.extend(r for r in records if isinstance(r, ReferenceRecord))
            run.failures.extend(failures)
        else:
            run.passes.append(as_pass(records))
    return run


def as_pass(records: Sequence[ServingRecord]) -> Pass:
    """The records of one pass, sorted by kind."""
    (about,) = (record for record in records if isinstance(record, PassRecord))
    return Pass(
        about,
        [record for record in records if isinstance(record, ServedRecord)],
        [record for record in records if isinstance(record, FailureRecord)],
    )
