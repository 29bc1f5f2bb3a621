"""A profile's predictions held against a sweep: what the recorded steps of every point should take
by the profile, beside what they took. Pure functions."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from specbench.messages import counted
from specbench.prediction import Forwards, Steps, predict
from specbench.profile import Profile
from specbench.records import RequestRecord, Run
from specbench.stats import MIN_CLUSTERS
from specbench.sweep.choices import by_setting
from specbench.sweep.points import Point, Points
from specbench.tables import Cell, Column, Heading, Note, Page, Table

_READING = (
    "predicted: the recorded steps, with the nodes that each drafted, in batches as they were "
    "decoded, at the profile's step times; what lies beyond its batches and depths is left out; "
    "error: predicted / measured - 1; inside: whether the measured interval holds the prediction, "
    f"`-` where under {MIN_CLUSTERS} batches leave none. "
    "The profile should be of the same machine, threads and dtype"
)


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """A point of a sweep, predicted.

    Args:
        point: as measured.
        predicted: its speed-up over vanilla at the same batch size.
    """

    point: Point
    predicted: float

    @property
    def error(self) -> float | None:
        """Of the prediction, as a share of what was measured."""
        return self.predicted / self.point.gain - 1 if self.point.gain else None

    @property
    def is_inside(self) -> bool | None:
        """Whether the measured interval holds it; None if there is none."""
        estimate = self.point.result.speed_up
        interval = estimate.interval() if estimate else None
        return interval.low <= self.predicted <= interval.high if interval else None


def predictions(
    profile: Profile, runs: Mapping[int, Run], points: Points
) -> dict[str, list[Prediction]]:
    """By workload: every point that was measured and lies within the profile's batches and depths.

    Raises:
        ValueError: the profile lacks a method.
    """
    return {
        workload.about.metrics.workload: [
            prediction
            for own in workload.by_method.values()
            for prediction in _of_method(profile, runs, workload.about.metrics.workload, own)
        ]
        for workload in points.workloads
    }


def _of_method(
    profile: Profile, runs: Mapping[int, Run], workload: str, points: Sequence[Point]
) -> Iterator[Prediction]:
    forwards = Forwards(profile)
    shortest, longest = forwards.contexts[0], forwards.contexts[-1]
    contexts = {
        batch: round(min(max(_mean_context(run, workload), shortest), longest))
        for batch, run in runs.items()
    }
    for setting, own in by_setting(points).items():
        deepest = Steps(profile, setting.method, shortest).deepest
        for point in own:
            if point.gain and point.batch <= forwards.rows[-1] and setting.depth <= deepest:
                batch = point.batch
                records = _in_full_batches(runs[batch], workload, setting.name, batch)
                predicted = predict(
                    profile, setting.method, records, batch, setting.depth, contexts[batch]
                )
                yield Prediction(point=point, predicted=predicted)


def _in_full_batches(run: Run, workload: str, method: str, size: int) -> list[RequestRecord]:
    """What a point is measured over, batch by batch as it was decoded."""
    own = (workload, method)
    found = {r.request: r for r in run.requests if (r.workload, r.method) == own}
    batches = dict.fromkeys(
        tuple(timing.requests)
        for timing in run.timings
        if (timing.workload, timing.method) == own and len(timing.requests) == size
    )
    return [found[request] for batch in batches for request in batch]


def _mean_context(run: Run, workload: str) -> float:
    """Tokens in a row's cache, half of its output behind the prompt."""
    return fmean(
        one.num_prompt_tokens + len(one.tokens) / 2
        for one in run.references
        if one.workload == workload
    )


def page(found: Mapping[str, Sequence[Prediction]]) -> Page:
    """The predictions beside what was measured."""
    elements: list[Heading | Note | Table] = [Heading("Predicted by the profile", 2)]
    for workload, made in found.items():
        if made:
            elements += [_table(workload, made), Note(_summary(workload, made), "strong")]
    return [*elements, Note(_READING)]


def _table(workload: str, found: Sequence[Prediction]) -> Table:
    columns = [
        Column("method", numbers=False),
        Column("batch"),
        Column("predicted"),
        Column("measured"),
        Column("error"),
        Column("inside", numbers=False),
    ]
    words = {True: "yes", False: "no", None: "-"}
    rows = [
        [
            Cell(one.point.result.method),
            Cell(str(one.point.batch)),
            Cell(f"{one.predicted:.2f}x"),
            Cell(f"{one.point.gain or 0.0:.2f}x"),
            Cell(f"{100 * (one.error or 0.0):+.1f} %"),
            Cell(words[one.is_inside]),
        ]
        for one in found
    ]
    return Table(f"{workload}: predicted and measured speed-ups", columns, rows)


def _summary(workload: str, found: Sequence[Prediction]) -> str:
    errors = sorted(abs(one.error) for one in found if one.error is not None)
    told = [one.is_inside for one in found if one.is_inside is not None]
    inside = f"{sum(told)} of {len(told)} {'lies' if len(told) == 1 else 'lie'} in the measured"
    return (
        f"{workload}: over {counted(len(errors), 'point')} the prediction is off by "
        f"{100 * median(errors):.1f} % in the median and {100 * errors[-1]:.1f} % at most; "
        + (f"{inside} interval" if told else "no point has a measured interval to lie in")
    )
