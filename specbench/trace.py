"""Replaying recorded steps: at other depths, and under depth controllers.

A record says of each position of an output whether the drafter was right there. Where its guess
depends on the committed tokens alone, as that of a draft model or of a shortened stack at T=0, it
would have said the same in a step that began elsewhere, so other depths can be replayed exactly,
but for the positions that were not put to the test: a bonus behind a draft that was all accepted.
For other drafters it is an approximation. Of a tree, the path that was taken counts.
"""

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import inf
from random import Random
from typing import Any, NamedTuple

from specbench.records import RequestRecord


class Mark(NamedTuple):
    """What the drafter was at a position.

    Args:
        is_right: whether it offered the token that was committed.
        offered: tokens from here on, at most; infinitely many where nothing but its depth ended
            its draft.
    """

    is_right: bool
    offered: float = inf


RIGHT, WRONG = Mark(True), Mark(False)
SILENT = Mark(False, 0)
"""It offered no token there, though it might have."""

Trace = Sequence[Mark]
"""The positions of one output."""


class Span(NamedTuple):
    """A draft of a trace."""

    offered: int
    matched: int


def read_traces(records: Iterable[RequestRecord], seed: int = 0) -> list[Trace]:
    """The traces of one method's records. Positions that were not put to the test are drawn, right
    as often as those that were."""
    records = list(records)
    deepest = max((step[1] for record in records for step in record.steps), default=0)
    marks = [_marks(record.steps, deepest) for record in records]
    tested = [mark.is_right for trace in marks for mark in trace if mark is not None]
    chance = sum(tested) / len(tested) if tested else 0.0
    random = Random(seed)
    return [
        [Mark(random.random() < chance) if mark is None else mark for mark in trace]
        for trace in marks
    ]


def _marks(steps: Sequence[Sequence[int]], deepest: int) -> list[Mark | None]:
    marks: list[Mark | None] = []
    for _, depth, _, committed, matched in steps:
        last = Mark(False, depth - matched) if depth < deepest else WRONG
        untested = matched == depth == deepest
        marks += [*[RIGHT] * matched, None if untested else last][:committed]
    return marks


def span(trace: Trace, begin: int, depth: int) -> Span:
    """What a draft from a position on offers, and how much of it is right; the last position is
    left to the bonus."""
    depth = max(0, min(depth, len(trace) - begin - 1))
    matched = 0
    while matched < depth and trace[begin + matched].is_right:
        matched += 1
    if matched == depth:
        return Span(depth, depth)
    return Span(int(min(depth, matched + trace[begin + matched].offered)), matched)


def spans(trace: Trace, depth: int) -> list[Span]:
    """All steps of an output at one depth."""
    found, begin = [], 0
    while begin < len(trace):
        found.append(span(trace, begin, depth))
        begin += found[-1].matched + 1
    return found


def check_replayable(info: Mapping[str, Any], method: str) -> None:
    """Holds that a method's short drafts were its own doing.

    Args:
        info: of ``run.json``.
        method: whose records are to be replayed.

    Raises:
        ValueError: a controller chose how deep they were.
    """
    controller = info["methods"].get(method, {}).get("controller", "fixed")
    if controller != "fixed":
        raise ValueError(
            f"{method} ran under the controller {controller}, so where it drafted less says "
            "nothing of the drafter; valid: outputs at a fixed depth"
        )


def are_trees(records: Iterable[RequestRecord]) -> bool:
    """Whether more nodes than levels were drafted in a step of them."""
    return any(nodes > depth for record in records for nodes, depth, *_ in record.steps)


def assumptions(records: Iterable[RequestRecord]) -> list[str]:
    """What a replay of such records takes for granted."""
    drafts = (
        "recorded drafts are trees, of which the path that was taken is replayed, as if it"
        if are_trees(records)
        else "recorded drafts are chains, replayed as if they"
    )
    return [
        f"{drafts} depended on committed tokens alone: a step of another depth would have been "
        "right at the same positions",
        "positions that were never tested, as that of the bonus behind a draft that was all "
        "accepted, are right as often as the tested ones of all outputs, on the average",
    ]


class Replay(NamedTuple):
    """What came of a replay.

    Args:
        num_tokens: committed.
        num_steps: of the batch.
        seconds: by the step times.
    """

    num_tokens: int
    num_steps: int
    seconds: float

    @property
    def tokens_per_s(self) -> float:
        """Throughput."""
        return self.num_tokens / self.seconds

    def regret(self, best: "Replay") -> float:
        """The share of another's throughput that this one misses."""
        return 1 - self.tokens_per_s / best.tokens_per_s


class Running(NamedTuple):
    """A row of a replay: which trace, and how far it is."""

    trace: int
    position: int


Room = Callable[[float], int]
"""How many rows there is room for, so many seconds after the start. Rows that are there stay."""


class Taken(NamedTuple):
    """A step of a replay.

    Args:
        spans: what each row had verified, and how much of that was right.
        seconds: that it took.
    """

    spans: Sequence[Span]
    seconds: float


def play(
    traces: Sequence[Trace],
    room: int | Room,
    step: Callable[[Sequence[Running]], Taken],
    until_s: float = inf,
) -> Replay:
    """Plays traces, so many at a time; the next joins as soon as one ends.

    Args:
        traces: outputs.
        room: rows at a time, always or by the time; 1 or more.
        step: takes one.
        until_s: when to stop, whatever is left.
    """
    waiting = deque(range(len(traces)))
    rows: list[Running] = []
    num_tokens, num_steps, seconds = 0, 0, 0.0
    while (waiting or rows) and seconds < until_s:
        most = room(seconds) if callable(room) else room
        while waiting and len(rows) < most:
            rows.append(Running(waiting.popleft(), 0))
        taken = step(rows)
        num_tokens += sum(one.matched + 1 for one in taken.spans)
        num_steps += 1
        seconds += taken.seconds
        moved = [
            row._replace(position=row.position + one.matched + 1)
            for row, one in zip(rows, taken.spans, strict=True)
        ]
        rows = [row for row in moved if row.position < len(traces[row.trace])]
    return Replay(num_tokens, num_steps, seconds)


def play_oracle(
    traces: Sequence[Trace],
    room: int | Room,
    depth: int,
    step_s: Callable[[Sequence[int]], float],
    until_s: float = inf,
) -> Replay:
    """The per-step oracle: it knows what is right, has nothing else verified, and of that as much
    as makes most tokens for each second of this step, level by level. See `play`.

    Args:
        step_s: seconds of a step, by the nodes of each row.
    """

    def step(rows: Sequence[Running]) -> Taken:
        right = [span(traces[row.trace], row.position, depth).matched for row in rows]
        nodes = [0] * len(rows)
        best, chosen = len(rows) / step_s(nodes), list(nodes)
        for level in range(1, 1 + max(right)):
            for row, most in enumerate(right):
                if most >= level:
                    nodes[row] = level
                    rate = (len(rows) + sum(nodes)) / step_s(nodes)
                    if rate > best:
                        best, chosen = rate, list(nodes)
        return Taken([Span(num, num) for num in chosen], step_s(chosen))

    return play(traces, room, step, until_s)
