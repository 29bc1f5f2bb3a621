"""Depth controllers compared on the same recorded outputs, with every fixed depth and the per-step
oracle, at the step times of a profile. Pure functions; what is shown is replayed, not measured."""

from collections.abc import Sequence
from dataclasses import dataclass

from specbench.depth import Choice, Fixed, StepTable
from specbench.depth.replay import replay
from specbench.method import MethodConfig
from specbench.prediction import check_within, unknown_drafts
from specbench.profile import Profile, step_table
from specbench.records import RequestRecord
from specbench.tables import Cell, Column, Heading, Note, Page, Table
from specbench.trace import Replay, Room, Trace, play_oracle, read_traces

OUTPUTS_PER_ROW = 8
SPELL_STEPS = 100
ASSUMPTIONS = (
    "recorded drafts are chains that depend on committed tokens alone, so that a step of another "
    "depth would have been right at the same positions; those never tested are right as often",
    "a step takes what the profile has for its batch and the mean depth of its rows; the next "
    "request joins as soon as a row ends, and prefill takes no time",
    "records have no chances: confidence is always sure, and survival goes by how a row's drafts "
    "fared so far",
    f"outputs are taken again from the first until there are {OUTPUTS_PER_ROW} for each row of the "
    "largest batch; under a changing load there is room for each of the batch sizes in turn, up "
    f"and down again, each for the time of {SPELL_STEPS} steps of a row without drafts",
    "the oracle knows what is right, drafts nothing else, and takes of it what makes most tokens a "
    "second in this step; regret is the share of its throughput that a controller misses",
)
DEFAULT = (
    "heuristic",
    "confidence",
    "ema",
    "off_above_batch:off_at=4",
    "goodput",
    "survival",
)
"""What is compared where nothing is said; every fixed depth besides."""


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
    times: StepTable,
    batches: Sequence[int],
    controllers: Sequence[str] = DEFAULT,
    depth: int | None = None,
) -> list[Compared]:
    """Replays outputs under every fixed depth and every controller.

    Args:
        traces: see `specbench.trace.read_traces`.
        times: what steps cost.
        batches: rows at a time; where there are several, a load that changes between them comes
            last.
        controllers: as a method's knob names them.
        depth: the deepest draft; by default the deepest that step times are known of.

    Raises:
        ValueError: a controller is not valid, or the depth beyond the step times.
    """
    deepest = times.nodes[-1] if depth is None else depth
    if not 1 <= deepest <= times.nodes[-1]:
        raise ValueError(f"--depth {deepest} is out of range; valid: 1..{times.nodes[-1]}")
    config = MethodConfig(depth=deepest, max_nodes=deepest)
    ways = {f"fixed at {d}": Fixed(d, d) for d in range(deepest + 1)}
    chosen = {text: Choice.read(text).make(config, times) for text in controllers}
    again = -(-OUTPUTS_PER_ROW * max(batches) // len(traces))
    traces = list(traces) * max(1, again)
    loads: dict[int | None, int | Room] = {batch: batch for batch in batches}
    if len(loads) > 1:
        loads[None] = changing(batches, SPELL_STEPS * times.step_s([0]))
    found = []
    for batch, room in loads.items():
        best = play_oracle(traces, room, deepest, times.step_s)
        for name, controller in (ways | chosen).items():
            made = replay(traces, room, controller, times)
            found.append(Compared(name=name, batch=batch, made=made, best=best))
    return found


def changing(batches: Sequence[int], spell_s: float) -> Room:
    """Room that goes through some batch sizes, up and down again, for so many seconds each."""
    up = sorted(batches)
    tide = up + up[-2:0:-1]
    return lambda seconds: tide[int(seconds / spell_s) % len(tide)]


def step_times(profile: Profile, method: str) -> StepTable:
    """Seconds of a method's steps, by rows and depth.

    Raises:
        ValueError: the profile lacks them.
    """
    steps = profile.steps.get(method, [])
    if not any(one.depth for one in steps):
        raise ValueError(unknown_drafts(profile, method))
    return step_table(steps)


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
        records: the method's.
        batches: by default those of the profile.

    Raises:
        ValueError: as `compare` and `step_times`, or a batch is beyond the profile.
    """
    times = step_times(profile, method)
    for batch in batches:
        check_within("--batches", batch, times.rows)
    chosen = list(batches) or times.rows
    found = compare(read_traces(records), times, chosen, controllers, depth)
    return [
        Heading(f"Controllers of {method}, replayed", 1),
        Note(f"{len(records)} recorded outputs; step times of {profile.device}, as profiled"),
        _table(found),
        Heading("Assumptions", 3),
        *(Note(assumption) for assumption in ASSUMPTIONS),
    ]


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
            cells.append(Cell(f"{100 * one.regret:.1f} %", tone))
        rows.append(cells)
    return Table("throughput, and what of the per-step oracle's is missed", columns, rows)
