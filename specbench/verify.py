"""Acceptance rules: pure functions of logits, proposal and keyed random numbers.

All choices at T=0, point-mass children and coupled drafts follow one rule: walk from the root to
the child that equals the target's own choice. Children drawn from a distribution q go through
recursive rejection. Both are lossless; `typical_walk` is not. Shapes: B rows, N nodes, V
vocabulary, M some nodes, K children of each.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch

from specbench.method import Proposal, Row, Typical
from specbench.sampling import (
    NO_MASS,
    Sampling,
    choose,
    likeliest_token,
    position_key,
    uniform,
    warp,
)
from specbench.tree import Tree

# Nodes worked on together on an accelerator: with 128k tokens, float64 noise takes 256 MiB.
_NODES_AT_ONCE = 256


class Walk(NamedTuple):
    """The accepted root path (node 0 first) and the bonus: the target's own token after it."""

    path: list[int]
    bonus: int


class Outcome(NamedTuple):
    """What the rule decides at one node: the accepted child, or None and the target's own token."""

    child: int | None
    bonus: int = -1


class Rejection(NamedTuple):
    """Recursive rejection at some nodes: the chance to accept each child when those before it were
    refused, and what the bonus is drawn from when all were."""

    accept_MK: torch.Tensor
    residual_MV: torch.Tensor


class _Place(NamedTuple):
    row: int
    node: int


def verify(
    logits_BNV: torch.Tensor,
    proposal: Proposal,
    rows: Sequence[Row],
    sampling: Sampling,
    typical: Typical | None = None,
    at_once: bool | None = None,
) -> list[Walk]:
    """Walks every row's tree by the rule that its nodes call for.

    Args:
        logits_BNV: the target's logits at the nodes.
        proposal: the trees, and what their nodes were drawn from.
        rows: their keys and lengths make the random numbers.
        sampling: the target's temperature, top-k and top-p.
        typical: use Medusa's typical acceptance instead (lossy; at T=0 it is greedy all the same).
        at_once: decide at all nodes beforehand instead of at each node that a walk comes to; the
            walks are the same. Default: on an accelerator, which is then not waited for at each.

    Raises:
        ValueError: a drafted token without mass in the distribution that it is said to come from.
    """
    judge = _Judge(logits_BNV, proposal, rows, sampling)
    if typical is not None and not sampling.greedy:
        return [judge.typical_walk(b, typical) for b in range(len(rows))]
    if at_once or (at_once is None and logits_BNV.device.type != "cpu"):
        judge.look_ahead()
    return [walk(partial(judge.outcome, b)) for b in range(len(rows))]


def walk(step: Callable[[int], Outcome]) -> Walk:
    """Follows ``step`` from the root to the first node that accepts no child."""
    path = [0]
    while True:
        child, bonus = step(path[-1])
        if child is None:
            return Walk(path, bonus)
        path.append(child)


class _Judge:
    """Decides at the nodes of a proposal."""

    def __init__(
        self,
        logits_BNV: torch.Tensor,
        proposal: Proposal,
        rows: Sequence[Row],
        sampling: Sampling,
    ) -> None:
        self.logits_BNV, self.proposal, self.rows, self.sampling = (
            logits_BNV,
            proposal,
            rows,
            sampling,
        )
        self.tokens = proposal.tokens_BN.tolist()
        # At T=0 rejection would accept the very child that equals the argmax.
        logq = None if sampling.greedy else proposal.logq
        self.logq: Sequence[Mapping[int, torch.Tensor]] = logq or [{}] * len(rows)
        self.known: dict[_Place, Outcome] = {}

    def outcome(self, row: int, node: int) -> Outcome:
        place = _Place(row, node)
        return self.known[place] if place in self.known else self._decide([place])[0]

    def look_ahead(self) -> None:
        """Decides at all nodes: those with equally many children drawn from a distribution are
        worked on together, and so are all that have none."""
        groups: dict[int, list[_Place]] = defaultdict(list)
        for b, tree in enumerate(self.proposal.trees):
            for n, children in enumerate(tree.children):
                groups[len(children) if n in self.logq[b] else 0].append(_Place(b, n))
        for group in groups.values():
            for start in range(0, len(group), _NODES_AT_ONCE):
                places = group[start : start + _NODES_AT_ONCE]
                self.known |= zip(places, self._decide(places), strict=True)

    def typical_walk(self, row: int, typical: Typical) -> Walk:
        """Typical acceptance, whatever the nodes were drawn from."""
        return typical_walk(
            self.proposal.trees[row],
            self.tokens[row],
            lambda node: self._logp([_Place(row, node)])[0],
            lambda node: self._choices([_Place(row, node)])[0],
            typical,
        )

    def _decide(self, places: Sequence[_Place]) -> list[Outcome]:
        row, node = places[0]
        is_drawn = node in self.logq[row] and self.proposal.trees[row].children[node]
        return self._reject(places) if is_drawn else self._match(places)

    def _match(self, places: Sequence[_Place]) -> list[Outcome]:
        """Accepts the child that equals the target's own choice."""
        outcomes = []
        for place, choice in zip(places, self._choices(places), strict=True):
            equal = (child for child, token in self._drafted(place) if token == choice)
            outcomes.append(Outcome(next(equal, None), choice))
        return outcomes

    def _reject(self, places: Sequence[_Place]) -> list[Outcome]:
        """Accepts by recursive rejection; when all children are refused, draws the bonus."""
        drafted = [self._drafted(place) for place in places]
        accept_MK, residual_MV = rejection(
            self._logp(places).softmax(-1),
            torch.stack([self.logq[row][node] for row, node in places]).softmax(-1),
            torch.tensor([[token for _, token in children] for children in drafted]),
            self.proposal.replacement,
        )
        uniform_MK = uniform(self._keys(places, "accept"), torch.arange(len(drafted[0])))
        outcomes = [
            Outcome(_first_accepted(children, accept_K, uniform_K))
            for children, accept_K, uniform_K in zip(
                drafted, accept_MK.tolist(), uniform_MK.tolist(), strict=True
            )
        ]
        refused = [m for m, outcome in enumerate(outcomes) if outcome.child is None]
        if refused:
            logp_MV = torch.stack([residual_MV[m] for m in refused]).clamp_min(NO_MASS).log()
            bonuses = choose(logp_MV, self._keys([places[m] for m in refused], "target")).tolist()
            for m, bonus in zip(refused, bonuses, strict=True):
                outcomes[m] = Outcome(None, bonus)
        return outcomes

    def _choices(self, places: Sequence[_Place]) -> list[int]:
        """The target's own tokens after the nodes."""
        if self.sampling.greedy:
            chosen_M = likeliest_token(self._logits(places))
        else:
            chosen_M = choose(self._logp(places), self._keys(places, "target"))
        return [int(token) for token in chosen_M.tolist()]

    def _logits(self, places: Sequence[_Place]) -> torch.Tensor:
        return torch.stack([self.logits_BNV[row, node] for row, node in places])

    def _logp(self, places: Sequence[_Place]) -> torch.Tensor:
        return warp(self._logits(places), self.sampling)

    def _keys(self, places: Sequence[_Place], purpose: str) -> list[int]:
        """Keys of the draws for the tokens after the nodes."""
        keys = []
        for b, node in places:
            row, depth = self.rows[b], self.proposal.trees[b].depths[node]
            keys.append(position_key(row.request.key, len(row.tokens) + depth, purpose))
        return keys

    def _drafted(self, place: _Place) -> list[tuple[int, int]]:
        """The children of a node in drafting order, each with its token."""
        tokens = self.tokens[place.row]
        return [(n, tokens[n]) for n in self.proposal.trees[place.row].children[place.node]]


def _first_accepted(
    children: Sequence[tuple[int, int]], accept: Sequence[float], uniforms: Sequence[float]
) -> int | None:
    for (child, token), chance, u in zip(children, accept, uniforms, strict=True):
        if math.isnan(chance):
            raise ValueError(
                f"token {token} was drafted, but the log-probabilities given for its parent node "
                "leave it no mass; valid: the tensor that it was drawn from"
            )
        if u < chance:
            return child
    return None


def rejection(
    p_MV: torch.Tensor, q_MV: torch.Tensor, children_MK: torch.Tensor, replacement: bool
) -> Rejection:
    """Recursive rejection sampling over children drawn in this order from q.

    A child x is accepted with chance min(1, p(x) / q(x)); after a refusal p becomes the residual
    norm(max(p - q, 0)). With replacement q stays (SpecInfer: Miao et al. 2024, algorithm 2);
    without it x is struck from q, which is renormalised (EAGLE: Li et al. 2024; recursive
    rejection sampling: Jeon et al. 2024).

    Args:
        p_MV, q_MV: probabilities after the same warpers, float32 or float64.
        children_MK: the tokens drawn, in order.
        replacement: whether they were drawn with replacement.

    Returns:
        Chances (NaN for a token that q cannot give) and residuals.
    """
    accept = []
    for token_M in children_MK.to(p_MV.device).unbind(-1):
        token_M1 = token_M[:, None]
        drawn_M1 = q_MV.gather(-1, token_M1)
        chance_M1 = (p_MV.gather(-1, token_M1) / drawn_M1).clamp_max(1)
        accept.append(chance_M1.masked_fill(drawn_M1 == 0, math.nan))
        p_MV = _residual(p_MV, q_MV)
        if not replacement:
            q_MV = q_MV.scatter(-1, token_M1, 0)
            q_MV = q_MV / q_MV.sum(-1, keepdim=True)
    return Rejection(torch.cat(accept, dim=-1), p_MV)


def _residual(p_MV: torch.Tensor, q_MV: torch.Tensor) -> torch.Tensor:
    residual_MV = (p_MV - q_MV).clamp_min(0)
    # Where p equals q up to rounding nothing is left; a refusal has next to no chance, and p does.
    is_empty_M1 = residual_MV.sum(-1, keepdim=True) == 0
    residual_MV = residual_MV + is_empty_M1 * p_MV
    return residual_MV / residual_MV.sum(-1, keepdim=True)


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
    for node, children in enumerate(tree.children):
        if node not in score or not children:
            continue
        logp_V = logp(node)
        p_V = logp_V.softmax(-1)
        entropy = -float((p_V * (p_V + 1e-5).log()).sum())
        threshold = min(typical.epsilon, typical.delta * math.exp(-entropy))
        for child in children:
            if float(p_V[tokens[child]]) > threshold:
                score[child] = score[node] + float(logp_V[tokens[child]])
    best = max(score, key=lambda node: (tree.depths[node], score[node]))
    return Walk(tree.path_to(best), choice(best))
