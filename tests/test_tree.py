"""Token trees: their shape and what is derived from it."""

import pytest
import torch

from specbench.tree import Tree, merge_paths

TREE = Tree.of((-1, 0, 0, 1, 1, 2, 4))


def test_a_tree_knows_its_depths_children_and_paths() -> None:
    assert len(TREE) == 7
    assert TREE.num_drafted == 6
    assert TREE.depths == (0, 1, 1, 2, 2, 2, 3)
    assert TREE.depth == 3
    assert TREE.children == ((1, 2), (3, 4), (5,), (), (6,), (), ())
    assert TREE.path_to(6) == [0, 1, 4, 6]
    assert TREE.path_to(0) == [0]


def test_a_node_has_itself_and_its_path_as_ancestors() -> None:
    assert TREE.ancestors_NN.dtype == torch.bool
    for node in range(len(TREE)):
        assert TREE.ancestors_NN[node].nonzero().flatten().tolist() == sorted(TREE.path_to(node))


def test_a_chain_is_a_tree_with_one_child_at_each_node() -> None:
    chain = Tree.chain(3)
    assert chain.parents == (-1, 0, 1, 2)
    assert chain.depth == chain.num_drafted == 3
    assert torch.equal(chain.ancestors_NN, torch.ones(4, 4).tril().bool())


def test_the_tree_that_drafts_nothing_is_its_root() -> None:
    root = Tree.chain(0)
    assert (len(root), root.depth, root.num_drafted, root.children) == (1, 0, 0, ((),))


def test_equal_shapes_are_one_tree() -> None:
    assert Tree.of((-1, 0, 0)) is Tree.of((-1, 0, 0))
    assert Tree((-1, 0, 0)) == Tree.of((-1, 0, 0))


@pytest.mark.parametrize("parents", [(), (0,), (0, 1)])
def test_a_tree_must_start_with_its_root(parents: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="starts with its root"):
        Tree(parents)


@pytest.mark.parametrize(("parents", "valid"), [((-1, 0, 2), "0..1"), ((-1, -1), "0..0")])
def test_a_parent_must_come_before_its_child(parents: tuple[int, ...], valid: str) -> None:
    node, parent = len(parents) - 1, parents[-1]
    with pytest.raises(ValueError, match=f"node {node} .* has parent {parent}; valid: {valid}"):
        Tree(parents)


def test_sequences_merge_into_a_tree_without_duplicate_siblings() -> None:
    tree, tokens = merge_paths([[5, 6, 7], [5, 8], [9], [5, 6, 7]], max_nodes=10)
    assert tree.parents == (-1, 0, 1, 2, 1, 0)
    assert tokens == [5, 6, 7, 8, 9]


def test_the_same_token_below_different_parents_is_two_nodes() -> None:
    tree, tokens = merge_paths([[5, 5], [6, 5]], max_nodes=10)
    assert tree.parents == (-1, 0, 1, 0, 3)
    assert tokens == [5, 5, 6, 5]


def test_earlier_sequences_come_first_when_nodes_run_out() -> None:
    tree, tokens = merge_paths([[5, 6, 7], [5, 8], [9]], max_nodes=4)
    assert tokens == [5, 6, 7, 8]
    assert tree.num_drafted == 4
    assert merge_paths([[5, 6, 7], [5, 6]], max_nodes=2)[1] == [5, 6]
    assert merge_paths([], max_nodes=4) == (Tree.chain(0), [])
