"""Methods held against the baseline at each rate: the ratio of latencies, how well it is known, and
from which rate on speculation hurts; pure functions."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from specbench import stats
from specbench.records import BASELINE
from specbench.serving.metrics import Metrics, latency_s, measure
from specbench.serving.records import Pass, ServedRecord
from specbench.stats import Estimate, Floats, Interval

NUM_BLOCKS = 10
"""Requests that come one after another wait in the same queue, so they are not independent: in
intervals, blocks of them count, at most so many in a pass (batch means)."""

MIN_ROUNDS = 2
"""Fewer do not show what drifts from pass to pass, so there is no verdict."""
TOO_FEW_ROUNDS = "too few rounds"


def compare(baseline: Sequence[Pass], own: Sequence[Pass]) -> Estimate | None:
    """The baseline's latency over a method's, sums over the requests that both have served in the
    same round; None without any.

    Its spread is over blocks of requests that arrived one after another; a block holds the same
    requests in all rounds. What drifts between passes is not in it: `with_drift` adds that.
    """
    sums: dict[tuple[str, str], Floats] = {}
    for first, second in _pairs(baseline, own):
        both_2 = np.array([latency_s(first), latency_s(second)])
        name = (first.workload, first.request)
        sums[name] = sums.get(name, np.zeros(2)) + both_2
    if not sums:
        return None
    sums_R2 = np.array(list(sums.values()))
    blocks = np.array_split(sums_R2, min(NUM_BLOCKS, len(sums_R2)))
    sums_C2 = np.array([block.sum(0) for block in blocks])
    return stats.jackknife(sums_C2, _ratio, sums_C2[:, 0])


def _pairs(
    baseline: Sequence[Pass], own: Sequence[Pass]
) -> Iterator[tuple[ServedRecord, ServedRecord]]:
    """What both saw of a request in a round, in the order of arrival."""
    found = {
        (one.about.round, record.workload, record.request): record
        for one in own
        for record in one.served
    }
    for one in baseline:
        for record in sorted(one.served, key=lambda r: r.arrival_s):
            key = (one.about.round, record.workload, record.request)
            if key in found:
                yield record, found[key]


def _ratio(sums_K2: Floats) -> Floats:
    ratio: Floats = sums_K2[..., 0] / sums_K2[..., 1]
    return ratio


class Drift(NamedTuple):
    """How far a method's ratio to the baseline may be off because passes drift: the machine is
    slower for all of one."""

    spread: float
    """Standard error of the ratio's logarithm."""
    freedom: int
    """Degrees of freedom of the spread."""


def drift(ratios_RM: Floats) -> Drift | None:
    """From the ratios to the baseline of R rounds and M methods at one rate: what is left of them
    once methods and rounds are taken out, the baseline being one more method of ratio 1 (randomised
    blocks: a round is a block, as all of it has the same arrivals). None of a single round.

    It takes all passes at a rate to drift alike, which gives two rounds of several methods degrees
    of freedom enough. In simulated runs where nothing differs, of 2 to 4 rounds and 1 to 5 methods,
    the verdicts that follow were wrong in at most 5 of 100 runs, also where one method drifts twice
    as far as the others.
    """
    num_rounds, num_methods = ratios_RM.shape
    if num_rounds < MIN_ROUNDS or not num_methods:
        return None
    logs = np.log(np.column_stack([np.ones(num_rounds), ratios_RM]))
    rest = logs - logs.mean(0) - logs.mean(1, keepdims=True) + logs.mean()
    freedom = (num_rounds - 1) * num_methods
    # A ratio is of two passes a round.
    return Drift(math.sqrt(2 * float((rest**2).sum()) / freedom / num_rounds), freedom)


def with_drift(estimate: Estimate, found: Drift | None) -> Estimate:
    """An estimate whose spread over blocks of requests holds that between passes as well, at the
    fewer of their degrees of freedom; without a spread where the passes' is not known."""
    if found is None or estimate.spread is None:
        return replace(estimate, spread=None)
    spread = math.hypot(estimate.spread, found.spread)
    return replace(estimate, spread=spread, freedom=min(estimate.freedom, found.freedom))


class Ratio(NamedTuple):
    """A method's latency over the baseline's, at one rate: above 1 it hurts."""

    value: float
    interval: Interval | None
    verdict: str
    """``faster``, ``slower`` or ``inconclusive``."""
    reason: str = ""
    """Why there is no verdict, where that is not the interval's doing."""

    @staticmethod
    def of(speed_up: Estimate, by_round: Sequence[float]) -> "Ratio":
        """The inverse of a speed-up; a verdict is given only where every round by itself lies on
        its side of 1.

        Args:
            speed_up: judged, with the spread between passes.
            by_round: the ratio of each round.
        """
        value, found = 1 / speed_up.value, speed_up.interval()
        if found is None:
            reason = "too few requests" if speed_up.too_few else TOO_FEW_ROUNDS
            return Ratio(value, None, "inconclusive", reason)
        interval = Interval(1 / found.high, 1 / found.low)
        is_slower = speed_up.verdict == "slower"
        if speed_up.verdict != "inconclusive" and not all(
            ratio > 1 if is_slower else ratio < 1 for ratio in by_round
        ):
            return Ratio(value, interval, "inconclusive", "rounds disagree")
        return Ratio(value, interval, speed_up.verdict)


@dataclass(frozen=True, kw_only=True)
class Result:
    """All that is shown of one method under one controller at one rate.

    Args:
        method, controller, load, rate: as in `specbench.serving.records.PassRecord`.
        metrics: None where nothing was served.
        latency_ratio: None of the baseline, and where nothing can be compared.
        ratio_by_round: likewise, of each round alone.
        num_failed: requests without an output, in all rounds.
        is_noisy: whether rounds differ by more than the spread over requests explains.
    """

    method: str
    controller: str
    load: float | None
    rate: float
    metrics: Metrics | None
    latency_ratio: Ratio | None
    ratio_by_round: Sequence[float]
    num_failed: int
    is_noisy: bool


def summarise(passes: Sequence[Pass]) -> list[Result]:
    """All passes but the saturated one, by rate, the baseline first; verdicts are judged
    together."""
    groups: dict[tuple[float, str, str], list[Pass]] = {}
    for one in passes:
        if one.about.rate is not None:
            key = (one.about.rate, one.about.method, one.about.controller)
            groups.setdefault(key, []).append(one)
    baselines = {rate: group for (rate, name, _), group in groups.items() if name == BASELINE}
    estimates = {
        key: estimate
        for key, group in groups.items()
        if key[1] != BASELINE and (estimate := compare(baselines.get(key[0], []), group))
    }
    rounds = {key: _by_round(baselines[key[0]], groups[key]) for key in estimates}
    drifts = {
        rate: _drift([found for key, found in rounds.items() if key[0] == rate])
        for rate in baselines
    }
    judged = stats.judge_together([with_drift(e, drifts[key[0]]) for key, e in estimates.items()])
    ratios = {
        key: Ratio.of(one, list(rounds[key].values()))
        for key, one in zip(estimates, judged, strict=True)
    }
    found = [
        Result(
            method=group[0].about.method,
            controller=group[0].about.controller,
            load=group[0].about.load,
            rate=key[0],
            metrics=measure(group),
            latency_ratio=ratios.get(key),
            ratio_by_round=list(rounds.get(key, {}).values()),
            num_failed=sum(len(one.failures) for one in group),
            is_noisy=key in estimates and _is_noisy(estimates[key], list(rounds[key].values())),
        )
        for key, group in groups.items()
    ]
    names = list(dict.fromkeys((one.about.method, one.about.controller) for one in passes))
    return sorted(found, key=lambda r: (r.rate, names.index((r.method, r.controller))))


def _by_round(baseline: Sequence[Pass], own: Sequence[Pass]) -> dict[int, float]:
    """By round, the ratio of latencies."""
    alone = {one.about.round: compare(baseline, [one]) for one in own}
    return {number: 1 / estimate.value for number, estimate in alone.items() if estimate}


def _drift(by_round: Sequence[Mapping[int, float]]) -> Drift | None:
    """Of all methods at one rate, from the rounds that all of them have."""
    shared = set.intersection(*map(set, by_round)) if by_round else set()
    ratios = [[found[number] for found in by_round] for number in sorted(shared)]
    return drift(np.array(ratios).reshape(len(shared), len(by_round)))


def _is_noisy(speed_up: Estimate, by_round: Sequence[float]) -> bool:
    """Whether rounds differ by more than the interval over requests alone."""
    interval = speed_up.interval()
    return interval is not None and (
        max(by_round) - min(by_round) > 1 / interval.low - 1 / interval.high
    )


def hurts_from(results: Sequence[Result]) -> Result | None:
    """Of one method under one controller, the lowest rate from which on, at every rate, it is
    proven that its latency is above the baseline's; None if it is not at the highest."""
    first = None
    for result in sorted(results, key=lambda r: r.rate, reverse=True):
        if result.latency_ratio is None or result.latency_ratio.verdict != "slower":
            break
        first = result
    return first
