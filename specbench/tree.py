"""Token trees: the shape of a proposal. Node 0 is the root, the last committed token; a chain is a
tree.

A tree is a tuple of parent indices with parent < child, so any prefix of the nodes is a tree too
and a drafter can grow one level by level.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
import torch


@dataclass(frozen=True)
class Tree:
    """The shape of one row's token tree.

    Args:
        parents: parent index of each node, ``-1`` for the root; ``parents[i] < i``.

    Raises:
        ValueError: the list is empty, or a parent does not come before its child.
    """

    parents: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.parents or self.parents[0] != -1:
            raise ValueError(
                f"a token tree starts with its root, parent -1; got {self.parents[:4]}"
            )
        for node, parent in enumerate(self.parents[1:], start=1):
            if not 0 <= parent < node:
                raise ValueError(
                    f"node {node} of a token tree has parent {parent}; valid: 0..{node - 1}"
                )

    def __len__(self) -> int:
        return len(self.parents)

    @staticmethod
    @lru_cache(maxsize=4096)
    def of(parents: tuple[int, ...]) -> "Tree":
        """The tree with these parents, made once."""
        return Tree(parents)

    @staticmethod
    def chain(num_drafted: int) -> "Tree":
        """The root followed by a chain of ``num_drafted`` tokens."""
        return Tree.of(tuple(range(-1, num_drafted)))

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """Depth of each node; the root's is 0."""
        depths = [0]
        for parent in self.parents[1:]:
            depths.append(depths[parent] + 1)
        return tuple(depths)

    @property
    def depth(self) -> int:
        """The longest path below the root."""
        return max(self.depths)

    @property
    def num_drafted(self) -> int:
        """Nodes below the root."""
        return len(self.parents) - 1

    @cached_property
    def children(self) -> tuple[tuple[int, ...], ...]:
        """The children of each node, in drafting order."""
        children: list[list[int]] = [[] for _ in self.parents]
        for node, parent in enumerate(self.parents[1:], start=1):
            children[parent].append(node)
        return tuple(tuple(nodes) for nodes in children)

    @cached_property
    def ancestors_NN(self) -> torch.Tensor:
        """bool [N, N]: entry (i, j) says that node j is node i or one of its ancestors."""
        # In numpy: torch takes ten times as long for such small rows, and dynamic trees are new at
        # every step.
        ancestors = np.eye(len(self), dtype=np.bool_)
        for node, parent in enumerate(self.parents[1:], start=1):
            ancestors[node] |= ancestors[parent]
        return torch.from_numpy(ancestors)

    def path_to(self, node: int) -> list[int]:
        """The nodes from the root to ``node``, both included."""
        path = [node]
        while path[-1] != 0:
            path.append(self.parents[path[-1]])
        return path[::-1]


def merge_paths(paths: Iterable[Iterable[int]], max_nodes: int) -> tuple[Tree, list[int]]:
    """Merges token sequences that start below the root into one tree without duplicate siblings (a
    trie).

    Earlier sequences have priority when ``max_nodes`` drafted nodes are used up.

    Returns:
        The tree and the tokens of its nodes below the root.
    """
    parents, tokens = [-1], list[int]()
    index: dict[tuple[int, int], int] = {}
    for path in paths:
        node = 0
        for token in path:
            child = index.get((node, token))
            if child is None:
                if len(tokens) == max_nodes:
                    break
                child = len(parents)
                parents.append(node)
                tokens.append(token)
                index[node, token] = child
            node = child
    return Tree.of(tuple(parents)), tokens
