"""Drafters of the kit: simple, right, and able, to check a loop with and to break."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from specbench.drafting import BranchingConfig, draft_tree
from specbench.method import Batch, Budget, Drawer, Method, MethodConfig, Proposal, Row, Verdict
from specbench.sampling import position_key, uniform
from specbench.target import KVCache, Target
from specbench.tree import Tree


class Scripted(Method):
    """Drafts a chain of the tokens that a script has for the next positions of a request's
    output."""

    def __init__(self, target: Target, script: Mapping[str, Sequence[int]]) -> None:
        super().__init__(target, MethodConfig())
        self.script = script

    def propose(self, batch: Batch, budgets: Sequence[Budget]) -> Proposal:
        """The next tokens of each script, as many as the budget allows."""
        drafted = [
            self.draft(row, budget.depth) for row, budget in zip(batch.rows, budgets, strict=True)
        ]
        return Proposal.from_rows(batch.rows, [Tree.chain(len(d)) for d in drafted], drafted)

    def draft(self, row: Row, depth: int) -> list[int]:
        """The next tokens of a row's script."""
        begin = len(row.output)
        return list(self.script[row.request.id][begin : begin + depth])


class Oracle(Scripted):
    """Knows the output, and drafts each next token right with a chance that depends on its depth.

    Args:
        script: the output of each request.
        law: by depth, the chance that the token is right if those before it are.
    """

    def __init__(
        self, target: Target, script: Mapping[str, Sequence[int]], law: Sequence[float]
    ) -> None:
        super().__init__(target, script)
        self.law = law

    def draft(self, row: Row, depth: int) -> list[int]:
        """The next tokens, some of them replaced by wrong ones."""
        tokens = super().draft(row, depth)
        position = len(row.tokens)
        for i, (token, chance) in enumerate(zip(tokens, self.law, strict=False)):
            key = position_key(row.request.key, position + i, "oracle")
            if float(uniform([key], torch.tensor([0]))) >= chance:
                tokens[i] = (token + 1) % self.target.vocab_size
        return tokens


@dataclass(frozen=True, kw_only=True)
class BigramConfig(BranchingConfig):
    """Knobs of the bigram drafter.

    Args:
        astray: draft from what the target says after another token, so that most is refused.
    """

    astray: bool = False


class Bigram(Method):
    """Drafts a chain or tree from what the target says after each token alone."""

    Config = BigramConfig
    config: BigramConfig

    def __init__(self, target: Target, config: BigramConfig) -> None:
        super().__init__(target, config)
        tokens_V1 = torch.arange(target.vocab_size)[:, None]
        cache = target.new_cache(len(tokens_V1))
        for _ in tokens_V1:
            cache.add_row()
        trees = [Tree.chain(0)] * len(tokens_V1)
        logits_VV = target.forward(tokens_V1, trees, cache).logits_BMV[:, 0].float()
        self.logits_VV = logits_VV.roll(1, 0) if config.astray else logits_VV

    def propose(self, batch: Batch, budgets: Sequence[Budget]) -> Proposal:
        """Drawn or likeliest tokens."""
        return self.draft(batch, budgets, self.drawer)

    def draft(self, batch: Batch, budgets: Sequence[Budget], drawer: Drawer) -> Proposal:
        """The same with another drawer."""
        roots_B1 = torch.tensor([row.tokens[-1:] for row in batch.rows])
        return draft_tree(
            batch.rows,
            budgets,
            self.config.branching,
            drawer,
            self.logits_VV[roots_B1],
            lambda tokens_BM, trees, starts: self.logits_VV[tokens_BM],
        )


@dataclass(frozen=True, kw_only=True)
class ShadowConfig(MethodConfig):
    """Knobs of the shadow.

    Args:
        passed_by: the target's layers that it passes by.
    """

    passed_by: tuple[int, ...] = (3,)


class Shadow(Method):
    """The target drafts chains for itself, on caches of its own; it never runs its last token."""

    Config = ShadowConfig
    config: ShadowConfig

    def __init__(self, target: Target, config: ShadowConfig) -> None:
        super().__init__(target, config)
        self.skip = frozenset(config.passed_by) & set(range(target.num_layers))
        self.caches: list[KVCache] = []
        self.num_run: list[int] = []
        """By row, the nodes of this step's chain that it ran, the root among them."""

    def start(self, rows: Sequence[Row], taps: Sequence[Mapping[int, torch.Tensor]]) -> None:
        """Caches of one row, empty yet."""
        for _ in rows:
            self.caches.append(self.target.new_cache(1))
            self.caches[-1].add_row()

    def propose(self, batch: Batch, budgets: Sequence[Budget]) -> Proposal:
        """A chain for each row."""
        self.num_run, drafts, logq = [], [], []
        for row, cache, budget in zip(batch.rows, self.caches, budgets, strict=True):
            unseen = row.tokens[cache.lengths[0] : -1]
            self.target.prefill(unseen, cache, 0, skip=self.skip)
            tokens, row_logq = row.tokens[-1:], dict[int, torch.Tensor]()
            for depth in range(min(budget)):
                draws = self.drawer.draw(self._logits(tokens, cache), row, len(row.tokens) + depth)
                if draws.logq_V is not None:
                    row_logq[depth] = draws.logq_V
                tokens = tokens + draws.tokens
            drafts.append(tokens[1:])
            logq.append(row_logq)
            self.num_run.append(len(tokens) - 1)
        return Proposal.from_rows(batch.rows, [Tree.chain(len(d)) for d in drafts], drafts, logq)

    def _logits(self, tokens: Sequence[int], cache: KVCache) -> torch.Tensor:
        """After the last of a chain's tokens, the others of which the cache holds."""
        last = len(tokens) - 1
        forward = self.target.forward(
            torch.tensor([tokens[-1:]]), [Tree.chain(last)], cache, start=last, skip=self.skip
        )
        return forward.logits_BMV[0, 0]

    def update(self, verdict: Verdict) -> None:
        """Keeps the accepted nodes that it ran."""
        for cache, path, num_run in zip(self.caches, verdict.paths, self.num_run, strict=True):
            cache.extend(0, min(len(path), num_run))

    def keep(self, rows: Sequence[int]) -> None:
        """Keeps the rows' caches."""
        self.caches = [self.caches[row] for row in rows]

    def reset(self) -> None:
        """Forgets all caches."""
        self.caches = []
