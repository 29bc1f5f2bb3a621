"""Trees of ranks: the forms they come in, what is taken within a budget, and which tree is best."""

import itertools
import json
import math
from collections.abc import Sequence
from pathlib import Path

import pytest

from specbench.ranks import RankTree
from specbench.tree import Tree

EAGLE_1 = "0 1 2 3 00 01 02 10 11 20 21 30 000 001 002 010 011 020 021 100 0000 0001 0002"
"""The start of EAGLE-1's published tree."""
PATHS = [[int(rank) for rank in path] for path in EAGLE_1.split()]
ACCURACY = [[0.5, 0.2, 0.1], [0.6, 0.1, 0.05], [0.7, 0.2, 0.05]]


def paths_of(tree: Tree, ranks: Sequence[int]) -> list[tuple[int, ...]]:
    """The path of ranks to each drafted node, read from the tree."""
    return [
        tuple(ranks[node - 1] for node in tree.path_to(last)[1:]) for last in range(1, len(tree))
    ]


def all_trees(nodes: list[tuple[int, ...]], size: int) -> list[tuple[tuple[int, ...], ...]]:
    """Every set of so many nodes that is a tree."""
    return [
        chosen
        for chosen in itertools.combinations(nodes, size)
        if all(len(path) == 1 or path[:-1] in chosen for path in chosen)
    ]


def chance(path: Sequence[int]) -> float:
    return math.prod(ACCURACY[level][rank] for level, rank in enumerate(path))


def test_the_dense_form_counts_children_below_the_root() -> None:
    tree = RankTree.parse("1,3,2")
    assert tree.paths == (
        *((rank,) for rank in range(3)),
        *((first, second) for first in range(3) for second in range(2)),
    )
    assert (tree.depth, tree.num_ranks) == (2, 3)
    assert len(RankTree.dense([1, 7, 6]).paths) == 7 + 42
    assert (RankTree.dense([1]).depth, RankTree.dense([1]).num_ranks) == (0, 0)


def test_paths_come_as_text_or_in_a_file(tmp_path: Path) -> None:
    text = json.dumps(PATHS)
    (tmp_path / "tree.json").write_text(text)
    as_text, from_file = RankTree.parse(text), RankTree.parse(str(tmp_path / "tree.json"))
    assert as_text.paths == from_file.paths == tuple(map(tuple, PATHS))
    assert as_text.num_ranks == 4


@pytest.mark.parametrize("by_level", [False, True])
@pytest.mark.parametrize(("depth", "nodes"), [(0, 5), (3, 0), (1, 9), (2, 7), (4, 12), (9, 99)])
def test_within_a_budget_the_first_nodes_are_taken(depth: int, nodes: int, by_level: bool) -> None:
    rank_tree = RankTree(PATHS)
    tree, ranks = rank_tree.within(depth, nodes, by_level)
    expected = [tuple(path) for path in PATHS if len(path) <= depth][:nodes]
    found = paths_of(tree, ranks)
    assert sorted(found) == sorted(expected)
    assert found == sorted(expected, key=lambda path: (len(path), path) if by_level else (0, path))
    assert rank_tree.within(depth, nodes, by_level).tree is tree


def test_depth_first_the_likeliest_path_comes_first() -> None:
    tree, ranks = RankTree(PATHS).within(4, 99)
    assert tree.path_to(4) == [0, 1, 2, 3, 4]
    assert ranks[:4] == (0, 0, 0, 0)


@pytest.mark.parametrize("num_nodes", range(1, 6))
def test_no_tree_of_as_many_nodes_promises_more_than_the_one_from_accuracies(
    num_nodes: int,
) -> None:
    nodes = [path for depth in (1, 2, 3) for path in itertools.product(range(3), repeat=depth)]
    likely = sorted(nodes, key=chance, reverse=True)[:18]
    best = max(sum(map(chance, paths)) for paths in all_trees(likely, num_nodes))
    found = RankTree.from_accuracy(ACCURACY, num_nodes).paths
    assert sum(map(chance, found)) == pytest.approx(best)


def test_a_tree_from_accuracies_is_the_best_one_for_fewer_nodes_too() -> None:
    whole = RankTree.from_accuracy(ACCURACY, 30).paths
    assert [chance(path) for path in whole] == sorted(map(chance, whole), reverse=True)
    for num_nodes in range(30):
        assert RankTree.from_accuracy(ACCURACY, num_nodes).paths == whole[:num_nodes]


def test_ranks_need_not_come_in_order_of_accuracy_and_those_without_a_chance_are_left_out() -> None:
    tree = RankTree.from_accuracy([[0.1, 0.4, 0.0], [0.0, 0.5]], 99)
    assert tree.paths == ((1,), (1, 1), (0,), (0, 1))


def test_a_tree_from_counts_holds_the_paths_that_were_seen_most() -> None:
    """Ranks that are right together count together: products of rates would put (1, 0) third."""
    seen = [[0, 0, 0]] * 5 + [[0, 0]] * 2 + [[0]] + [[1, 2]] * 4 + [[]] * 9
    tree = RankTree.from_counts(seen, 5)
    assert tree.paths == ((0,), (0, 0), (0, 0, 0), (1,), (1, 2))
    assert RankTree.from_counts(seen, 2).paths == ((0,), (0, 0))
    assert RankTree.from_counts([], 5).paths == ()


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("2,3", r"\[2, 3\] is out of range; valid: 1 for the root"),
        ("1,0", "is out of range"),
        ("[[0],[0]]", r"path \[0\] is empty, negative or there twice"),
        ("[[]]", r"path \[\] is empty"),
        ("[[-1]]", r"path \[-1\] is empty, negative"),
        ("[[0],[1,0],[1]]", r"path \[1, 0\] comes before \[1\]"),
        ("[0,1]", "valid: a list of paths"),
        ('[["0"]]', "valid: a list of paths"),
        ("[[0]", "valid: 1,7,6, a JSON list of paths, or a file"),
        ("no/such/file.json", "'no/such/file.json': .*No such file.*; valid: 1,7,6"),
    ],
)
def test_what_is_no_tree_is_refused(text: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        RankTree.parse(text)


def test_a_tree_with_fewer_ranks_keeps_the_nodes_that_need_no_more() -> None:
    tree = RankTree([(0,), (1,), (0, 2), (1, 0), (0, 2, 0), (1, 0, 1)])
    assert tree.with_ranks(2).paths == ((0,), (1,), (1, 0), (1, 0, 1))
    assert tree.with_ranks(3).paths == tree.paths
