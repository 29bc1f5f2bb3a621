"""Trees grown from ranked children: the best ones are found, they are trees, and nothing is run in
vain."""

import itertools
import math
import random
from collections.abc import Callable, Sequence

import pytest
import torch

from specbench.conformance.decoding import make_request
from specbench.growing import (
    ByConfidence,
    ByRank,
    Growth,
    Node,
    branching_tree,
    drafted,
    likeliest,
)
from specbench.method import Budget, Drawer, Row
from specbench.ranks import RankedTree, RankTree
from specbench.sampling import Sampling
from specbench.target import largest
from specbench.tree import Tree

Path = tuple[int, ...]
Law = Callable[[Path], Sequence[float]]
"""By path, the log-probabilities of its children."""


def path_of(node: Node) -> Path:
    return () if node.parent is None else (*path_of(node.parent), node.token)


def grow(growth: Growth, law: Law) -> tuple[list[Path], list[float]]:
    """Grows a tree as a drafter does; its paths, and their scores."""
    places = [path_of(node) for node in growth.level]
    while growth.level:
        ranked = []
        for node in growth.level:
            children = sorted(enumerate(law(path_of(node))), key=lambda item: -item[1])
            ranked.append(children[: growth.num_children])
        before = growth.level
        growth.grow(
            [[token for token, _ in children] for children in ranked],
            [[logp for _, logp in children] for children in ranked],
        )
        for node, index in zip(growth.level, growth.parents_in_level, strict=True):
            assert before[index] is node.parent
        assert [node.place for node in growth.level] == list(
            range(growth.start, growth.start + len(growth.level))
        )
        places += [path_of(node) for node in growth.level]
    assert len(growth.tree) == len(places) or places == []
    assert all(
        places[parent] == place[:-1]
        for parent, place in zip(growth.ran[1:], places[1:], strict=True)
    )
    nodes = list(growth.drafted())
    return [path_of(node) for node in nodes], [node.score for node in nodes]


def check_tree(paths: Sequence[Path]) -> None:
    """Closed under parents, which come first; no path twice."""
    for index, path in enumerate(paths):
        assert len(path) == 1 or path[:-1] in paths[:index]
    assert len(set(paths)) == len(paths)


def random_law(seed: int, num_tokens: int, values: Sequence[float] = ()) -> Law:
    """Distributions of their own at each path; or only some values, for ties."""

    def law(path: Path) -> list[float]:
        chance = random.Random(f"{seed} {path}")
        if values:
            return [chance.choice(values) for _ in range(num_tokens)]
        weights = [chance.random() ** 3 + 1e-6 for _ in range(num_tokens)]
        return [math.log(weight / sum(weights)) for weight in weights]

    return law


def score(path: Path, law: Law) -> float:
    return sum(law(path[:i])[token] for i, token in enumerate(path))


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("nodes", [1, 2, 5, 9])
def test_the_best_nodes_of_all_are_found(seed: int, nodes: int) -> None:
    law, depth = random_law(seed, 4), 1 + seed % 4
    growth = ByConfidence(Budget(depth, nodes), top_k=nodes)
    paths, scores = grow(growth, law)
    every = [
        path
        for length in range(1, depth + 1)
        for path in itertools.product(range(4), repeat=length)
    ]
    best = sorted(every, key=lambda path: -score(path, law))[:nodes]
    assert set(paths) == set(best)
    assert scores == pytest.approx([score(path, law) for path in paths])
    check_tree(paths)
    # A level has no more nodes than could have a child among the best.
    assert max(growth.tree.depths.count(depth) for depth in range(depth + 1)) <= max(1, nodes - 1)


def eagle2(law: Law, budget: Budget, top_k: int) -> set[Path]:
    """The algorithm as it was published: all children of the best of each level are kept, and the
    best of all are chosen in the end."""
    pool: list[tuple[float, Path]] = []
    frontier: list[tuple[float, Path]] = [(0.0, ())]
    for _ in range(budget.depth):
        level = []
        for parent_score, path in frontier:
            ranked = sorted(enumerate(law(path)), key=lambda item: -item[1])[:top_k]
            level += [(parent_score + logp, (*path, token)) for token, logp in ranked]
        pool += level
        frontier = sorted(level, key=lambda item: -item[0])[:top_k]
    return {path for _, path in sorted(pool, key=lambda item: -item[0])[: budget.nodes]}


@pytest.mark.parametrize("top_k", [1, 2, 3])
@pytest.mark.parametrize("seed", range(20))
def test_with_few_in_front_it_is_the_published_tree(seed: int, top_k: int) -> None:
    law, budget = random_law(seed, 5), Budget(4, 1 + seed)
    paths, _ = grow(ByConfidence(budget, top_k), law)
    assert set(paths) == eagle2(law, budget, top_k)
    check_tree(paths)


@pytest.mark.parametrize("values", [[0.0], [0.0, -1.0], [-0.5, -0.5, -1.0, -math.inf]])
@pytest.mark.parametrize("seed", range(10))
def test_ties_never_part_a_child_from_its_parent(seed: int, values: list[float]) -> None:
    law = random_law(seed, 4, values)
    for nodes, top_k in itertools.product([1, 3, 6, 10], [1, 2, 4]):
        paths, scores = grow(ByConfidence(Budget(4, nodes), top_k), law)
        check_tree(paths)
        assert scores == sorted(scores, reverse=True)
        assert len(paths) == min(nodes, len(eagle2(law, Budget(4, 1000), top_k)))


@pytest.mark.parametrize("broken", [math.nan, 1e-7, math.inf])
def test_what_is_no_log_probability_still_gives_a_tree(broken: float) -> None:
    paths, _ = grow(ByConfidence(Budget(3, 6), 2), lambda path: [broken, -1.0, broken])
    check_tree(paths)
    assert len(paths) == 6


def test_fewer_tokens_than_children_give_a_smaller_tree() -> None:
    paths, _ = grow(ByConfidence(Budget(2, 30), top_k=8), random_law(0, 2))
    assert set(paths) == {(0,), (1,), (0, 0), (0, 1), (1, 0), (1, 1)}


@pytest.mark.parametrize(
    "growth", [ByConfidence(Budget(0, 0), 4), ByRank(RankedTree(Tree.of((-1,)), ()))]
)
def test_without_a_budget_nothing_is_grown(growth: Growth) -> None:
    assert not growth.level and not list(growth.drafted())
    growth.grow([[1, 2, 3, 4]], [[-1.0] * 4])
    assert not growth.level and not list(growth.drafted())
    assert growth.start == 1


# Static trees.


def parse(paths: str) -> list[Path]:
    return [tuple(map(int, path)) for path in paths.split()]


def test_a_static_tree_is_grown_level_by_level() -> None:
    paths = parse("0 1 00 01 000 10 2 20 001")
    for depth, nodes in itertools.product([1, 2, 3, 5], [1, 3, 4, 6, 20]):
        growth = ByRank(RankTree(paths).within(depth, nodes, by_level=True))
        found, _ = grow(growth, lambda path: range(0, -9, -1))
        check_tree(found)
        assert found == sorted(found, key=lambda path: (len(path), path))
        assert set(found) == set([path for path in paths if len(path) <= depth][:nodes])


@pytest.mark.parametrize("branching", [(), (2,), (2, 2), (3, 1, 2)])
@pytest.mark.parametrize("nodes", [1, 2, 5, 7, 40])
@pytest.mark.parametrize("depth", [1, 2, 4])
def test_branching_makes_the_shapes_of_drawn_trees(
    branching: tuple[int, ...], nodes: int, depth: int
) -> None:
    from specbench.drafting import draft_tree

    budget, row = Budget(depth, nodes), Row(make_request([1]), [1])
    growth = ByRank(branching_tree(branching, budget))
    grow(growth, lambda path: range(0, -9, -1))
    same = draft_tree(
        [row],
        [budget],
        branching,
        Drawer(Sampling()),
        torch.rand(1, 1, 9),
        lambda tokens_BM, trees, starts: torch.rand(*tokens_BM.shape, 9),
    )
    assert drafted([row], [growth]).trees == same.trees


def test_drafted_nodes_become_a_proposal() -> None:
    growths = [ByConfidence(Budget(3, 4), 2), ByConfidence(Budget(0, 0), 2)]
    chances = {(): [-0.1, -2.0], (0,): [-0.2, -3.0], (0, 0): [-3.0, -2.5], (1,): [-9.0, -9.0]}
    grow(growths[0], lambda path: chances[path])
    rows = [Row(make_request([7]), [7]), Row(make_request([8]), [8])]
    proposal = drafted(rows, growths)
    assert proposal.trees == [Tree((-1, 0, 1, 0, 2)), Tree((-1,))]
    assert proposal.tokens_BN.tolist() == [[7, 0, 0, 1, 1], [8, 0, 0, 0, 0]]


# Ranking.


@pytest.mark.parametrize("kernel", [False, True])
@pytest.mark.parametrize("num_tokens", [5, 64, 640, 1000, 4096])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_likeliest_are_torchs_top_k(
    num_tokens: int, dtype: torch.dtype, kernel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not kernel:
        monkeypatch.setattr(largest, "available", lambda *_: False)
    elif not largest.available(dtype, 64, 1):
        pytest.skip(f"no kernel for {dtype}")
    torch.manual_seed(num_tokens)
    for num_children in (1, 3, 5):
        # Few different values, so that many are equal.
        logits = (torch.randn(2, 3, num_tokens) * 8).round().to(dtype)
        logits[0, 0] = 1.0
        expected = logits.float().topk(num_children).values
        best = likeliest(logits.clone(), num_children)
        assert torch.equal(best.values.float(), expected)
        assert torch.equal(logits.float().gather(-1, best.indices), expected)
        assert all(len(set(ids)) == num_children for ids in best.indices.flatten(0, 1).tolist())
        normal = likeliest(logits.clone(), num_children, log_probabilities=True)
        logq = logits.float().log_softmax(-1)
        torch.testing.assert_close(normal.values, logq.topk(num_children).values)
        torch.testing.assert_close(logq.gather(-1, normal.indices), normal.values)


def test_the_kernel_passes_over_what_is_no_number_and_finds_the_first_of_equals() -> None:
    if not largest.available(torch.float32, 128, 3):
        pytest.skip("no kernel for float32")
    logits = torch.zeros(3, 128)
    logits[0, [5, 70, 100]] = 2.0
    logits[1, 3], logits[1, 90] = torch.nan, 1.0
    logits[2] = -torch.inf
    logits[2, 77] = -5.0
    found = largest.largest(logits, 3)
    assert found.indices[0].tolist() == [5, 70, 100]
    assert found.indices[1].tolist() == [90, 0, 1] and found.values[1].tolist() == [1.0, 0.0, 0.0]
    assert int(found.indices[2, 0]) == 77 and float(found.log_sum[2]) == -5.0
