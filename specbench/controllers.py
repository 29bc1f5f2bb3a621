"""Depth controllers for methods that are loaded: what one must know of the machine and the drafter,
how long steps take and how far the drafter's chances can be believed, is measured here before it
decides anything."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean, median
from typing import Any

import numpy as np

from specbench.depth import Calibration, Choice, DepthController, StepTable
from specbench.method import Method
from specbench.profile import StepSamples, step_table
from specbench.profiling import measure_steps, record_samples

_REPEATS = 3


@dataclass(frozen=True)
class Known:
    """What was measured of a method; the rest follows, or is measured, once it is asked for.

    Args:
        method: the method.
        samples: of its whole steps, by rows and depth.
    """

    method: Method
    samples: Sequence[StepSamples]

    @cached_property
    def steps(self) -> StepTable:
        """Seconds of whole steps, by rows and depth."""
        return step_table(self.samples)

    @cached_property
    def verifying(self) -> StepTable:
        """Of steps whose drafts are there already, by rows and drafted nodes."""
        return by_nodes(self.samples)

    @cached_property
    def drafting(self) -> StepTable:
        """Of drafting to the full depth, by rows."""
        deepest = max(one.depth for one in self.samples)
        return StepTable(
            {(s.rows, 0): median(s.draft_s) for s in self.samples if s.depth == deepest}
        )

    @cached_property
    def calibration(self) -> Calibration:
        """Of its chances."""
        texts = record_samples(self.method.target, self.method)
        return Calibration.fit([sample for text in texts for sample in text])


class Controllers:
    """Makes the controllers of methods that are loaded.

    Args:
        max_rows: the most rows that they will see.
    """

    def __init__(self, max_rows: int) -> None:
        self.max_rows = max_rows
        self._known: dict[Method, Known] = {}

    def make(self, method: Method, choice: Choice | None = None) -> DepthController:
        """A method's controller, new; the first time, what it goes by is measured.

        Args:
            choice: by default the one that its knob names.

        Raises:
            ValueError: it needs step times, and the target has no tokenizer or too short a context
            to measure them.
        """
        choice = choice or Choice.read(method.config.controller)
        if not choice.needs_times:
            return choice.make(method.config)
        if method not in self._known:
            self._known[method] = measure(method, self.max_rows)
        known, given = self._known[method], dict[str, Any]()
        if choice.takes_calibration:
            given = {"drafting": known.drafting, "calibration": known.calibration}
        return choice.make(method.config, known.verifying if given else known.steps, **given)


def measure(method: Method, max_rows: int) -> Known:
    """What controllers go by, from steps over a few fixed texts."""
    depth = method.config.depth
    depths = sorted({0, *(d for d in (1, 2, 3, 4, 6, 8, 12, 16) if d < depth), depth})
    rows = _grid(max_rows)
    return Known(method, measure_steps(method.target, method, rows, depths, repeats=_REPEATS))


def _grid(max_rows: int) -> list[int]:
    """Batch sizes to measure: the powers of two and the largest."""
    return sorted({*(2**i for i in range(max_rows.bit_length())), max_rows})


def by_nodes(steps: Sequence[StepSamples]) -> StepTable:
    """Seconds of a step without its drafting, by the nodes that each row verifies: between those
    that were drafted they are interpolated."""
    rows = sorted({one.rows for one in steps})
    curves = {}
    for num in rows:
        found = sorted((fmean(s.nodes), median(_verify_s(s))) for s in steps if s.rows == num)
        curves[num] = ([nodes for nodes, _ in found], [seconds for _, seconds in found])
    most = round(max(nodes[-1] for nodes, _ in curves.values()))
    return StepTable(
        {(num, n): float(np.interp(n, *curves[num])) for num in rows for n in range(most + 1)}
    )


def _verify_s(steps: StepSamples) -> list[float]:
    return [f + b for f, b in zip(steps.forward_s, steps.bookkeeping_s, strict=True)]
