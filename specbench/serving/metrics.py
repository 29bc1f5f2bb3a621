"""Records of a serving run -> numbers: latency, throughput, and from which rate on speculation
hurts; pure functions.

What is missing is None, never 0.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from specbench import stats
from specbench.records import BASELINE, LOSSLESS
from specbench.serving.records import Pass, ServedRecord
from specbench.stats import Estimate, Floats, Interval

NUM_BLOCKS = 10
"""Requests that come one after another wait in the same queue, so they are not independent: in
intervals, blocks of them count, so many in a pass (batch means)."""


class Percentiles(NamedTuple):
    """Over requests."""

    p50: float
    p90: float
    p99: float


@dataclass(frozen=True, kw_only=True)
class Metrics:
    """What passes come to; percentiles over their requests, in seconds.

    Args:
        latency: from a request's arrival to its last token.
        first_token: from its arrival to the end of the step that brought its first tokens.
        queueing: from its arrival to when it left the queue.
        token: from its first tokens to its last, per token after the first; None where no output
            has two.
        tokens_per_s: committed tokens per second of those in which any request was there.
        mean_batch: rows of a step, over steps.
        tau: committed tokens per row and step.
        lossless: how many outputs are exact, tie, broken, ...; what there is none of is left out.
        law_p: as in `specbench.metrics.law_p_value`.
    """

    latency: Percentiles
    first_token: Percentiles
    queueing: Percentiles
    token: Percentiles | None
    tokens_per_s: float
    mean_batch: float
    tau: float
    lossless: Mapping[str, int]
    law_p: float | None


def latency_s(record: ServedRecord) -> float:
    """From arrival to end."""
    return record.end_s - record.arrival_s


def first_token_s(record: ServedRecord) -> float:
    """From arrival to the first tokens, the wait and the prefill included."""
    return record.first_token_s - record.arrival_s


def queueing_s(record: ServedRecord) -> float:
    """From arrival to the start."""
    return record.start_s - record.arrival_s


def token_s(record: ServedRecord) -> float | None:
    """Seconds per token after the first; None of an output of one."""
    following = len(record.tokens) - 1
    return (record.end_s - record.first_token_s) / following if following else None


def percentiles(values: Iterable[float]) -> Percentiles | None:
    """Interpolated between the nearest; None of nothing."""
    found = list(values)
    if not found:
        return None
    return Percentiles(*np.percentile(found, [50, 90, 99]).tolist())


def busy_s(served: Sequence[ServedRecord]) -> float:
    """Seconds in which any request was there, waiting or running."""
    total, until = 0.0, 0.0
    for record in sorted(served, key=lambda r: r.arrival_s):
        begin = max(until, record.arrival_s)
        total += max(0.0, record.end_s - begin)
        until = max(until, record.end_s)
    return total


def measure(passes: Sequence[Pass]) -> Metrics | None:
    """What the passes of all rounds come to; None where nothing was served."""
    served = [record for one in passes for record in one.served]
    latency = percentiles(map(latency_s, served))
    first_token = percentiles(map(first_token_s, served))
    queueing = percentiles(map(queueing_s, served))
    if latency is None or first_token is None or queueing is None:
        return None
    num_tokens = sum(len(record.tokens) for record in served)
    batches = [batch for record in served for batch in record.batches]
    return Metrics(
        latency=latency,
        first_token=first_token,
        queueing=queueing,
        token=percentiles(s for record in served if (s := token_s(record)) is not None),
        tokens_per_s=num_tokens / sum(busy_s(one.served) for one in passes),
        # A step of b rows is in b of the records.
        mean_batch=len(batches) / sum(1 / batch for batch in batches),
        tau=num_tokens / len(batches),
        lossless=_count_lossless(served),
        law_p=_law_p(served),
    )


def _count_lossless(served: Sequence[ServedRecord]) -> dict[str, int]:
    found = [record.lossless for record in served]
    return {name: found.count(name) for name in LOSSLESS if name in found}


def _law_p(served: Sequence[ServedRecord]) -> float | None:
    found = [record.surprise for record in served if record.surprise]
    excess = sum(one.nats - one.expected_nats for one in found)
    return stats.law_p(excess, sum(one.variance for one in found)) if found else None


def capacity(served: Sequence[ServedRecord]) -> float:
    """Requests per second that a server can do at most, from a pass in which all came at once: the
    tokens per second while the batch was as large as it ever was, over the mean output.

    The time counts from the start to the last step of such a batch, all prefills until then
    included.
    """
    largest = max(batch for record in served for batch in record.batches)
    until = max(
        end
        for record in served
        for end, batch in zip(record.step_ends_s, record.batches, strict=True)
        if batch == largest
    )
    begun = min(record.start_s for record in served)
    num_tokens = sum(
        step[3]
        for record in served
        for end, step in zip(record.step_ends_s, record.steps, strict=True)
        if end <= until
    )
    mean_output = sum(len(record.tokens) for record in served) / len(served)
    return num_tokens / (until - begun) / mean_output


def compare(baseline: Sequence[Pass], own: Sequence[Pass]) -> Estimate | None:
    """The baseline's latency over a method's, sums over the requests that both have served in the
    same round; None without any.

    Its spread is over blocks of requests that arrived one after another; a block holds the same
    requests in all rounds.
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


class Ratio(NamedTuple):
    """A method's latency over the baseline's, at one rate: above 1 it hurts."""

    value: float
    interval: Interval | None
    verdict: str
    """``faster``, ``slower`` or ``inconclusive``."""

    @staticmethod
    def of(speed_up: Estimate) -> "Ratio":
        """The inverse of what `compare` says."""
        found = None if speed_up.too_few else speed_up.interval()
        interval = found and Interval(1 / found.high, 1 / found.low)
        return Ratio(1 / speed_up.value, interval, speed_up.verdict)


@dataclass(frozen=True, kw_only=True)
class Result:
    """All that is shown of one method under one controller at one rate.

    Args:
        method, controller, load, rate: as in `specbench.serving.records.PassRecord`.
        metrics: None where nothing was served.
        latency_ratio: None of the baseline, and where nothing can be compared.
        ratio_by_round: likewise, of each round alone.
        num_failed: requests without an output, in all rounds.
    """

    method: str
    controller: str
    load: float | None
    rate: float
    metrics: Metrics | None
    latency_ratio: Ratio | None
    ratio_by_round: Sequence[float]
    num_failed: int

    @property
    def is_noisy(self) -> bool:
        """Whether rounds differ by more than the interval."""
        interval = self.latency_ratio and self.latency_ratio.interval
        if not interval or not self.ratio_by_round:
            return False
        reach = max(self.ratio_by_round) - min(self.ratio_by_round)
        return reach > interval.high - interval.low


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
    judged = stats.judge_together(list(estimates.values()))
    ratios = {key: Ratio.of(one) for key, one in zip(estimates, judged, strict=True)}
    found = [
        Result(
            method=method,
            controller=controller,
            load=group[0].about.load,
            rate=rate,
            metrics=measure(group),
            latency_ratio=ratios.get((rate, method, controller)),
            ratio_by_round=_by_round(baselines.get(rate, []), group),
            num_failed=sum(len(one.failures) for one in group),
        )
        for (rate, method, controller), group in groups.items()
    ]
    names = list(dict.fromkeys((one.about.method, one.about.controller) for one in passes))
    return sorted(found, key=lambda r: (r.rate, names.index((r.method, r.controller))))


def _by_round(baseline: Sequence[Pass], own: Sequence[Pass]) -> list[float]:
    if not own or own[0].about.method == BASELINE:
        return []
    alone = (compare(baseline, [one]) for one in own)
    return [1 / estimate.value for estimate in alone if estimate]


def hurts_from(results: Sequence[Result]) -> Result | None:
    """Of one method under one controller, the lowest rate from which on, at every rate, its latency
    is above the baseline's; None if it is not at the highest."""
    first = None
    for result in sorted(results, key=lambda r: r.rate, reverse=True):
        if result.latency_ratio is None or result.latency_ratio.value <= 1:
            break
        first = result
    return first
