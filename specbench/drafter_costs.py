"""What drafters cost, counted like a forward: a draft model, heads on a hidden state, a head on
features, a shortened stack. Drafting by look-up costs nothing that is counted.

Each is the cost of drafting one tree for each row: its root first, with what was committed since
the last draft, then level by level, but for the last, which has no children.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from specbench.costs import Cost, Shape, forward_cost

if TYPE_CHECKING:
    from specbench.tree import Tree


@dataclass(frozen=True, kw_only=True)
class Draft:
    """What is drafted.

    Args:
        rows: sequences.
        levels: nodes of each level below the root, of each row's tree.
        parents: those of them that have children; empty where they all have.
        context: tokens in each row's cache.
        unseen: tokens committed since the last draft, the root included.
        width: bytes of a number.
    """

    rows: int
    levels: Sequence[int]
    context: int
    parents: Sequence[int] = ()
    unseen: int = 1
    width: int = 2

    @property
    def running(self) -> Sequence[int]:
        """Nodes of each level but the last, which drafts nothing."""
        return self.levels[:-1]

    @property
    def fertile(self) -> Sequence[int]:
        """Those of them that have children."""
        return self.parents[:-1] if self.parents else self.running


class Levels(NamedTuple):
    """Nodes of each level below the root, and how many of them have children."""

    levels: list[int]
    parents: list[int]


def levels_of(tree: "Tree") -> Levels:
    """The levels of a tree."""
    fertile = [d for d, own in zip(tree.depths, tree.children, strict=True) if own]
    below = range(1, 1 + tree.depth)
    return Levels([tree.depths.count(d) for d in below], [fertile.count(d) for d in below])


def model_cost(shape: Shape, draft: Draft) -> Cost:
    """A draft model with a cache of its own. With a reduced vocabulary, that is the shape's."""
    if not draft.levels:
        return Cost()
    lagging = draft.context - draft.unseen + 1
    cost = _run(shape, draft, draft.unseen, lagging, num_logits=1)
    return cost.plus(_levels(shape, draft, draft.running, draft.context + 1))


def heads_cost(
    hidden: int, num_layers: int, vocab: int, draft: Draft, *, own_heads: bool = False
) -> Cost:
    """Medusa's heads, one for each level.

    Args:
        hidden: width of the target's hidden state.
        num_layers: blocks of each head.
        vocab: tokens that can be drafted.
        draft: what is drafted.
        own_heads: whether each head has its own language-model head, or all share one.
    """
    num_heads, block, head = len(draft.levels), num_layers * hidden * hidden, vocab * hidden
    read = num_heads * block + head * (num_heads if own_heads else min(1, num_heads))
    return Cost(2.0 * draft.rows * num_heads * (block + head), float(draft.width * read))


def features_cost(
    layers: Shape, draft: Draft, *, fused_width: int = 0, first: Shape | None = None
) -> Cost:
    """EAGLE's head.

    Args:
        layers: of the head, its language-model head included.
        draft: what is drafted; one entry for each unseen token.
        fused_width: of EAGLE-3, the width of the hidden states that are fused into a feature; 0
            before EAGLE-3, where token and feature are projected at every entry instead.
        first: the first layer, where it is unlike the others.
    """
    if not draft.levels:
        return Cost()
    parts = (
        [layers] if first is None else [first, replace(layers, num_layers=layers.num_layers - 1)]
    )
    lagging = draft.context - draft.unseen
    cost = Cost()
    for index, part in enumerate(parts):
        last = index == len(parts) - 1
        run = _run(part, draft, draft.unseen, lagging, num_logits=int(last))
        levels = _levels(part, draft, draft.fertile, draft.context, with_logits=last)
        cost = cost.plus(run).plus(levels)
    width_in = fused_width or 2 * layers.hidden
    entries = draft.unseen + (0 if fused_width else sum(draft.fertile))
    projection = width_in * layers.hidden
    times = 1 if fused_width else 1 + len(draft.fertile)
    return cost.plus(
        Cost(2.0 * projection * entries * draft.rows, float(draft.width * projection * times))
    )


def short_stack_cost(
    target: Shape,
    draft: Draft,
    *,
    num_layers: int,
    resumed: int,
    adapter: Shape | None = None,
) -> Cost:
    """The target without some layers, or its first ones with an adapter behind them.

    Args:
        target: the whole model.
        draft: what is drafted.
        num_layers: layers that run.
        resumed: those in front of the first one passed by. The last level runs through them too,
            so that verification need not (`specbench.costs.forward_cost` of the others).
        adapter: what stands behind the layers, its language-model head included.
    """
    if not draft.levels:
        return Cost()
    stack = target.part(num_layers)
    cost = Cost()
    for part in [stack] if adapter is None else [stack, adapter]:
        with_logits = part is adapter or adapter is None
        run = _run(part, draft, 1, draft.context, num_logits=int(with_logits))
        levels = _levels(part, draft, draft.running, draft.context + 1, with_logits=with_logits)
        cost = cost.plus(run).plus(levels)
    num_run = 1 + sum(draft.running)
    rest, before = draft.levels[-1], draft.context + num_run
    return cost.plus(_run(target.part(resumed), draft, rest, before, 0)) if resumed else cost


def _levels(
    shape: Shape, draft: Draft, levels: Sequence[int], context: int, *, with_logits: bool = True
) -> Cost:
    """Levels with so many nodes, one after the other."""
    cost = Cost()
    for nodes in levels:
        cost = cost.plus(_run(shape, draft, nodes, context, nodes if with_logits else 0))
        context += nodes
    return cost


def _run(shape: Shape, draft: Draft, tokens: int, context: int, num_logits: int) -> Cost:
    return forward_cost(
        shape, draft.rows, tokens, context, width=draft.width, num_logits=num_logits
    )
