"""A profile as a page: forwards, roofline and knee, breadth against depth, drafters."""

from collections.abc import Mapping, Sequence

from specbench.depth.calibration import LEAST_DRAFTS, Reliability, check_calibration
from specbench.machines import Machine
from specbench.profile import Profile, drafts_trees
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
    "to a depth are taken, and how often they are, in 15 bins, on texts that nothing was fitted "
    f"to; calibrated: after temperatures that were fitted to the other texts, where {LEAST_DRAFTS} "
    "drafts or more are so deep; (bound): the largest or the smallest temperature tried",
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
    """Of the methods whose drafts are chains with chances; why the others are missing."""
    found = {
        name: check_calibration(texts)
        for name, texts in profile.samples.items()
        if not drafts_trees(profile.steps.get(name, ()))
    }
    columns = [
        Column("method", numbers=False),
        Column("depth"),
        Column("drafts fitted to"),
        Column("held-out drafts"),
        Column("calibration error"),
        Column("temperature"),
        Column("calibrated"),
        Column("helped", numbers=False),
    ]
    rows = [[Cell(name), *_reliable(one)] for name, depths in found.items() for one in depths]
    table = Table("how far the drafters' chances can be believed", columns, rows)
    return [
        *([table] if rows else []),
        *(Note(text) for text in _uncalibrated(profile, found)),
    ]


def _reliable(one: Reliability) -> list[Cell]:
    cells = [
        Cell(str(one.depth)),
        Cell(str(one.num_fitted)),
        Cell(str(one.num)),
        Cell(f"{one.believed:.3f}"),
    ]
    if one.temperature is None or one.calibrated is None:
        return [*cells, Cell(MISSING), Cell(MISSING), Cell("not fitted")]
    bound = " (bound)" if one.at_bound else ""
    return [
        *cells,
        Cell(f"{one.temperature:.2f}{bound}"),
        Cell(f"{one.calibrated:.3f}"),
        Cell("yes", "good") if one.helped else Cell("no", "bad"),
    ]


def _uncalibrated(profile: Profile, found: Mapping[str, Sequence[Reliability]]) -> list[str]:
    """Which methods' chances are not in the table, are not calibrated, or not for the better."""
    lines = []
    for name, steps in profile.steps.items():
        if not any(one.depth for one in steps):
            continue
        depths = found.get(name, ())
        few = [one for one in depths if one.temperature is None]
        worse = [str(one.depth) for one in depths if one.temperature and not one.helped]
        if drafts_trees(steps):
            lines.append(
                f"{name} is not in the table of chances: it drafts trees, and only chains "
                "are calibrated"
            )
        elif not depths:
            lines.append(
                f"{name} is not in the table of chances: no draft with chances was "
                "recorded on the held-out texts"
            )
        if few:
            lines.append(
                f"{name}: no temperature is fitted from depth {few[0].depth} on, where "
                f"there are {few[0].num_fitted} drafts to fit to; it takes {LEAST_DRAFTS}"
            )
        if worse:
            lines.append(
                f"{name}: calibration did not help on the held-out texts at depth "
                f"{', '.join(worse)}"
            )
    return lines
