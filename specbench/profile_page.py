"""A profile as a page: forwards, roofline and knee, breadth against depth, drafters."""

from collections.abc import Sequence

from specbench.depth.calibration import check_calibration
from specbench.machines import Machine
from specbench.profile import Profile
from specbench.roofline import Analysis, Knee, analyse, breadths, drafting, knees, machine
from specbench.stats import Spread
from specbench.tables import MISSING, NO_BREAK, Cell, Column, Heading, Note, Page, Table

_READING = (
    "ms are medians [quartiles] over the rounds; a row's tokens are a chain behind a full cache",
    "roofline: max(bytes / bandwidth, FLOPs / rate) + overhead; bandwidth and rate are the best "
    "that torch reached here, the overhead is fitted to the forwards of one token",
    "n*: the most tokens a row for which a forward costs at most 10 % more than for one",
    "level: seconds of drafting for each level of depth, over the forward of a step without a "
    "draft; other: bookkeeping",
    "calibration error: mean distance between how likely the drafter calls it that its tokens down "
    "to a depth are taken, and how often they are, in 15 bins; calibrated: after temperatures that "
    "were fitted to other texts",
    "a step's ms stand for its text: rows of a few fixed texts, short, decoded greedily",
)


def page(profile: Profile) -> Page:
    """All of it."""
    analyses, here = analyse(profile), machine(profile)
    return [
        Heading(f"Profile of {profile.target['name']} on {profile.device}", 1),
        *(Note(text) for text in _about(profile, here)),
        *(Note(text, "strong") for text in profile.notes),
        *(_forwards(analyses, context) for context in profile.contexts),
        *(_roofline(analyses, context) for context in profile.contexts),
        _knees(knees(profile)),
        *_breadths(profile),
        *_drafters(profile),
        *_reliability(profile),
        Heading("How to read it", 3),
        *(Note(text) for text in _READING),
    ]


def _about(profile: Profile, here: Machine) -> list[str]:
    facts = profile.provenance
    return [
        f"{profile.dtype}, {facts.get('threads', MISSING)} threads, "
        f"{len(profile.passes[0].seconds)} rounds; load average at the start "
        f"{facts.get('load_average', MISSING)}",
        f"machine: {here.bandwidth / 1e9:.1f} GB/s, {here.rate / 1e9:.0f} GFLOP/s, "
        f"{here.overhead_s * 1e6:.0f} us for each layer of a pass",
    ]


def _ms(seconds: Spread) -> Cell:
    middle, low, high = (1e3 * part for part in seconds)
    return Cell(f"{middle:.2f} [{low:.2f},{NO_BREAK}{high:.2f}]")


def _ratio(ratio: Spread) -> Cell:
    return Cell(f"{ratio.median:.2f} [{ratio.low:.2f},{NO_BREAK}{ratio.high:.2f}]")


def _forwards(analyses: Sequence[Analysis], context: int) -> Table:
    found = {
        (one.times.tokens, one.times.rows): _ms(one.seconds)
        for one in analyses
        if one.times.context == context
    }
    rows = sorted({num for _, num in found})
    cells = [
        [Cell(str(tokens)), *(found.get((tokens, num), Cell(MISSING)) for num in rows)]
        for tokens in sorted({tokens for tokens, _ in found})
    ]
    columns = [Column("tokens /row"), *(Column(f"B={num} ms") for num in rows)]
    return Table(f"forwards behind a context of {context}", columns, cells)


def _roofline(analyses: Sequence[Analysis], context: int) -> Table:
    columns = [
        Column("batch"),
        Column("tokens /row"),
        Column("MB"),
        Column("GFLOP"),
        Column("FLOP /byte"),
        Column("waits for", numbers=False),
        Column("roofline ms"),
        Column("measured / roofline"),
    ]
    rows = [
        [
            Cell(str(one.times.rows)),
            Cell(str(one.times.tokens)),
            Cell(f"{one.cost.num_bytes / 1e6:.0f}"),
            Cell(f"{one.cost.flops / 1e9:.2f}"),
            Cell(f"{one.cost.intensity:.1f}"),
            Cell("compute" if one.is_compute_bound else "memory"),
            Cell(f"{one.modelled_s * 1e3:.2f}"),
            Cell(f"{one.ratio:.2f}"),
        ]
        for one in analyses
        if one.times.context == context
    ]
    return Table(f"roofline behind a context of {context}", columns, rows)


def _knees(found: Sequence[Knee]) -> Table:
    columns = [
        Column("context"),
        Column("batch"),
        Column("n* measured"),
        Column("tokens of all rows"),
        Column("n* by the roofline"),
    ]
    rows = [
        [
            Cell(str(one.context)),
            Cell(str(one.rows)),
            Cell(_at_most(one.measured, one.most)),
            Cell(_at_most(one.measured, one.most, one.rows)),
            Cell(_at_most(one.modelled, one.most)),
        ]
        for one in found
    ]
    return Table("the knee", columns, rows)


def _at_most(tokens: int | None, most: int, rows: int = 1) -> str:
    return f"> {rows * most}" if tokens is None else str(rows * tokens)


def _breadths(profile: Profile) -> list[Note | Table]:
    """Where rows and tokens were both measured so often."""
    rows = [
        [
            Cell(str(one.context)),
            Cell(str(one.tokens)),
            _ratio(one.ratio),
            Cell(f"{100 * one.extra_bytes:.0f} %"),
        ]
        for one in breadths(profile)
    ]
    if not rows:
        return [Note("breadth against depth: no batch was measured as a number of tokens too")]
    columns = [
        Column("context"),
        Column("n"),
        Column("n rows of 1 / 1 row of n"),
        Column("bytes read more"),
    ]
    return [Table("breadth against depth", columns, rows)]


def _drafters(profile: Profile) -> list[Note | Table]:
    """Of the methods that drafted."""
    columns = [
        Column("method", numbers=False),
        Column("batch"),
        Column("depth"),
        Column("nodes"),
        Column("draft ms"),
        Column("forward ms"),
        Column("other ms"),
        Column("level"),
        Column("step / step without"),
    ]
    rows = [
        [
            Cell(name),
            Cell(str(one.steps.rows)),
            Cell(str(one.steps.depth)),
            Cell(f"{one.nodes:.1f}"),
            Cell(f"{one.draft_s * 1e3:.2f}"),
            Cell(f"{one.forward_s * 1e3:.2f}"),
            Cell(f"{one.bookkeeping_s * 1e3:.2f}"),
            Cell(f"{100 * one.level:.1f} %"),
            _ratio(one.step),
        ]
        for name, steps in profile.steps.items()
        for one in drafting(steps)
    ]
    return [Table("steps of the drafters", columns, rows)] if rows else []


def _reliability(profile: Profile) -> list[Note | Table]:
    """Of the methods whose drafts are chains with chances."""
    columns = [
        Column("method", numbers=False),
        Column("depth"),
        Column("drafts"),
        Column("calibration error"),
        Column("temperature"),
        Column("calibrated"),
    ]
    rows = [
        [
            Cell(name),
            Cell(str(one.depth)),
            Cell(str(one.num)),
            Cell(f"{one.believed:.3f}"),
            Cell(f"{one.temperature:.2f}"),
            Cell(f"{one.calibrated:.3f}"),
        ]
        for name, texts in profile.samples.items()
        for one in check_calibration(texts)
    ]
    return [Table("how far the drafters' chances can be believed", columns, rows)] if rows else []
