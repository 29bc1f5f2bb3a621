"""The arithmetic that a method's steps took, counted from its records: always more than vanilla's,
which is the point of speculation."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from specbench.costs import Cost, Shape, forward_cost
from specbench.drafter_costs import Draft
from specbench.records import RequestRecord


@dataclass(frozen=True, kw_only=True)
class Arithmetic:
    """FLOPs for each committed token, over vanilla's.

    Args:
        verify: of the target's forwards.
        draft: of drafting.
        rejected: of both, what went into drafts that were not accepted.
    """

    verify: float
    draft: float
    rejected: float

    @property
    def total(self) -> float:
        """Of both."""
        return self.verify + self.draft

    @property
    def rejected_share(self) -> float:
        """Of all that was done, what went into drafts that were not accepted."""
        return self.rejected / self.total


def count_arithmetic(
    records: Sequence[RequestRecord],
    target: Shape,
    num_prompt_tokens: Sequence[int],
    draft_cost: Callable[[Draft], Cost],
    resumed_layers: int = 0,
) -> Arithmetic:
    """What a method's steps took.

    Args:
        records: of one method.
        target: its shape.
        num_prompt_tokens: of each record's request.
        draft_cost, resumed_layers: the method's (`specbench.method.Method`). A tree is taken to
            have as many nodes in each level.
    """
    verify = draft = rejected = vanilla = 0.0
    later = target.part(target.num_layers - resumed_layers)
    for record, num_prompt in zip(records, num_prompt_tokens, strict=True):
        context, unseen = num_prompt - 1, 1
        for nodes, depth, accepted, committed, _ in record.steps:
            own = draft_cost(
                Draft(rows=1, levels=_levels(nodes, depth), context=context, unseen=unseen)
            ).flops
            whole = forward_cost(target if not nodes else later, 1, 1 + nodes, context).flops
            verify += whole
            draft += own
            if nodes:
                wasted = (nodes - accepted) / nodes
                rejected += wasted * (own + whole * nodes / (1 + nodes))
            for position in range(committed):
                vanilla += forward_cost(target, 1, 1, context + position).flops
            context, unseen = context + committed, committed
    return Arithmetic(verify=verify / vanilla, draft=draft / vanilla, rejected=rejected / vanilla)


def _levels(nodes: int, depth: int) -> list[int]:
    """So many nodes on so many levels, about evenly."""
    return [nodes * (i + 1) // depth - nodes * i // depth for i in range(depth)]
