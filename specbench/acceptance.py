"""What is accepted of drafts, as given or as recorded, by depth. Pure functions of records."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Protocol

from specbench.records import RequestRecord
from specbench.theory import tokens_by_position
from specbench.trace import Span, read_traces, spans


class Acceptance(Protocol):
    """What is accepted of a draft."""

    @property
    def deepest(self) -> int:
        """The deepest draft that it says something of, 1 at least."""
        ...

    @property
    def largest(self) -> int | None:
        """The largest batch that it says something of; None for any."""
        ...

    def tokens(self, depth: int) -> float:
        """Mean committed tokens of a step that drafts so deep, the bonus included; 1 at depth 0."""
        ...

    def nodes(self, depth: int) -> float:
        """Mean drafted nodes of such a step."""
        ...

    def steps(self, batch: int, depth: int) -> Mapping[int, float]:
        """Steps by how many rows of the batch they have; of the same work at every depth."""
        ...


@dataclass(frozen=True)
class Given:
    """Chains with a given chance at each position.

    Args:
        chances: by depth, each that of a token whose predecessors were accepted; nothing is said
            of deeper ones.
    """

    chances: tuple[float, ...]

    def __post_init__(self) -> None:
        tokens_by_position(self.chances)
        if not self.chances:
            raise ValueError("no acceptance is given; valid: a chance for each position")

    @property
    def deepest(self) -> int:
        """As deep as chances are given."""
        return len(self.chances)

    largest = None

    def tokens(self, depth: int) -> float:
        """Expected tokens."""
        assert depth <= self.deepest, "nothing is said of deeper drafts"
        return tokens_by_position(self.chances[:depth])

    def nodes(self, depth: int) -> float:
        """One for each level."""
        return depth

    def steps(self, batch: int, depth: int) -> Mapping[int, float]:
        """Of one token of each row of a batch that is always full."""
        return {batch: 1 / self.tokens(depth)}


class Replayed:
    """The outputs of a run, step by step at another depth (see `specbench.trace`).

    Args:
        records: of one method; some of their steps drafted.
        static: batches are made of the outputs in their order, each of one workload, and run until
            the last row has ended, as a run decodes them; else a batch is always full, as under
            continuous batching.
    """

    def __init__(self, records: Sequence[RequestRecord], *, static: bool = False) -> None:
        self._traces = read_traces(records)
        self._workloads = [record.workload for record in records]
        self._static = static
        self.deepest = max(step[1] for record in records for step in record.steps)
        self._spans: dict[int, list[list[Span]]] = {}

    @property
    def largest(self) -> int | None:
        """The largest batch that the outputs of each workload fill; None where any is full."""
        return min(Counter(self._workloads).values()) if self._static else None

    def tokens(self, depth: int) -> float:
        """Mean over the steps."""
        found = self._at(depth)
        return sum(map(len, self._traces)) / sum(map(len, found))

    def nodes(self, depth: int) -> float:
        """Mean over the steps, of a chain: what a tree had beside its path is not counted."""
        return fmean(step.offered for steps in self._at(depth) for step in steps)

    def steps(self, batch: int, depth: int) -> Mapping[int, float]:
        """Of all whole batches of the outputs; where batches are always full, of one token of each
        row."""
        if not self._static:
            return {batch: 1 / self.tokens(depth)}
        lengths: dict[str, list[int]] = {}
        for workload, steps in zip(self._workloads, self._at(depth), strict=True):
            lengths.setdefault(workload, []).append(len(steps))
        running: Counter[int] = Counter()
        for own in lengths.values():
            for rows in zip(*[iter(own)] * batch, strict=False):
                running.update(sum(length > i for length in rows) for i in range(max(rows)))
        return running

    def _at(self, depth: int) -> list[list[Span]]:
        """The steps of each output."""
        if depth not in self._spans:
            self._spans[depth] = [spans(trace, depth) for trace in self._traces]
        return self._spans[depth]
