"""The only clock of what is measured."""

import time
from typing import Any

import torch


class Stopwatch:
    """Seconds by phase. On a GPU it marks the stream and waits once, at the end."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._marks: list[tuple[str, Any]] = [("", self._mark())]

    def lap(self, phase: str) -> None:
        """Ends a phase."""
        self._marks.append((phase, self._mark()))

    def _mark(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def seconds(self) -> dict[str, float]:
        """The sum of each phase's laps."""
        if self._cuda:
            torch.cuda.synchronize()
        total: dict[str, float] = {}
        for (_, begin), (phase, end) in zip(self._marks, self._marks[1:], strict=False):
            lap = begin.elapsed_time(end) / 1e3 if self._cuda else end - begin
            total[phase] = total.get(phase, 0.0) + lap
        return total
