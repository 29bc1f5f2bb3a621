"""What a training run shows as it goes: lines, and on a terminal a bar below them."""

from collections.abc import Callable
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn


class Display:
    """Lines only.

    Args:
        say: takes a line.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self.say = say

    def show(self, phase: str, done: float, total: float, unit: str, text: str) -> None:
        """How far a phase is, and how it goes."""
        self.say(f"{phase}: {done:g} of {total:g} {unit}, {text}")

    def move(self, done: float) -> None:
        """The phase shown last is so far now."""


class Terminal(Display):
    """Lines on standard error, and a bar if that is a terminal."""

    def __init__(self) -> None:
        console = Console(stderr=True)
        super().__init__(
            lambda text: console.print(text, markup=False, highlight=False, soft_wrap=True)
        )
        self._bar = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TaskProgressColumn(),
            TimeRemainingColumn(),
            console=console,
            # It is drawn in the process that trains.
            refresh_per_second=1,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("loading", total=None)

    def __enter__(self) -> "Terminal":
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bar.stop()

    def show(self, phase: str, done: float, total: float, unit: str, text: str) -> None:
        """Says it, and moves the bar."""
        super().show(phase, done, total, unit, text)
        if self._bar.tasks[self._task].description != phase:
            self._bar.reset(self._task, description=phase, completed=int(done), total=total)
        self._bar.update(self._task, completed=done, total=total)

    def move(self, done: float) -> None:
        """Moves the bar."""
        self._bar.update(self._task, completed=done)
