"""What each column of a report says of a method, to the word and the digit."""

from collections.abc import Callable, Iterable, Mapping, Sequence

from specbench.breakdown import Breakdown, Promise
from specbench.metrics import LEAST_LAW_P, Acceptance, Times
from specbench.summary import MethodResult
from specbench.tables import MISSING, NO_BREAK, Cell, Column, Table

_MOST_POSITIONS = 8
_NOT_THE_TARGETS = ("broken", "lossy")
_Show = Callable[[MethodResult], Cell | str]
_Text = Callable[[float | None], str]


def results_table(methods: Sequence[MethodResult]) -> Table:
    """What came out: acceptance, speed-up, losslessness."""
    return _table("", methods, _RESULT_COLUMNS)


def costs_table(methods: Sequence[MethodResult]) -> Table:
    """What it costs: forwards, nodes, seconds, weights."""
    return _table("cost", methods, _COST_COLUMNS)


def positions_table(methods: Sequence[MethodResult]) -> Table:
    """Offered depth and conditional acceptance by position, of the methods that drafted."""
    drafting = [m for m in methods if m.acceptance and m.acceptance.positions]
    deepest = max((len(m.acceptance.positions) for m in drafting if m.acceptance), default=0)
    columns: list[tuple[Column, _Show]] = [
        _MARKED,
        (Column("tau by prompt"), _accepted(lambda a: a.tau_by_prompt, number)),
        (Column("depth"), _accepted(lambda a: a.num_offered / a.num_steps, number)),
        *((Column(f"{p}"), _at(p)) for p in range(1, min(deepest, _MOST_POSITIONS) + 1)),
    ]
    more = f" (the first {_MOST_POSITIONS} of {deepest})" if deepest > _MOST_POSITIONS else ""
    return _table(f"drafts, and their acceptance at position p{more}", drafting, columns)


def prediction_table(methods: Sequence[MethodResult]) -> Table:
    """What theory promises from the acceptance, and what of it drafting, wider forwards and
    bookkeeping took; of the methods that drafted."""
    drafting = [m for m in methods if m.promise and m.breakdown]
    return _table("theory against measurement", drafting, _PREDICTION_COLUMNS)


def ranking_table(methods: Sequence[MethodResult]) -> Table:
    """The results, best speed-up first, with ranks; broken and lossy methods, and those without a
    speed-up, stand at the end without a rank."""
    ordered = sorted(methods, key=lambda m: (-_standing(m), m.method))
    ranked = [m for m in ordered if _standing(m) > 0 and not m.is_baseline]
    ranks = {m.method: str(place) for place, m in enumerate(ranked, start=1)}
    rank: tuple[Column, _Show] = (Column("rank"), lambda m: ranks.get(m.method, MISSING))
    return _table("", ordered, [rank, *_RESULT_COLUMNS])


def _standing(method: MethodResult) -> float:
    """What a method is ranked by; 0 is no rank."""
    if method.is_baseline:
        return 1.0
    if method.speed_up is None or is_not_the_targets(method):
        return 0.0
    return method.speed_up.value


def is_not_the_targets(method: MethodResult) -> bool:
    """Whether outputs are broken, lossy or not in law."""
    return bool(marks(method))


def _is_unlawful(method: MethodResult) -> bool:
    return method.law_p is not None and method.law_p < LEAST_LAW_P


def _accepted(read: Callable[[Acceptance], float | None], text: _Text) -> _Show:
    return lambda method: text(read(method.acceptance) if method.acceptance else None)


def _timed(read: Callable[[Times], float | None], text: _Text) -> _Show:
    return lambda method: text(read(method.times) if method.times else None)


def _promised(read: Callable[[Promise], float]) -> _Show:
    return lambda method: number(read(method.promise) if method.promise else None)


def _broken_down(read: Callable[[Breakdown], float], text: _Text) -> _Show:
    return lambda method: text(read(method.breakdown) if method.breakdown else None)


def _times(value: float | None) -> str:
    return MISSING if value is None else f"{value:.2f}x"


def _at(p: int) -> Callable[[MethodResult], str]:
    def show(method: MethodResult) -> str:
        positions = method.acceptance.positions if method.acceptance else []
        return percent(positions[p - 1].conditional if p <= len(positions) else None)

    return show


def _table(
    title: str, methods: Iterable[MethodResult], columns: Sequence[tuple[Column, _Show]]
) -> Table:
    rows = [[_cell(show(method)) for _, show in columns] for method in methods]
    return Table(title, [column for column, _ in columns], rows)


def _cell(shown: Cell | str) -> Cell:
    return shown if isinstance(shown, Cell) else Cell(shown)


def _show_method(method: MethodResult) -> str:
    return f"{method.method} ({method.label})" if method.label else method.method


def marks(method: MethodResult) -> list[str]:
    """Why outputs are not the target's; nothing if they are."""
    found = [mark.upper() for mark in _NOT_THE_TARGETS if mark in method.lossless]
    return [*found, "NOT IN LAW"] if _is_unlawful(method) else found


def _show_marked(method: MethodResult) -> Cell:
    found = marks(method)
    return Cell(" ".join([method.method, *found]), "bad" if found else "")


def show_speed_up(method: MethodResult) -> Cell:
    """The speed-up with its interval and verdict."""
    estimate = method.speed_up
    if method.is_baseline:
        return Cell("1.00x baseline")
    if estimate is None:
        return Cell(MISSING)
    interval = estimate.interval()
    if interval is None:
        return Cell(f"{estimate.value:.2f}x, too few prompts to tell")
    ends = f"[{number(interval.low)},{NO_BREAK}{number(interval.high)}]"
    tone = {"faster": "good", "slower": "bad"}.get(estimate.verdict, "")
    if tone:
        verdict = f"{NO_BREAK}{estimate.verdict}"
    else:
        verdict = f" {estimate.verdict}, blind{NO_BREAK}below{NO_BREAK}" + percent(
            estimate.smallest_visible, digits=0
        ).replace(" ", NO_BREAK)
    return Cell(f"{estimate.value:.2f}x{NO_BREAK}{ends}{verdict}", tone)


def _show_split(method: MethodResult) -> str:
    times = method.times
    if times is None:
        return MISSING
    shares = (times.draft_share, times.forward_share, times.bookkeeping_share)
    return "/".join(MISSING if share is None else f"{100 * share:.0f}" for share in shares)


def show_lossless(method: MethodResult) -> Cell:
    """How many outputs are exact, ties, broken, ..., with the largest gap and the p-value."""
    tone = "bad" if is_not_the_targets(method) else ""
    gap = method.largest_tie
    gaps = "" if gap is None else f" (logit gap{NO_BREAK}up{NO_BREAK}to{NO_BREAK}{gap:.2g})"
    law = "" if method.law_p is None else f" (p{NO_BREAK}{method.law_p:.2g})"
    shown = losslessness(method.lossless)
    if _is_unlawful(method):
        shown = shown.replace("in law", "NOT in law")
    return Cell(shown + gaps + law, tone)


def losslessness(counts: Mapping[str, int]) -> str:
    """How many outputs are exact, ties, broken, ..., the worst first."""
    total = sum(counts.values())
    if counts.get("exact") == total and total:
        return f"exact {total}/{total}"
    words = {
        "broken": "BROKEN {}",
        "exact": "{} exact",
        "tie": "{} tie" if counts.get("tie") == 1 else "{} ties",
        "law": "in law" if counts.get("law") == total else "{} in law",
        "lossy": "LOSSY" if counts.get("lossy") == total else "{} LOSSY",
    }
    text = ", ".join(words[name].format(counts[name]) for name in words if counts.get(name))
    return text or MISSING


def _show_failed(method: MethodResult) -> Cell:
    return Cell(str(method.num_failed), "bad" if method.num_failed else "")


def _show_weights(method: MethodResult) -> str:
    extra = method.extra_bytes
    return MISSING if extra is None else f"{extra / 2**20:.1f}"


def number(value: float | None, digits: int = 2) -> str:
    """A number of so many decimals."""
    return MISSING if value is None else f"{value:.{digits}f}"


def percent(value: float | None, digits: int = 1) -> str:
    """A share as a percentage of so many decimals."""
    return MISSING if value is None else f"{100 * value:.{digits}f} %"


def _tenths(value: float | None) -> str:
    return number(value, 1)


def _thousandths(value: float | None) -> str:
    return number(value, 3)


def _milliseconds(value: float | None) -> str:
    return MISSING if value is None else f"{1000 * value:.1f}"


_METHOD: tuple[Column, _Show] = (Column("method", numbers=False), _show_method)
_MARKED: tuple[Column, _Show] = (Column("method", numbers=False), _show_marked)
"""For the tables beside the results, which do not say otherwise what is lossless."""
_RESULT_COLUMNS: list[tuple[Column, _Show]] = [
    _METHOD,
    (Column("tau"), _accepted(lambda a: a.tau, number)),
    (Column("acceptance"), _accepted(lambda a: a.rate, percent)),
    (Column("speed-up", numbers=False), show_speed_up),
    (Column("tokens/s"), _timed(lambda t: t.tokens_per_s, _tenths)),
    (Column("draft/ verify/ other %"), _show_split),
    (Column("lossless", numbers=False), show_lossless),
    (Column("failed"), _show_failed),
]
_COST_COLUMNS: list[tuple[Column, _Show]] = [
    _MARKED,
    (Column("forwards /token"), _timed(lambda t: t.forwards_per_token, _thousandths)),
    (Column("nodes /token"), _accepted(lambda a: a.nodes_per_token, number)),
    (Column("wasted"), _accepted(lambda a: a.wasted, percent)),
    (Column("FLOPs /vanilla's"), lambda m: number(m.flops.total if m.flops else None)),
    (Column("on rejected"), lambda m: percent(m.flops.rejected_share if m.flops else None)),
    (Column("ms /step"), _timed(lambda t: t.step_s, _milliseconds)),
    (Column("prefill ms"), _timed(lambda t: t.prefill_s, _milliseconds)),
    (Column("extra MiB"), _show_weights),
]
_PREDICTION_COLUMNS: list[tuple[Column, _Show]] = [
    _MARKED,
    (Column("tau if i.i.d."), _promised(lambda p: p.iid)),
    (Column("tau by position"), _promised(lambda p: p.by_position)),
    (Column("tau"), _promised(lambda p: p.measured)),
    (Column("vanilla ms"), _broken_down(lambda b: b.vanilla_s, _milliseconds)),
    (Column("ideal ms"), _broken_down(lambda b: b.ideal_s, _milliseconds)),
    (Column("+ draft"), _broken_down(lambda b: b.draft_s, _milliseconds)),
    (Column("+ verify"), _broken_down(lambda b: b.verify_s, _milliseconds)),
    (Column("+ other"), _broken_down(lambda b: b.bookkeeping_s, _milliseconds)),
    (Column("= ms /token"), _broken_down(lambda b: b.method_s, _milliseconds)),
    (Column("ideal speed-up"), _broken_down(lambda b: b.ideal_speed_up, _times)),
    (Column("speed-up"), _broken_down(lambda b: b.speed_up, _times)),
]
