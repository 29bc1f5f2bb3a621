"""Depth by survival and load: of all rows' drafts, those nodes are verified that raise the
throughput of the whole batch (DSpark, Algorithm 1)."""

from collections.abc import Sequence
from heapq import heappop, heappush
from itertools import pairwise

from specbench.depth.calibration import Calibration
from specbench.depth.controller import Admission, Candidate
from specbench.depth.goodput import Goodput, fared
from specbench.depth.times import StepTimes
from specbench.method import Budget, Row, Step, Verdict
from specbench.tree import Tree


class Survival(Goodput):
    """Drafts as deep as goodput has it for chains, and of the drafts admits the likeliest node of
    all rows while expected tokens for each second rise, and stops at the first that does not raise
    them.

    To look beyond that one would be to look at its token: the next chance depends on it. In the
    paper a block is drafted at once, as deep as can be; where each level costs time, how deep must
    be decided before, by how drafts fared.

    Args:
        depth, max_nodes: the most.
        probe: as of goodput: where nothing is drafted, the share of the time that may go into
            looking again.
        times: what steps cost, or if ``drafting`` is given, what they cost whose drafts are there;
            by the nodes that each row verifies.
        drafting: what drafting costs, by depth.
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
        probe: float = 0.01,
        drafting: StepTimes | None = None,
        calibration: Calibration = Calibration(),  # noqa: B008 - frozen
    ) -> None:
        super().__init__(depth, max_nodes, times=times, probe=probe)
        self.drafting, self.calibration = drafting, calibration

    def choose(self, rows: Sequence[Row]) -> list[Budget]:
        """The depth that promises most; what drafting so deep takes is then spent."""
        budgets = super().choose(rows)
        self.rows: Sequence[Row] = rows
        self._refused.clear()
        self.drafting_s = self._drafting_s(len(rows), budgets[0].depth)
        return budgets

    def admit(self, admission: Admission) -> None:
        """Algorithm 1. A probe is admitted whatever is thought of it: nothing is learnt of drafts
        that are not verified."""
        if self.is_probing:
            for row in range(len(admission.num_nodes)):
                if admission.next(row):
                    admission.admit(row)
            return
        nodes = [0] * len(admission.num_nodes)
        survivals = [[1.0] for _ in nodes]
        queue: list[tuple[float, int]] = []
        tokens = float(len(nodes))
        rate = tokens / self._rest_s(nodes)

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
            before, rate = rate, tokens / self._rest_s(nodes)
            if rate <= before:
                break
            admission.admit(row)
            enqueue(row)
        for row, num_admitted in enumerate(admission.num_nodes):
            first = None if num_admitted else admission.next(row)
            if first is not None and first.chance is not None:
                self._refused[row] = survivals[row][1]

    def observe(self, verdict: Verdict) -> None:
        """Counts how the likeliest drafts fared. Those of which nothing was admitted count by their
        chance: else only the likelier ones would, and drafting would seem to pay where it does
        not."""
        proposed = zip(verdict.rows, verdict.proposal.trees, verdict.paths, strict=True)
        for index, (row, tree, path) in enumerate(proposed):
            known = fared(*_along_the_likeliest(tree, path, row.steps[-1]))
            refused = [self._refused[index]] if index in self._refused else []
            self.acceptance.add(row, known or refused)

    def _rest_s(self, nodes: Sequence[int]) -> float:
        """Of this step, whatever of its drafts it verifies."""
        return self.drafting_s + self.times.step_s(nodes)

    def _step_s(self, num_rows: int, depth: int) -> float:
        return super()._step_s(num_rows, depth) + self._drafting_s(num_rows, depth)

    def _drafting_s(self, num_rows: int, depth: int) -> float:
        return self.drafting.step_s([depth] * num_rows) if self.drafting else 0.0

    def _chance(self, row: int, found: Candidate) -> float:
        if found.chance is None:
            return self.acceptance.chances(self.rows[row])[found.depth - 1]
        return self.calibration.chance(found.chance, found.depth)

    def reset(self) -> None:
        """Forgets how drafts fared."""
        super().reset()
        self.rows = ()
        self.drafting_s = 0.0
        self._refused: dict[int, float] = {}
        """By place in the batch: the chance of a row's first draft, where none was admitted."""


def _along_the_likeliest(tree: Tree, path: Sequence[int], step: Step) -> tuple[int, int]:
    """How many levels of the likeliest child's likeliest child and so on were put to the test, and
    how many of these were taken."""
    taken = 0
    for parent, node in pairwise(path):
        if node != tree.children[parent][0]:
            return taken + 1, taken
        taken += 1
    # Behind a row's end nothing was put to the test.
    is_tested = tree.children[path[-1]] and taken == step.matched
    return taken + bool(is_tested), taken
