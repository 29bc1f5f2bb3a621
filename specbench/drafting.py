"""Drafting a token tree of a fixed shape, level by level, from a model's logits: what all
autoregressive drafters share.

How many children a node has depends on the budget, on how many tokens have mass and on how sure the
drafter is there, never on which of them were drawn, so sampled trees stay lossless. Shapes: B rows,
M nodes of a level, V vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count

import torch

from specbench.method import Budget, Drawer, MethodConfig, Proposal, Row, pad_rows
from specbench.tree import Tree

Expand = Callable[[torch.Tensor, list[Tree], list[int]], torch.Tensor]
"""Runs a level's nodes: their tokens [B, M], each row's tree, each row's first node -> logits [B,
M, V]."""


@dataclass(frozen=True, kw_only=True)
class BranchingConfig(MethodConfig):
    """The knobs of a method that drafts level by level.

    Args:
        branching: children per node at each level; 1 beyond its end. Empty drafts a chain, or
            the tree that another knob names.
    """

    branching: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        if any(children < 1 for children in self.branching):
            raise ValueError(
                f"branching {self.branching} is out of range; valid: 1 or more at each level"
            )

    @property
    def drafts_trees(self) -> bool:
        """Where a node has several children."""
        return any(children > 1 for children in self.branching)


@dataclass
class _Draft:
    """One row's tree while it grows."""

    row: Row
    budget: Budget
    parents: list[int] = field(default_factory=lambda: [-1])
    tokens: list[int] = field(default_factory=list)
    logq: dict[int, torch.Tensor] = field(default_factory=dict)
    chances: list[float] = field(default_factory=list)
    level: list[int] = field(default_factory=lambda: [0])
    """The deepest nodes; none once they are to have no children."""
    leaves: set[int] = field(default_factory=set)
    """Nodes that are to have no children, whatever the others have."""

    @property
    def tree(self) -> Tree:
        """Its shape so far."""
        return Tree.of(tuple(self.parents))

    def grow(
        self,
        logits_MV: torch.Tensor,
        sure_M: Sequence[bool],
        depth: int,
        num_children: int,
        drawer: Drawer,
    ) -> None:
        """Draws the children of the deepest nodes, which are then the deepest; those that were
        drawn while the drafter was not sure will have none."""
        parents, self.level = self.level, []
        for parent, logits_V, sure in zip(parents, logits_MV, sure_M, strict=False):
            if parent not in self.leaves and (room := self._room(depth)):
                position = len(self.row.tokens) + depth - 1
                draws = drawer.draw(logits_V, self.row, position, min(num_children, room))
                if draws.logq_V is not None:
                    self.logq[parent] = draws.logq_V
                self.chances += draws.chances
                self._add(parent, draws.tokens, sure)
        if not self._room(depth + 1) or self.leaves.issuperset(self.level):
            self.level = []

    def _room(self, depth: int) -> int:
        """How many nodes may still be added at a depth."""
        return self.budget.nodes - len(self.tokens) if depth <= self.budget.depth else 0

    def _add(self, parent: int, tokens: Sequence[int], sure: bool) -> None:
        nodes = range(len(self.parents), len(self.parents) + len(tokens))
        self.level += nodes
        if not sure:
            self.leaves.update(nodes)
        self.parents += [parent] * len(tokens)
        self.tokens += tokens


def draft_tree(
    rows: Sequence[Row],
    budgets: Sequence[Budget],
    branching: Sequence[int],
    drawer: Drawer,
    root_logits_B1V: torch.Tensor,
    expand: Expand,
    threshold: float = 0.0,
) -> Proposal:
    """Drafts a tree for every row.

    Args:
        rows, budgets: the rows, and what each may draft.
        branching: children per node at each level below the root; 1 beyond its end.
        drawer: draws the children.
        root_logits_B1V: the drafter's logits at the roots.
        expand: runs the nodes of a level that are to have children; a row without any gets as its
            first node the number of its nodes, and padding.
        threshold: where the drafter gives its likeliest token less than this, the tokens drawn
            there have no children. It looks at the distribution, not at what was drawn from it.
    """
    drafts = [_Draft(row, budget) for row, budget in zip(rows, budgets, strict=True)]
    logits_BMV = root_logits_B1V
    for depth in count(1):
        num_children = branching[depth - 1] if depth <= len(branching) else 1
        sure_BM = _sure(logits_BMV, threshold)
        for draft, logits_MV, sure_M in zip(drafts, logits_BMV, sure_BM, strict=True):
            draft.grow(logits_MV, sure_M, depth, num_children, drawer)
        if not any(draft.level for draft in drafts):
            break
        starts = [draft.level[0] if draft.level else len(draft.parents) for draft in drafts]
        tokens = [[draft.tokens[node - 1] for node in draft.level] for draft in drafts]
        logits_BMV = expand(pad_rows(tokens), [draft.tree for draft in drafts], starts)
    return Proposal.from_rows(
        rows,
        [draft.tree for draft in drafts],
        [draft.tokens for draft in drafts],
        [draft.logq for draft in drafts],
        [draft.chances for draft in drafts] if drawer.rates else None,
    )


def _sure(logits_BMV: torch.Tensor, threshold: float) -> list[list[bool]]:
    """At which nodes the likeliest token has at least so much probability."""
    if not threshold:
        return [[True] * logits_BMV.shape[1]] * len(logits_BMV)
    logits_BMV = logits_BMV.float()
    top_BM = (logits_BMV.amax(-1) - logits_BMV.logsumexp(-1)).exp()
    sure: list[list[bool]] = (top_BM >= threshold).tolist()
    return sure
