"""Depth by goodput: expected committed tokens for each second (SmartSpec: Liu et al. 2024)."""

from collections.abc import Sequence

from specbench.depth.controller import Bounded
from specbench.depth.times import StepTimes
from specbench.method import Budget, Row, Step, Verdict
from specbench.theory import tokens_by_position


class AcceptanceByDepth:
    """Running estimates of the chance at each depth.

    Args:
        depth: the deepest.
        memory: steps after which an observation counts 1 / e.
        prior: the chance before anything is seen, which counts as much as one observation.
    """

    def __init__(self, depth: int, memory: float = 200.0, prior: float = 0.7) -> None:
        self.keep, self.prior = 1 - 1 / memory, prior
        self.tested, self.taken = [0.0] * depth, [0.0] * depth

    @property
    def chances(self) -> list[float]:
        """By depth."""
        pairs = zip(self.taken, self.tested, strict=True)
        return [(taken + self.prior) / (tested + 1) for taken, tested in pairs]

    def add(self, step: Step) -> None:
        """Takes in what was put to the test."""
        for depth in range(min(step.depth, step.matched + 1, len(self.tested))):
            self.tested[depth] = self.tested[depth] * self.keep + 1
            self.taken[depth] = self.taken[depth] * self.keep + (depth < step.matched)


class Goodput(Bounded):
    """The depth, the same for all rows, that promises most tokens for each second.

    Args:
        depth, max_nodes: the most.
        times: what steps cost.
        probe: after so many steps without a draft, one level is drafted to see how it fares now.
    """

    def __init__(self, depth: int, max_nodes: int, *, times: StepTimes, probe: int = 64) -> None:
        super().__init__(depth, max_nodes)
        self.times, self.probe, self.num_idle = times, probe, 0
        self.reset()

    def choose(self, rows: Sequence[Row]) -> list[Budget]:
        """The best depth, 0 among them."""
        chances = self.acceptance.chances
        goodput = [
            tokens_by_position(chances[:depth]) / self.times.step_s([depth] * len(rows))
            for depth in range(self.budget.depth + 1)
        ]
        depth = goodput.index(max(goodput))
        self.num_idle = 0 if depth else self.num_idle + 1
        if self.num_idle > self.probe:
            depth, self.num_idle = 1, 0
        return [self.within(depth)] * len(rows)

    def observe(self, verdict: Verdict) -> None:
        """Counts what was accepted."""
        for row in verdict.rows:
            self.acceptance.add(row.steps[-1])

    def reset(self) -> None:
        """Forgets how drafts fared."""
        self.acceptance = AcceptanceByDepth(self.budget.depth)
        self.num_idle = 0
