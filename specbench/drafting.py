"""Drafting a token tree of a fixed shape, level by level, from a model's logits: what all
autoregressive drafters share.

The shape depends on the budget and on how many tokens have mass, never on which tokens were drawn,
so sampled trees stay lossless. Shapes: B rows, M nodes of a level, V vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from specbench.method import Budget, Drawer, Proposal, Row
from specbench.tree import Tree

Expand = Callable[[torch.Tensor, list[Tree], list[int]], torch.Tensor]
"""Runs a level's nodes: their tokens [B, M], each row's tree, each row's first node -> logits [B,
M, V]."""


@dataclass
class _Draft:
    """One row's tree while it grows."""

    row: Row
    budget: Budget
    parents: list[int] = field(default_factory=lambda: [-1])
    tokens: list[int] = field(default_factory=list)
    logq: dict[int, torch.Tensor] = field(default_factory=dict)
    level: list[int] = field(default_factory=lambda: [0])

    def grow(self, logits_MV: torch.Tensor, depth: int, num_children: int, drawer: Drawer) -> None:
        """Draws the children of the present level's nodes."""
        parents, self.level = self.level, []
        if depth > self.budget.depth:
            return
        for parent, logits_V in zip(parents, logits_MV, strict=False):
            room = self.budget.nodes - len(self.tokens)
            if room == 0:
                return
            position = len(self.row.tokens) + depth - 1
            draws = drawer.draw(logits_V, self.row, position, min(num_children, room))
            if draws.logq_V is not None:
                self.logq[parent] = draws.logq_V
            for token in draws.tokens:
                self.level.append(len(self.parents))
                self.parents.append(parent)
                self.tokens.append(token)


def draft_tree(
    rows: Sequence[Row],
    budgets: Sequence[Budget],
    branching: Sequence[int],
    drawer: Drawer,
    root_logits_B1V: torch.Tensor,
    expand: Expand,
) -> Proposal:
    """Drafts a tree for every row.

    Args:
        rows, budgets: the rows, and what each may draft.
        branching: children per node at each level below the root; 1 beyond its end.
        drawer: draws the children.
        root_logits_B1V: the drafter's logits at the roots.
        expand: runs the nodes of a level; called between levels, not for the last one.
    """
    drafts = [_Draft(row, budget) for row, budget in zip(rows, budgets, strict=True)]
    logits_BMV = root_logits_B1V
    deepest = max(budget.depth for budget in budgets)
    for depth in range(1, deepest + 1):
        num_children = branching[depth - 1] if depth <= len(branching) else 1
        for draft, logits_MV in zip(drafts, logits_BMV, strict=True):
            draft.grow(logits_MV, depth, num_children, drawer)
        width = max(len(draft.level) for draft in drafts)
        if depth == deepest or width == 0:
            break
        starts = [draft.level[0] if draft.level else len(draft.parents) for draft in drafts]
        tokens = [[draft.tokens[node - 1] for node in draft.level] for draft in drafts]
        tokens_BM = torch.tensor([level + [0] * (width - len(level)) for level in tokens])
        logits_BMV = expand(tokens_BM, [Tree.of(tuple(d.parents)) for d in drafts], starts)
    return Proposal.from_rows(
        rows,
        [Tree.of(tuple(draft.parents)) for draft in drafts],
        [draft.tokens for draft in drafts],
        [draft.logq for draft in drafts],
    )
