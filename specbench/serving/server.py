"""The server: requests wait in a queue, first come first served, join the loop between steps as
rows become free, and leave it when they end.

Whatever happens, each request ends: with an output, or with a reason why there is none.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from specbench.bench import in_words
from specbench.decode import Decoder, check_request
from specbench.method import Request, Row
from specbench.serving.arrivals import Arrival
from specbench.serving.clock import Clock


@dataclass(eq=False)
class Visit:
    """What one request saw; times are seconds since the server's start."""

    arrival: Arrival
    start_s: float = 0.0
    """When it left the queue; its prefill comes after that."""
    row: Row | None = None
    step_ends_s: list[float] = field(default_factory=list)
    batches: list[int] = field(default_factory=list)
    """By step, how many rows were decoded together."""
    failure: str | None = None

    @property
    def request(self) -> Request:
        """The request."""
        return self.arrival.request

    def restart(self) -> None:
        """Forgets all but its arrival."""
        self.row, self.step_ends_s, self.batches = None, [], []


class Server:
    """Serves requests with one method.

    Args:
        make_decoder: the loop, new, for up to so many rows; its laps are the clock's.
        max_batch: the most rows that are decoded together.
        clock: the time.
    """

    def __init__(
        self, make_decoder: Callable[[int], Decoder], max_batch: int, clock: Clock
    ) -> None:
        self.make_decoder, self.max_batch, self.clock = make_decoder, max_batch, clock
        self.decoder = make_decoder(max_batch)
        self.waiting: deque[Visit] = deque()
        self.running: list[Visit] = []

    def serve(self, arrivals: Sequence[Arrival]) -> list[Visit]:
        """Serves requests until all have ended.

        Returns:
            What each saw, in the order of arrival.

        Raises:
            torch.AcceleratorError: the device can no longer be used.
        """
        visits = [Visit(arrival) for arrival in sorted(arrivals, key=lambda a: a.time_s)]
        coming = deque(visits)
        while coming or self.waiting or self.running:
            now = self.clock.now()
            while coming and coming[0].arrival.time_s <= now:
                self.waiting.append(coming.popleft())
            if not (self.waiting or self.running):
                self.clock.wait_until(coming[0].arrival.time_s)
                continue
            try:
                self._join()
                self._step()
            except Exception as error:
                self._sort_out(error)
        return visits

    def _join(self) -> None:
        """As many as there are free rows leave the queue; one that the target cannot do takes no
        row."""
        joining: list[Visit] = []
        while self.waiting and len(joining) < self.decoder.num_free:
            visit = self.waiting.popleft()
            try:
                check_request(visit.request, self.decoder.target)
            except ValueError as error:
                visit.failure = in_words(error)
            else:
                joining.append(visit)
        if not joining:
            return
        start_s = self.clock.now()
        self.running += joining
        rows = self.decoder.join([visit.request for visit in joining])
        for visit, row in zip(joining, rows, strict=True):
            visit.start_s, visit.row = start_s, row

    def _step(self) -> None:
        """One step of all that run."""
        if not self.running:
            return
        done = self.decoder.step()
        now = self.clock.now()
        for visit in self.running:
            visit.step_ends_s.append(now)
            visit.batches.append(len(self.running))
        self.running = [visit for visit in self.running if visit.row not in done]

    def _sort_out(self, error: Exception) -> None:
        """After a batch failed: each of its requests is tried alone. Those that fail there have
        failed, the others go back to the head of the queue and begin anew; if none fails alone,
        they failed together. All this takes its time from everybody."""
        together, self.running = self.running, []
        assert together, "what fails is a batch"
        reason = in_words(error)
        if len(together) > 1:
            for visit in together:
                visit.failure = self._why_alone(visit.request)
        innocent = [visit for visit in together if visit.failure is None]
        if len(innocent) == len(together):
            for visit in together:
                visit.failure = reason
        else:
            for visit in reversed(innocent):
                visit.restart()
                self.waiting.appendleft(visit)
        self.decoder = self.make_decoder(self.max_batch)

    def _why_alone(self, request: Request) -> str | None:
        """Why a request fails when it is decoded alone; None if it does not."""
        try:
            self.make_decoder(1).run([request])
        except Exception as error:
            return in_words(error)
        return None
