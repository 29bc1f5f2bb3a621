"""Depth by goodput: expected committed tokens for each second (SmartSpec: Liu et al. 2024)."""

from collections.abc import Sequence
from itertools import accumulate
from weakref import WeakKeyDictionary

from specbench.depth.controller import Bounded
from specbench.depth.times import StepTimes
from specbench.method import Budget, Row, Verdict
from specbench.theory import survivals

_FIRST_CHANCE = 0.7
"""Before anything is seen."""
_MEMORY, _OWN_MEMORY = 200, 50
"""Steps after which one counts 1 / e."""
_PULL = 5
"""Steps of its own after which a row counts as much as all rows."""


class RunningAcceptance:
    """Running estimates of each row's chance at each depth, from how its drafts fared and, while it
    has few, how those of all rows did.

    Args:
        depth: the deepest.
    """

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self._all = _Counts(depth, _MEMORY)
        self._own: WeakKeyDictionary[Row, _Counts] = WeakKeyDictionary()

    def chances(self, row: Row) -> list[float]:
        """By depth."""
        common = self._all.chances([_FIRST_CHANCE] * self.depth, 1)
        own = self._own.get(row)
        return own.chances(common, _PULL) if own else common

    def add(self, row: Row, taken: Sequence[float]) -> None:
        """Takes in how a row's drafts fared.

        Args:
            taken: by depth, as far as is known: 1 if that draft was taken, 0 if it was not, its
                chance where it was not put to the test.
        """
        self._all.add(taken)
        self._own.setdefault(row, _Counts(self.depth, _OWN_MEMORY)).add(taken)


def fared(tested: int, taken: int) -> list[float]:
    """As `RunningAcceptance` takes it: of so many levels the first so many were taken."""
    return [1.0] * taken + [0.0] * (tested - taken)


class _Counts:
    """By depth, tokens that were put to the test, and those that were taken; older ones fade."""

    def __init__(self, depth: int, memory: float) -> None:
        self.keep = 1 - 1 / memory
        self.tested, self.taken = [0.0] * depth, [0.0] * depth

    def chances(self, prior: Sequence[float], weight: float) -> list[float]:
        """With a prior that counts as so many tests."""
        return [
            (taken + weight * chance) / (tested + weight)
            for taken, tested, chance in zip(self.taken, self.tested, prior, strict=True)
        ]

    def add(self, taken: Sequence[float]) -> None:
        for depth, share in enumerate(taken[: len(self.tested)]):
            self.tested[depth] = self.tested[depth] * self.keep + 1
            self.taken[depth] = self.taken[depth] * self.keep + share


class Goodput(Bounded):
    """The depth, the same for all rows, that promises most tokens for each second.

    Args:
        depth, max_nodes: the most.
        times: what whole steps cost, by the depth that each row drafts.
        probe: where nothing is drafted, the share of the time that may go into a level now and then
            to see how drafts fare by now. None does where not even drafts that are all accepted
            would pay.
    """

    def __init__(
        self, depth: int, max_nodes: int, *, times: StepTimes, probe: float = 0.01
    ) -> None:
        super().__init__(depth, max_nodes)
        if not 0 <= probe <= 1:
            raise ValueError(f"probe {probe} is out of range; valid: 0..1")
        self.times, self.probe = times, probe
        self._seconds: dict[int, list[float]] = {}
        self.reset()

    def choose(self, rows: Sequence[Row]) -> list[Budget]:
        """The best depth, 0 among them."""
        tokens = [0.0] * (1 + self.budget.depth)
        for row in rows:
            expected = accumulate(survivals(self.acceptance.chances(row)), initial=1.0)
            tokens = [a + b for a, b in zip(tokens, expected, strict=True)]
        seconds = self._by_depth(len(rows))
        goodput = [t / s for t, s in zip(tokens, seconds, strict=True)]
        depth = goodput.index(max(goodput))
        self.is_probing = not depth and self._is_time_to_probe(seconds)
        depth += self.is_probing
        if depth:
            self.idle_s = 0.0
        return [self.within(depth)] * len(rows)

    def _by_depth(self, num_rows: int) -> list[float]:
        """Seconds of a step at each depth; looked up once for each number of rows."""
        if num_rows not in self._seconds:
            depths = range(1 + self.budget.depth)
            self._seconds[num_rows] = [self._step_s(num_rows, depth) for depth in depths]
        return self._seconds[num_rows]

    def _step_s(self, num_rows: int, depth: int) -> float:
        """Of a step that drafts so deep."""
        return self.times.step_s([depth] * num_rows)

    def _is_time_to_probe(self, seconds: Sequence[float]) -> bool:
        """Whether to see again how a level of drafts fares; by the seconds of a step at each
        depth."""
        self.idle_s += seconds[0]
        could_pay = any((1 + d) * seconds[0] > s for d, s in enumerate(seconds) if d)
        return could_pay and seconds[1] - seconds[0] <= self.probe * self.idle_s

    def observe(self, verdict: Verdict) -> None:
        """Counts what was accepted."""
        for row in verdict.rows:
            step = row.steps[-1]
            self.acceptance.add(row, fared(min(step.depth, step.matched + 1), step.matched))

    def reset(self) -> None:
        """Forgets how drafts fared."""
        self.acceptance = RunningAcceptance(self.budget.depth)
        self.idle_s, self.is_probing = 0.0, False
