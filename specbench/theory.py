"""What acceptance and costs promise: expected tokens of a step, speed-ups, the best depth, the
crossover batch. Pure functions; tokens of a step count the bonus.

A chance is that of a token to be accepted if all before it on its path were. Letters as in
Leviathan et al. (2023, "Fast inference from transformers via speculative decoding"): alpha, the
chance where it is the same everywhere; gamma, the depth; c, the seconds of drafting one token over
those of a step of the target.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate
from operator import mul
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from specbench.tree import Tree


def tokens_iid(alpha: float, gamma: int) -> float:
    """Expected tokens of a step, all chances alike (equation 1): (1 - alpha^(gamma + 1)) / (1 -
    alpha)."""
    _check_chances([alpha])
    return sum(alpha**depth for depth in range(gamma + 1))


def tokens_by_position(chances: Sequence[float]) -> float:
    """Expected tokens of a step that drafts a chain, from the chance at each depth: EAGLE's rise
    with depth, Medusa's fall."""
    return 1 + sum(survivals(chances))


def survivals(chances: Sequence[float]) -> list[float]:
    """By depth, the chance that the token there and all before it are accepted."""
    _check_chances(chances)
    return list(accumulate(chances, mul))


def tokens_of_tree(tree: "Tree", chances: Sequence[float]) -> float:
    """Expected tokens of a step that drafts a tree, from each drafted node's chance to be the child
    that is taken, if its parent was: 1 + the sum over nodes of the chance of its path."""
    _check_chances(chances)
    reached = [1.0]
    for parent, chance in zip(tree.parents[1:], chances, strict=True):
        reached.append(reached[parent] * chance)
    return sum(reached)


def speed_up_iid(alpha: float, gamma: int, c: float) -> float:
    """The promised speed-up where verification costs no more than a step of one (theorem 3.8)."""
    return tokens_iid(alpha, gamma) / (gamma * c + 1)


def operations_iid(alpha: float, gamma: int, c: float) -> float:
    """Arithmetic for each token over vanilla's, c being the drafter's over the target's for one
    token (theorem 3.11)."""
    return (gamma * c + gamma + 1) / tokens_iid(alpha, gamma)


class StepCost(NamedTuple):
    """Seconds of a step."""

    draft_s: float
    forward_s: float
    bookkeeping_s: float = 0.0

    @property
    def total_s(self) -> float:
        """All of it."""
        return sum(self)


def speed_up(tokens: float, cost: StepCost, vanilla: StepCost) -> float:
    """The speed-up over vanilla at the same batch, from the tokens of a step and what steps cost,
    measured or modelled."""
    return tokens * vanilla.total_s / cost.total_s


class Choice(NamedTuple):
    """A depth, and the speed-up that it promises."""

    depth: int
    speed_up: float


def best_depth(chances: Sequence[float], cost_at: Callable[[int], StepCost]) -> Choice:
    """The depth that promises most, 0 for not to draft; of equals the least.

    Args:
        chances: by depth; no deeper than these.
        cost_at: what a step of a depth costs.
    """
    vanilla, tokens = cost_at(0), [1.0, *accumulate(survivals(chances), initial=1.0)][1:]
    return best_depth_of([speed_up(t, cost_at(d), vanilla) for d, t in enumerate(tokens)])


def best_depth_of(speed_ups: Sequence[float]) -> Choice:
    """The depth with the largest speed-up, of equals the least.

    Args:
        speed_ups: by depth, from 0.
    """
    gain = max(speed_ups)
    return Choice(speed_ups.index(gain), gain)


def crossover(speed_ups: Mapping[int, float]) -> int | None:
    """The batch size from which on speculation does not pay; None if it pays at the largest.

    Args:
        speed_ups: by batch size.
    """
    paying = [batch for batch, gain in speed_ups.items() if gain > 1]
    beyond = [batch for batch in sorted(speed_ups) if batch > max(paying, default=0)]
    return beyond[0] if beyond else None


def knee(seconds: Mapping[int, float], tolerance: float = 0.1) -> int | None:
    """The most tokens that a pass can have before it costs so much more than the smallest one;
    None if none of them does.

    Args:
        seconds: of a pass, by tokens.
        tolerance: as a share.
    """
    free = seconds[min(seconds)] * (1 + tolerance)
    within = None
    for tokens in sorted(seconds):
        if seconds[tokens] > free:
            return within
        within = tokens
    return None


def _check_chances(chances: Iterable[float]) -> None:
    for chance in chances:
        if not 0 <= chance <= 1:
            raise ValueError(f"chance {chance} is out of range; valid: 0..1")
