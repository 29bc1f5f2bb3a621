"""Points -> which depth is best, where speculation stops to pay, and what is recommended: pure
functions.

What is recommended is proven: the speed-up's interval lies above 1 and its verdict, corrected for
all of the sweep, says so. Everything else is off, also batch sizes beyond the largest measured.
Where too few batches were timed for a verdict nothing is recommended, off no more than on: it is as
if nothing had been measured there.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from specbench.sweep.config import Setting
from specbench.sweep.points import Point
from specbench.theory import crossover


class Ends(NamedTuple):
    """From which batch size on speculation does not pay; None where that is not so up to the
    largest."""

    unproven: int | None
    """From here on no interval lies above 1."""
    proven: int | None
    """From here on all intervals lie below 1."""


def find_ends(points: Iterable[Point]) -> Ends:
    """Where points stop to pay. Of several at one batch size the best counts; those that cannot be
    told do not."""
    at = by_batch(point for point in points if not point.is_untold)
    lows = {batch: max(p.proven.low if p.pays else 0.0 for p in here) for batch, here in at.items()}
    highs = {batch: max(p.proven.high for p in here) for batch, here in at.items()}
    return Ends(crossover(lows), crossover(highs))


def by_batch(points: Iterable[Point]) -> dict[int, list[Point]]:
    """Points by batch size, ascending."""
    found: dict[int, list[Point]] = {}
    for point in sorted(points, key=lambda point: point.batch):
        found.setdefault(point.batch, []).append(point)
    return found


def by_setting(points: Iterable[Point]) -> dict[Setting, list[Point]]:
    """Points by what they have in common over the batch sizes."""
    found: dict[Setting, list[Point]] = {}
    for point in points:
        if point.setting:
            found.setdefault(point.setting, []).append(point)
    return found


def best(points: Iterable[Point]) -> Point | None:
    """The point with the largest speed-up, proven or not; None without any."""
    measured = [point for point in points if point.gain is not None]
    return max(measured, key=lambda point: point.gain or 0.0, default=None)


def recommend(points: Iterable[Point]) -> dict[int, Point | None]:
    """By batch size: the fastest of the points that are proven to pay; None is off. Batch sizes
    where that cannot be told are left out."""
    return {
        batch: best(point for point in here if point.pays)
        for batch, here in by_batch(points).items()
        if not is_untold(here)
    }


def is_untold(points: Iterable[Point]) -> bool:
    """Whether there are speed-ups, but all from too few batches to tell anything of them."""
    measured = [point for point in points if point.gain is not None]
    return bool(measured) and all(point.is_untold for point in measured)


def last_paying(choices: Mapping[int, Point | None]) -> int:
    """The largest batch size that is not off; 0 if all are."""
    return max((batch for batch, point in choices.items() if point), default=0)


class Span(NamedTuple):
    """Batch sizes, both ends included, and the depth there; 0 is off."""

    first: int
    last: int
    depth: int


def spans(choices: Mapping[int, Point | None]) -> list[Span]:
    """The depth by ranges of batch sizes, from 1 to the largest measured. One that was not measured
    is taken as the next larger that was: what pays there pays with fewer rows."""
    found: list[Span] = []
    begin = 1
    for batch, point in sorted(choices.items()):
        depth = point.setting.depth if point and point.setting else 0
        if found and found[-1].depth == depth:
            found[-1] = found[-1]._replace(last=batch)
        else:
            found.append(Span(begin, batch, depth))
        begin = batch + 1
    return found


@dataclass(frozen=True)
class Fixed:
    """One setting for all loads, and the batch sizes up to which it pays.

    Args:
        point: the setting, at the largest of them.
        last: that batch size.
    """

    point: Point
    last: int


def best_fixed(points: Sequence[Point]) -> Fixed | None:
    """The setting that pays, without a gap from the smallest batch size on, up to the largest; of
    equals the one that gains most over these. None if none pays at the smallest."""
    found: list[tuple[int, float, Fixed]] = []
    for here in by_setting(points).values():
        paying: list[Point] = []
        for point in sorted(here, key=lambda point: point.batch):
            if not point.pays:
                break
            paying.append(point)
        smallest = min(point.batch for point in points)
        if paying and paying[0].batch == smallest:
            mean = sum(point.gain or 0.0 for point in paying) / len(paying)
            last = paying[-1]
            found.append((last.batch, mean, Fixed(last, last.batch)))
    return max(found, key=lambda entry: entry[:2], default=(0, 0.0, None))[2]
