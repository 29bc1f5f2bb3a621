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
        it held."""
        temperatures: list[float] = []
        for depth in range(1, 1 + max((len(s.chances) for s in samples), default=0)):
            deep = [s for s in samples if len(s.chances) >= depth]
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
    expected calibration errors on texts that nothing was fitted to."""

    depth: int
    num: int
    temperature: float
    believed: float
    """As it is."""
    calibrated: float


def check_calibration(texts: Sequence[Sequence[Sample]]) -> list[Reliability]:
    """Fits to the samples of every other text and checks on the rest, by depth."""
    fitted = Calibration.fit([sample for text in texts[::2] for sample in text])
    held_out = [sample for text in texts[1::2] for sample in text]
    found = []
    for depth, temperature in enumerate(fitted.temperatures, start=1):
        deep = [sample for sample in held_out if len(sample.chances) >= depth]
        survived = np.array([sample.matched >= depth for sample in deep], dtype=np.float64)
        believed, calibrated = (
            expected_error(calibration.survivals(deep, depth), survived)
            for calibration in (Calibration(), fitted)
        )
        found.append(Reliability(depth, len(deep), temperature, believed, calibrated))
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
