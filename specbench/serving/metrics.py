"""Records of a serving run -> numbers: latency, throughput, capacity; pure functions.

What is missing is None, never 0.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from specbench import stats
from specbench.records import LOSSLESS
from specbench.serving.records import Pass, ServedRecord


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
