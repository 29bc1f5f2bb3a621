"""What `specbench simulate` predicts, as a page: by batch, by depth, and what is assumed."""

from collections.abc import Sequence

from specbench.acceptance import Acceptance
from specbench.scenario import Point, Scenario, crossovers
from specbench.simulate import SimulateConfig
from specbench.tables import MISSING, Cell, Column, Heading, Note, Page, Table


def page(config: SimulateConfig) -> Page:
    """What is predicted, as a page."""
    setup = config.setup()
    scenario = setup.scenario
    points = [scenario.at(batch) for batch in sorted(set(setup.batches))]
    target, machine = scenario.target, scenario.machine
    fitting = [point for point in points if point.fits is not False]
    return [
        Heading(f"Predicted, not measured: {setup.model} on {machine.name}", 1),
        Note(
            f"target: {_billions(target.num_weights)} weights, "
            f"{_billions(target.num_active_weights)} of them active, in {setup.dtype}; context "
            f"{scenario.context}"
        ),
        Note(
            f"machine: {machine.bandwidth / 1e9:.0f} GB/s, {machine.rate / 1e12:.3g} TFLOP/s, "
            f"{machine.overhead_s * 1e6:.0f} us for each layer of a pass"
            + (f", {machine.memory_bytes / 2**30:.0f} GiB" if machine.memory_bytes else "")
        ),
        Note(f"drafter: {setup.drafter} ({setup.why}); acceptance: {_source(config)}"),
        *(Note(line) for line in _ended(config, scenario)),
        *(Note(doubt, "strong") for doubt in setup.doubts),
        _batches(points),
        *_depths(fitting, scenario.acceptance),
        Note(_crossover(points, fitting), "strong"),
        Heading("Assumptions", 3),
        *(Note(assumption) for assumption in setup.assumptions),
    ]


def _ended(config: SimulateConfig, scenario: Scenario) -> list[str]:
    """Where the grid of depths ends, unless that is where the user said."""
    known, shown = scenario.acceptance.deepest, scenario.deepest
    said = "given" if config.run is None else "recorded"
    if shown == known != config.depth:
        return [f"depths end at {known}: no acceptance is {said} beyond that"]
    if shown != config.depth:
        return [f"depths end at {shown}, the deepest that is simulated or was profiled"]
    return []


def _source(config: SimulateConfig) -> str:
    if config.run is None:
        return ", ".join(f"{chance:g}" for chance in config.acceptance) + " by position"
    return " ".join(filter(None, ["recorded in", str(config.run), config.method, config.workload]))


def _billions(number: float) -> str:
    return f"{number / 1e9:.2f}B"


def _batches(points: Sequence[Point]) -> Table:
    columns = [
        Column("batch"),
        Column("vanilla ms /step"),
        Column("vanilla tokens/s"),
        Column("waits for", numbers=False),
        Column("deepest verify waits for", numbers=False),
        Column("best depth"),
        Column("speed-up"),
        Column("weights + KV GiB"),
        Column("fits", numbers=False),
    ]
    rows = [
        [
            Cell(str(point.batch)),
            Cell(f"{point.vanilla_s * 1e3:.2f}"),
            Cell(f"{point.batch / point.vanilla_s:.0f}"),
            Cell(point.vanilla_bound),
            Cell(point.verify_bound),
            Cell(MISSING if point.fits is False else str(point.best.depth)),
            Cell(MISSING) if point.fits is False else _gain(point.best.speed_up),
            Cell(f"{point.memory.weights / 2**30:.1f} + {point.memory.kv / 2**30:.1f}"),
            _fits(point.fits),
        ]
        for point in points
    ]
    return Table("by batch", columns, rows)


def _depths(points: Sequence[Point], acceptance: Acceptance) -> list[Table]:
    """Of the batches that fit."""
    if not points:
        return []
    columns = [Column("depth"), Column("tokens /step")]
    columns += [*(Column(f"B={point.batch}") for point in points), Column("pays below batch")]
    rows = [
        [
            Cell(str(1 + i)),
            Cell(f"{acceptance.tokens(1 + i):.2f}"),
            *(_gain(point.speed_ups[i]) for point in points),
            Cell("all here" if end is None else str(end)),
        ]
        for i, end in enumerate(crossovers(points))
    ]
    return [Table("speed-up by depth and batch", columns, rows)]


def _crossover(points: Sequence[Point], fitting: Sequence[Point]) -> str:
    left_out = ", ".join(str(point.batch) for point in points if point not in fitting)
    if not fitting:
        return f"No batch here fits into the memory ({left_out}), so nothing is predicted."
    without = f" Batches that do not fit into the memory are left out: {left_out}." * bool(left_out)
    ends = crossovers(fitting)
    if None in ends:
        most = "largest batch here that fits" if left_out else "largest batch here"
        return f"Some depth pays up to the {most}, {fitting[-1].batch}.{without}"
    last = max(end for end in ends if end is not None)
    return f"No depth pays from batch {last} on: switch speculation off there.{without}"


def _gain(gain: float) -> Cell:
    return Cell(f"{gain:.2f}x", "good" if gain > 1 else "bad" if gain < 1 else "")


def _fits(fits: bool | None) -> Cell:
    if fits is None:
        return Cell(MISSING)
    return Cell("yes") if fits else Cell("no", "bad")
