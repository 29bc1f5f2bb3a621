"""Predicted against measured: what a method's own acceptance and costs promise, and where the rest
of the time went. Pure functions of a run's records."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from specbench.metrics import Position, measure_acceptance, paired_timings
from specbench.records import Run, TimingRecord
from specbench.theory import StepCost, tokens_by_position, tokens_iid


@dataclass(frozen=True, kw_only=True)
class Promise:
    """Tokens of a row's step, as theory has them and as they were.

    Args:
        depth: mean offered depth.
        iid: as if every chance were the same, at the mean depth rounded.
        by_position: from the chance at each position, over the depths that were offered.
        measured: tau.
    """

    depth: float
    iid: float
    by_position: float
    measured: float


def promise(run: Run, workload: str, method: str) -> Promise | None:
    """What a method's acceptance promises; None where it has decoded or drafted nothing.

    Outputs end in the middle of a step, and a token behind the end counts for nothing: that is
    what sets the measured apart from the prediction by position.
    """
    found = measure_acceptance(run, workload, method)
    if found is None or not found.num_offered:
        return None
    depth = found.num_offered / found.num_steps
    return Promise(
        depth=depth,
        iid=tokens_iid(mean_chance(found.positions), round(depth)),
        by_position=_tokens(found.positions, found.num_steps),
        measured=found.tau,
    )


def mean_chance(positions: Sequence[Position]) -> float:
    """The chance of a token to be accepted once it is reached, over all positions: alpha."""
    reached = sum(position.reached for position in positions)
    return sum(position.accepted for position in positions) / reached if reached else 0.0


def chances(positions: Sequence[Position]) -> list[float]:
    """The chance at each position; none was found at one that was never reached."""
    return [position.conditional or 0.0 for position in positions]


def _tokens(positions: Sequence[Position], num_steps: int) -> float:
    """Expected tokens where some steps offer less depth than others."""
    by_position = chances(positions)
    offered = [num_steps, *(position.offered for position in positions), 0]
    return (
        sum(
            (offered[depth] - offered[depth + 1]) * tokens_by_position(by_position[:depth])
            for depth in range(len(positions) + 1)
        )
        / num_steps
    )


@dataclass(frozen=True, kw_only=True)
class Breakdown:
    """Where a method's seconds for each token go, and vanilla's beside them. The four parts sum up
    to the measured.

    Args:
        vanilla_s: of vanilla, for each token.
        ideal_s: of the method if its steps cost what vanilla's do.
        draft_s: drafting.
        verify_s: what its forwards cost beyond vanilla's, of one node a row.
        bookkeeping_s: what the rest of its steps costs beyond the rest of vanilla's.
    """

    vanilla_s: float
    ideal_s: float
    draft_s: float
    verify_s: float
    bookkeeping_s: float

    @property
    def method_s(self) -> float:
        """Measured, for each token."""
        return self.ideal_s + self.draft_s + self.verify_s + self.bookkeeping_s

    @property
    def ideal_speed_up(self) -> float:
        """If drafting, wider forwards and bookkeeping cost nothing."""
        return self.vanilla_s / self.ideal_s

    @property
    def speed_up(self) -> float:
        """As measured."""
        return self.vanilla_s / self.method_s


def break_down(run: Run, workload: str, method: str) -> Breakdown | None:
    """Splits the difference between the ideal speed-up and the measured one; None where method and
    baseline were not timed on the same batches."""
    pairs = [both for batch in paired_timings(run, workload, method).values() for both in batch]
    if not pairs:
        return None
    vanilla, own = (_mean_step(side) for side in zip(*pairs, strict=True))
    per_token = own.tokens
    return Breakdown(
        vanilla_s=vanilla.cost.total_s / vanilla.tokens,
        ideal_s=vanilla.cost.total_s / per_token,
        draft_s=(own.cost.draft_s - vanilla.cost.draft_s) / per_token,
        verify_s=(own.cost.forward_s - vanilla.cost.forward_s) / per_token,
        bookkeeping_s=(own.cost.bookkeeping_s - vanilla.cost.bookkeeping_s) / per_token,
    )


@dataclass(frozen=True)
class _Step:
    """A mean step: tokens of all its rows, and its cost."""

    tokens: float
    cost: StepCost


def _mean_step(timings: Sequence[TimingRecord]) -> _Step:
    columns = [
        (t.num_tokens, t.num_forwards, t.draft_s, t.forward_s, t.bookkeeping_s) for t in timings
    ]
    tokens, steps, draft_s, forward_s, bookkeeping_s = np.sum(columns, axis=0).tolist()
    return _Step(
        tokens / steps, StepCost(draft_s / steps, forward_s / steps, bookkeeping_s / steps)
    )
