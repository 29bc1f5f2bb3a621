"""Depth by survival and load: of all rows' drafts, those nodes are verified that raise the
throughput of the whole batch (DSpark, Algorithm 1)."""

from collections.abc import Sequence
from heapq import heappop, heappush

from specbench.depth.calibration import Calibration
from specbench.depth.controller import Admission, Bounded, Candidate
from specbench.depth.goodput import RunningAcceptance
from specbench.depth.times import StepTimes
from specbench.method import Budget, Row, Verdict


class Survival(Bounded):
    """Admits the likeliest node of all rows while expected tokens for each second rise, and stops
    at the first that does not raise them.

    To look beyond that one would be to look at its token: the next chance depends on it.

    Args:
        depth, max_nodes: the most that is drafted.
        times: what steps cost, or if ``drafting`` is given, what they cost whose drafts are there.
        drafting: what drafting to the full depth takes; told of rows alone.
        calibration: of the drafter's chances. A drafter without chances gets those with which a
            row's tokens at each depth were taken so far.
    """

    reads_drafts = True

    def __init__(
        self,
        depth: int,
        max_nodes: int,
        *,
        times: StepTimes,
        drafting: StepTimes | None = None,
        calibration: Calibration = Calibration(),  # noqa: B008 - frozen
    ) -> None:
        super().__init__(depth, max_nodes)
        self.times, self.drafting, self.calibration = times, drafting, calibration
        self.rows: Sequence[Row] = ()
        self.reset()

    def choose(self, rows: Sequence[Row]) -> list[Budget]:
        """The most, or nothing where no draft could pay, not even one that is all accepted."""
        self.rows = rows
        idle = len(rows) / self.times.step_s([0] * len(rows))
        pays = any(
            len(rows) * (1 + depth) / self._step_s([depth] * len(rows)) > idle
            for depth in range(1, 1 + self.budget.depth)
        )
        return [self.budget if pays else Budget(0, 0)] * len(rows)

    def admit(self, admission: Admission) -> None:
        """Algorithm 1."""
        nodes = [0] * len(admission.num_nodes)
        survivals = [[1.0] for _ in nodes]
        queue: list[tuple[float, int]] = []
        tokens = float(len(nodes))
        rate = tokens / self._step_s(nodes)

        def enqueue(row: int) -> None:
            if found := admission.next(row):
                chance = self._chance(row, found)
                survivals[row].append(survivals[row][found.parent] * chance)
                heappush(queue, (-survivals[row][-1], row))

        for row in range(len(nodes)):
            enqueue(row)
        while queue:
            _, row = heappop(queue)
            nodes[row] += 1
            tokens += survivals[row][-1]
            before, rate = rate, tokens / self._step_s(nodes)
            if rate <= before:
                break
            admission.admit(row)
            enqueue(row)

    def _step_s(self, nodes: Sequence[int]) -> float:
        """Of a step that has drafted, whatever of that it verifies."""
        drafting_s = self.drafting.step_s([0] * len(nodes)) if self.drafting else 0.0
        return drafting_s + self.times.step_s(nodes)

    def _chance(self, row: int, found: Candidate) -> float:
        if found.chance is None:
            return self.acceptance.chances(self.rows[row])[found.depth - 1]
        return self.calibration.chance(found.chance, found.depth)

    def observe(self, verdict: Verdict) -> None:
        """Counts what was accepted."""
        self.acceptance.add(verdict.rows)

    def reset(self) -> None:
        """Forgets how drafts fared."""
        self.acceptance = RunningAcceptance(self.budget.depth)
        self.rows = ()
