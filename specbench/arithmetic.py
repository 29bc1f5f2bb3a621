"""The arithmetic that a method's steps took, counted from the steps themselves: always more than
vanilla's, which is the point of speculation."""

from collections.abc import Callable, Sequence

from specbench.costs import Cost, Shape, forward_cost
from specbench.drafter_costs import Draft
from specbench.method import Method
from specbench.records import Flops


def count_flops(method: Method, num_prompt_tokens: int, steps: Sequence[Sequence[int]]) -> Flops:
    """What the steps of one request took; see `flops_of_steps`.

    Raises:
        ValueError: the target has layers of a kind that is not counted.
    """
    return flops_of_steps(
        steps, num_prompt_tokens, method.target.shape, method.draft_cost, method.resumed_layers
    )


def flops_of_steps(
    steps: Sequence[Sequence[int]],
    num_prompt_tokens: int,
    target: Shape,
    draft_cost: Callable[[Draft], Cost],
    resumed_layers: int = 0,
) -> Flops:
    """What the steps of one request took.

    Args:
        steps: as in a record.
        num_prompt_tokens: of the request.
        target: its shape.
        draft_cost, resumed_layers: the method's (`specbench.method.Method`). A tree is taken to
            have as many nodes in each level.
    """
    verify = draft = rejected = vanilla = 0.0
    later = target.part(target.num_layers - resumed_layers)
    context, unseen = num_prompt_tokens - 1, 1
    for nodes, depth, accepted, committed, _ in steps:
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
    return Flops(verify=verify, draft=draft, rejected=rejected, vanilla=vanilla)


def _levels(nodes: int, depth: int) -> list[int]:
    """So many nodes on so many levels, about evenly."""
    return [nodes * (i + 1) // depth - nodes * i // depth for i in range(depth)]
