"""FLOPs for each committed token, by hand."""

import pytest

from specbench.arithmetic import count_arithmetic
from specbench.costs import Cost, Shape
from specbench.drafter_costs import Draft
from tests.made_runs import output

SHAPE = Shape(
    hidden=64, num_layers=4, num_heads=4, num_kv_heads=2, head_dim=16, vocab=512, inner=128
)


def nothing(draft: Draft) -> Cost:
    return Cost()


def test_vanillas_arithmetic_is_one() -> None:
    found = count_arithmetic([output("vanilla", "a", *[(0, 0, 0, 1)] * 5)], SHAPE, [9], nothing)
    assert found.total == pytest.approx(1)
    assert found.rejected_share == 0


def test_drafts_that_are_all_accepted_cost_their_drafting_alone() -> None:
    record = output("echo", "a", *[(3, 3, 3, 4)] * 5)
    found = count_arithmetic([record], SHAPE, [9], nothing)
    assert found.verify == pytest.approx(1, rel=0.02)
    assert found.rejected == 0


def test_what_is_not_accepted_is_paid_for_nothing() -> None:
    record = output("echo", "a", *[(4, 4, 1, 2)] * 5)
    step = 2 * SHAPE.num_active_weights
    found = count_arithmetic([record], SHAPE, [9], lambda draft: Cost(step / 2 * len(draft.levels)))
    assert found.verify == pytest.approx(5 / 2, rel=0.03)
    assert found.draft == pytest.approx(2 / 2, rel=0.05)
    assert found.total > 1
    assert found.rejected == pytest.approx((3 + 1.5) / 2, rel=0.05)
    assert found.rejected_share == pytest.approx(found.rejected / found.total)


def test_layers_that_drafting_ran_are_not_counted_twice() -> None:
    record = output("echo", "a", *[(1, 1, 1, 2)] * 5)
    whole, half = (count_arithmetic([record], SHAPE, [9], nothing, n).verify for n in (0, 2))
    head = SHAPE.head_weights / SHAPE.num_active_weights
    assert half / whole == pytest.approx(head + (1 - head) / 2, rel=0.03)
