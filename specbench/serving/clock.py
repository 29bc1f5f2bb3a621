"""The clock that a server lives by. Beside `specbench.bench` nothing else reads one."""

import time
from typing import Protocol

import torch


class Clock(Protocol):
    """Tells the time, in seconds since its start, and waits."""

    def now(self) -> float:
        """Seconds since the start, once all that was begun is done."""
        ...

    def wait_until(self, time_s: float) -> None:
        """Returns at that time, not before."""
        ...

    def lap(self, phase: str) -> None:
        """The loop has come to the end of a phase: ``prefill``, ``draft``, ``forward``,
        ``bookkeeping``."""
        ...


class WallClock:
    """The real one.

    Args:
        device: what computes; a GPU is waited for before the time is told.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._start = self._read()

    def _read(self) -> float:
        if self._cuda:
            torch.cuda.synchronize()
        return time.perf_counter()

    def now(self) -> float:
        """Seconds since the start."""
        return self._read() - self._start

    def wait_until(self, time_s: float) -> None:
        """Sleeps."""
        while (left := time_s - self.now()) > 0:
            time.sleep(left)

    def lap(self, phase: str) -> None:
        """Nothing: real time passes by itself."""
