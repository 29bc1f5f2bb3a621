"""Depth controllers for methods that are loaded: what one must know of the machine and the drafter,
how long steps take and how far the drafter's chances can be believed, is measured here before it
decides anything."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import median
from typing import Any

from specbench.depth import Calibration, Choice, DepthController, StepTable
from specbench.method import Method
from specbench.profile import Pass, StepSamples, step_table
from specbench.profiling import measure_forwards, measure_steps, record_samples

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
        """Of steps whose drafts are there already, by rows and nodes of each row: what forwards
        take, times what the method's own take of that (drafting may have run some layers), and the
        bookkeeping."""
        nodes = [0, *_grid(self.method.config.max_nodes)]
        context = round(max(one.context for one in self.samples))
        idle = {one.rows: one for one in self.samples if not one.depth}
        passes = [Pass(rows, 1 + n, context) for rows in idle for n in nodes]
        timed = measure_forwards(self.method.target, passes, _REPEATS)
        forwards = StepTable({(one.rows, one.tokens - 1): median(one.seconds) for one in timed})
        seconds = {}
        for deepest in (one for one in self.samples if one.depth == self.steps.nodes[-1]):
            rows = deepest.rows
            own_s = median(
                forward_s / forwards.step_s([nodes] * rows)
                for forward_s, nodes in zip(deepest.forward_s, deepest.nodes, strict=True)
            )
            for n in nodes:
                forward_s = forwards.step_s([n] * rows) * (own_s if n else 1.0)
                seconds[rows, n] = forward_s + median(idle[rows].bookkeeping_s)
        return StepTable(seconds)

    @cached_property
    def drafting(self) -> StepTable:
        """Of drafting, by rows and depth."""
        return step_table(self.samples, lambda one: one.draft_s)

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


def _grid(most: int) -> list[int]:
    """Where to measure: at the powers of two and at the most."""
    return sorted({*(2**i for i in range(most.bit_length())), most})
