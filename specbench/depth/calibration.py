"""How far a drafter's chances can be believed, and what makes them believable: sequential
temperature scaling (DSpark, section on confidence-scheduled verification).

A sample is one step of a chain: the chance of each drafted token, and how many were taken.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from specbench.depth.controller import Admission
from specbench.depth.load import Fixed
from specbench.method import Verdict
from specbench.stats import Floats

_TEMPERATURES = np.geomspace(0.1, 10, 81)
_LEAST = 1e-6
LEAST_DRAFTS = 50
"""The fewest drafts of a depth that a temperature is fitted to: how often so many are taken is
known to 0.07 (a standard error), about what the fit is to tell apart. With fewer it would follow
chance to a bound."""


class Sample(NamedTuple):
    """A step that drafted a chain."""

    chances: tuple[float, ...]
    matched: int


class Recorder(Fixed):
    """Drafts to a fixed depth and keeps a sample of every step, to calibrate on; `reset` keeps
    them."""

    reads_drafts = True

    def __init__(self, depth: int, max_nodes: int) -> None:
        super().__init__(depth, max_nodes)
        self.samples: list[Sample] = []

    def admit(self, admission: Admission) -> None:
        """All of it."""
        for row in range(len(admission.num_nodes)):
            while admission.next(row):
                admission.admit(row)

    def observe(self, verdict: Verdict) -> None:
        """Keeps what chains looked like."""
        for row, chances in zip(verdict.rows, verdict.proposal.chances or (), strict=False):
            step = row.steps[-1]
            if step.nodes == step.depth:
                self.samples.append(Sample(tuple(chances), step.matched))


@dataclass(frozen=True)
class Calibration:
    """A temperature for each depth; beyond the last, the last. Without any, chances are believed.

    Args:
        temperatures: above 1 makes a drafter less sure, below 1 surer.
    """

    temperatures: tuple[float, ...] = ()

    def chance(self, chance: float, depth: int) -> float:
        """What a drafter's chance at a depth, from 1, comes to."""
        if not self.temperatures:
            return chance
        temperature = self.temperatures[min(depth, len(self.temperatures)) - 1]
        return float(_scaled(np.array([chance]), temperature)[0])

    @staticmethod
    def fit(samples: Sequence[Sample]) -> "Calibration":
        """The temperatures that make survival, the product of the chances down to a depth, agree
        best with how often it came true; fitted from the first depth on, each with those before
        it held. From where there are fewer than `LEAST_DRAFTS` on, chances are believed."""
        temperatures: list[float] = []
        for depth in range(1, 1 + max((len(s.chances) for s in samples), default=0)):
            deep = [s for s in samples if len(s.chances) >= depth]
            if len(deep) < LEAST_DRAFTS:
                return Calibration((*temperatures, 1.0) if temperatures else ())
            before = Calibration(tuple(temperatures)).survivals(deep, depth - 1)
            own = np.array([s.chances[depth - 1] for s in deep])
            survived = np.array([s.matched >= depth for s in deep], dtype=np.float64)
            errors = [
                expected_error(before * _scaled(own, temperature), survived)
                for temperature in _TEMPERATURES
            ]
            temperatures.append(float(_TEMPERATURES[int(np.argmin(errors))]))
        return Calibration(tuple(temperatures))

    def survivals(self, samples: Sequence[Sample], depth: int) -> Floats:
        """Of each sample, the product of its chances down to a depth."""
        products = [
            np.prod([self.chance(s.chances[i], i + 1) for i in range(depth)]) for s in samples
        ]
        return np.array(products, dtype=np.float64)


class Reliability(NamedTuple):
    """How far a drafter's survival down to a depth, the product of its chances, can be believed:
    expected calibration errors on texts that nothing was fitted to.

    Args:
        depth: down to which.
        num_fitted: drafts so deep that there are to fit to.
        num: those to check on, 1 or more.
        temperature: that was fitted; None where there are too few drafts.
        believed: the error of the chances as they are.
        calibrated: after the temperatures; None where there is none.
    """

    depth: int
    num_fitted: int
    num: int
    temperature: float | None
    believed: float
    calibrated: float | None

    @property
    def at_bound(self) -> bool:
        """Whether a temperature beyond those that were tried might fit better."""
        return self.temperature in (_TEMPERATURES[0], _TEMPERATURES[-1])

    @property
    def helped(self) -> bool:
        """Whether the error is less after calibration."""
        return self.calibrated is not None and self.calibrated < self.believed


def check_calibration(texts: Sequence[Sequence[Sample]]) -> list[Reliability]:
    """Fits to the samples of every other text and checks on the rest, by depth."""
    to_fit, held_out = ([s for text in texts[part::2] for s in text] for part in (0, 1))
    fitted = Calibration.fit(to_fit)
    found = []
    for depth in range(1, 1 + max((len(s.chances) for s in held_out), default=0)):
        deep = [sample for sample in held_out if len(sample.chances) >= depth]
        survived = np.array([sample.matched >= depth for sample in deep], dtype=np.float64)
        believed, calibrated = (
            expected_error(calibration.survivals(deep, depth), survived)
            for calibration in (Calibration(), fitted)
        )
        num_fitted = sum(len(sample.chances) >= depth for sample in to_fit)
        is_fitted = num_fitted >= LEAST_DRAFTS
        found.append(
            Reliability(
                depth=depth,
                num_fitted=num_fitted,
                num=len(deep),
                temperature=fitted.temperatures[depth - 1] if is_fitted else None,
                believed=believed,
                calibrated=calibrated if is_fitted else None,
            )
        )
    return found


class Bin(NamedTuple):
    """Predictions that are about alike."""

    num: int
    predicted: float
    observed: float


def reliability(predicted: Floats, observed: Floats, num_bins: int = 15) -> list[Bin]:
    """Means of prediction and outcome, in bins of equal width; empty ones are left out."""
    index = np.minimum((predicted * num_bins).astype(int), num_bins - 1)
    bins = []
    for i in np.unique(index):
        inside = index == i
        bins.append(
            Bin(int(inside.sum()), float(predicted[inside].mean()), float(observed[inside].mean()))
        )
    return bins


def expected_error(predicted: Floats, observed: Floats) -> float:
    """Expected calibration error: the mean distance of the two over the bins, by their size."""
    return sum(
        found.num * abs(found.predicted - found.observed)
        for found in reliability(predicted, observed)
    ) / max(1, len(predicted))


def _scaled(chances: Floats, temperature: float) -> Floats:
    clipped = np.clip(chances, _LEAST, 1 - _LEAST)
    scaled: Floats = 1 / (1 + ((1 - clipped) / clipped) ** (1 / temperature))
    return scaled
