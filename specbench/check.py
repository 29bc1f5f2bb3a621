"""Two runs -> one verdict: is a method still right, as well accepted and as fast as it was?"""

from collections.abc import Sequence
from dataclasses import dataclass

from specbench.comparable import MACHINE, WORKERS, differences
from specbench.filing import is_edited
from specbench.judge import Case, Finding, Verdict
from specbench.messages import suggest
from specbench.metrics import measure_times
from specbench.records import BASELINE, Run

MARGIN = 0.05


@dataclass(frozen=True, kw_only=True)
class Check:
    """All findings, and notes for who reads them."""

    baseline: Run
    run: Run
    margin: float
    findings: Sequence[Finding]
    notes: Sequence[str]

    @property
    def verdict(self) -> Verdict:
        """Of everything."""
        return worst(self.findings)


def worst(findings: Sequence[Finding]) -> Verdict:
    """The worst verdict; of nothing it is inconclusive."""
    order = list(Verdict)
    return min((f.verdict for f in findings), key=order.index, default=Verdict.INCONCLUSIVE)


def check(
    baseline: Run,
    run: Run,
    *,
    method: str | None = None,
    margin: float = MARGIN,
    allow: Sequence[str] = (),
    hard_only: bool = False,
) -> Check:
    """Judges a run's methods against a baseline.

    Args:
        method: the one to judge; all by default.
        margin: the loss, as a share, that the soft part lets pass.
        allow: groups of `comparable.GROUPS` that may differ.
        hard_only: leave the soft part out.

    Raises:
        ValueError: the runs are not to be compared, one is not whole, or there is no such method.
    """
    if not 0 < margin < 1:
        raise ValueError(f"--margin {margin} is out of range; valid: above 0, below 1")
    for one in (baseline, run):
        if one.missing_shards:
            raise ValueError(
                f"{one.folder} lacks {len(one.missing_shards)} of {len(one.info['shards'])} "
                f"shards; finish it: `specbench run --resume {one.folder}`"
            )
        if is_edited(one.info):
            raise ValueError(f"{one.folder}/run.json has been edited: nothing can be told from it")
    methods = _methods(run, method)
    apart = differences(baseline, run, methods, allow)
    elsewhere, beside = apart.pop(MACHINE, []), apart.pop(WORKERS, [])
    untimed = MACHINE if elsewhere else WORKERS if beside else None
    if apart:
        raise ValueError(
            f"{run.folder} is not to be compared with {baseline.folder}: "
            f"{'; '.join(text for texts in apart.values() for text in texts)}; "
            f"--allow {','.join(apart)} compares them all the same"
        )
    workloads = [name for name in baseline.info["workloads"] if name in run.info["workloads"]]
    if not workloads:
        raise ValueError(
            f"{run.folder} shares no workload with {baseline.folder}; valid: "
            f"{', '.join(baseline.info['workloads'])}"
        )
    notes = [f"another machine: {text}" for text in elsewhere]
    notes += [f"not so many at work side by side: {text}" for text in beside]
    notes += [f"allowed to differ: {name}" for name in allow]
    notes += [] if untimed else _of_the_baseline(baseline, run, margin)
    findings: list[Finding] = []
    for name in methods:
        if name not in baseline.info["methods"]:
            notes.append(f"{name} is new: judged against {BASELINE} and the best of its kind")
        for workload in workloads:
            case = Case(baseline, run, name, workload, margin, untimed)
            findings += case.findings()
    findings = [f for f in findings if f.is_hard or not hard_only]
    return Check(baseline=baseline, run=run, margin=margin, findings=findings, notes=notes)


def _of_the_baseline(baseline: Run, run: Run, margin: float) -> list[str]:
    """Where vanilla itself is not as fast as it was: every speed-up is measured against it."""
    lines = []
    for workload in baseline.info["workloads"]:
        rates = [
            times.tokens_per_s
            for one in (baseline, run)
            if (times := measure_times(one, workload, BASELINE)) and times.tokens_per_s
        ]
        if len(rates) == 2 and abs(rates[1] / rates[0] - 1) > margin:
            lines.append(
                f"{BASELINE} on {workload}: {rates[1]:.1f} tokens/s, was {rates[0]:.1f}; another "
                "load of the machine, or the loop has changed"
            )
    return lines


def _methods(run: Run, method: str | None) -> list[str]:
    found = [name for name in run.info["methods"] if name != BASELINE]
    if not found:
        raise ValueError(f"{run.folder} holds no method beside {BASELINE}: nothing is to be judged")
    if method is not None and method not in found:
        raise ValueError(
            f"{run.folder} has no method {method!r}{suggest(method, found)}; "
            f"valid: {', '.join(found)}"
        )
    return found if method is None else [method]
