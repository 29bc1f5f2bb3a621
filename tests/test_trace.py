"""Replayed steps against steps that were really decoded."""

from collections.abc import Sequence
from functools import cache

import pytest

from specbench.conformance.decoding import make_request
from specbench.conformance.drafters import Oracle, Scripted
from specbench.conformance.models import looping_target
from specbench.depth import Fixed, Goodput, StepTable, Survival
from specbench.depth.replay import replay
from specbench.method import Budget, Row
from specbench.target import Target
from specbench.trace import (
    RIGHT,
    SILENT,
    WRONG,
    Mark,
    Span,
    Trace,
    play_oracle,
    read_traces,
    span,
    spans,
)
from tests.controllers import SETTINGS, made, names
from tests.drafters import Setting, as_record, decode, make_method
from tests.made_runs import output

REQUESTS = [make_request((3 + i,), 60, name=str(i)) for i in range(40)]


@cache
def target() -> Target:
    return looping_target(eos_token_id=None)


def test_a_record_says_where_the_drafter_was_right() -> None:
    record = output(
        "echo", "a", (3, 3, 1, 2), (3, 3, 3, 4), (1, 1, 1, 2), (0, 0, 0, 1), (2, 2, 0, 1)
    )
    (trace,) = read_traces([record])
    assert list(trace[:5]) == [RIGHT, WRONG, RIGHT, RIGHT, RIGHT]
    assert trace[5] in (RIGHT, WRONG)
    assert list(trace[6:]) == [RIGHT, SILENT, SILENT, Mark(False, 2)]


def test_a_span_ends_where_the_drafter_is_wrong_or_silent() -> None:
    trace = [RIGHT, RIGHT, SILENT, RIGHT, WRONG, RIGHT]
    assert span(trace, 0, 4) == Span(2, 2)
    assert span(trace, 3, 2) == Span(2, 1)
    assert span(trace, 4, 9) == Span(1, 0)
    assert span(trace, 5, 9) == Span(0, 0)
    stopped = [RIGHT, Mark(False, 2), *[RIGHT] * 4]
    assert span(stopped, 0, 5) == Span(3, 1)
    assert span(stopped, 0, 2) == Span(2, 1)
    assert span(stopped, 1, 9) == Span(2, 0)
    assert [one.matched + 1 for one in spans(trace, 9)] == [3, 2, 1]


def tau(rows: Sequence[Row]) -> float:
    return sum(len(row.output) for row in rows) / sum(len(row.steps) for row in rows)


def tau_replayed(traces: Sequence[Trace], depth: int) -> float:
    return sum(map(len, traces)) / sum(len(spans(trace, depth)) for trace in traces)


def test_a_replay_at_its_own_depth_is_what_was_recorded() -> None:
    method = make_method(target(), Setting("early_exit", (("exit_layer", "2"), ("branching", ""))))
    rows = decode(target(), method, REQUESTS, max_rows=40, budget=Budget(3, 3))
    traces = read_traces(map(as_record, rows))
    for row, trace in zip(rows, traces, strict=True):
        found = [Span(step.depth, step.matched) for step in row.steps]
        assert spans(trace, 3)[:-1] == found[:-1]


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_replay_at_another_depth_is_what_is_decoded_there(depth: int) -> None:
    plain = decode(
        target(), Scripted(target(), {r.id: [] for r in REQUESTS}), REQUESTS, max_rows=40
    )
    oracle = Oracle(target(), {row.request.id: row.output for row in plain}, (0.7,) * 6)
    deep, real = (
        decode(target(), oracle, REQUESTS, max_rows=40, budget=Budget(d, d)) for d in (6, depth)
    )
    traces = read_traces(map(as_record, deep))
    assert tau_replayed(traces, depth) == pytest.approx(tau(real), rel=0.02)


def test_a_replayed_controller_does_what_a_live_one_does() -> None:
    method = make_method(target(), Setting("early_exit", (("exit_layer", "2"), ("branching", ""))))
    deep = decode(target(), method, REQUESTS, max_rows=8, budget=Budget(4, 4))
    live = decode(target(), method, REQUESTS, max_rows=8, controller=Fixed(2, 2))
    traces, times = read_traces(map(as_record, deep)), TIMES
    assert replay(traces, 8, Fixed(2, 2), times).num_tokens == sum(len(r.output) for r in live)
    steps = sum(len(spans(trace, 2)) for trace in traces)
    assert steps == pytest.approx(sum(len(row.steps) for row in live), rel=0.05)


TIMES = StepTable(
    {(rows, n): 1 + 0.02 * rows * (n + 1) + 0.05 * n for rows in (1, 64) for n in (0, 8)}
)


def made_traces() -> list[Trace]:
    """Easy outputs and hard ones, which take turns."""
    easy, hard = [RIGHT] * 9 + [WRONG], [RIGHT] + [WRONG] * 9
    return [(easy if i % 2 else hard) * 12 for i in range(24)]


@pytest.mark.parametrize(("name", "knobs"), SETTINGS, ids=names())
def test_no_controller_beats_the_oracle_by_much(name: str, knobs: dict[str, object]) -> None:
    traces = made_traces()
    for batch in (1, 8, 24):
        best = play_oracle(traces, batch, 4, TIMES.step_s)
        found = replay(traces, batch, made(name, knobs), TIMES)
        assert found.num_tokens == best.num_tokens == 24 * 120
        assert -0.01 < found.regret(best) < 1


def test_under_changing_load_goodput_and_survival_lose_less_than_every_fixed_depth() -> None:
    traces = made_traces()
    regrets = {
        name: max(
            replay(traces, batch, controller, TIMES).regret(
                play_oracle(traces, batch, 8, TIMES.step_s)
            )
            for batch in (1, 24)
        )
        for name, controller in {
            **{f"fixed {depth}": Fixed(depth, 8) for depth in range(9)},
            "goodput": Goodput(8, 8, times=TIMES),
            "survival": Survival(8, 8, times=TIMES),
        }.items()
    }
    fixed = min(regret for name, regret in regrets.items() if name.startswith("fixed"))
    assert max(regrets["goodput"], regrets["survival"]) < fixed


@pytest.mark.parametrize("name", ["goodput", "survival"])
@pytest.mark.parametrize("batch", [1, 4])
def test_a_controller_sees_when_drafts_fare_well_again(name: str, batch: int) -> None:
    """It drafts nothing once they were wrong for long, and can learn only from what it tries."""
    hard, easy = [WRONG] * 60, [RIGHT] * 60
    traces = [hard] * 10 * batch + [easy] * 100 * batch
    best = play_oracle(traces, batch, 4, TIMES.step_s)
    assert replay(traces, batch, made(name, {"times": TIMES}), TIMES).regret(best) < 0.1
    assert replay(traces, batch, Fixed(0, 0), TIMES).regret(best) > 0.5
