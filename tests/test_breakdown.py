"""Predicted against measured, on runs whose numbers can be worked out by hand."""

from functools import cache

import pytest

from specbench.breakdown import break_down, promise
from specbench.conformance.decoding import make_request
from specbench.conformance.drafters import Oracle, Scripted
from specbench.conformance.models import looping_target
from specbench.method import Budget
from specbench.records import Record
from specbench.theory import tokens_by_position
from tests.drafters import as_record, decode
from tests.made_runs import made_run, output, paired, reference, timing


def test_the_parts_sum_up_to_the_measured_time() -> None:
    records: list[Record] = [
        reference("a"),
        timing("vanilla", ["a"], 8.0, num_tokens=4, num_forwards=4, shares=(0, 0.75, 0.25)),
        timing("echo", ["a"], 6.0, num_tokens=4, num_forwards=2, shares=(0.25, 0.5, 0.25)),
    ]
    found = break_down(made_run(*records), "code", "echo")
    assert found is not None
    assert found.vanilla_s == 2 and found.method_s == 1.5
    assert found.ideal_s == 1
    assert (found.draft_s, found.verify_s, found.bookkeeping_s) == (0.375, 0, 0.125)
    assert found.ideal_speed_up == 2
    assert found.speed_up == pytest.approx(2 / 1.5)


def test_only_what_both_were_timed_on_counts() -> None:
    records = paired("echo", 1.5)
    extra: list[Record] = [reference("z"), timing("echo", ["z"], 1000.0)]
    assert break_down(made_run(*records, *extra), "code", "echo") == break_down(
        made_run(*records), "code", "echo"
    )
    assert break_down(made_run(*extra), "code", "echo") is None


def test_ragged_depths_count_as_they_were_offered() -> None:
    steps = [(2, 2, 2, 3), (2, 2, 1, 2), (2, 2, 0, 1), (1, 1, 1, 2), (0, 0, 0, 1)]
    found = promise(made_run(reference("a"), output("echo", "a", *steps)), "code", "echo")
    assert found is not None
    first, second = 3 / 4, 1 / 2
    expected = 3 * tokens_by_position([first, second]) + tokens_by_position([first]) + 1
    assert found.by_position == pytest.approx(expected / 5)
    assert found.measured == 9 / 5
    assert found.depth == 7 / 5


def test_what_drafts_nothing_promises_nothing() -> None:
    run = made_run(reference("a"), output("vanilla", "a", (0, 0, 0, 1)))
    assert promise(run, "code", "vanilla") is None
    assert promise(run, "code", "echo") is None


@cache
def _outputs() -> dict[str, list[int]]:
    target = looping_target(eos_token_id=None)
    requests = [make_request((3 + i,), 60, name=str(i)) for i in range(64)]
    rows = decode(target, Scripted(target, {r.id: [] for r in requests}), requests, max_rows=64)
    return {row.request.id: row.output for row in rows}


def test_the_prediction_by_position_is_what_a_known_law_gives() -> None:
    target, law = looping_target(eos_token_id=None), (0.9, 0.5, 0.8)
    requests = [make_request((3 + i,), 60, name=str(i)) for i in range(64)]
    oracle = Oracle(target, _outputs(), law)
    rows = decode(target, oracle, requests, max_rows=64, budget=Budget(3, 3))
    found = promise(made_run(*map(as_record, rows)), "any", "any")
    assert found is not None
    assert found.by_position == pytest.approx(found.measured, rel=0.03)
    assert found.by_position == pytest.approx(tokens_by_position(law), rel=0.05)
