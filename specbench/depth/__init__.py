"""Depth controllers: how deep each row may draft, and how much of a draft is verified."""

from collections.abc import Mapping
from typing import Any

from specbench.depth.calibration import Calibration, Recorder
from specbench.depth.controller import Admission, Bounded, Candidate, DepthController
from specbench.depth.feedback import Confidence, Ema, Heuristic
from specbench.depth.goodput import Goodput
from specbench.depth.load import ByBatch, Fixed, OffAboveBatch
from specbench.depth.survival import Survival
from specbench.depth.times import StepTable, StepTimes
from specbench.messages import suggest

CONTROLLERS: Mapping[str, type[Bounded]] = {
    "fixed": Fixed,
    "off_above_batch": OffAboveBatch,
    "by_batch": ByBatch,
    "heuristic": Heuristic,
    "confidence": Confidence,
    "ema": Ema,
    "goodput": Goodput,
    "survival": Survival,
}
"""By name."""

__all__ = [
    "CONTROLLERS",
    "Admission",
    "ByBatch",
    "Calibration",
    "Candidate",
    "Confidence",
    "DepthController",
    "Ema",
    "Fixed",
    "Goodput",
    "Heuristic",
    "OffAboveBatch",
    "Recorder",
    "StepTable",
    "StepTimes",
    "Survival",
    "make_controller",
]


def make_controller(name: str, depth: int, max_nodes: int, **knobs: Any) -> DepthController:
    """A controller by its name.

    Args:
        name: one of `CONTROLLERS`.
        depth, max_nodes: the most that a row may draft.
        knobs: its own; see its class.

    Raises:
        ValueError: there is none of that name, or a knob is unknown, missing or out of range.
    """
    if name not in CONTROLLERS:
        raise ValueError(
            f"unknown controller {name!r}{suggest(name, CONTROLLERS)}; valid: "
            f"{', '.join(CONTROLLERS)}"
        )
    try:
        return CONTROLLERS[name](depth, max_nodes, **knobs)
    except TypeError as error:
        raise ValueError(f"controller {name}: {error}") from error
