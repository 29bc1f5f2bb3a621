"""What a profile says of a machine: what its passes wait for, how many tokens a pass has for nearly
nothing, whether rows and tokens cost the same, what drafting costs. Pure functions."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from specbench.costs import Cost, forward_cost
from specbench.machines import WIDTHS, Machine
from specbench.profile import PassTimes, Profile, StepSamples
from specbench.stats import Spread, spread
from specbench.theory import knee

KNEE = 0.1
"""How much more than one token's a pass may take up to the knee."""


def machine(profile: Profile) -> Machine:
    """The machine that a profile was measured on: its bandwidth and rate, and what a pass takes
    beside these, for each layer: the median over those of one token a row."""
    name, num_layers = f"{profile.device}, as profiled", profile.shape.num_layers
    bare = Machine(
        name=name,
        bandwidth=profile.bandwidth,
        rate=profile.rate,
        overhead_s=0,
        memory_bytes=profile.memory_bytes,
    )
    beside = [
        (median(one.seconds) - bare.seconds(cost_of(profile, one), 0)) / num_layers
        for one in profile.passes
        if one.tokens == 1
    ]
    return Machine(
        name=name,
        bandwidth=profile.bandwidth,
        rate=profile.rate,
        overhead_s=max(0.0, median(beside)),
        memory_bytes=profile.memory_bytes,
    )


def cost_of(profile: Profile, one: PassTimes) -> Cost:
    """What a forward of the profile moves and computes."""
    width = WIDTHS[profile.dtype]
    return forward_cost(profile.shape, one.rows, one.tokens, one.context, width=width)


@dataclass(frozen=True, kw_only=True)
class Analysis:
    """A forward held against the roofline.

    Args:
        times: as measured.
        cost: as counted.
        seconds: measured.
        modelled_s: by the machine.
        is_compute_bound: whether its arithmetic takes longer than its traffic.
    """

    times: PassTimes
    cost: Cost
    seconds: Spread
    modelled_s: float
    is_compute_bound: bool

    @property
    def ratio(self) -> float:
        """Measured over modelled."""
        return self.seconds.median / self.modelled_s


def analyse(profile: Profile) -> list[Analysis]:
    """All forwards of a profile, in order."""
    here = machine(profile)
    found = []
    for one in sorted(profile.passes, key=lambda one: (one.context, one.rows, one.tokens)):
        cost = cost_of(profile, one)
        found.append(
            Analysis(
                times=one,
                cost=cost,
                seconds=spread(one.seconds),
                modelled_s=here.seconds(cost, profile.shape.num_layers),
                is_compute_bound=here.is_compute_bound(cost),
            )
        )
    return found


@dataclass(frozen=True, kw_only=True)
class Knee:
    """The most tokens a row that a pass takes at hardly more than the price of one.

    Args:
        rows, context: of the pass.
        most: tokens of the widest pass that was measured.
        measured: between the widths of the grid interpolated; None if no pass costs so much more.
        modelled: by the roofline; likewise.
    """

    rows: int
    context: int
    most: int
    measured: int | None
    modelled: int | None


def knees(profile: Profile) -> list[Knee]:
    """By context and batch."""
    here, width, num_layers = machine(profile), WIDTHS[profile.dtype], profile.shape.num_layers
    found = []
    for context in profile.contexts:
        for rows in profile.rows:
            curve = _curve(profile, rows, context)
            if 1 not in curve or len(curve) < 2:
                continue
            tokens = range(1, 1 + max(curve))
            known = sorted(curve)
            measured = np.interp(tokens, known, [curve[n] for n in known]).tolist()
            costs = (forward_cost(profile.shape, rows, n, context, width=width) for n in tokens)
            modelled = [here.seconds(cost, num_layers) for cost in costs]
            found.append(
                Knee(
                    rows=rows,
                    context=context,
                    most=max(curve),
                    measured=knee(dict(zip(tokens, measured, strict=True)), KNEE),
                    modelled=knee(dict(zip(tokens, modelled, strict=True)), KNEE),
                )
            )
    return found


def _curve(profile: Profile, rows: int, context: int) -> dict[int, float]:
    """Seconds by tokens a row."""
    return {
        one.tokens: median(one.seconds)
        for one in profile.passes
        if (one.rows, one.context) == (rows, context)
    }


@dataclass(frozen=True, kw_only=True)
class Breadth:
    """Many rows of one token against one row of as many tokens.

    Args:
        tokens: of either.
        context: of each row.
        ratio: seconds of the many rows over those of the one, round by round.
        extra_bytes: that the many rows read more, as a share of what the one reads.
    """

    tokens: int
    context: int
    ratio: Spread
    extra_bytes: float


def breadths(profile: Profile) -> list[Breadth]:
    """Wherever both were measured."""
    by_place = {one.place: one for one in profile.passes}
    found = []
    for wide in sorted(profile.passes, key=lambda one: (one.context, one.rows)):
        deep = by_place.get(wide.place._replace(rows=1, tokens=wide.rows))
        if wide.tokens > 1 or wide.rows == 1 or deep is None:
            continue
        pairs = zip(wide.seconds, deep.seconds, strict=True)
        more = cost_of(profile, wide).num_bytes / cost_of(profile, deep).num_bytes - 1
        found.append(
            Breadth(
                tokens=wide.rows,
                context=wide.context,
                ratio=spread([a / b for a, b in pairs]),
                extra_bytes=more,
            )
        )
    return found


@dataclass(frozen=True, kw_only=True)
class Drafting:
    """What a method's steps cost at one budget, beside its steps without a draft.

    Args:
        steps: as measured.
        nodes: mean of a row.
        draft_s, forward_s, bookkeeping_s: medians.
        level: of drafting one level, over the forward of a step without a draft: c of theory.
        step: of a whole step, over one without a draft.
    """

    steps: StepSamples
    nodes: float
    draft_s: float
    forward_s: float
    bookkeeping_s: float
    level: float
    step: Spread


def drafting(steps: Sequence[StepSamples]) -> list[Drafting]:
    """Of one method, wherever it drafts; by batch and depth."""
    idle = {one.rows: one for one in steps if not one.depth}
    found = []
    for one in sorted(steps, key=lambda one: (one.rows, one.depth)):
        if not one.depth:
            continue
        without = idle[one.rows]
        vanilla = [sum(both) for both in zip(without.forward_s, without.bookkeeping_s, strict=True)]
        ratios = [a / b for a, b in zip(one.total_s, vanilla, strict=True)]
        draft_s = median(one.draft_s)
        found.append(
            Drafting(
                steps=one,
                nodes=sum(one.nodes) / len(one.nodes),
                draft_s=draft_s,
                forward_s=median(one.forward_s),
                bookkeeping_s=median(one.bookkeeping_s),
                level=draft_s / one.depth / median(without.forward_s),
                step=spread(ratios),
            )
        )
    return found
