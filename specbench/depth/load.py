"""Depth by the size of the batch alone, or always the same."""

from collections.abc import Mapping, Sequence
from weakref import WeakSet

from specbench.depth.controller import Bounded
from specbench.method import Budget, Row


class Fixed(Bounded):
    """The same budget for every row and step."""

    def choose(self, rows: Sequence[Row]) -> list[Budget]:
        """The budget, once for each row."""
        return [self.budget] * len(rows)


class OffAboveBatch(Bounded):
    """Drafts nothing while so many rows or more are decoded together, as vLLM's
    ``disable_by_batch_size``.

    Args:
        depth, max_nodes: below that.
        off_at: the smallest batch that drafts nothing.
        sticky: a row that once was in such a batch never drafts again, as in vLLM V0.
    """

    def __init__(
        self, depth: int, max_nodes: int, *, off_at: int = 8, sticky: bool = False
    ) -> None:
        super().__init__(depth, max_nodes)
        if off_at < 1:
            raise ValueError(f"off_at {off_at} is out of range; valid: 1 or more")
        self.off_at, self.sticky = off_at, sticky
        self.reset()

    def choose(self, rows: Sequence[Row]) -> list[Budget]:
        """The budget, or nothing."""
        if len(rows) >= self.off_at:
            if self.sticky:
                self.off.update(rows)
            return [Budget(0, 0)] * len(rows)
        return [Budget(0, 0) if row in self.off else self.budget for row in rows]

    def reset(self) -> None:
        """Lets all rows draft again."""
        self.off: WeakSet[Row] = WeakSet()


class ByBatch(Bounded):
    """A depth for each size of batch, as vLLM's ``num_speculative_tokens_per_batch_size``.

    Args:
        depth, max_nodes: the most.
        depths: by the smallest batch size that it holds for; below the first one, the most:
            ``4:2/16:0`` drafts to depth 2 from batch size 4 on, and nothing from 16 on.
    """

    def __init__(self, depth: int, max_nodes: int, *, depths: Mapping[int, int]) -> None:
        super().__init__(depth, max_nodes)
        if any(batch < 1 or levels < 0 for batch, levels in depths.items()):
            raise ValueError(f"depths {dict(depths)} are out of range; valid: {{batch: depth}}")
        self.depths = dict(sorted(depths.items()))

    def choose(self, rows: Sequence[Row]) -> list[Budget]:
        """What the table says, for all rows alike."""
        depth = self.budget.depth
        for batch, levels in self.depths.items():
            if batch <= len(rows):
                depth = levels
        return [self.within(depth)] * len(rows)
