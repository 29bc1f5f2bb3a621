"""Depth controllers: how deep each row may draft, and how much of a draft is verified."""

from specbench.depth.calibration import Calibration, Recorder
from specbench.depth.choice import CONTROLLERS, Choice, make_controller
from specbench.depth.controller import Admission, Candidate, DepthController
from specbench.depth.feedback import Confidence, Ema, Heuristic
from specbench.depth.goodput import Goodput
from specbench.depth.load import ByBatch, Fixed, OffAboveBatch
from specbench.depth.survival import Survival
from specbench.depth.times import StepTable, StepTimes

__all__ = [
    "CONTROLLERS",
    "Admission",
    "ByBatch",
    "Calibration",
    "Candidate",
    "Choice",
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
