"""Depth controllers: how deep each row may draft, decided before a step's draft tokens exist."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

from specbench.method import Budget, Row, Verdict


class DepthController(ABC):
    """Chooses every row's budget from what was seen before this step; anything else would not be
    lossless."""

    @abstractmethod
    def choose(self, rows: Sequence[Row]) -> list[Budget]:
        """A budget for each row of the coming step."""

    def observe(self, verdict: Verdict) -> None:  # noqa: B027 - an optional hook
        """Takes in what became of the step."""

    def reset(self) -> None:  # noqa: B027 - an optional hook
        """Forgets what it has seen."""


class Fixed(DepthController):
    """The same budget for every row and step."""

    def __init__(self, depth: int, max_nodes: int) -> None:
        self.budget = Budget(depth, max_nodes)

    def choose(self, rows: Sequence[Row]) -> list[Budget]:
        """The budget, once for each row."""
        return [self.budget] * len(rows)
