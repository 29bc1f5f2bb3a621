"""Acceptance rules: pure functions of logits, proposal and keyed random numbers.

All choices at T=0, point-mass children and coupled drafts follow one rule: walk from the root to
the child that equals the target's own choice. Children drawn from a distribution q go through
recursive rejection. Both are lossless; `typical_walk` is not. Shapes: B rows, N nodes, V
vocabulary.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch

from specbench.method import Proposal, Row, Typical
from specbench.sampling import Sampling, draw, position_key, uniform, warp
from specbench.tree import Tree


class Walk(NamedTuple):
    """The accepted root path (node 0 first) and the bonus: the target's own token after it."""

    path: list[int]
    bonus: int


class Rejection(NamedTuple):
    """Recursive rejection at one node: the chance to accept each child in turn, and what to draw
    from if none is."""

    accept: list[float]
    residual_V: torch.Tensor


def verify(
    logits_BNV: torch.Tensor,
    proposal: Proposal,
    rows: Sequence[Row],
    sampling: Sampling,
    typical: Typical | None = None,
) -> list[Walk]:
    """Walks every row's tree by the rule that its nodes call for.

    Args:
        logits_BNV: the target's logits at the nodes.
        proposal: the trees, and what their nodes were drawn from.
        rows: their keys and lengths make the random numbers.
        sampling: the target's temperature, top-k and top-p.
        typical: use Medusa's typical acceptance instead (lossy; at T=0 it is greedy all the same).
    """
    choices = _all_choices(logits_BNV, proposal.trees, rows, sampling)
    tokens = proposal.tokens_BN.tolist()
    walks = []
    for b, (row, tree) in enumerate(zip(rows, proposal.trees, strict=True)):
        node = _Node(logits_BNV[b], row, tree, sampling, choices[b] if choices else None)
        if typical is not None and not sampling.greedy:
            walks.append(typical_walk(tree, tokens[b], node.logp, node.choice, typical))
        else:
            logq: Mapping[int, torch.Tensor] = proposal.logq[b] if proposal.logq else {}
            step = _Stepper(tree, tokens[b], node, logq, proposal.replacement)
            walks.append(walk(step))
    return walks


def _all_choices(
    logits_BNV: torch.Tensor, trees: Sequence[Tree], rows: Sequence[Row], sampling: Sampling
) -> list[list[int]] | None:
    """The target's choice at every node with one transfer to the host; None where it is cheaper to
    choose on the way."""
    if sampling.greedy:
        return logits_BNV.argmax(-1).tolist()
    if logits_BNV.device.type == "cpu":
        return None
    drawn = []
    for b, (row, tree) in enumerate(zip(rows, trees, strict=True)):
        node = _Node(logits_BNV[b], row, tree, sampling, None)
        picks = [draw(node.logp(n), node.key(n, "target")) for n in range(len(tree))]
        drawn.append(torch.cat(picks + picks[:1] * (logits_BNV.shape[1] - len(tree))))
    return torch.stack(drawn).tolist()


class _Node:
    """The target's view of one row's nodes: distributions, choices and keys, each computed when
    asked for."""

    def __init__(
        self,
        logits_NV: torch.Tensor,
        row: Row,
        tree: Tree,
        sampling: Sampling,
        choices: list[int] | None,
    ) -> None:
        self.logits_NV, self.row, self.tree, self.sampling, self.choices = (
            logits_NV,
            row,
            tree,
            sampling,
            choices,
        )

    def key(self, node: int, purpose: str) -> int:
        position = len(self.row.tokens) + self.tree.depths[node]
        return position_key(self.row.request.key, position, purpose)

    def logp(self, node: int) -> torch.Tensor:
        return warp(self.logits_NV[node][None], self.sampling)[0]

    def choice(self, node: int) -> int:
        if self.choices is not None:
            return self.choices[node]
        return int(draw(self.logp(node), self.key(node, "target")))


class _Stepper:
    """At a node: the accepted child, or None and the bonus."""

    def __init__(
        self,
        tree: Tree,
        tokens: list[int],
        node: _Node,
        logq: Mapping[int, torch.Tensor],
        replacement: bool,
    ) -> None:
        self.tree, self.tokens, self.node, self.logq, self.replacement = (
            tree,
            tokens,
            node,
            logq,
            replacement,
        )

    def __call__(self, node: int) -> tuple[int | None, int]:
        children = self.tree.children[node]
        logq_V = self.logq.get(node)
        if logq_V is None or not children:
            choice = self.node.choice(node)
            return next((child for child in children if self.tokens[child] == choice), None), choice
        steps = rejection(
            self.node.logp(node).exp(),
            logq_V.exp(),
            [self.tokens[child] for child in children],
            self.replacement,
        )
        uniforms = uniform([self.node.key(node, "accept")], torch.arange(len(children)))[0].tolist()
        for child, accept, u in zip(children, steps.accept, uniforms, strict=True):
            if u < accept:
                return child, -1
        return None, int(draw(steps.residual_V.log(), self.node.key(node, "target")))


def walk(step: Callable[[int], tuple[int | None, int]]) -> Walk:
    """Follows ``step`` from the root to the first node that accepts no child."""
    path = [0]
    while True:
        child, bonus = step(path[-1])
        if child is None:
            return Walk(path, bonus)
        path.append(child)


def rejection(
    p_V: torch.Tensor, q_V: torch.Tensor, children: Sequence[int], replacement: bool
) -> Rejection:
    """Recursive rejection sampling over children drawn in this order from q.

    A child x is accepted with chance min(1, p(x) / q(x)); after a refusal p becomes the residual
    norm(max(p - q, 0)). With replacement q stays (SpecInfer: Miao et al. 2024, algorithm 2);
    without it x is struck from q, which is renormalised (EAGLE: Li et al. 2024; recursive
    rejection sampling: Jeon et al. 2024).

    Args:
        p_V, q_V: probabilities after the same warpers, float32 or float64.
        children: the tokens drawn, in order.
        replacement: whether they were drawn with replacement.
    """
    accept = []
    for token in children:
        q = float(q_V[token])
        assert q > 0, "a token was proposed that its draft distribution cannot give"
        accept.append(min(1.0, float(p_V[token]) / q))
        residual_V = (p_V - q_V).clamp_min(0)
        mass = float(residual_V.sum())
        # p equals q up to rounding: then the refusal has no chance, and any p will do.
        p_V = residual_V / mass if mass > 0 else p_V
        if not replacement:
            q_V = q_V.clone()
            q_V[token] = 0
            left = float(q_V.sum())
            q_V = q_V / left if left > 0 else q_V
    return Rejection(accept, p_V)


def typical_walk(
    tree: Tree,
    tokens: Sequence[int],
    logp: Callable[[int], torch.Tensor],
    choice: Callable[[int], int],
    typical: Typical,
) -> Walk:
    """Medusa's typical acceptance: the longest path of typical tokens, of equals the likelier one.
    Lossy.

    A token x below a node with distribution p is typical iff p(x) > min(epsilon, delta exp(-H(p))).
    """
    score = {0: 0.0}
    for node in range(len(tree)):
        if node not in score or not tree.children[node]:
            continue
        logp_V = logp(node)
        p_V = logp_V.exp()
        entropy = -float((p_V * (p_V + 1e-5).log()).sum())
        threshold = min(typical.epsilon, typical.delta * math.exp(-entropy))
        for child in tree.children[node]:
            if float(p_V[tokens[child]]) > threshold:
                score[child] = score[node] + float(logp_V[tokens[child]])
    best = max(score, key=lambda node: (tree.depths[node], score[node]))
    return Walk(tree.path_to(best), choice(best))
