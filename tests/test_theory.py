"""The formulas against numbers that are known or can be worked out by hand."""

import random

import pytest

from specbench.theory import (
    Choice,
    StepCost,
    best_depth,
    crossover,
    knee,
    operations_iid,
    speed_up,
    speed_up_iid,
    tokens_by_position,
    tokens_iid,
    tokens_of_tree,
)
from specbench.tree import Tree


def test_iid_tokens_are_the_papers_closed_form() -> None:
    assert tokens_iid(0.8, 4) == pytest.approx((1 - 0.8**5) / (1 - 0.8))
    assert tokens_iid(1, 3) == 4
    assert tokens_iid(0, 3) == tokens_iid(0.5, 0) == 1


@pytest.mark.parametrize(
    ("alpha", "c", "depth", "gain"),
    [(0.3, 0.02, 3, 1.34), (0.6, 0.05, 4, 1.92), (0.8, 0.1, 6, 2.47), (0.9, 0.3, 5, 1.87)],
)
def test_the_best_depth_is_that_of_the_published_table(
    alpha: float, c: float, depth: int, gain: float
) -> None:
    found = best_depth([alpha] * 30, lambda gamma: StepCost(gamma * c, 1))
    assert found.depth == depth
    assert found.speed_up == pytest.approx(gain, abs=0.005)
    assert found.speed_up == pytest.approx(speed_up_iid(alpha, depth, c))


def test_speculation_pays_where_chance_exceeds_cost_and_nowhere_else() -> None:
    assert best_depth([0.2] * 9, lambda gamma: StepCost(gamma * 0.2, 1)) == Choice(0, 1)
    assert best_depth([0.21] * 9, lambda gamma: StepCost(gamma * 0.2, 1)).depth == 1


def test_arithmetic_for_each_token_is_never_less_than_vanillas() -> None:
    assert operations_iid(0.8, 4, 0.1) == pytest.approx((4 * 0.1 + 5) * 0.2 / (1 - 0.8**5))
    assert all(operations_iid(alpha, 3, 0) >= 1 for alpha in (0.0, 0.5, 1.0))


def test_positions_and_chains_agree_with_iid_where_chances_are_alike() -> None:
    assert tokens_by_position([0.7] * 5) == pytest.approx(tokens_iid(0.7, 5))
    assert tokens_of_tree(Tree.chain(5), [0.7] * 5) == pytest.approx(tokens_iid(0.7, 5))
    assert tokens_by_position([0.9, 0.5]) == pytest.approx(1 + 0.9 + 0.45)


def test_tokens_of_a_tree_are_what_walks_over_it_commit() -> None:
    tree, chances = Tree.of((-1, 0, 0, 1, 1, 2)), [0.5, 0.3, 0.6, 0.2, 0.9]
    generator, committed, walks = random.Random(0), 0, 40_000
    for _ in range(walks):
        node = 0
        while True:
            committed += 1
            draws = generator.random()
            for child in tree.children[node]:
                draws -= chances[child - 1]
                if draws < 0:
                    node = child
                    break
            else:
                break
    assert tokens_of_tree(tree, chances) == pytest.approx(committed / walks, rel=0.01)


def test_a_speed_up_is_of_measured_costs() -> None:
    vanilla = StepCost(0, 0.9, 0.1)
    assert speed_up(3, StepCost(0.5, 1.2, 0.3), vanilla) == pytest.approx(1.5)


def test_the_crossover_is_the_first_batch_behind_the_last_that_pays() -> None:
    assert crossover({1: 2.0, 2: 0.9, 4: 1.1, 8: 1.0, 16: 0.8}) == 8
    assert crossover({1: 0.9, 2: 0.8}) == 1
    assert crossover({1: 2.0, 2: 1.1}) is None


def test_the_knee_is_the_last_size_that_comes_at_nearly_no_price() -> None:
    assert knee({1: 1.0, 2: 1.02, 4: 1.1, 8: 1.3}) == 4
    assert knee({1: 1.0, 8: 1.05}) is None


def test_chances_beyond_one_are_refused() -> None:
    with pytest.raises(ValueError, match="out of range"):
        tokens_by_position([0.5, 1.5])
