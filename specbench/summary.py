"""A run -> what is shown of it: every method on every workload, with the speed-up's interval."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from specbench import metrics, stats
from specbench.breakdown import Breakdown, Promise, break_down, promise
from specbench.metrics import Acceptance, Times, WorkloadMetrics
from specbench.records import BASELINE, Flops, Run
from specbench.stats import Estimate


@dataclass(frozen=True, kw_only=True)
class MethodResult:
    """All that is shown of one method on one workload; None is what was not measured."""

    method: str
    label: str
    is_baseline: bool
    acceptance: Acceptance | None
    times: Times | None
    speed_up: Estimate | None
    speed_up_by_round: Sequence[float]
    lossless: Mapping[str, int]
    largest_tie: float | None
    law_p: float | None
    num_failed: int
    extra_bytes: int | None
    flops: Flops | None
    promise: Promise | None
    breakdown: Breakdown | None


@dataclass(frozen=True, kw_only=True)
class WorkloadResult:
    """A workload and the methods that ran on it, the baseline first."""

    metrics: WorkloadMetrics
    decodings: Sequence[Mapping[str, Any]]
    methods: Sequence[MethodResult]


def summarise(run: Run) -> list[WorkloadResult]:
    """What is shown of a run, workloads with the least entropy first. Its verdicts are judged
    together."""
    names = {record.workload for record in run.references}
    names |= {record.workload for record in run.requests}
    names |= {record.workload for record in run.failures}
    found = [_workload_result(run, name) for name in names]
    return _judged(sorted(found, key=lambda result: _by_entropy(result.metrics)))


def _judged(results: Sequence[WorkloadResult]) -> list[WorkloadResult]:
    """With the p-values of all speed-ups corrected for their number."""
    alone = [m.speed_up for result in results for m in result.methods if m.speed_up]
    judged = iter(stats.judge_together(alone))
    return [
        replace(
            result,
            methods=[replace(m, speed_up=m.speed_up and next(judged)) for m in result.methods],
        )
        for result in results
    ]


def _by_entropy(workload: WorkloadMetrics) -> tuple[bool, float, str]:
    nats = workload.entropy_nats
    return (nats is None, nats or 0.0, workload.workload)


def _workload_result(run: Run, workload: str) -> WorkloadResult:
    decodings = [r.decoding for r in run.references if r.workload == workload]
    return WorkloadResult(
        metrics=metrics.measure_workload(run, workload),
        decodings=[d for i, d in enumerate(decodings) if d not in decodings[:i]],
        methods=[_method_result(run, workload, name) for name in _methods(run, workload)],
    )


def _methods(run: Run, workload: str) -> list[str]:
    """The methods with any record on a workload, as the run lists them, the baseline first."""
    outputs = {record.method for record in run.requests if record.workload == workload}
    failed = {record.method for record in run.failures if record.workload == workload}
    seen = outputs | failed
    listed = run.info.get("methods", {})
    known = dict.fromkeys([*listed, *sorted(name for name in seen if name)])
    # A failure without a method struck them all.
    shown = [name for name in known if name in seen or (None in seen and name in listed)]
    return sorted(shown, key=lambda name: name != BASELINE)


def _method_result(run: Run, workload: str, method: str) -> MethodResult:
    about = run.info.get("methods", {}).get(method, {})
    is_baseline = method == BASELINE
    pairs = metrics.pair_times(run, workload, method)
    return MethodResult(
        method=method,
        label=about.get("label", ""),
        is_baseline=is_baseline,
        acceptance=metrics.measure_acceptance(run, workload, method),
        times=metrics.measure_times(run, workload, method),
        speed_up=stats.speed_up(pairs) if len(pairs) and not is_baseline else None,
        speed_up_by_round=[] if is_baseline else metrics.speed_up_by_round(run, workload, method),
        lossless=metrics.count_lossless(run, workload, method),
        largest_tie=metrics.largest_tie(run, workload, method),
        law_p=metrics.law_p_value(run, workload, method),
        num_failed=metrics.count_failures(run, workload, method),
        extra_bytes=about.get("extra_bytes"),
        flops=metrics.sum_flops(run, workload, method),
        promise=None if is_baseline else promise(run, workload, method),
        breakdown=None if is_baseline else break_down(run, workload, method),
    )
