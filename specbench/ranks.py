"""Trees of ranks: drafted trees whose shape is known before anything is drafted.

A node is named by the ranks of the guesses on the way to it: (0, 2) is the third likeliest guess
after the likeliest one. The nodes of a `RankTree` come in order of worth, so that its first n are
the tree to take for n nodes.
"""

import heapq
import json
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from specbench.messages import in_one_line
from specbench.tree import Tree

Ranks = tuple[int, ...]


class RankedTree(NamedTuple):
    """The shape of one row's tree, and which guess each node takes."""

    tree: Tree
    ranks: tuple[int, ...]
    """By drafted node (1, 2, ... of the tree): 0 for the likeliest child of its parent."""


class RankTree:
    """A tree of ranks, in order of worth: any prefix is a tree too.

    Args:
        paths: its nodes below the root, each as the ranks on the way to it; a parent comes before
            its children.

    Raises:
        ValueError: names the path that is empty, negative, there twice, or before its parent.
    """

    def __init__(self, paths: Iterable[Sequence[int]]) -> None:
        self.paths = tuple(tuple(path) for path in paths)
        seen: set[Ranks] = {()}
        for path in self.paths:
            if path in seen or min(path) < 0:
                raise ValueError(
                    f"tree: path {list(path)} is empty, negative or there twice; valid: distinct "
                    "lists of ranks, 0 or more each"
                )
            if path[:-1] not in seen:
                raise ValueError(f"tree: path {list(path)} comes before {list(path[:-1])}")
            seen.add(path)
        self._cut: dict[tuple[int, int, bool], RankedTree] = {}

    @property
    def depth(self) -> int:
        """The longest path."""
        return max(map(len, self.paths), default=0)

    @property
    def num_ranks(self) -> int:
        """How many guesses a node must offer at most."""
        return max(map(max, self.paths), default=-1) + 1

    def with_ranks(self, num_ranks: int) -> "RankTree":
        """The nodes whose ranks, and those of the nodes before them, are below a number."""
        return RankTree(path for path in self.paths if max(path) < num_ranks)

    def within(self, depth: int, nodes: int, by_level: bool = False) -> RankedTree:
        """The most worthy nodes within a budget; made once for each.

        Args:
            depth, nodes: the budget.
            by_level: order them level by level, for a drafter that runs one level after the other.
                Otherwise depth first, so that the likeliest path is 0, 1, 2, ... and its keys and
                values need not be moved.
        """
        key = (depth, nodes, by_level)
        if key not in self._cut:
            paths = [path for path in self.paths if len(path) <= depth][:nodes]
            paths.sort(key=lambda path: (len(path) * by_level, path))
            index = {path: node for node, path in enumerate([(), *paths])}
            parents = (-1, *(index[path[:-1]] for path in paths))
            self._cut[key] = RankedTree(Tree.of(parents), tuple(path[-1] for path in paths))
        return self._cut[key]

    @staticmethod
    def dense(widths: Sequence[int]) -> "RankTree":
        """All combinations of the first ranks at each level, as medusa-llm 0.1 writes them: 1 for
        the root, then children per node (``1,7,6``: 7 nodes, and 6 below each).

        Raises:
            ValueError: the first is not 1, or one is below 1.
        """
        if not widths or widths[0] != 1 or min(widths) < 1:
            raise ValueError(
                f"tree {list(widths)} is out of range; valid: 1 for the root, then 1 or more "
                "children for each level"
            )
        level: list[Ranks] = [()]
        paths: list[Ranks] = []
        for width in widths[1:]:
            level = [(*path, rank) for path in level for rank in range(width)]
            paths += level
        return RankTree(paths)

    @staticmethod
    def from_accuracy(accuracy: Sequence[Sequence[float]], num_nodes: int) -> "RankTree":
        """The tree with most expected matches, where ranks are right independently of each other:
        the node with the largest product of accuracies is added again and again (Cai et al. 2024,
        section 2.3.3).

        Args:
            accuracy: by level and rank, how often that guess is right.
            num_nodes: nodes below the root; fewer where no more have a chance.
        """
        levels = [
            sorted(((chance, rank) for rank, chance in enumerate(level)), key=lambda c: -c[0])
            for level in accuracy
        ]
        paths: list[Ranks] = []
        # A node's siblings come in order of chance, so each puts forward the next, and its own
        # likeliest child. An entry is (-product, path, its parent's product, place among siblings).
        waiting: list[tuple[float, Ranks, float, int]] = []

        def put(parent: Ranks, product: float, place: int) -> None:
            if len(parent) < len(levels) and place < len(levels[len(parent)]):
                chance, rank = levels[len(parent)][place]
                if chance > 0:
                    heapq.heappush(waiting, (-product * chance, (*parent, rank), product, place))

        put((), 1.0, 0)
        while waiting and len(paths) < num_nodes:
            worth, path, parent_worth, place = heapq.heappop(waiting)
            paths.append(path)
            put(path[:-1], parent_worth, place + 1)
            put(path, -worth, 0)
        return RankTree(paths)

    @staticmethod
    def from_counts(seen: Iterable[Sequence[int]], num_nodes: int) -> "RankTree":
        """The tree with most matches on ranks that were seen: unlike products of accuracies it
        knows that guesses are right together.

        Args:
            seen: for each place, the rank of the right token at each level, up to the first that
                no guess had.
            num_nodes: nodes below the root; fewer where no more were seen.
        """
        counts = Counter(
            tuple(ranks[:depth]) for ranks in seen for depth in range(1, len(ranks) + 1)
        )
        order = sorted(counts, key=lambda path: (-counts[path], len(path), path))
        return RankTree(order[:num_nodes])

    @staticmethod
    def parse(text: str) -> "RankTree":
        """A tree from a knob: ``1,7,6`` (dense), a JSON list of paths (``[[0],[1],[0,0]]``, the
        form of Medusa's and EAGLE's published trees), or the name of a file that holds one.

        Raises:
            ValueError: it is none of these, or no tree.
        """
        if re.fullmatch(r"\d+(,\d+)*", text):
            return RankTree.dense([int(width) for width in text.split(",")])
        try:
            paths = json.loads(text if text.startswith("[") else Path(text).read_text())
        except (OSError, ValueError) as error:
            raise ValueError(
                f"tree {text!r}: {in_one_line(error)}; valid: 1,7,6, a JSON list of paths, or a "
                "file that holds one"
            ) from error
        return RankTree.from_json(paths)

    @staticmethod
    def from_json(paths: object) -> "RankTree":
        """A tree from a parsed list of paths.

        Raises:
            ValueError: it is no list of lists of whole numbers, or no tree.
        """
        if not isinstance(paths, list) or not all(
            isinstance(path, list) and all(type(rank) is int for rank in path) for path in paths
        ):
            raise ValueError("tree: valid: a list of paths, each a list of ranks: [[0],[1],[0,0]]")
        return RankTree(paths)
