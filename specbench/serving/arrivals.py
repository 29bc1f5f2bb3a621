"""When requests arrive: a Poisson stream, at one rate or at two in turns."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from specbench.method import Request


@dataclass(frozen=True)
class Arrival:
    """A request and when it comes, in seconds since the start."""

    time_s: float
    request: Request


SPELLS = 4
"""Of a stream at two rates: slow, fast, slow, fast."""


def poisson_times(rate: float, count: int, seed: Sequence[int], swing: float = 1.0) -> list[float]:
    """The first so many times of a Poisson stream: gaps follow an exponential law.

    The stream of one seed is the same at every rate, but for its speed: what differs between two
    rates is then the load alone.

    Args:
        rate: arrivals per second, on the average; infinite for all at once.
        count: how many.
        seed: of the random numbers; any whole numbers of 0 or more.
        swing: how many times as fast requests come in every other spell, of `SPELLS` with equally
            many of them.
    """
    gaps = np.random.default_rng(seed).exponential(size=count)
    spells = np.arange(count) * SPELLS // count
    slow, fast = spell_rates(swing)
    gaps /= np.where(spells % 2, fast, slow)
    times: list[float] = (gaps.cumsum() / rate).tolist()
    return times


def spell_rates(swing: float) -> tuple[float, float]:
    """The slow rate and the fast one, over the mean of as many requests at each."""
    return (1 + swing) / (2 * swing), (1 + swing) / 2


def arrive(
    requests: Sequence[Request], rate: float, seed: Sequence[int], swing: float = 1.0
) -> list[Arrival]:
    """Requests, in their order, at the times of such a stream."""
    times = poisson_times(rate, len(requests), seed, swing)
    return [Arrival(time, request) for time, request in zip(times, requests, strict=True)]
