"""Medusa: heads on the target's last hidden state guess several tokens ahead at once, and a fixed
tree of their likeliest guesses is verified (Cai et al. 2024).

A guess does not depend on the guesses before it, so all levels of the tree come from one evaluation
of the heads, on the hidden state of the token before the root. Drafts are point masses: lossless
at any temperature, unless the paper's typical acceptance is asked for.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch

from specbench.costs import Cost
from specbench.drafter_costs import Draft, heads_cost
from specbench.growing import likeliest
from specbench.learned.medusa import load_heads
from specbench.learned.shipped import missing, weights_for
from specbench.method import Batch, Budget, Method, MethodConfig, Proposal, Row, Typical, Verdict
from specbench.ranks import RankTree
from specbench.target import FINAL, Target, fingerprint, packing
from specbench.training.medusa import MedusaRecipe


@dataclass(frozen=True, kw_only=True)
class MedusaConfig(MethodConfig):
    """Knobs of Medusa.

    Args:
        weights: folder or Hub name of the heads; empty for those that come with the project.
        tree: the tree of ranks: ``1,7,6`` (dense), a JSON list of paths or the name of a file that
            holds one; empty for the one that the heads were calibrated to. The nodes that the
            budget leaves room for are taken.
        typical: accept by the paper's typical acceptance instead: lossy, except at T=0.
        epsilon, delta: its thresholds.
    """

    depth: int = 4
    max_nodes: int = 6
    weights: str = ""
    tree: str = ""
    typical: bool = False
    epsilon: float = 0.09
    delta: float = 0.3

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.epsilon <= 0 or self.delta <= 0:
            raise ValueError(
                f"epsilon {self.epsilon}, delta {self.delta} are out of range; valid: above 0"
            )

    @property
    def drafts_trees(self) -> bool:
        """Of ranks."""
        return True


class _Guesses(NamedTuple):
    """By row, level and rank: tokens, and the values that they are ranked by."""

    tokens: list[list[list[int]]]
    values: list[list[list[float]]]


class Medusa(Method):
    """Heads draft a tree of ranks."""

    Config = MedusaConfig
    Recipe = MedusaRecipe
    trials: ClassVar = {"tree": ("1,1,1,1", "1,3,2")}
    taps = (FINAL,)
    config: MedusaConfig

    def __init__(self, target: Target, config: MedusaConfig) -> None:
        super().__init__(target, config)
        weights = weights_for("medusa", config.weights, target.name)
        self.heads, self.tree = load_heads(weights, target)
        self.fingerprint = fingerprint(self.heads)
        if config.tree:
            self.tree = RankTree.parse(config.tree)
            _check_tree(self.tree, self.heads.num_heads, self._vocab_size)
        else:
            self.tree = self.tree.with_ranks(self._vocab_size)
        self._num_bytes = sum(p.numel() * p.element_size() for p in self.heads.parameters())
        packing.pack_for(self.heads, target.dtype, target.device)
        if config.typical:
            self.typical = Typical(epsilon=config.epsilon, delta=config.delta)
        self.hidden: list[torch.Tensor | None] = []
        """By row, the hidden state [h] of the token before the root; None while it has not run."""

    @classmethod
    def lacks(cls, config: MethodConfig, target: str) -> str:
        """The heads."""
        assert isinstance(config, MedusaConfig)
        return missing("medusa", config.weights, target)

    @property
    def _vocab_size(self) -> int:
        ids_D = self.heads.ids_D
        return self.target.vocab_size if ids_D is None else len(ids_D)

    @property
    def label(self) -> str:
        """How many heads, and whose."""
        source = f" of {self.config.weights}" if self.config.weights else ""
        return f"{self.heads.num_heads} heads{source}"

    @property
    def num_extra_bytes(self) -> int:
        """The heads' weights."""
        return self._num_bytes

    def draft_cost(self, draft: Draft) -> Cost:
        """The heads of the tree's levels."""
        heads = self.heads
        own_heads, hidden = bool(heads.lm_heads), self.target.hidden_size
        return heads_cost(hidden, heads.num_layers, self._vocab_size, draft, own_heads=own_heads)

    def start(self, rows: Sequence[Row], taps: Sequence[Mapping[int, torch.Tensor]]) -> None:
        """Keeps the hidden state of each prompt's last token but one."""
        self.hidden += [tap[FINAL][0, -1].clone() if FINAL in tap else None for tap in taps]

    def propose(self, batch: Batch, budgets: Sequence[Budget]) -> Proposal:
        """The tree's guesses; nothing where no token has run yet."""
        shapes = [
            self.tree.within(*(Budget(0, 0) if hidden is None else budget))
            for hidden, budget in zip(self.hidden, budgets, strict=True)
        ]
        drafting = [row for row, shape in enumerate(shapes) if shape.ranks]
        drafted: list[list[int]] = [[] for _ in shapes]
        chances: list[list[float]] = [[] for _ in shapes]
        if drafting:
            num_levels = max(shapes[row].tree.depth for row in drafting)
            num_ranks = max(max(shapes[row].ranks) for row in drafting) + 1
            hidden = [state for row in drafting if (state := self.hidden[row]) is not None]
            guesses = self._guess(torch.stack(hidden), num_levels, num_ranks)
            for row, tokens, logps in zip(drafting, *guesses, strict=True):
                tree, ranks = shapes[row]
                places = [(d - 1, rank) for d, rank in zip(tree.depths[1:], ranks, strict=True)]
                drafted[row] = [tokens[level][rank] for level, rank in places]
                if self.drawer.rates:
                    chances[row] = [math.exp(logps[level][rank]) for level, rank in places]
        trees = [shape.tree for shape in shapes]
        rated = chances if self.drawer.rates else None
        return Proposal.from_rows(batch.rows, trees, drafted, chances=rated)

    @torch.inference_mode()
    def _guess(self, hidden_Mh: torch.Tensor, num_levels: int, num_ranks: int) -> _Guesses:
        """The likeliest tokens; where draws are rated, with their log-probabilities."""
        best = likeliest(self.heads(hidden_Mh, num_levels), num_ranks, self.drawer.rates)
        ids_MKR = best.indices if self.heads.ids_D is None else self.heads.ids_D[best.indices]
        return _Guesses(ids_MKR.tolist(), best.values.tolist())

    def update(self, verdict: Verdict) -> None:
        """Keeps the hidden state of each last accepted node: the next token after it is the new
        root."""
        last = torch.tensor([path[-1] for path in verdict.paths])
        self.hidden = list(verdict.taps[FINAL][torch.arange(len(last)), last].unbind())

    def keep(self, rows: Sequence[int]) -> None:
        """Keeps the rows' hidden states."""
        self.hidden = [self.hidden[row] for row in rows]

    def reset(self) -> None:
        """Forgets all rows."""
        self.hidden = []

    def describe(self) -> dict[str, Any]:
        """The settings, and what drafts."""
        return super().describe() | {
            "num_heads": self.heads.num_heads,
            "draft_vocab_size": self._vocab_size,
            "tree_paths": [list(path) for path in self.tree.paths[: self.config.max_nodes]],
        }


def _check_tree(tree: RankTree, num_heads: int, vocab_size: int) -> None:
    """Refuses a tree that asks for more than the heads have.

    Raises:
        ValueError: it is deeper than there are heads, or takes more guesses than there are tokens.
    """
    if tree.depth > num_heads:
        raise ValueError(
            f"medusa: a tree of depth {tree.depth} needs as many heads; these are {num_heads}"
        )
    if tree.num_ranks > vocab_size:
        raise ValueError(
            f"medusa: the tree takes {tree.num_ranks} guesses at a token; these heads know "
            f"{vocab_size} tokens"
        )
