"""Progress of a run in the terminal: shards done, their rate and an estimate; plain lines where
there is no terminal."""

from types import TracebackType

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.progress import Progress as Bar


class Progress:
    """Shows how far a run is.

    Args:
        num_shards: shards of the run.
        num_done: those finished by an earlier run.
    """

    def __init__(self, num_shards: int, num_done: int) -> None:
        self.console = Console(stderr=True)
        self.num_shards, self.num_done = num_shards, num_done
        self._bar = Bar(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("shards, {task.fields[rate]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=self.console,
            # Without Ray it is drawn in the process that measures.
            refresh_per_second=1,
            disable=not self.console.is_terminal,
        )
        self._task = self._bar.add_task(
            "loading", start=False, total=num_shards, completed=num_done, rate="- s each"
        )
        self._first = num_done

    def __enter__(self) -> "Progress":
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bar.stop()

    def say(self, text: str) -> None:
        """A line of its own."""
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def start(self, shard: str) -> None:
        """A shard was begun; with the first, the clock starts."""
        if self._bar.tasks[self._task].start_time is None:
            self._bar.start_task(self._task)
        self._bar.update(self._task, description=shard)

    def finish(self, shard: str) -> None:
        """A shard is done."""
        self.num_done += 1
        elapsed_s = self._bar.tasks[self._task].elapsed or 0.0
        seconds = elapsed_s / (self.num_done - self._first)
        rate = f"{seconds:.1f} s each"
        self._bar.update(self._task, completed=self.num_done, rate=rate)
        if not self.console.is_terminal:
            left = seconds * (self.num_shards - self.num_done)
            self.say(
                f"{shard} done: {self.num_done}/{self.num_shards} shards, {rate}, {left:.0f} s left"
            )
