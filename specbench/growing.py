"""Growing a token tree of point masses level by level, from each node's likeliest children: by
confidence (EAGLE-2's dynamic tree), or by rank (a static tree).

A drafter runs the nodes that are to have children, and ranks the children of each; a `Growth` says
which nodes are to run next, and which are drafted in the end. All of it is host bookkeeping.
Shapes: B rows, M nodes of a level, K children of each, D tokens that may be drafted.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch

from specbench.method import Budget, Proposal, Row
from specbench.ranks import RankedTree, Ranks, RankTree
from specbench.target import largest
from specbench.tree import Tree

_BLOCK = 64


class Likeliest(NamedTuple):
    """The largest values [B, M, K] in descending order, and their indices."""

    values: torch.Tensor
    indices: torch.Tensor


def likeliest(
    logits_BMD: torch.Tensor, num_children: int, log_probabilities: bool = False
) -> Likeliest:
    """The K largest logits of each node, of equal ones any, or their log-probabilities.

    The logits may be lost. torch's `topk` on a CPU is slow over many: without a kernel, they lie in
    the K blocks with the largest maxima, and what is largest in each block is found at the speed of
    memory.
    """
    num_tokens = logits_BMD.shape[-1]
    on_cpu, num_blocks = logits_BMD.device.type == "cpu", num_tokens // _BLOCK
    if on_cpu and largest.available(logits_BMD.dtype, num_tokens, num_children):
        found = largest.largest(logits_BMD.flatten(0, 1).contiguous(), num_children)
        values = found.values - found.log_sum if log_probabilities else found.values
        shape = (*logits_BMD.shape[:2], num_children)
        return Likeliest(values.view(shape), found.indices.view(shape))
    if log_probabilities:
        logits_BMD = logits_BMD.log_softmax(-1, dtype=torch.float32)
    if not on_cpu or num_tokens % _BLOCK or num_blocks < 4 * num_children:
        return Likeliest(*logits_BMD.topk(num_children))
    blocks = logits_BMD.view(*logits_BMD.shape[:2], -1, _BLOCK)
    at_BMK = blocks.amax(-1).topk(num_children).indices
    inside = blocks.gather(-2, at_BMK[..., None].expand(-1, -1, -1, _BLOCK)).flatten(-2)
    values, index_BMK = inside.topk(num_children)
    block_BMK = at_BMK.gather(-1, index_BMK // _BLOCK)
    return Likeliest(values, block_BMK * _BLOCK + index_BMK % _BLOCK)


@dataclass(eq=False, slots=True)
class Node:
    """A node of a growing tree.

    Args:
        token: its token.
        parent: its parent; None for the root.
        score: log-probability of the path to it, where the growth asks for that.
        place: its place in the order in which the drafter runs nodes; the root's is 0.
    """

    token: int
    parent: "Node | None"
    score: float = 0.0
    place: int = 0


class Growth(ABC):
    """One row's tree while it grows."""

    def __init__(self, num_children: int) -> None:
        self.num_children = num_children
        """K, how many of each node's children it wants to know."""
        root = Node(-1, None)
        self.ran = [-1]
        """By place, the place of the parent: the tree of the nodes that ran or are to run."""
        self.level = [root]
        """The nodes that run next, or just ran; none once no more are to have children."""
        self.parents_in_level = [0]
        """For each of them, its parent's index in the level before."""

    @abstractmethod
    def grow(
        self, tokens_MK: Sequence[Sequence[int]], scores_MK: Sequence[Sequence[float]]
    ) -> None:
        """Takes in the likeliest children of the level's nodes, the best first, with their
        log-probabilities if it goes by them, and sets the next level."""

    @abstractmethod
    def drafted(self) -> Sequence[Node]:
        """The nodes to draft; parents come before their children."""

    @property
    def tree(self) -> Tree:
        """The tree of the nodes that ran or are to run."""
        return Tree.of(tuple(self.ran))

    @property
    def start(self) -> int:
        """Place of the level's first node; the number of nodes if there is none."""
        return self.level[0].place if self.level else len(self.ran)

    def _run(self, nodes: list[Node]) -> None:
        start, self.parents_in_level = self.start, []
        for node in nodes:
            assert node.parent is not None
            node.place = len(self.ran)
            self.ran.append(node.parent.place)
            self.parents_in_level.append(node.parent.place - start)
        self.level = nodes


class ByConfidence(Growth):
    """EAGLE-2's tree (Li et al. 2024, section 4): the best nodes by the probability of their paths,
    to which the best of each level have given children.

    Equal scores keep the order in which the nodes were found, so that a parent always comes before
    its children.

    Args:
        budget: how deep, and how many nodes.
        top_k: the most nodes of a level to have children.
    """

    def __init__(self, budget: Budget, top_k: int) -> None:
        super().__init__(top_k)
        self.budget, self.top_k, self.depth = budget, top_k, 0
        self.best: list[Node] = []
        if not budget.depth:
            self.level = []

    def grow(
        self, tokens_MK: Sequence[Sequence[int]], scores_MK: Sequence[Sequence[float]]
    ) -> None:
        """Adds the children to the best nodes found so far, and lets those of them have children
        that can be the parents of one of the best."""
        if not self.level:
            return
        found = [
            # Rounding may give a sure child more than its parent, and broken weights no number.
            Node(token, parent, parent.score + (logp if logp < 0 else 0.0))
            for parent, tokens, logps in zip(self.level, tokens_MK, scores_MK, strict=False)
            for token, logp in zip(tokens, logps, strict=True)
        ]
        # What is not among the best now never will be.
        self.best = sorted(self.best + found, key=lambda node: -node.score)[: self.budget.nodes]
        self.depth += 1
        new = set(found) if self.depth < self.budget.depth else set()
        # A child of the last of the best would come behind it.
        fertile = self.best[: self.budget.nodes - 1]
        self._run([node for node in fertile if node in new][: self.top_k])

    def drafted(self) -> list[Node]:
        """The best nodes, by score."""
        return self.best


class ByRank(Growth):
    """A static tree: which ranks are drafted where never changes.

    Args:
        shape: the tree, its nodes level by level.
    """

    def __init__(self, shape: RankedTree) -> None:
        super().__init__(1 + max(shape.ranks, default=0))
        self.shape = shape
        self.nodes: list[Node] = []
        self.numbers = [0] if shape.ranks else []
        """Of the level's nodes in the tree."""
        if not shape.ranks:
            self.level = []

    def grow(
        self, tokens_MK: Sequence[Sequence[int]], scores_MK: Sequence[Sequence[float]]
    ) -> None:
        """Adds the children that the tree has at these places."""
        tree, ranks = self.shape
        found = {
            child: Node(tokens[rank], parent, parent.score + scores[rank])
            for number, parent, tokens, scores in zip(
                self.numbers, self.level, tokens_MK, scores_MK, strict=False
            )
            for child in tree.children[number]
            for rank in [ranks[child - 1]]
        }
        self.nodes += found.values()
        self.numbers = [number for number in found if tree.children[number]]
        self._run([found[number] for number in self.numbers])

    def drafted(self) -> list[Node]:
        """All nodes, level by level."""
        return self.nodes


def drafted(rows: Sequence[Row], growths: Sequence[Growth], rates: bool = False) -> Proposal:
    """What was grown, as a proposal of point masses; with the nodes' chances, if they were scored
    by log-probability."""
    trees, tokens, chances = [], [], []
    for growth in growths:
        index: dict[Node, int] = {}
        parents = [-1]
        for number, node in enumerate(growth.drafted(), start=1):
            index[node] = number
            assert node.parent is not None
            parents.append(0 if node.parent.parent is None else index[node.parent])
        trees.append(Tree.of(tuple(parents)))
        tokens.append([node.token for node in index])
        chances.append([_chance(node) for node in index] if rates else [])
    return Proposal.from_rows(rows, trees, tokens, chances=chances if rates else None)


def _chance(node: Node) -> float:
    assert node.parent is not None
    return min(1.0, math.exp(node.score - node.parent.score))


@lru_cache(maxsize=256)
def branching_tree(branching: tuple[int, ...], budget: Budget) -> RankedTree:
    """The tree with so many children for a node at each level, and 1 beyond, level by level, as far
    as a budget goes."""
    level: list[Ranks] = [()]
    paths: list[Ranks] = []
    for depth in range(budget.depth):
        width = branching[depth] if depth < len(branching) else 1
        level = [(*path, rank) for path in level for rank in range(width)][: budget.nodes]
        paths += level
    return RankTree(paths[: budget.nodes]).within(*budget, by_level=True)
