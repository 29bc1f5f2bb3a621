"""Speed-ups predicted from a profile: steps interpolated between those that were measured. Pure
functions; nothing is modelled but what the profile has not."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import zip_longest
from statistics import fmean, median

import numpy as np

from specbench import roofline
from specbench.acceptance import Acceptance
from specbench.depth import StepTable
from specbench.machines import WIDTHS
from specbench.method import Step
from specbench.profile import Profile, StepSamples, step_table, unknown_drafts
from specbench.recorded_drafter import LOOK_UP
from specbench.records import BASELINE, RequestRecord
from specbench.scenario import Scenario, make_drafter
from specbench.theory import StepCost

ASSUMPTIONS = (
    "steps are interpolated from the profile, not modelled: linearly between the batches, tokens "
    "and contexts that were measured; nothing is said beyond them",
    "a profiled method drafts, verifies and keeps its books as long as in its profiled steps; its "
    "forwards are scaled, by the grid of forwards, to the nodes and the context asked for",
    "a method that is not in the profile takes vanilla's forwards and bookkeeping, and drafts as "
    "long as the drafter named, by a roofline of the measured bandwidth and rate; layers that a "
    "drafter ran are verified again",
    "memory is counted, and what a pass waits for is said by that roofline",
    "a forward over ragged rows takes what one over as many nodes in even rows does",
    "all rows have the same context; sampling and prefill take no time",
    "a profiled method that drafts more nodes than levels drafts trees, of as many nodes where "
    "nothing else is recorded",
)


class Forwards:
    """Seconds of a target's forwards, between those of a profile. Contexts whose grid has a gap,
    where the target's context had no room, are left out.

    Args:
        profile: has a context without a gap.

    Raises:
        ValueError: it has none.
    """

    def __init__(self, profile: Profile) -> None:
        self.rows = profile.rows
        self.tokens = sorted({one.tokens for one in profile.passes})
        self._tables = {}
        for context in profile.contexts:
            seconds = {
                (one.rows, one.tokens - 1): median(one.seconds)
                for one in profile.passes
                if one.context == context
            }
            if len(seconds) == len(self.rows) * len(self.tokens):
                self._tables[context] = StepTable(seconds)
        if not self._tables:
            raise ValueError("no context of the profile has all batches and tokens")
        if len(self.tokens) < 2:
            raise ValueError(
                f"the profile has no forwards but of {self.tokens[0]} token a row; valid: one of "
                "`specbench profile --tokens 1,2,4` or more"
            )
        self.contexts = list(self._tables)

    def seconds(self, rows: int, tokens: float, context: float) -> float:
        """Of a forward.

        Args:
            rows: within the profile's.
            tokens: of each row, between whole numbers too; within the profile's.
            context: of each row; the nearest of the profile's where it is beyond them.

        Raises:
            ValueError: the profile has no forwards so large or so small.
        """
        check_within("batch", rows, self.rows)
        check_within("tokens", tokens, self.tokens)
        found = [self._tables[one].step_s([tokens - 1] * rows) for one in self.contexts]
        return float(np.interp(context, self.contexts, found))


def check_within(what: str, value: float, grid: Sequence[float]) -> None:
    """Holds a number to a profile's grid.

    Raises:
        ValueError: it is beyond.
    """
    if not grid[0] <= value <= grid[-1]:
        raise ValueError(
            f"{what} {value:g} is beyond the profile; valid: {grid[0]:g}..{grid[-1]:g}, or a new "
            "`specbench profile`"
        )


@dataclass(frozen=True)
class Steps:
    """What steps take, by a profile.

    Args:
        profile: as measured.
        method: whose; one that the profile has not takes what vanilla's do, and drafts for
            nothing.
        context: tokens of each row.

    Raises:
        ValueError: the context is beyond the profile.
    """

    profile: Profile
    method: str
    context: int

    def __post_init__(self) -> None:
        check_within("--context", self.context, self.forwards.contexts)

    @cached_property
    def forwards(self) -> Forwards:
        """The target's."""
        return Forwards(self.profile)

    @property
    def knows_drafts(self) -> bool:
        """Whether the method's own drafts were measured."""
        return any(one.depth for one in self.profile.steps.get(self.method, ()))

    @property
    def deepest(self) -> int:
        """The deepest draft that something is known of."""
        if self.knows_drafts:
            return max(one.depth for one in self._own)
        return self.forwards.tokens[-1] - 1

    def cost(
        self, rows: int, depth: int, nodes: float, tree_nodes: float | None = None
    ) -> StepCost:
        """Of a step.

        Args:
            rows: decoded together.
            depth: that each may draft; 0 for a step of vanilla, where the profile has some.
            nodes: drafted of each, in chains.
            tree_nodes: in trees, of each; None for those of the profile.

        Raises:
            ValueError: it is beyond the profile.
        """
        check_within("batch", rows, self.forwards.rows)
        check_within("--depth", depth, [0, self.deepest])
        if not depth and self._vanilla is not self:
            return self._vanilla.cost(rows, 0, 0.0)
        if not self._own:
            return StepCost(0.0, self._grid_s(rows, nodes, self.context))
        known = depth if self.knows_drafts else 0
        draft_s, own_forward, bookkeeping_s, _ = (
            table.step_s([known] * rows) for table in self._parts
        )
        nodes = self.nodes(rows, depth, nodes, tree_nodes)
        forward_s = own_forward * self._grid_s(rows, nodes, self.context)
        return StepCost(draft_s if depth else 0.0, forward_s, bookkeeping_s)

    def nodes(self, rows: int, depth: int, nodes: float, tree_nodes: float | None = None) -> float:
        """What each row verifies beyond one token; see `cost`."""
        known = depth if self.knows_drafts else 0
        own = self._parts[-1].step_s([known] * rows) if self._own else 0.0
        if own <= known:
            return nodes
        return own if tree_nodes is None else tree_nodes

    def _grid_s(self, rows: int, nodes: float, context: float) -> float:
        return self.forwards.seconds(rows, 1 + nodes, context)

    @cached_property
    def _vanilla(self) -> "Steps":
        """Vanilla's, where they were measured; a method without drafts takes a little longer."""
        known = BASELINE in self.profile.steps and self.method != BASELINE
        return replace(self, method=BASELINE) if known else self

    @cached_property
    def _own(self) -> Sequence[StepSamples]:
        """Steps of the method, else of vanilla, else none."""
        steps = self.profile.steps
        return steps.get(self.method) or steps.get(BASELINE) or ()

    @cached_property
    def _parts(self) -> tuple[StepTable, StepTable, StepTable, StepTable]:
        """Seconds of drafting, the forward over one of the grid, seconds of bookkeeping, and
        drafted nodes."""

        def over_grid(one: StepSamples) -> list[float]:
            # Step by step: one that drafts more takes longer, so medians of both do not belong
            # together.
            return [
                forward_s / self._grid_s(one.rows, nodes, one.context)
                for forward_s, nodes in zip(one.forward_s, one.nodes, strict=True)
            ]

        return (
            step_table(self._own, lambda one: one.draft_s),
            step_table(self._own, over_grid),
            step_table(self._own, lambda one: one.bookkeeping_s),
            step_table(self._own, lambda one: [fmean(one.nodes)]),
        )


@dataclass(frozen=True, kw_only=True)
class ProfiledScenario(Scenario):
    """Speculation on a machine that was profiled.

    Args:
        steps: what steps take. The drafter counts only where they do not know the method's drafts.
    """

    steps: Steps

    def step(self, batch: int, depth: int) -> StepCost:
        """What a step costs."""
        cost = self.steps.cost(batch, depth, self.acceptance.nodes(depth))
        if self.steps.knows_drafts:
            return cost
        return cost._replace(draft_s=self.draft_s(batch, depth))

    def nodes(self, batch: int, depth: int) -> float:
        """Those of the profile's trees, where it has some."""
        return self.steps.nodes(batch, depth, super().nodes(batch, depth))


def on_profile(
    steps: Steps, acceptance: Acceptance, depth: int, drafter: str = LOOK_UP
) -> ProfiledScenario:
    """A scenario on the machine that was profiled.

    Args:
        steps: what they take there.
        acceptance: as recorded or given.
        depth: the deepest draft.
        drafter: see `specbench.scenario.make_drafter`; counts where the profile does not know the
            method's drafts.
    """
    profile = steps.profile
    width = WIDTHS[profile.dtype]
    return ProfiledScenario(
        machine=roofline.machine(profile),
        target=profile.shape,
        drafter=make_drafter(drafter, profile.shape, width, depth),
        acceptance=acceptance,
        deepest=depth,
        context=steps.context,
        width=width,
        steps=steps,
    )


def predict(
    profile: Profile,
    method: str,
    records: Sequence[RequestRecord],
    batch: int,
    depth: int,
    context: int | None = None,
) -> float:
    """The speed-up over vanilla at the same batch that a profile promises: recorded steps are
    taken again, in batches as a run decodes them, until the last row of each has ended.

    Args:
        profile: of the machine; the method among what was measured.
        method: whose steps are taken.
        records: its own, of requests in the order in which they are batched.
        batch: rows at a time.
        depth: that the recorded drafts might have.
        context: tokens of each row; None for the shortest that was profiled.

    Raises:
        ValueError: the profile lacks the method, or has nothing so large; or there is no record.
    """
    shortest = Forwards(profile).contexts[0]
    steps = Steps(profile, method, shortest if context is None else context)
    if not steps.knows_drafts:
        raise ValueError(unknown_drafts(profile, method))
    if not records:
        raise ValueError(f"there is no recorded output of method {method!r} to replay")
    vanilla_s = own_s = 0.0
    for begin in range(0, len(records), batch):
        rows = records[begin : begin + batch]
        taken = [[Step(*step) for step in row.steps] for row in rows]
        alone = [[0] * sum(step.committed for step in row) for row in taken]
        vanilla_s += _seconds(alone, 0, steps)
        own_s += _seconds([[step.nodes for step in row] for row in taken], depth, steps)
    return vanilla_s / own_s


def _seconds(drafted: Sequence[Sequence[int]], depth: int, steps: Steps) -> float:
    """Of one batch.

    Args:
        drafted: by row, the nodes of each of its steps.
    """
    seconds = 0.0
    for nodes in zip_longest(*drafted):
        running = [num for num in nodes if num is not None]
        mean = fmean(running)
        seconds += steps.cost(len(running), depth, mean, tree_nodes=mean).total_s
    return seconds
