"""When requests arrive: a Poisson stream."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from specbench.method import Request


@dataclass(frozen=True)
class Arrival:
    """A request and when it comes, in seconds since the start."""

    time_s: float
    request: Request


def poisson_times(rate: float, count: int, seed: Sequence[int]) -> list[float]:
    """The first so many times of a Poisson stream: gaps follow an exponential law.

    The stream of one seed is the same at every rate, but for its speed: what differs between two
    rates is then the load alone.

    Args:
        rate: arrivals per second; infinite for all at once.
        count: how many.
        seed: of the random numbers; any whole numbers of 0 or more.
    """
    gaps = np.random.default_rng(seed).exponential(size=count)
    times: list[float] = (gaps.cumsum() / rate).tolist()
    return times


def arrive(requests: Sequence[Request], rate: float, seed: Sequence[int]) -> list[Arrival]:
    """Requests, in their order, at the times of a Poisson stream."""
    times = poisson_times(rate, len(requests), seed)
    return [Arrival(time, request) for time, request in zip(times, requests, strict=True)]
