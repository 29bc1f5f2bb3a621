"""Records -> numbers: acceptance, tau, times and cost by workload and method; pure functions.

What is missing is None, never 0.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from specbench import stats
from specbench.records import (
    BASELINE,
    LOSSLESS,
    Flops,
    ReferenceRecord,
    RequestRecord,
    Run,
    TimingRecord,
)
from specbench.stats import Floats, ratio_of_rates
from specbench.workloads import LEAST_TAIL

LEAST_LAW_P = 1e-3
"""Outputs with a lower p-value are not the target's."""
_Pair = tuple[TimingRecord, TimingRecord]


class Position(NamedTuple):
    """Acceptance at one depth, in steps."""

    offered: int
    """Steps that offered a token at this depth."""
    reached: int
    """Those that accepted all before it, with the output not ended there."""
    accepted: int

    @property
    def unconditional(self) -> float | None:
        """Share of the offered that was accepted."""
        return _ratio(self.accepted, self.offered)

    @property
    def conditional(self) -> float | None:
        """Share of the reached that was accepted."""
        return _ratio(self.accepted, self.reached)


@dataclass(frozen=True, kw_only=True)
class Acceptance:
    """What became of a method's drafts on a workload.

    Args:
        num_requests: outputs that this is made of.
        num_steps: their steps.
        num_tokens: their committed tokens.
        num_offered: sum of the offered depths.
        num_drafted: drafted nodes.
        num_accepted: accepted tokens.
        tau: committed tokens / steps.
        tau_by_prompt: mean over prompts of each prompt's tau.
        rate: accepted / offered; None where nothing was drafted.
        positions: by depth, from 1.
        nodes_per_token: drafted nodes / committed tokens.
        wasted: drafted nodes that were not accepted / drafted nodes.
    """

    num_requests: int
    num_steps: int
    num_tokens: int
    num_offered: int
    num_drafted: int
    num_accepted: int
    tau: float
    tau_by_prompt: float
    rate: float | None
    positions: Sequence[Position]
    nodes_per_token: float
    wasted: float | None


@dataclass(frozen=True, kw_only=True)
class Times:
    """Where a method's time went on a workload; batches and rounds pooled but where it says median.

    Args:
        num_batches: distinct batches that were timed.
        num_rounds: most rounds that any of them was timed in.
        tokens_per_s: committed tokens per second of decoding; by batch, the median round.
        prefill_s: seconds of prefill per request; by batch, the median round.
        draft_share: of the decode time; None where no time passed.
        forward_share: likewise, target forwards.
        bookkeeping_share: likewise, all the rest.
        step_s: decode seconds per step, which is one target forward.
        forwards_per_token: target forwards / committed tokens; below 1 / tau where rows share a
        forward.
    """

    num_batches: int
    num_rounds: int
    tokens_per_s: float | None
    prefill_s: float
    draft_share: float | None
    forward_share: float | None
    bookkeeping_share: float | None
    step_s: float
    forwards_per_token: float


@dataclass(frozen=True, kw_only=True)
class WorkloadMetrics:
    """What the references say of a workload.

    Args:
        num_prompts: prompts, each with all its turns.
        num_requests: references.
        num_tokens: of the references.
        entropy_nats: mean over tokens; None without references.
        looping: share of references that loop, of those long enough to tell.
    """

    workload: str
    kind: str
    num_prompts: int
    num_requests: int
    num_tokens: int
    entropy_nats: float | None
    looping: float | None


def measure_workload(run: Run, workload: str) -> WorkloadMetrics:
    """Describes a workload by its references."""
    references = [record for record in run.references if record.workload == workload]
    names = {record.request for record in references}
    lengths = [len(record.tokens) for record in references]
    long = [record for record in references if len(record.tokens) >= LEAST_TAIL]
    nats = sum(
        record.entropy_nats * length for record, length in zip(references, lengths, strict=True)
    )
    return WorkloadMetrics(
        workload=workload,
        kind=_kind(run, workload, references),
        num_prompts=len({prompt_of(name, names) for name in names}),
        num_requests=len(references),
        num_tokens=sum(lengths),
        entropy_nats=_ratio(nats, sum(lengths)),
        looping=_ratio(sum(record.looping for record in long), len(long)),
    )


def _kind(run: Run, workload: str, references: Sequence[ReferenceRecord]) -> str:
    if references:
        return references[0].workload_kind
    return str(run.info.get("workloads", {}).get(workload, {}).get("kind", "unknown"))


def measure_acceptance(run: Run, workload: str, method: str) -> Acceptance | None:
    """A method's acceptance on a workload; None where it has decoded nothing."""
    records = [r for r in run.requests if (r.workload, r.method) == (workload, method)]
    if not records:
        return None
    steps = [step for record in records for step in record.steps]
    nodes, depths, accepted, committed, _ = (sum(column) for column in zip(*steps, strict=True))
    return Acceptance(
        num_requests=len(records),
        num_steps=len(steps),
        num_tokens=committed,
        num_offered=depths,
        num_drafted=nodes,
        num_accepted=accepted,
        tau=committed / len(steps),
        tau_by_prompt=_tau_by_prompt(records, request_names(run, workload)),
        rate=_ratio(accepted, depths),
        positions=_positions(steps),
        nodes_per_token=nodes / committed,
        wasted=_ratio(nodes - accepted, nodes),
    )


def _tau_by_prompt(records: Iterable[RequestRecord], names: set[str]) -> float:
    num_tokens: Counter[str] = Counter()
    num_steps: Counter[str] = Counter()
    for record in records:
        prompt = prompt_of(record.request, names)
        num_tokens[prompt] += len(record.tokens)
        num_steps[prompt] += len(record.steps)
    return float(np.mean([num_tokens[prompt] / num_steps[prompt] for prompt in num_tokens]))


def _positions(steps: Sequence[Sequence[int]]) -> list[Position]:
    deepest = max(depth for _, depth, *_ in steps)
    return [_position(p, steps) for p in range(1, deepest + 1)]


def _position(p: int, steps: Sequence[Sequence[int]]) -> Position:
    offered = [step for step in steps if step[1] >= p]
    # Without a bonus the output ended behind the accepted tokens: the next was not put to the test.
    reached = sum(min(accepted, committed - 1) >= p - 1 for _, _, accepted, committed, _ in offered)
    return Position(len(offered), reached, sum(step[2] >= p for step in offered))


def sum_flops(run: Run, workload: str, method: str) -> Flops | None:
    """A method's arithmetic on a workload; None where that of an output was not counted."""
    found = [r.flops for r in run.requests if r.workload == workload and r.method == method]
    counted = [flops for flops in found if flops]
    if not found or len(counted) < len(found):
        return None
    return Flops(
        verify=sum(f.verify for f in counted),
        draft=sum(f.draft for f in counted),
        rejected=sum(f.rejected for f in counted),
        vanilla=sum(f.vanilla for f in counted),
    )


def measure_times(run: Run, workload: str, method: str) -> Times | None:
    """Where a method's time went on a workload; None where it was not timed."""
    batches = _by_batch(run, workload, method)
    if not batches:
        return None
    timings = [timing for batch in batches.values() for timing in batch]
    decode_s = sum(timing.decode_s for timing in timings)
    num_forwards = sum(timing.num_forwards for timing in timings)
    medians = [_median_round(batch) for batch in batches.values()]
    return Times(
        num_batches=len(batches),
        num_rounds=max(len(batch) for batch in batches.values()),
        tokens_per_s=_ratio(sum(m.num_tokens for m in medians), sum(m.decode_s for m in medians)),
        prefill_s=sum(m.prefill_s for m in medians) / sum(len(names) for names in batches),
        draft_share=_ratio(sum(timing.draft_s for timing in timings), decode_s),
        forward_share=_ratio(sum(timing.forward_s for timing in timings), decode_s),
        bookkeeping_share=_ratio(sum(timing.bookkeeping_s for timing in timings), decode_s),
        step_s=decode_s / num_forwards,
        forwards_per_token=num_forwards / sum(timing.num_tokens for timing in timings),
    )


class _MedianRound(NamedTuple):
    num_tokens: float
    decode_s: float
    prefill_s: float


def _median_round(batch: Iterable[TimingRecord]) -> _MedianRound:
    return _MedianRound(
        *np.median([(t.num_tokens, t.decode_s, t.prefill_s) for t in batch], axis=0).tolist()
    )


def pair_times(run: Run, workload: str, method: str) -> Floats:
    """The method's and the baseline's decode times of the same batches, for `stats.speed_up`.

    Returns:
        [C, 4], by cluster: the baseline's seconds and tokens, the method's seconds and tokens.
    """
    batches = pair_batches(run, workload, method)
    return sum_clusters(batches, request_names(run, workload)).reshape(-1, 4)


def pair_batches(
    run: Run, workload: str, method: str, baseline: str = BASELINE
) -> dict[tuple[str, ...], Floats]:
    """By batch: the baseline's seconds and tokens, the method's seconds and tokens. Only rounds
    that both were timed in count, and of these the median (a hiccup of the machine is no part of a
    method's speed)."""
    return {
        batch: np.median([_seconds_and_tokens(pair) for pair in pairs], axis=0)
        for batch, pairs in paired_timings(run, workload, method, baseline).items()
    }


def sum_clusters(batches: Mapping[tuple[str, ...], Floats], names: set[str]) -> Floats:
    """Sums of what each batch holds, [C, K], by cluster: batches that share a prompt, as its turns
    do, are one.

    Args:
        batches: by their requests.
        names: all requests of the workload.
    """
    clusters = group_batches(list(batches), names)
    sums = [np.sum([batches[batch] for batch in cluster], axis=0) for cluster in clusters]
    return np.array(sums, dtype=np.float64)


def speed_up_by_round(run: Run, workload: str, method: str) -> list[float]:
    """Each round's speed-up, over the batches that every round timed: one number but for the moods
    of the machine."""
    batches = [
        {base.round: _seconds_and_tokens((base, timed)) for base, timed in pairs}
        for pairs in paired_timings(run, workload, method).values()
    ]
    rounds = sorted({round_ for batch in batches for round_ in batch})
    whole = [batch for batch in batches if len(batch) == len(rounds)]
    if not whole:
        return []
    return [float(ratio_of_rates(np.sum([b[r] for b in whole], axis=0))) for r in rounds]


def paired_timings(
    run: Run, workload: str, method: str, baseline: str = BASELINE
) -> dict[tuple[str, ...], list[_Pair]]:
    """By batch: the baseline's and the method's timings in the rounds that have both."""
    base, timed = (_by_batch(run, workload, name) for name in (baseline, method))
    pairs: dict[tuple[str, ...], list[_Pair]] = {}
    for batch in sorted(timed.keys() & base.keys()):
        in_round = {timing.round: timing for timing in base[batch]}
        both = [(in_round[t.round], t) for t in timed[batch] if t.round in in_round]
        if both:
            pairs[batch] = both
    return pairs


def _seconds_and_tokens(pair: _Pair) -> Floats:
    return np.array([value for t in pair for value in (t.decode_s, t.num_tokens)])


def _by_batch(run: Run, workload: str, method: str) -> dict[tuple[str, ...], list[TimingRecord]]:
    batches = defaultdict(list)
    for timing in run.timings:
        if (timing.workload, timing.method) == (workload, method):
            batches[tuple(timing.requests)].append(timing)
    return dict(batches)


def group_batches(
    batches: Sequence[tuple[str, ...]], names: set[str]
) -> list[list[tuple[str, ...]]]:
    """Groups batches into clusters: those that share a prompt, directly or through others.

    Args:
        batches: the requests of each.
        names: all requests of the workload.
    """
    clusters: list[tuple[set[str], list[tuple[str, ...]]]] = []
    for batch in batches:
        prompts, members = {prompt_of(name, names) for name in batch}, [batch]
        apart = []
        for cluster in clusters:
            if cluster[0] & prompts:
                prompts, members = prompts | cluster[0], cluster[1] + members
            else:
                apart.append(cluster)
        clusters = [*apart, (prompts, members)]
    return [members for _, members in clusters]


def prompt_of(request: str, names: set[str]) -> str:
    """The prompt that a request is a turn of: ``x/2`` belongs to ``x`` if there is a request ``x``
    (a prompt may itself be called ``set/2``)."""
    prompt, slash, turn = request.rpartition("/")
    return prompt if slash and turn.isdecimal() and prompt in names else request


def request_names(run: Run, workload: str) -> set[str]:
    """All requests of a workload that the run has a word on."""
    return {
        record.request
        for records in (run.references, run.requests, run.failures)
        for record in records
        if record.workload == workload
    }


def count_lossless(run: Run, workload: str, method: str) -> dict[str, int]:
    """How many of a method's outputs are exact, tie, broken, ...; what there is none of is left
    out."""
    found = Counter(
        r.lossless for r in run.requests if (r.workload, r.method) == (workload, method)
    )
    return {name: found[name] for name in LOSSLESS if found[name]}


def largest_tie(run: Run, workload: str, method: str) -> float | None:
    """The largest logit gap of a method's ties; None without any."""
    splits = (
        r.divergence
        for r in run.requests
        if (r.workload, r.method, r.lossless) == (workload, method, "tie")
    )
    return max((s.gap for s in splits if s and s.gap is not None), default=None)


def law_p_value(run: Run, workload: str, method: str) -> float | None:
    """The p-value of the test that a method's sampled outputs are as surprising to the target as
    its distribution says; None where none was put to it."""
    found = [
        r.surprise
        for r in run.requests
        if (r.workload, r.method) == (workload, method) and r.surprise
    ]
    excess = sum(one.nats - one.expected_nats for one in found)
    return stats.law_p(excess, sum(one.variance for one in found)) if found else None


def count_failures(run: Run, workload: str, method: str) -> int:
    """Requests that a method has no output for: its own failures and those before its turn."""
    return len(
        {
            record.request
            for record in run.failures
            if record.workload == workload and record.method in (method, None)
        }
    )


def peak_memory_mib(run: Run) -> float | None:
    """The most that any worker of the run had used; all methods share a worker."""
    return max((record.peak_memory_mib for record in run.resources), default=None)


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None
