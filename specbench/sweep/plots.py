"""A sweep's curves: speed-up and throughput against the batch size, a curve for each depth, as PNG
and SVG. Needs matplotlib, which only this module imports, where it draws."""

import re
from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

from specbench.sweep.choices import by_setting
from specbench.sweep.points import Point, Points, WorkloadPoints

FORMATS = ("png", "svg")
_SIZE_INCHES = (11.0, 4.5)
_DPI = 150
_MARKERS = "os^Dv"
"""Of the settings, so that curves which lie on each other are told apart."""


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


def draw(points: Points, about: str, folder: Path) -> list[Path]:
    """Draws each method on each workload.

    Args:
        about: what was measured on what, for the title.
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
            heading = f"{method} on {workload.about.metrics.workload}; {about}"
            figure = _figure(heading, workload, own)
            for form in FORMATS:
                path = folder / f"{re.sub(r'[^A-Za-z0-9._@-]+', '_', name)}.{form}"
                figure.savefig(path, dpi=_DPI)
                files.append(path)
    return files


def _figure(heading: str, workload: WorkloadPoints, points: Sequence[Point]) -> Any:
    from matplotlib.figure import Figure

    figure = Figure(figsize=_SIZE_INCHES, layout="constrained")
    figure.suptitle(heading)
    left, right = figure.subplots(1, 2)
    batches = sorted({point.batch for point in points})
    for (setting, own), marker in zip(by_setting(points).items(), cycle(_MARKERS), strict=False):
        size = "" if setting.nodes is None else f", {setting.nodes} nodes"
        label = f"depth {setting.depth}{size}"
        _draw_speed_ups(left, own, label, marker)
        _draw_throughput(right, own, label, marker=marker)
    baselines = list(workload.baselines.values())
    _draw_throughput(right, baselines, "vanilla", color="black", marker="x")
    left.axhline(1.0, color="black", linewidth=1)
    left.set_ylabel("speed-up over vanilla, 95 % interval\n(hollow: too few batches for one)")
    right.set_ylabel("tokens/s of the batch")
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        axes.set_xticks(batches, [str(batch) for batch in batches])
        axes.set_xlabel("batch size")
        axes.legend()
    return figure


def _draw_speed_ups(axes: Any, points: Sequence[Point], label: str, marker: str) -> None:
    """With their intervals; what has none is hollow."""
    drawn = [(point.batch, point.result.speed_up) for point in points if point.result.speed_up]
    line = axes.plot([batch for batch, _ in drawn], [one.value for _, one in drawn], label=label)
    color = line[0].get_color()
    for batch, estimate in drawn:
        interval = estimate.interval()
        low, high = interval or (estimate.value, estimate.value)
        axes.errorbar(
            batch,
            estimate.value,
            yerr=[[estimate.value - low], [high - estimate.value]],
            marker=marker,
            color=color,
            markerfacecolor=color if interval else "white",
            capsize=3 if interval else 0,
        )


def _draw_throughput(axes: Any, points: Sequence[Point], label: str, **style: Any) -> None:
    drawn = [(p.batch, p.tokens_per_s) for p in points if p.tokens_per_s is not None]
    axes.plot([b for b, _ in drawn], [rate for _, rate in drawn], label=label, **style)
