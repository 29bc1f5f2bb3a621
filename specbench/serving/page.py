"""A serving run as a page: latency against arrival rate, and from where on speculation hurts."""

from collections.abc import Callable, Sequence
from itertools import groupby

from specbench.columns import losslessness, number
from specbench.describe import doubts, failure_lines, provenance_lines, title
from specbench.merge import Section
from specbench.messages import are, counted
from specbench.metrics import LEAST_LAW_P
from specbench.records import BASELINE, Run
from specbench.serving.arrivals import SPELLS, spell_rates
from specbench.serving.metrics import Metrics, Percentiles, capacity
from specbench.serving.ratios import (
    MIN_ROUNDS,
    NUM_BLOCKS,
    TOO_FEW_ROUNDS,
    Ratio,
    Result,
    hurts_from,
    summarise,
)
from specbench.serving.records import SERVING, ServingRun
from specbench.stats import MIN_CLUSTERS
from specbench.tables import MISSING, NO_BREAK, Cell, Column, Heading, Note, Page, Table

DEFINITIONS = {
    "load": "arrivals per second over the most requests per second that vanilla serves at the "
    "largest batch, from a pass in which all came at once; above 1 the queue grows as long as "
    "requests come. Where the rate swings it is the mean: of as many requests in slow spells as in "
    "fast ones",
    "latency": "seconds from a request's arrival to its last token",
    "of vanilla's": "the sum of latencies over vanilla's, at the same rate, of the same requests "
    "arriving at the same times; above 1 speculation hurts. The 95 % interval holds two spreads: "
    f"over up to {NUM_BLOCKS} blocks of requests that came one after another, as these wait in one "
    f"queue (under {MIN_CLUSTERS} blocks there is no interval); and between passes, as a machine's "
    "drift makes all of one slower: what is left of the ratios of all methods at a rate once "
    "methods and rounds are taken out, Student's t at the fewer degrees of freedom. A verdict "
    f"takes {MIN_ROUNDS} rounds, and each of them by itself must lie on its side of 1; it is "
    "corrected for the number of all (Holm). Two rounds of one method prove hardly anything: give "
    "more --rounds",
    "first token": "seconds from the arrival to the end of the step that brought the first tokens: "
    "the wait, the prefill, and the prefills of those that joined at once",
    "waited": "seconds from the arrival to when it left the queue",
    "ms /token": "from the first tokens to the last, over the tokens after the first",
    "tokens/s": "committed tokens per second of those in which any request was there",
    "batch": "rows decoded together, mean over steps",
    "tau": "committed tokens per row and step; vanilla's is exactly 1",
    "lossless": "outputs against the target's own, each request decoded alone: exact, tie (within "
    "the numerical tolerance), BROKEN, in law (drafts were drawn), LOSSY",
    "failed": "requests without an output; those beside them in the batch began anew, which is in "
    "their times",
    "50/90/99": "percentiles over requests",
}


def page(run: ServingRun, *, define: bool = True) -> Page:
    """All that is shown of a serving run.

    Args:
        run: as filed.
        define: whether its words are explained.
    """
    results = summarise(run.passes)
    as_run = Run(run.folder, run.info)
    failures = [*run.failures, *(failure for one in run.passes for failure in one.failures)]
    elements: list[Heading | Note | Table] = [
        Heading(f"Serving: {title(as_run)}", 1),
        Note(_settings(run)),
        *(Note(line, "bad") for line in [*_missing(run), *doubts(as_run, SERVING.info)]),
        *(Note(line, "bad") for line in failure_lines(failures)),
        *(Note(line, "bad") for line in [*_few_rounds(results), *_noisy(results)]),
    ]
    for _, same in groupby(results, lambda r: r.rate):
        at_rate = list(same)
        elements += [Heading(_rate(at_rate[0]), 2), _latencies(at_rate), _throughputs(at_rate)]
    elements += [Heading("Where it hurts", 2), *(Note(s, "strong") for s in verdicts(results))]
    elements.append(Heading("How it was measured", 2))
    section = Section(union=as_run, runs=[as_run], differs=())
    elements += [Note(line) for line in provenance_lines(section)]
    if define:
        columns = [Column("word", numbers=False), Column("meaning", numbers=False)]
        rows = [[Cell(word), Cell(text)] for word, text in DEFINITIONS.items()]
        elements += [Heading("Definitions", 2), Table("", columns, rows)]
    return elements


_WORDS = {
    "slower": "proven to hurt",
    "inconclusive": "not proven either way",
    "faster": "proven to help",
}


def verdicts(results: Sequence[Result]) -> list[str]:
    """Of each method under each controller, at which rates speculation is proven to hurt and to
    help, and at which it is open, in words."""
    named: dict[str, list[Result]] = {}
    for result in results:
        if result.method != BASELINE:
            named.setdefault(f"{result.method}, {_breakable(result.controller)}", []).append(result)
    return [f"{name}: {_verdict(own)}" for name, own in named.items()]


def _verdict(results: Sequence[Result]) -> str:
    """Of the results of one method and controller, the lowest rate first."""
    known = [(result, result.latency_ratio) for result in results if result.latency_ratio]
    if len(known) < len(results):
        return "not known, it could not be compared with vanilla at every rate"
    clauses = []
    for verdict, words in _WORDS.items():
        here = [(result, ratio) for result, ratio in known if ratio.verdict == verdict]
        if here:
            measured = ", ".join(f"{ratio.value:.2f}x" for _, ratio in here)
            where = _where([result for result, _ in here], results)
            clauses.append(f"{words} {where} (measured {measured} of vanilla's latency)")
    return "; ".join(clauses)


def _where(here: Sequence[Result], results: Sequence[Result]) -> str:
    """At which of the rates."""
    if len(here) == len(results) > 1:
        return "at every rate here"
    first = hurts_from(results)
    if first is None or first is results[-1] or first not in here:
        return f"at {_places(here)}"
    below = [result for result in here if result.rate < first.rate]
    return (f"at {_places(below)} and " if below else "") + f"from {_at(first)} on"


def _places(results: Sequence[Result]) -> str:
    return " and ".join(_at(result) for result in results)


def _at(result: Result) -> str:
    return f"load {result.load:g}" if result.load is not None else f"{result.rate:g} requests/s"


def _rate(result: Result) -> str:
    rate = f"{number(result.rate)} requests/s"
    return rate if result.load is None else f"load {result.load:g}: {rate}"


def _settings(run: ServingRun) -> str:
    settings = run.info["settings"]
    temperature, swing = settings.get("temperature"), settings.get("swing", 1.0)
    saturated = [one for one in run.passes if one.about.rate is None and one.served]
    parts = [
        f"{counted(len(run.references), 'request')} at each rate and round, from "
        + ", ".join(run.info["workloads"]),
        f"rounds {settings.get('rounds')}",
        *([_swing(swing)] if swing > 1 else []),
        f"at most {settings.get('max_batch')} at once and "
        + counted(int(settings.get("max_new_tokens", 0)), "token"),
        f"T={temperature:g}, rule {settings.get('sampling')}" if temperature else "greedy",
        *(f"vanilla's capacity {capacity(one.served):.3g} requests/s" for one in saturated),
    ]
    return "; ".join(parts)


def _swing(swing: float) -> str:
    slow, fast = spell_rates(swing)
    return (
        f"the rate swings: {SPELLS} spells, every other one {swing:g} times as fast, at {slow:.2g} "
        f"and {fast:.2g} times the mean"
    )


def _missing(run: ServingRun) -> list[str]:
    if not run.missing:
        return []
    missing, parts = len(run.missing), counted(len(run.info["shards"]), "part")
    return [f"the run did not end: {missing} of {parts} {are(missing)} missing"]


def _few_rounds(results: Sequence[Result]) -> list[str]:
    few = [r for r in results if r.latency_ratio and r.latency_ratio.reason == TOO_FEW_ROUNDS]
    if not few:
        return []
    rates = _places(list({result.rate: result for result in few}.values()))
    return [
        f"too few rounds for a verdict at {rates}: what drifts from pass to pass shows only "
        f"between rounds, so it takes {MIN_ROUNDS} in which every method was served; give --rounds "
        f"{MIN_ROUNDS} or more"
    ]


def _noisy(results: Sequence[Result]) -> list[str]:
    return [
        f"noisy: {result.method}, {result.controller} at {_at(result)}, its latency ranges from "
        f"{min(result.ratio_by_round):.2f}x to {max(result.ratio_by_round):.2f}x of vanilla's "
        "between rounds, further than its requests explain; measure again on a quiet "
        "machine or with more --rounds"
        for result in results
        if result.is_noisy
    ]


_Show = Callable[[Result], Cell | str]
_Part = Callable[[Metrics], str]


def _latencies(results: Sequence[Result]) -> Table:
    return _table(
        "seconds, percentiles 50/90/99",
        results,
        [
            (Column("latency"), _of(lambda m: _three(m.latency))),
            (Column("of vanilla's", numbers=False), _ratio),
            (Column("first token"), _of(lambda m: _three(m.first_token))),
            (Column("waited"), _of(lambda m: _three(m.queueing))),
        ],
    )


def _throughputs(results: Sequence[Result]) -> Table:
    return _table(
        "what was done",
        results,
        [
            (Column("ms /token 50/90/99"), _of(_tokens)),
            (Column("tokens/s"), _of(lambda m: number(m.tokens_per_s, 1))),
            (Column("batch"), _of(lambda m: number(m.mean_batch))),
            (Column("tau"), _of(lambda m: number(m.tau))),
            (Column("lossless", numbers=False), _lossless),
            (Column("failed"), lambda r: Cell(str(r.num_failed), "bad" if r.num_failed else "")),
        ],
    )


def _table(name: str, results: Sequence[Result], columns: Sequence[tuple[Column, _Show]]) -> Table:
    first: list[tuple[Column, _Show]] = [
        (Column("method", numbers=False), lambda r: r.method),
        (
            Column("controller", numbers=False),
            lambda r: MISSING if r.method == BASELINE else _breakable(r.controller),
        ),
    ]
    shown = [*first, *columns]
    rows = [[_cell(show(result)) for _, show in shown] for result in results]
    return Table(name, [column for column, _ in shown], rows)


def _cell(shown: Cell | str) -> Cell:
    return shown if isinstance(shown, Cell) else Cell(shown)


def _breakable(controller: str) -> str:
    """With spaces where a long one may be broken."""
    return controller.replace(":", ": ", 1).replace(",", ", ")


def _of(part: _Part) -> _Show:
    return lambda result: part(result.metrics) if result.metrics else MISSING


def _three(found: Percentiles, scale: float = 1.0, digits: int = 2) -> str:
    return "/".join(number(scale * value, digits) for value in found)


def _tokens(metrics: Metrics) -> str:
    return _three(metrics.token, 1e3, 0) if metrics.token else MISSING


def _ratio(result: Result) -> Cell:
    ratio = result.latency_ratio
    if ratio is None:
        return Cell("baseline" if result.method == BASELINE else MISSING)
    tone = {"faster": "good", "slower": "bad"}.get(ratio.verdict, "")
    reason = f", {ratio.reason}" if ratio.reason else ""
    return Cell(f"{_numbers(ratio)} {ratio.verdict}{reason}", tone)


def _numbers(ratio: Ratio) -> str:
    if ratio.interval is None:
        return f"{ratio.value:.2f}x"
    low, high = map(number, ratio.interval)
    return f"{ratio.value:.2f}x{NO_BREAK}[{low},{NO_BREAK}{high}]"


def _lossless(result: Result) -> Cell:
    if result.metrics is None:
        return Cell(MISSING)
    counts, p = result.metrics.lossless, result.metrics.law_p
    unlawful = p is not None and p < LEAST_LAW_P
    text = losslessness(counts)
    if unlawful:
        text = text.replace("in law", "NOT in law")
    law = "" if p is None else f" (p{NO_BREAK}{p:.2g})"
    bad = unlawful or "broken" in counts or "lossy" in counts
    return Cell(text + law, "bad" if bad else "")
