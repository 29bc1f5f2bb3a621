"""EAGLE: a small head drafts on the target's own hidden states (EAGLE and EAGLE-2: Li et al. 2024,
EAGLE-3: Li et al. 2025).

The head's cache holds entries of true features only. Those of drafted tokens stand on the head's
own outputs, lie behind the cache's length, and are written over: each step first runs the entries
of all tokens committed since, on the features that the verify forward gave.

Shapes: B rows, M nodes of a level, N nodes, P entries, m * w the width of the stacked taps.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from specbench.costs import Cost, shape_of
from specbench.drafter_costs import Draft, features_cost
from specbench.drafting import BranchingConfig, draft_tree
from specbench.growing import (
    ByConfidence,
    ByRank,
    Growth,
    branching_tree,
    drafted,
    likeliest,
)
from specbench.learned.eagle_files import load_eagle
from specbench.learned.layers import open_nodes
from specbench.learned.shipped import missing, weights_for
from specbench.method import Batch, Budget, Method, MethodConfig, Proposal, Row, Verdict, pad_rows
from specbench.ranks import RankTree
from specbench.target import KVCache, Target, fingerprint
from specbench.training.eagle import EagleRecipe
from specbench.tree import Tree

_TREES = ("dynamic", "static", "chain")
_DRAFTS = ("top", "drawn")
_CHUNK = 256
# EAGLE-1's tree of 25 nodes, in an order in which it can be cut anywhere: one rank down counts as
# much as one level down.
_PATHS = (
    "0 00 1 000 01 10 2 0000 001 010 100 02 11 20 3 00000 0001 002 011 020 21 30 00001 0002 021"
)
_EAGLE1 = RankTree(tuple(map(int, path)) for path in _PATHS.split())


@dataclass(frozen=True, kw_only=True)
class EagleConfig(BranchingConfig):
    """Knobs of EAGLE.

    Args:
        weights: folder or Hub name of the head; empty for the one that comes with the project.
        tree: ``dynamic``, by the head's own confidence (EAGLE-2); ``static``, by ranks (EAGLE-1);
            or ``chain``.
        top_k: of a dynamic tree, how many nodes of a level have children, and how many each.
        ranks: of a static tree, its paths, the best first: as Medusa's ``tree``; empty for
            EAGLE-1's, or what ``branching`` says.
        drafts: ``top``, the likeliest tokens; or ``drawn`` from the head's distribution, when
            sampling, for a chain or a tree by ``branching``.
    """

    depth: int = 3
    max_nodes: int = 6
    weights: str = ""
    tree: str = "dynamic"
    top_k: int = 8
    ranks: str = ""
    drafts: str = "top"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tree not in _TREES:
            raise ValueError(f"unknown tree {self.tree!r}; valid: {', '.join(_TREES)}")
        if self.drafts not in _DRAFTS:
            raise ValueError(f"unknown drafts {self.drafts!r}; valid: {', '.join(_DRAFTS)}")
        if self.top_k < 1:
            raise ValueError(f"top_k {self.top_k} is out of range; valid: 1 or more")
        if self.tree != "static" and (self.branching or self.ranks):
            raise ValueError(
                f"a {self.tree} tree has no branching and no ranks; valid: tree=static"
            )
        if self.branching and self.ranks:
            raise ValueError("branching and ranks exclude each other; valid: one of them")
        if self.ranks:
            RankTree.parse(self.ranks)
        if self.drafts == "drawn" and not (self.tree == "chain" or self.branching):
            raise ValueError(
                "drawn drafts need a chain or a static tree with branching; valid: drafts=top"
            )

    @property
    def drafts_trees(self) -> bool:
        """Unless it is told to draft a chain."""
        return self.tree != "chain"


class Eagle(Method):
    """An EAGLE head drafts for the target."""

    Config = EagleConfig
    Recipe = EagleRecipe
    config: EagleConfig

    def __init__(self, target: Target, config: EagleConfig) -> None:
        super().__init__(target, config)
        self.head = load_eagle(weights_for("eagle", config.weights, target.name), target)
        self.fingerprint = fingerprint(self.head)
        self.num_parameters = self.head.num_parameters
        self.head.for_inference()
        self.taps = tuple(dict.fromkeys(self.head.shape.taps))
        self.cache = KVCache(1)
        self.pending: list[list[torch.Tensor]] = []
        """By row, the stacked hidden states [P, m * w] of the entries that are still to run, in
        pieces, as they came: a row may go long without a draft."""
        width = len(self.head.shape.taps) * target.hidden_size
        self.padding_1i = torch.zeros(1, width, dtype=target.dtype, device=target.device)
        ranks = RankTree.parse(config.ranks) if config.ranks else _EAGLE1
        self.ranks = ranks.with_ranks(self.head.num_draft_tokens)

    @classmethod
    def lacks(cls, config: MethodConfig, target: str) -> str:
        """The head."""
        assert isinstance(config, EagleConfig)
        return missing("eagle", config.weights, target)

    @property
    def label(self) -> str:
        """Which version, and how many tokens it may draft."""
        version = "3" if self.head.shape.fused else "2" if self.config.tree == "dynamic" else "1"
        if not self.head.reduced:
            return f"EAGLE-{version}"
        return f"EAGLE-{version}, {self.head.num_draft_tokens} draft tokens"

    @property
    def num_extra_bytes(self) -> int:
        """The head's weights, the rows of the target's own head among them."""
        return self.num_parameters * self.target.dtype.itemsize

    def describe(self) -> dict[str, Any]:
        """The settings, and what the head reads."""
        return super().describe() | {
            "taps": self.head.shape.taps,
            "num_draft_tokens": self.head.num_draft_tokens,
            "num_parameters": self.num_parameters,
        }

    def draft_cost(self, draft: Draft) -> Cost:
        """The head's entries; of a dynamic tree, as if it ran the nodes alone that have children
        in the end."""
        shape = self.head.shape
        layers = replace(shape_of(shape.config.to_dict()), vocab=self.head.num_draft_tokens)
        wide = replace(layers, width_in=2 * layers.hidden)
        if not shape.fused:
            return features_cost(layers, draft)
        if shape.all_wide or layers.num_layers == 1:
            return features_cost(wide, draft, fused_width=shape.in_width)
        first = replace(wide, num_layers=1)
        return features_cost(layers, draft, fused_width=shape.in_width, first=first)

    @torch.inference_mode()
    def start(self, rows: Sequence[Row], taps: Sequence[Mapping[int, torch.Tensor]]) -> None:
        """Runs all entries of the prompts but the last, which is left to the first step."""
        for row, hidden in zip(rows, taps, strict=True):
            index = self.cache.add_row()
            self.pending.append([])
            if hidden:
                self._run_ahead(index, row, self.head.stack(hidden)[0])

    def _run_ahead(self, index: int, row: Row, stacked_Pi: torch.Tensor) -> None:
        """Runs a row's pending entries but the last, in chunks."""
        for begin in range(0, len(stacked_Pi) - 1, _CHUNK):
            chunk = stacked_Pi[begin : min(begin + _CHUNK, len(stacked_Pi) - 1)]
            first = self.cache.lengths[index] + 1
            tokens = torch.tensor([row.tokens[first : first + len(chunk)]])
            trees = [Tree.chain(len(chunk) - 1)]
            self._run(tokens, self.head.reduce(chunk[None]), trees, [0], index)
            self.cache.extend(index, len(chunk))
        self.pending[index] = [stacked_Pi[-1:].clone()]

    @torch.inference_mode()
    def propose(self, batch: Batch, budgets: Sequence[Budget]) -> Proposal:
        """A tree from the head's logits; nothing for a row of one token, which has no feature."""
        budgets = [
            budget if pending and min(budget) > 0 else Budget(0, 0)
            for budget, pending in zip(budgets, self.pending, strict=True)
        ]
        drafting = [row for row, budget in enumerate(budgets) if budget.depth]
        if not drafting:
            return Proposal.nothing(batch.rows)
        out_B1h = self._catch_up(batch.rows, drafting)
        if self.config.drafts == "drawn" and not self.drawer.sampling.greedy:
            proposal = self._draw(batch.rows, budgets, out_B1h)
        else:
            proposal = self._grow(batch.rows, budgets, out_B1h)
        for row in drafting:
            # The root's own entry; those of the drafted nodes behind it are given up.
            self.cache.extend(row, 1)
            self.pending[row] = []
        return proposal

    def _catch_up(self, rows: Sequence[Row], drafting: Sequence[int]) -> torch.Tensor:
        """Runs the pending entries of the rows that draft, the root's last; it is then node 0
        behind the cache's length. The others get a padding root.

        Returns:
            The head's outputs [B, 1, h] at the roots.
        """
        tokens, stacked = [[0]] * len(rows), [self.padding_1i] * len(rows)
        for row in drafting:
            stacked[row] = torch.cat(self.pending[row])
            if len(stacked[row]) > _CHUNK:
                self._run_ahead(row, rows[row], stacked[row])
                (stacked[row],) = self.pending[row]
            tokens[row] = rows[row].tokens[self.cache.lengths[row] + 1 :]
            assert len(tokens[row]) == len(stacked[row])
        stacked_BPi = (
            stacked[0][None] if len(rows) == 1 else pad_sequence(stacked, batch_first=True)
        )
        trees = [Tree.chain(len(entries) - 1) for entries in tokens]
        out_BPh = self._run(pad_rows(tokens), self.head.reduce(stacked_BPi), trees, [0] * len(rows))
        for row in drafting:
            self.cache.extend(row, len(tokens[row]) - 1)
        return _pick(out_BPh, [[len(entries) - 1] for entries in tokens])

    def _run(
        self,
        tokens_BN: torch.Tensor,
        features_BNh: torch.Tensor,
        trees: Sequence[Tree],
        starts: Sequence[int],
        first_row: int = 0,
    ) -> torch.Tensor:
        """The head's outputs [B, N, h] at nodes ``starts`` and on of each tree."""
        num_nodes, device = tokens_BN.shape[1], self.target.device
        nodes = open_nodes(
            self.cache, trees, starts, num_nodes, self.target.dtype, device, first_row
        )
        out: torch.Tensor = self.head(tokens_BN.to(device), features_BNh, nodes, self.cache)
        return out

    def _grow(
        self, rows: Sequence[Row], budgets: Sequence[Budget], out_BMh: torch.Tensor
    ) -> Proposal:
        """A tree of the likeliest tokens."""
        growths = [self._growth(budget) for budget in budgets]
        self._add_children(growths, out_BMh)
        while any(growth.level for growth in growths):
            tokens = pad_rows([[node.token for node in growth.level] for growth in growths])
            features_BMh = _pick(out_BMh, [growth.parents_in_level for growth in growths])
            trees = [growth.tree for growth in growths]
            out_BMh = self._run(tokens, features_BMh, trees, [growth.start for growth in growths])
            self._add_children(growths, out_BMh)
        return drafted(rows, growths, self.drawer.rates)

    def _growth(self, budget: Budget) -> Growth:
        if self.config.tree == "dynamic":
            return ByConfidence(budget, self.config.top_k)
        if self.config.tree == "static" and not self.config.branching:
            return ByRank(self.ranks.within(*budget, by_level=True))
        return ByRank(branching_tree(self.config.branching, budget))

    def _add_children(self, growths: Sequence[Growth], out_BMh: torch.Tensor) -> None:
        """Ranks the children of the level's nodes."""
        num_children = max(growth.num_children for growth in growths)
        num_children = min(num_children, self.head.num_draft_tokens)
        scored = self.config.tree == "dynamic" or self.drawer.rates
        best = likeliest(self.head.logits(out_BMh), num_children, scored)
        tokens, scores = self.head.token_ids(best.indices).tolist(), best.values.tolist()
        for growth, tokens_MK, scores_MK in zip(growths, tokens, scores, strict=True):
            growth.grow(tokens_MK, scores_MK)

    def _draw(
        self, rows: Sequence[Row], budgets: Sequence[Budget], out_B1h: torch.Tensor
    ) -> Proposal:
        """A tree drawn from the head's distribution."""
        out, previous = out_B1h, [0] * len(rows)

        def expand(tokens_BM: torch.Tensor, trees: list[Tree], starts: list[int]) -> torch.Tensor:
            nonlocal out, previous
            parents = [
                [parent - first for parent in tree.parents[start:]]
                for tree, start, first in zip(trees, starts, previous, strict=True)
            ]
            out = self._run(tokens_BM, _pick(out, parents), trees, starts)
            previous = starts
            return self.head.over_vocabulary(self.head.logits(out))

        logits_B1V = self.head.over_vocabulary(self.head.logits(out))
        return draft_tree(rows, budgets, self.config.branching, self.drawer, logits_B1V, expand)

    @torch.inference_mode()
    def update(self, verdict: Verdict) -> None:
        """Keeps the true features of the committed nodes, for their entries to run next."""
        stacked_BPi = _pick(self.head.stack(verdict.taps), verdict.paths)
        for pending, stacked_Pi, path in zip(self.pending, stacked_BPi, verdict.paths, strict=True):
            pending.append(stacked_Pi[: len(path)])

    def keep(self, rows: Sequence[int]) -> None:
        """Keeps the rows' caches and pending entries."""
        self.cache.keep(rows)
        self.pending = [self.pending[row] for row in rows]

    def reset(self) -> None:
        """Forgets all rows; the allocated cache is used again."""
        self.keep([])


def _pick(out_BMh: torch.Tensor, index: Sequence[Sequence[int]]) -> torch.Tensor:
    """For each row, its outputs with these indices, padded: [B, N, h]."""
    index_BN = pad_rows(index).to(out_BMh.device, non_blocking=True)
    rows_B1 = torch.arange(len(index), device=out_BMh.device)[:, None]
    return out_BMh[rows_B1, index_BN]
