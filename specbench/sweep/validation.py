"""A profile's predictions held against a sweep: what the recorded steps of every point should take
by the profile, and what `specbench simulate` makes of a single run, beside what was measured. Pure
functions."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import NamedTuple

from specbench.acceptance import Replayed
from specbench.messages import counted
from specbench.prediction import Forwards, Steps, on_profile, predict
from specbench.profile import Profile
from specbench.records import RequestRecord, Run
from specbench.stats import MIN_CLUSTERS
from specbench.sweep.config import Setting
from specbench.sweep.points import Point, Points
from specbench.tables import MISSING, Cell, Column, Heading, Note, Page, Table

_READING = (
    "predicted: the recorded steps, with the nodes that each drafted, in batches as they were "
    "decoded, at the profile's step times",
    "simulated: what `specbench simulate --static` makes of the steps that were recorded at the "
    "smallest batch size and the largest depth alone; `-` for trees of other sizes than the "
    "method's own",
    "error: of that, as a share of what was measured; inside: whether the measured interval holds "
    f"the prediction, `-` where under {MIN_CLUSTERS} batches leave none",
    "the profile should be of the same machine, threads and dtype",
)
_LARGE = 0.1
"""An error from which on a prediction is of little use."""


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """A point of a sweep, predicted.

    Args:
        point: as measured.
        measured: its speed-up over vanilla at the same batch size.
        predicted: from its own steps.
        simulated: from those of another point; None where that says nothing of it.
    """

    point: Point
    measured: float
    predicted: float
    simulated: float | None

    @property
    def error(self) -> float:
        """Of the prediction, as a share of what was measured."""
        return self.predicted / self.measured - 1

    @property
    def simulated_error(self) -> float | None:
        """Of the simulation, likewise."""
        return None if self.simulated is None else self.simulated / self.measured - 1

    @property
    def is_inside(self) -> bool | None:
        """Whether the measured interval holds it; None if there is none."""
        estimate = self.point.result.speed_up
        interval = estimate.interval() if estimate else None
        return interval.low <= self.predicted <= interval.high if interval else None


class Held(NamedTuple):
    """A sweep held against a profile.

    Args:
        found: by workload, the points that it predicts.
        left_out: by the reason why it says nothing of them, the points that were measured.
    """

    found: dict[str, list[Prediction]]
    left_out: dict[str, list[str]]


def hold(profile: Profile, runs: Mapping[int, Run], points: Points) -> Held:
    """Every point that was measured, as far as the profile goes.

    Raises:
        ValueError: no context of the profile has a full grid.
    """
    held = Held({}, {})
    forwards = Forwards(profile)
    for workload in points.workloads:
        name = workload.about.metrics.workload
        contexts = {
            batch: _within(_mean_context(run, name), forwards.contexts)
            for batch, run in runs.items()
        }
        held.found[name] = []
        for own in workload.by_method.values():
            settings = [point.setting for point in own if point.setting]
            recorded = _simulated_from(runs[min(runs)], name, settings)
            for point in own:
                run, context = runs[point.batch], contexts[point.batch]
                if point.gain is None or point.setting is None:
                    continue
                try:
                    prediction = _of_point(profile, run, name, point, context, recorded)
                except ValueError as error:
                    label = f"{point.setting.name} at batch size {point.batch}"
                    held.left_out.setdefault(str(error), []).append(label)
                else:
                    held.found[name].append(prediction)
    return held


def _within(context: float, known: Sequence[int]) -> int:
    return round(min(max(context, known[0]), known[-1]))


def _of_point(
    profile: Profile,
    run: Run,
    workload: str,
    point: Point,
    context: int,
    recorded: Replayed | None,
) -> Prediction:
    """Raises ValueError where the profile says nothing of it."""
    setting, batch = point.setting, point.batch
    assert setting is not None and point.gain is not None, "a point that was measured"
    records = _in_full_batches(run, workload, setting.name, batch)
    steps = Steps(profile, setting.method, context)
    return Prediction(
        point=point,
        measured=point.gain,
        predicted=predict(profile, setting.method, records, batch, setting.depth, context),
        simulated=_simulate(steps, recorded, setting, batch),
    )


def _simulated_from(run: Run, workload: str, settings: Iterable[Setting]) -> Replayed | None:
    """What was recorded of the deepest setting; None where nothing was drafted there."""
    plain = [setting for setting in settings if setting.nodes is None]
    name = max(plain, key=lambda one: one.depth).name if plain else ""
    records = [r for r in run.requests if (r.workload, r.method) == (workload, name)]
    drafted = any(step[1] for record in records for step in record.steps)
    return Replayed(records, static=True) if drafted else None


def _simulate(
    steps: Steps, recorded: Replayed | None, setting: Setting, batch: int
) -> float | None:
    if recorded is None or setting.nodes is not None or setting.depth > recorded.deepest:
        return None
    if recorded.largest is not None and batch > recorded.largest:
        return None
    return on_profile(steps, recorded, setting.depth).speed_up(batch, setting.depth)


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


def page(held: Held) -> Page:
    """The predictions beside what was measured."""
    elements: list[Heading | Note | Table] = [Heading("Predicted by the profile", 2)]
    for reason, names in held.left_out.items():
        elements.append(Note(f"not predicted: {', '.join(names)}: {reason}", "bad"))
    for workload, made in held.found.items():
        if made:
            elements += [
                _table(workload, made),
                *(Note(n, "strong") for n in _summary(workload, made)),
            ]
    return [*elements, *map(Note, _READING)]


def _table(workload: str, found: Sequence[Prediction]) -> Table:
    columns = [
        Column("method", numbers=False),
        Column("batch"),
        Column("measured"),
        Column("predicted"),
        Column("error"),
        Column("inside", numbers=False),
        Column("simulated"),
        Column("error"),
    ]
    words = {True: "yes", False: "no", None: "-"}
    rows = [
        [
            Cell(one.point.result.method),
            Cell(str(one.point.batch)),
            Cell(f"{one.measured:.2f}x"),
            Cell(f"{one.predicted:.2f}x"),
            Cell(f"{100 * one.error:+.1f} %"),
            Cell(words[one.is_inside]),
            Cell(MISSING if one.simulated is None else f"{one.simulated:.2f}x"),
            Cell(MISSING if one.simulated_error is None else f"{100 * one.simulated_error:+.1f} %"),
        ]
        for one in found
    ]
    return Table(f"{workload}: predicted and measured speed-ups", columns, rows)


def _summary(workload: str, found: Sequence[Prediction]) -> Iterator[str]:
    told = [one.is_inside for one in found if one.is_inside is not None]
    inside = f"{sum(told)} of {len(told)} {'lies' if len(told) == 1 else 'lie'} in the measured"
    yield _spread(f"{workload}, predicted", [one.error for one in found]) + (
        f"; {inside} interval" if told else "; no point has a measured interval to lie in"
    )
    simulated = [one.simulated_error for one in found if one.simulated_error is not None]
    if simulated:
        yield _spread(f"{workload}, simulated", simulated)


def _spread(what: str, errors: Sequence[float]) -> str:
    sizes = sorted(map(abs, errors))
    return (
        f"{what}: over {counted(len(sizes), 'point')} it is off by {100 * median(sizes):.1f} % in "
        f"the median and {100 * sizes[-1]:.1f} % at most, by more than {100 * _LARGE:.0f} % at "
        f"{sum(size > _LARGE for size in sizes)}"
    )
