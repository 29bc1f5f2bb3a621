"""Runs of a sweep -> points: what each method at each depth, tree size and batch size came to.
Pure functions of records.

Of a run only the timings of full batches count: the last one of a shard may be smaller than its
batch size says.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from specbench import stats
from specbench.breakdown import Breakdown, Promise, break_down, promise
from specbench.columns import is_not_the_targets
from specbench.messages import are, counted
from specbench.records import Run
from specbench.stats import MIN_CLUSTERS, Estimate, Interval
from specbench.summary import MethodResult, WorkloadResult, summarise
from specbench.sweep.config import Setting

_OPEN = Interval(0.0, float("inf"))


@dataclass(frozen=True, kw_only=True)
class Point:
    """A method at one depth, tree size and batch size on one workload, or the baseline there.

    Args:
        setting: which; None for the baseline.
        batch: requests decoded together.
        result: acceptance, times, losslessness, and the speed-up, judged with all of the sweep.
        mean_rows: rows of a step, which are fewer than the batch once some have ended.
        mean_steps: steps of a request.
        is_tree: whether it drafted anything but chains.
        most_nodes: the most nodes that it drafted in a step of a row.
        promise: tokens of a step, as theory has them and as they were.
        breakdown: where the seconds of a token went.
    """

    setting: Setting | None
    batch: int
    result: MethodResult
    mean_rows: float | None
    mean_steps: float | None
    is_tree: bool
    most_nodes: int
    promise: Promise | None
    breakdown: Breakdown | None

    @property
    def tokens_per_s(self) -> float | None:
        """Of the batch, prefill left out."""
        return self.result.times.tokens_per_s if self.result.times else None

    @property
    def row_s(self) -> float | None:
        """Seconds of a token as its request has them: of a step / tau."""
        times, acceptance = self.result.times, self.result.acceptance
        return times.step_s / acceptance.tau if times and acceptance else None

    @property
    def request_s(self) -> float | None:
        """Seconds of a request, the prefill of its whole batch included."""
        times = self.result.times
        if times is None or self.mean_steps is None:
            return None
        return times.prefill_s * self.batch + times.step_s * self.mean_steps

    @property
    def gain(self) -> float | None:
        """The speed-up over the baseline at this batch size."""
        return self.result.speed_up.value if self.result.speed_up else None

    @property
    def proven(self) -> Interval:
        """The speed-up's interval; an end that its corrected verdict does not put on one side of 1
        is open."""
        estimate = self.result.speed_up
        interval = estimate.interval() if estimate else None
        if estimate is None or interval is None:
            return _OPEN
        low = interval.low if estimate.verdict == "faster" else _OPEN.low
        high = interval.high if estimate.verdict == "slower" else _OPEN.high
        return Interval(low, high)

    @property
    def num_batches(self) -> int:
        """What the speed-up rests on; 0 where there is none."""
        return self.result.speed_up.num_clusters if self.result.speed_up else 0

    @property
    def is_untold(self) -> bool:
        """Whether too few batches were timed to tell whether it pays."""
        return self.result.speed_up is not None and self.result.speed_up.too_few

    @property
    def is_sound(self) -> bool:
        """Whether every request was decoded, to the target's own output."""
        return not self.result.num_failed and not is_not_the_targets(self.result)

    @property
    def pays(self) -> bool:
        """Whether it is proven to be faster than the baseline, and is sound."""
        return self.proven.low > 1 and self.is_sound


@dataclass(frozen=True)
class WorkloadPoints:
    """A workload's points, by batch size.

    Args:
        about: the workload, as the smallest batch size has it.
        baselines: by batch size.
        points: of the methods, in the order of settings and batch sizes.
    """

    about: WorkloadResult
    baselines: Mapping[int, Point]
    points: Sequence[Point]

    @cached_property
    def by_method(self) -> dict[str, list[Point]]:
        """The points of each method."""
        found: dict[str, list[Point]] = {}
        for point in self.points:
            if point.setting:
                found.setdefault(point.setting.method, []).append(point)
        return found


@dataclass(frozen=True)
class Points:
    """All of a sweep.

    Args:
        workloads: the one of least entropy first.
        notes: what a reader should know.
    """

    workloads: Sequence[WorkloadPoints]
    notes: Sequence[str]


def measure(runs: Mapping[int, Run]) -> Points:
    """The points of runs that differ in their batch size; all speed-ups are judged together.

    Args:
        runs: by batch size.
    """
    twins = find_twins(list(runs.values()))
    found: dict[str, list[tuple[int, WorkloadResult]]] = {}
    full = {batch: _full_batches(run, batch) for batch, run in sorted(runs.items())}
    for batch, run in full.items():
        for result in summarise(run):
            found.setdefault(result.metrics.workload, []).append((batch, result))
    workloads = []
    for name, results in found.items():
        points = [
            _point(full[batch], name, batch, method)
            for batch, result in results
            for method in result.methods
            if method.method not in twins and (method.is_baseline or Setting.read(method.method))
        ]
        workloads.append((results[0][1], points))
    judged = _judge([point for _, points in workloads for point in points])
    grouped = [_group(about, [next(judged) for _ in points]) for about, points in workloads]
    return Points(grouped, list(_notes(runs, twins, grouped)))


def _group(about: WorkloadResult, points: Sequence[Point]) -> WorkloadPoints:
    baselines = {point.batch: point for point in points if point.result.is_baseline}
    drafting = [point for point in points if point.setting]
    order = {name: place for place, name in enumerate(m.method for m in about.methods)}
    drafting.sort(key=lambda p: (order.get(p.result.method, len(order)), p.batch))
    return WorkloadPoints(about, baselines, drafting)


def _full_batches(run: Run, batch: int) -> Run:
    return replace(run, timings=[t for t in run.timings if len(t.requests) == batch])


def _point(run: Run, workload: str, batch: int, result: MethodResult) -> Point:
    name = result.method
    records = [r for r in run.requests if (r.workload, r.method) == (workload, name)]
    steps = [step for record in records for step in record.steps]
    num_steps = {record.request: len(record.steps) for record in records}
    timings = [t for t in run.timings if (t.workload, t.method) == (workload, name)]
    timed = [num_steps[request] for t in timings for request in t.requests]
    num_forwards = sum(timing.num_forwards for timing in timings)
    return Point(
        setting=None if result.is_baseline else Setting.read(name),
        batch=batch,
        result=result,
        mean_rows=sum(timed) / num_forwards if num_forwards else None,
        mean_steps=sum(timed) / len(timed) if timed else None,
        is_tree=any(nodes > depth for nodes, depth, *_ in steps),
        most_nodes=max((step[0] for step in steps), default=0),
        promise=promise(run, workload, name),
        breakdown=None if result.is_baseline else break_down(run, workload, name),
    )


def _judge(points: Sequence[Point]) -> Iterator[Point]:
    """With the verdicts corrected for the number of all speed-ups of the sweep."""
    alone: list[Estimate] = [p.result.speed_up for p in points if p.result.speed_up]
    judged = iter(stats.judge_together(alone))
    for point in points:
        speed_up = point.result.speed_up and next(judged)
        yield replace(point, result=replace(point.result, speed_up=speed_up))


def find_twins(runs: Sequence[Run]) -> dict[str, str]:
    """Names that drafted exactly as an earlier name of the same method did, step by step, with the
    earlier name: a depth that a drafter cannot reach, say. They are the same point twice."""
    steps: dict[str, list[tuple[object, ...]]] = {}
    for place, run in enumerate(runs):
        for r in sorted(run.requests, key=lambda r: (r.workload, r.request)):
            taken = tuple(map(tuple, r.steps))
            steps.setdefault(r.method, []).append((place, r.workload, r.request, taken))
    listed = [name for run in runs for name in run.info.get("methods", {})]
    first: dict[tuple[object, ...], str] = {}
    twins = {}
    for name in dict.fromkeys(listed):
        setting = Setting.read(name)
        if setting is None or name not in steps:
            continue
        earlier = first.setdefault((setting.method, *steps[name]), name)
        if earlier != name:
            twins[name] = earlier
    return twins


def _notes(
    runs: Mapping[int, Run], twins: Mapping[str, str], workloads: Sequence[WorkloadPoints]
) -> Iterator[str]:
    for name, earlier in twins.items():
        yield f"{name} drafted exactly as {earlier} did: its point is left out"
    for batch, run in runs.items():
        if partial := {tuple(t.requests) for t in run.timings if len(t.requests) != batch}:
            yield (
                f"batch size {batch}: {counted(len(partial), 'smaller batch')} "
                f"{are(len(partial))} left out of all times"
            )
        for workload in workloads:
            if few := [p.num_batches for p in workload.points if p.batch == batch and p.is_untold]:
                yield (
                    f"batch size {batch}: {counted(min(few), 'batch')} of "
                    f"{workload.about.metrics.workload} {'was' if min(few) == 1 else 'were'} "
                    f"timed, a verdict takes {MIN_CLUSTERS}: give --prompts "
                    f"{MIN_CLUSTERS * batch} or more"
                )
