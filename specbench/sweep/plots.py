"""A sweep's curves: speed-up and throughput against the batch size, a curve for each depth, as PNG
and SVG. Needs matplotlib, which only this module imports, where it draws."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from specbench.sweep.choices import by_setting
from specbench.sweep.points import Point, Points, WorkloadPoints

FORMATS = ("png", "svg")
_SIZE_INCHES = (11.0, 4.5)
_DPI = 150


def require() -> None:
    """Holds that plots can be drawn.

    Raises:
        ValueError: matplotlib is not installed.
    """
    try:
        import matplotlib.figure  # noqa: F401 - whether it is there
    except ImportError as error:
        raise ValueError(
            f"--plots needs matplotlib: {error}; install 'matplotlib' (the extra `plots` of this "
            "project), or leave --plots out"
        ) from error


def draw(points: Points, folder: Path) -> list[Path]:
    """Draws each method on each workload.

    Args:
        folder: where the files go; it is made.

    Returns:
        The files.

    Raises:
        ValueError: matplotlib is not installed.
    """
    require()
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    for workload in points.workloads:
        for method, own in workload.by_method.items():
            name = f"{workload.about.metrics.workload}-{method}"
            figure = _figure(name, workload, own)
            for form in FORMATS:
                path = folder / f"{re.sub(r'[^A-Za-z0-9._@-]+', '_', name)}.{form}"
                figure.savefig(path, dpi=_DPI)
                files.append(path)
    return files


def _figure(name: str, workload: WorkloadPoints, points: Sequence[Point]) -> Any:
    from matplotlib.figure import Figure

    figure = Figure(figsize=_SIZE_INCHES, layout="constrained")
    figure.suptitle(name)
    left, right = figure.subplots(1, 2)
    batches = sorted({point.batch for point in points})
    for setting, own in by_setting(points).items():
        size = "" if setting.nodes is None else f", {setting.nodes} nodes"
        label = f"depth {setting.depth}{size}"
        _draw_speed_ups(left, own, label)
        _draw_throughput(right, own, label)
    _draw_throughput(right, list(workload.baselines.values()), "vanilla", color="black")
    left.axhline(1.0, color="black", linewidth=1)
    left.set_ylabel("speed-up over vanilla, 95 % interval")
    right.set_ylabel("tokens/s of the batch")
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        axes.set_xticks(batches, [str(batch) for batch in batches])
        axes.set_xlabel("batch size")
        axes.legend()
    return figure


def _draw_speed_ups(axes: Any, points: Sequence[Point], label: str) -> None:
    """With their intervals; what has none is a point alone."""
    drawn = [(point.batch, point.result.speed_up) for point in points if point.result.speed_up]
    values = [estimate.value for _, estimate in drawn]
    intervals = [estimate.interval() or (estimate.value, estimate.value) for _, estimate in drawn]
    below = [value - low for value, (low, _) in zip(values, intervals, strict=True)]
    above = [high - value for value, (_, high) in zip(values, intervals, strict=True)]
    axes.errorbar(
        [batch for batch, _ in drawn],
        values,
        yerr=[below, above],
        marker="o",
        capsize=3,
        label=label,
    )


def _draw_throughput(axes: Any, points: Sequence[Point], label: str, **style: Any) -> None:
    drawn = [(p.batch, p.tokens_per_s) for p in points if p.tokens_per_s is not None]
    axes.plot([b for b, _ in drawn], [rate for _, rate in drawn], marker="o", label=label, **style)
