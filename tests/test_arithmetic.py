"""FLOPs for each committed token, by hand."""

import pytest

from specbench.arithmetic import flops_of_steps
from specbench.costs import Cost, Shape
from specbench.drafter_costs import Draft

SHAPE = Shape(
    hidden=64, num_layers=4, num_heads=4, num_kv_heads=2, head_dim=16, vocab=512, inner=128
)


def nothing(draft: Draft) -> Cost:
    return Cost()


def test_vanillas_arithmetic_is_one() -> None:
    found = flops_of_steps([(0, 0, 0, 1, 0)] * 5, 9, SHAPE, nothing)
    assert found.total == pytest.approx(1)
    assert found.rejected_share == 0


def test_drafts_that_are_all_accepted_cost_their_drafting_alone() -> None:
    steps = [(3, 3, 3, 4, 3)] * 5
    found = flops_of_steps(steps, 9, SHAPE, nothing)
    assert found.verify == pytest.approx(found.vanilla, rel=0.02)
    assert found.rejected == 0


def test_what_is_not_accepted_is_paid_for_nothing() -> None:
    steps = [(4, 4, 1, 2, 1)] * 5
    step = 2 * SHAPE.num_active_weights
    found = flops_of_steps(steps, 9, SHAPE, lambda draft: Cost(step / 2 * len(draft.levels)))
    assert found.verify / found.vanilla == pytest.approx(5 / 2, rel=0.03)
    assert found.draft / found.vanilla == pytest.approx(2 / 2, rel=0.05)
    assert found.total == pytest.approx((5 + 2) / 2, rel=0.05)
    assert found.rejected / found.vanilla == pytest.approx((3 + 1.5) / 2, rel=0.05)
    assert found.rejected_share == pytest.approx((3 + 1.5) / (5 + 2), rel=0.05)


def test_layers_that_drafting_ran_are_not_counted_twice() -> None:
    steps = [(1, 1, 1, 2, 1)] * 5
    whole, half = (flops_of_steps(steps, 9, SHAPE, nothing, n).verify for n in (0, 2))
    head = SHAPE.head_weights / SHAPE.num_active_weights
    assert half / whole == pytest.approx(head + (1 - head) / 2, rel=0.03)
