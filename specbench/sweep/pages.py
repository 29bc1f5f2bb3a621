"""A sweep as a page: the recommendation, heat maps, all points, and what theory promises beside
what was measured."""

from collections.abc import Callable, Iterator, Mapping, Sequence

from specbench.columns import marks, number, percent, show_lossless, show_speed_up
from specbench.describe import describe_workload, provenance_lines, title, warnings
from specbench.merge import Section
from specbench.messages import counted
from specbench.records import Run
from specbench.stats import MIN_CLUSTERS
from specbench.sweep.choices import (
    best,
    by_batch,
    by_setting,
    find_ends,
    is_untold,
    last_paying,
    recommend,
)
from specbench.sweep.config import Setting
from specbench.sweep.engines import advise
from specbench.sweep.points import Point, Points, WorkloadPoints
from specbench.tables import MISSING, Cell, Column, Heading, Note, Page, Table

_MARKS = {"faster": "+", "slower": "-", "inconclusive": "?"}
_LARGE = 1.25
"""A speed-up, or its inverse, from which on a cell of the heat map has the stronger colour."""
LEGEND = (
    "depth: 3n6 is depth 3 with at most 6 nodes",
    "speed-up: over vanilla at the same batch size, on the same prompts, in turns with it; `+` is "
    "faster, `-` slower, `?` not proven either way, by verdicts corrected for all speed-ups of the "
    "sweep (Holm)",
    "tokens/s: of the whole batch, prefill left out; rows: of a step, fewer than the batch once "
    "some have ended, for none joins in their place",
    "ms/token: as a request has it, seconds of a step / tau; s/request: with the prefill of its "
    "batch, as if all steps of a pass took equally long",
    "best: the largest speed-up, proven or not; not above 1 from: the batch size from which on no "
    "interval lies above 1; below 1 from: from which on all lie below 1; cannot tell: under "
    f"{MIN_CLUSTERS} batches were timed, so there is no interval",
    "tokens /step: of a row, bonus included; iid: as if every draft token had the same chance; by "
    "position: from the chance at each depth; tau: as it was. Each would be the speed-up if a step "
    "cost what vanilla's does and rows ended alike; the ideal one has the rows as they ended",
    "ideal + draft + verify + other = ms of a token of the batch: ideal is vanilla's step over the "
    "tokens of the method's; verify is what forwards cost beyond those of one node a row; other is "
    "bookkeeping beyond vanilla's. Rounds are pooled there; elsewhere the median one counts",
)


def page(runs: Mapping[int, Run], points: Points, notes: Sequence[str] = ()) -> Page:
    """All of a sweep.

    Args:
        runs: by batch size.
        points: theirs.
        notes: what became known before anything was measured.
    """
    first = next(iter(runs.values()))
    elements: list[Heading | Note | Table] = [Heading(f"Sweep: {title(first)}", 1)]
    elements += [Note(note, "bad") for note in [*notes, *points.notes, *_doubts(runs)]]
    for workload in points.workloads:
        elements += _workload(workload)
    for workload in points.workloads:
        if tables := list(_against_theory(workload)):
            name = workload.about.metrics.workload
            elements += [Heading(f"{name}: measured against theory", 2), *tables]
    elements.append(Heading("How it was measured", 2))
    elements += [Note(line) for line in provenance_lines(Section(list(runs.values()), first, []))]
    return [*elements, Heading("How to read it", 2), *(Note(line) for line in LEGEND)]


def _doubts(runs: Mapping[int, Run]) -> Iterator[str]:
    """What a report warns of in each run, but for its speed-ups: these are judged here."""
    for run in runs.values():
        name = f"{run.folder.name}: "
        for warning in warnings(Section([run], run, []), []):
            yield name + warning.removeprefix(name)


def _workload(workload: WorkloadPoints) -> Iterator[Heading | Note | Table]:
    yield Heading(workload.about.metrics.workload, 2)
    yield Note(describe_workload(workload.about))
    yield from _recommendation(workload)
    for method, points in workload.by_method.items():
        yield _heat_map(method, points)
    yield _vanilla(workload)
    for method, points in workload.by_method.items():
        yield _details(method, points)


def _recommendation(workload: WorkloadPoints) -> Iterator[Heading | Note | Table]:
    choices = recommend(workload.points)
    columns = [
        Column("batch"),
        Column("recommended", numbers=False),
        Column("depth"),
        Column("speed-up", numbers=False),
        Column("tokens/s"),
    ]
    at = by_batch(workload.points)
    rows = [
        _choice(workload.baselines.get(batch), batch, choices[batch])
        if batch in choices
        else _untold(batch, here)
        for batch, here in at.items()
    ]
    yield Table("recommendation", columns, rows)
    yield Note(_switch(choices, [batch for batch in at if batch not in choices]), "strong")
    for method, points in workload.by_method.items():
        for advice in advise(points):
            yield Note(f"{method}, {advice.engine}: `{advice.setting}` ({advice.unsaid})")


def _choice(vanilla: Point | None, batch: int, point: Point | None) -> list[Cell]:
    if point is None or point.setting is None:
        rate = number(vanilla.tokens_per_s if vanilla else None, 1)
        off = Cell("off", "strong")
        return [Cell(str(batch)), off, Cell("0"), Cell("1.00x baseline"), Cell(rate)]
    return [
        Cell(str(batch)),
        Cell(point.setting.method, "strong"),
        Cell(_depth(point.setting)),
        show_speed_up(point.result),
        Cell(number(point.tokens_per_s, 1)),
    ]


def _untold(batch: int, points: Sequence[Point]) -> list[Cell]:
    num_batches = max(point.num_batches for point in points)
    reason = f"cannot tell: {counted(num_batches, 'batch')} of {MIN_CLUSTERS} needed"
    return [Cell(str(batch)), Cell(reason, "strong"), *[Cell(MISSING)] * 3]


def _switch(choices: Mapping[int, Point | None], untold: Sequence[int]) -> str:
    """What to do.

    Args:
        choices: where it can be told.
        untold: the other batch sizes.
    """
    sizes = f"batch size{'s' if len(untold) > 1 else ''} {', '.join(map(str, untold))}"
    if not choices:
        return (
            f"Whether speculation pays at {sizes} cannot be told: a verdict takes {MIN_CLUSTERS} "
            "batches."
        )
    last, largest = last_paying(choices), max(choices)
    if not last:
        where = "any batch size here: leave speculation off"
        if untold:
            where = f"batch size {', '.join(map(str, choices))}: leave speculation off there"
        text = f"No setting is proven to pay at {where}."
    elif last == largest:
        judged = "with a verdict" if untold else "measured"
        text = f"It pays up to the largest batch size {judged}, {last}; beyond, nothing is known."
    else:
        text = f"Nothing is proven to pay above batch size {last}: switch speculation off there."
    return text + (f" At {sizes} it cannot be told." if untold else "")


def _depth(setting: Setting) -> str:
    return str(setting.depth) if setting.nodes is None else f"{setting.depth}n{setting.nodes}"


def _heat_map(method: str, points: Sequence[Point]) -> Table:
    batches = list(by_batch(points))
    columns = [
        Column("depth", numbers=False),
        *(Column(f"B={batch}") for batch in batches),
        Column("not above 1 from"),
        Column("below 1 from"),
    ]
    rows = []
    for setting, own in by_setting(points).items():
        at = {point.batch: point for point in own}
        cells = [_heat(at.get(batch)) for batch in batches]
        rows.append([Cell(_depth(setting)), *cells, *_ends(own)])
    bests = [best(here) for here in by_batch(points).values()]
    cells = [Cell(_depth(p.setting) if p and p.setting else MISSING, "strong") for p in bests]
    rows.append([Cell("best", "strong"), *cells, *_ends(points)])
    return Table(f"{method}: speed-up by depth and batch size", columns, rows)


def _ends(points: Sequence[Point]) -> list[Cell]:
    if is_untold(points):
        return [Cell("cannot tell")] * 2
    return [Cell(MISSING if end is None else str(end)) for end in find_ends(points)]


def _heat(point: Point | None) -> Cell:
    if point is None or point.result.speed_up is None:
        return Cell(MISSING)
    estimate = point.result.speed_up
    text = f"{estimate.value:.2f}x {_MARKS[estimate.verdict]}".replace(" ", "\N{NO-BREAK SPACE}")
    if not point.is_sound:
        return Cell(" ".join([text, *(marks(point.result) or ["FAILED"])]), "bad")
    is_large = max(estimate.value, 1 / estimate.value) >= _LARGE
    tones = {"faster": ("warm", "hot"), "slower": ("cool", "cold"), "inconclusive": ("", "")}
    return Cell(text, tones[estimate.verdict][is_large])


def _vanilla(workload: WorkloadPoints) -> Table:
    columns = [Column("batch"), *(column for column, _ in _TIMES)]
    rows = [
        [Cell(str(batch)), *(Cell(show(point)) for _, show in _TIMES)]
        for batch, point in sorted(workload.baselines.items())
    ]
    return Table("vanilla", columns, rows)


_TIMES: tuple[tuple[Column, Callable[[Point], str]], ...] = (
    (Column("rows"), lambda p: number(p.mean_rows, 1)),
    (Column("tokens/s"), lambda p: number(p.tokens_per_s, 1)),
    (Column("ms /token"), lambda p: _ms(p.row_s)),
    (Column("s /request"), lambda p: number(p.request_s, 3)),
)


def _details(method: str, points: Sequence[Point]) -> Table:
    columns = [
        Column("depth", numbers=False),
        Column("batch"),
        *(column for column, _ in _TIMES),
        Column("tau"),
        Column("acceptance"),
        Column("speed-up", numbers=False),
        Column("lossless", numbers=False),
    ]
    rows = [
        [
            Cell(_depth(point.setting)),
            Cell(str(point.batch)),
            *(Cell(show(point)) for _, show in _TIMES),
            *_acceptance(point),
            show_speed_up(point.result),
            show_lossless(point.result),
        ]
        for point in points
        if point.setting
    ]
    return Table(f"{method}: all points", columns, rows)


def _acceptance(point: Point) -> list[Cell]:
    acceptance = point.result.acceptance
    if acceptance is None:
        return [Cell(MISSING), Cell(MISSING)]
    return [Cell(number(acceptance.tau)), Cell(percent(acceptance.rate))]


def _against_theory(workload: WorkloadPoints) -> Iterator[Table]:
    columns = [Column("depth", numbers=False), Column("batch")]
    columns += [Column(f"tokens /step: {word}") for word in ("iid", "by position", "tau")]
    columns += [Column(word) for word in ("ideal speed-up", "measured speed-up")]
    columns += [Column(f"{word} ms") for word in ("ideal", "draft", "verify", "other", "all")]
    for method, points in workload.by_method.items():
        rows = [_theory(point) for point in points if point.promise and point.breakdown]
        if rows:
            yield Table(f"{method}: promised and measured", columns, rows)


def _theory(point: Point) -> list[Cell]:
    promise, parts, setting = point.promise, point.breakdown, point.setting
    assert promise and parts and setting, "asked for where they are known"
    tokens = (promise.iid, promise.by_position, promise.measured)
    seconds = (parts.ideal_s, parts.draft_s, parts.verify_s, parts.bookkeeping_s, parts.method_s)
    return [
        Cell(_depth(setting)),
        Cell(str(point.batch)),
        *(Cell(number(value)) for value in tokens),
        Cell(f"{parts.ideal_speed_up:.2f}x"),
        Cell(f"{parts.speed_up:.2f}x"),
        *(Cell(_ms(value)) for value in seconds),
    ]


def _ms(seconds: float | None) -> str:
    return MISSING if seconds is None else f"{1000 * seconds:.2f}"
