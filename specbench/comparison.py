"""Depth controllers compared on the same recorded outputs, with every fixed depth and the per-step
oracle, at the step times of a profile. Pure functions; what is shown is replayed, not measured."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from math import inf
from typing import NamedTuple

from specbench.depth import Choice, DepthController, Fixed, StepTable
from specbench.depth.replay import replay
from specbench.method import MethodConfig
from specbench.prediction import check_within
from specbench.profile import (
    Profile,
    StepSamples,
    drafts_trees,
    profiled_name,
    step_table,
    unknown_drafts,
    variant_note,
)
from specbench.records import RequestRecord
from specbench.tables import Cell, Column, Heading, Note, Page, Table
from specbench.trace import (
    Replay,
    Room,
    Trace,
    are_trees,
    assumptions,
    play_oracle,
    read_traces,
)

OUTPUTS_PER_ROW = 8
SPELL_STEPS = 500
ASSUMPTIONS = (
    "a step takes what the profile has for its batch and the mean depth of its rows; the next "
    "request joins as soon as a row ends, and prefill takes no time",
    "records have no chances: survival goes by how a row's drafts fared so far",
    f"outputs are taken again from the first until there are {OUTPUTS_PER_ROW} for each row of the "
    "largest batch; under a changing load there is room for each of the batch sizes in turn, up "
    f"and down again, each for the time of {SPELL_STEPS} steps of a row without drafts; rows that "
    "are there stay until they end, and outputs are taken again until that time is over",
    "the oracle knows what is right, drafts nothing else, and takes of it what makes most tokens a "
    "second in this step; regret is the share of its throughput that a controller misses, below 0 "
    "where looking at one step at a time is not best in the long run",
)
DEFAULT = ("heuristic", "ema", "off_above_batch:off_at=4", "goodput", "survival")
"""What is compared where nothing is said, as far as it can be; every fixed depth besides. Not
`confidence`, which goes by chances alone: records have none."""


class Costs(NamedTuple):
    """Seconds of steps, by rows and depth.

    Args:
        drafting: of their drafts.
        rest: of what comes when these are there.
    """

    drafting: StepTable
    rest: StepTable

    @staticmethod
    def of(steps: Sequence[StepSamples]) -> "Costs":
        """As profiled."""
        return Costs(
            step_table(steps, lambda one: one.draft_s),
            step_table(
                steps,
                lambda one: [a + b for a, b in zip(one.forward_s, one.bookkeeping_s, strict=True)],
            ),
        )

    @property
    def whole(self) -> StepTable:
        """Of all of them."""
        grid = product(self.rest.rows, self.rest.nodes)
        parts = (self.drafting, self.rest)
        return StepTable({(b, d): sum(one.step_s([d] * b) for one in parts) for b, d in grid})


@dataclass(frozen=True, kw_only=True)
class Compared:
    """One way of choosing depths at one batch size.

    Args:
        name: of the controller, with its knobs.
        batch: rows at a time; None for a load that changes between all batch sizes.
        made: tokens and seconds of it.
        best: those of the oracle.
    """

    name: str
    batch: int | None
    made: Replay
    best: Replay

    @property
    def regret(self) -> float:
        """The share of the oracle's throughput that it misses."""
        return self.made.regret(self.best)


def compare(
    traces: Sequence[Trace],
    costs: Costs,
    batches: Sequence[int],
    controllers: Sequence[str] = DEFAULT,
    depth: int | None = None,
) -> list[Compared]:
    """Replays outputs under every fixed depth and every controller.

    Args:
        traces: see `specbench.trace.read_traces`.
        costs: what steps cost.
        batches: rows at a time; where there are several, a load that changes between them comes
            last.
        controllers: as a method's knob names them.
        depth: the deepest draft; by default the deepest that step times are known of.

    Raises:
        ValueError: a controller is not valid, or the depth beyond the step times.
    """
    times = costs.whole
    deepest = times.nodes[-1] if depth is None else depth
    if not 1 <= deepest <= times.nodes[-1]:
        raise ValueError(f"--depth {deepest} is out of range; valid: 1..{times.nodes[-1]}")
    batches = list(dict.fromkeys(batches))
    config = MethodConfig(depth=deepest, max_nodes=deepest)
    ways = {f"fixed at {d}": Fixed(d, d) for d in range(deepest + 1)}
    chosen = {text: _make(Choice.read(text), config, costs) for text in controllers}
    again = -(-OUTPUTS_PER_ROW * max(batches) // len(traces))
    loads = [_Load(batch, batch, list(traces) * max(1, again)) for batch in batches]
    if len(batches) > 1:
        loads.append(_changing(batches, traces, times, deepest))
    found = []
    for load in loads:
        best = play_oracle(load.traces, load.room, deepest, times.step_s, load.until_s)
        for name, controller in (ways | chosen).items():
            made = replay(
                load.traces, load.room, controller, costs.rest, costs.drafting, load.until_s
            )
            found.append(Compared(name=name, batch=load.batch, made=made, best=best))
    return found


def _make(choice: Choice, config: MethodConfig, costs: Costs) -> DepthController:
    if choice.takes_calibration:
        return choice.make(config, costs.rest, drafting=costs.drafting)
    return choice.make(config, costs.whole)


class _Load(NamedTuple):
    """What is there to do, and for how many rows there is room."""

    batch: int | None
    room: int | Room
    traces: Sequence[Trace]
    until_s: float = inf


def _changing(
    batches: Sequence[int], traces: Sequence[Trace], times: StepTable, deepest: int
) -> _Load:
    """One tide, and more outputs than anything can make of it."""
    alone_s = times.step_s([0])
    sizes = tide(batches)
    until_s = len(sizes) * SPELL_STEPS * alone_s
    # No step is shorter than one of a row without drafts, and none makes more than all it drafts.
    most = len(sizes) * SPELL_STEPS * max(batches) * (1 + deepest)
    again = -(-most // sum(map(len, traces)))
    return _Load(None, spells(sizes, SPELL_STEPS * alone_s), list(traces) * again, until_s)


def tide(batches: Sequence[int]) -> list[int]:
    """Batch sizes, up and down again; the least comes once."""
    up = sorted(batches)
    return up + up[-2:0:-1]


def spells(sizes: Sequence[int], spell_s: float) -> Room:
    """Room for each of some sizes in turn, for so many seconds each."""
    return lambda seconds: sizes[int(seconds / spell_s) % len(sizes)]


def page(
    profile: Profile,
    method: str,
    records: Sequence[RequestRecord],
    batches: Sequence[int] = (),
    controllers: Sequence[str] = DEFAULT,
    depth: int | None = None,
) -> Page:
    """The comparison of one method's controllers, as a page.

    Args:
        profile: has steps of the method, or of the one that it is a variant of.
        records: the method's.
        batches: by default those of the profile.

    Raises:
        ValueError: as `compare`; or the profile lacks the method's steps, or a batch; or nothing
        was drafted; or a controller is named that cannot be replayed.
    """
    profiled = profiled_name(profile, method)
    if profiled is None:
        raise ValueError(unknown_drafts(profile, method))
    if not any(step[1] for record in records for step in record.steps):
        raise ValueError(f"{method} drafted nothing here; valid: outputs with drafts")
    costs = Costs.of(profile.steps[profiled])
    for batch in batches:
        check_within("--batches", batch, costs.rest.rows)
    chosen = list(batches) or costs.rest.rows
    controllers, notes = _replayable(controllers, records)
    found = compare(read_traces(records), costs, chosen, controllers, depth)
    return [
        Heading(f"Controllers of {method}, replayed", 1),
        Note(f"{len(records)} recorded outputs; step times of {profile.device}, as profiled"),
        *([] if profiled == method else [Note(variant_note(method, profiled), "strong")]),
        *(Note(line, "strong") for line in [*_without_chances(controllers), *notes]),
        _table(found),
        Heading("Assumptions", 3),
        *(Note(one) for one in _assumptions(records, profile.steps[profiled])),
    ]


def _replayable(
    controllers: Sequence[str], records: Sequence[RequestRecord]
) -> tuple[Sequence[str], Sequence[str]]:
    """Those that can be replayed on these records, and a note on those that cannot."""
    admitting = [text for text in controllers if Choice.read(text).takes_calibration]
    if not (admitting and are_trees(records)):
        return controllers, ()
    why = (
        f"{', '.join(admitting)}: admits the nodes of a tree one by one, and a record has only the "
        "path that was taken"
    )
    if controllers is not DEFAULT:
        raise ValueError(f"{why}; valid: other controllers, or outputs of chains")
    return [text for text in controllers if text not in admitting], (f"left out: {why}",)


def _without_chances(controllers: Sequence[str]) -> list[str]:
    return [
        f"{text} goes by the drafter's chances alone, and records have none: here it is always "
        "sure, as the deepest fixed depth"
        for text in controllers
        if Choice.read(text).needs_chances
    ]


def _assumptions(records: Sequence[RequestRecord], steps: Sequence[StepSamples]) -> list[str]:
    lines = assumptions(records)
    if are_trees(records):
        drafts = "trees" if drafts_trees(steps) else "chains, though trees were recorded,"
        lines.append(f"a step that drafts costs what the profile's {drafts} of its depth cost")
    return [*lines, *ASSUMPTIONS]


def _table(found: Sequence[Compared]) -> Table:
    columns = [Column("controller", numbers=False)]
    batches = list(dict.fromkeys(one.batch for one in found))
    for batch in batches:
        load = "changing" if batch is None else f"B={batch}"
        columns += [Column(f"{load} tokens/s"), Column("regret")]
    least = {b: min(one.regret for one in found if one.batch == b) for b in batches}
    rows = []
    for name in dict.fromkeys(one.name for one in found):
        cells = [Cell(name)]
        for one in (one for one in found if one.name == name):
            tone = "good" if one.regret == least[one.batch] else ""
            cells.append(Cell(f"{one.made.tokens_per_s:.1f}"))
            cells.append(Cell(f"{100 * one.regret:.1f} %".replace("-0.0", "0.0"), tone))
        rows.append(cells)
    return Table("throughput, and what of the per-step oracle's is missed", columns, rows)
