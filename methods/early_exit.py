"""Self-speculation: the target drafts for itself with some of its layers passed by.

Two ways, one mechanism. An exit at layer e passes by all layers from e on (LayerSkip: Elhoushi et
al. 2024). Otherwise a set of middle layers is passed by, chosen by a short calibration, with
nothing trained (Draft & Verify: Zhang et al. 2024; SWIFT: Xia et al. 2025). Drafts write to the
target's own cache. The layers before the first one that is passed by compute just what the target
would, so verification resumes behind them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from specbench.drafting import BranchingConfig, draft_tree
from specbench.method import Batch, Budget, Method, Proposal, pad_rows
from specbench.target import Resume, Target
from specbench.tree import Tree

# What calibration runs on: no prompt of any workload.
_CALIBRATION_TEXT = """The committee met on Tuesday to discuss the new bridge. Engineers had found
that the old one, built in 1931, could no longer carry heavy lorries, and the town needed a safe
way across the river before winter.

def mean_and_spread(values):
    total = sum(values)
    mean = total / len(values)
    variance = sum((value - mean) ** 2 for value in values) / len(values)
    return mean, variance ** 0.5
"""


@dataclass(frozen=True, kw_only=True)
class EarlyExitConfig(BranchingConfig):
    """Knobs of self-speculation.

    Args:
        exit_layer: leave the stack after this many layers; 0 passes by middle layers instead.
        skip: the layers to pass by; empty and no ``exit_layer``: choose them by calibration.
        num_skipped: how many layers calibration passes by; 0 lets it choose that too.
    """

    depth: int = 2
    exit_layer: int = 0
    skip: tuple[int, ...] = ()
    num_skipped: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.exit_layer < 0 or self.num_skipped < 0 or any(layer < 0 for layer in self.skip):
            raise ValueError("exit_layer, skip and num_skipped are out of range; valid: 0 or more")
        if self.exit_layer and self.skip:
            raise ValueError("exit_layer and skip exclude each other; valid: one of them")


class EarlyExit(Method):
    """The target without some of its layers drafts for the whole one."""

    Config = EarlyExitConfig
    config: EarlyExitConfig

    def __init__(self, target: Target, config: EarlyExitConfig) -> None:
        super().__init__(target, config)
        self.skip = _layers_to_skip(target, config)

    @property
    def label(self) -> str:
        """Which layers draft."""
        if self.config.exit_layer:
            return f"exit after layer {self.config.exit_layer} of {self.target.num_layers}"
        return f"{len(self.skip)} of {self.target.num_layers} layers passed by"

    def propose(self, batch: Batch, budgets: Sequence[Budget]) -> Proposal:
        """A chain or tree from the shortened stack's logits."""
        if not any(budget.depth for budget in budgets):
            return Proposal.nothing(batch.rows)
        stack = _ShortStack(self.target, batch, self.skip)
        roots_B1 = torch.tensor([[row.tokens[-1]] for row in batch.rows])
        logits_B1V = stack.expand(roots_B1, [Tree.chain(0)] * len(roots_B1), [0] * len(roots_B1))
        proposal = draft_tree(
            batch.rows, budgets, self.config.branching, self.drawer, logits_B1V, stack.expand
        )
        return stack.resumable(proposal)

    def describe(self) -> dict[str, Any]:
        """The settings, and which layers are passed by."""
        return super().describe() | {"layers_passed_by": sorted(self.skip)}


class _ShortStack:
    """The target without some layers, on a batch's own cache, for one step.

    It collects each node's hidden state in front of the first layer that is passed by.
    """

    def __init__(self, target: Target, batch: Batch, skip: frozenset[int]) -> None:
        self.target, self.batch, self.skip = target, batch, skip
        self.first_skipped = min(skip)
        self.hidden: list[list[torch.Tensor]] = [[] for _ in batch.rows]

    def expand(
        self, tokens_BM: torch.Tensor, trees: Sequence[Tree], starts: Sequence[int]
    ) -> torch.Tensor:
        """Logits [B, M, V] of the trees' nodes from ``starts`` on."""
        return self._run(tokens_BM, trees, starts, self.skip, slice(None))

    def _run(
        self,
        tokens_BM: torch.Tensor,
        trees: Sequence[Tree],
        starts: Sequence[int],
        skip: frozenset[int],
        logits_at: slice,
    ) -> torch.Tensor:
        taps = (self.first_skipped - 1,) if self.first_skipped else ()
        forward = self.target.forward(
            tokens_BM,
            trees,
            self.batch.cache,
            start=starts,
            logits_at=logits_at,
            taps=taps,
            skip=skip,
        )
        for tapped_BMh in forward.taps.values():
            for row, (tree, start) in enumerate(zip(trees, starts, strict=True)):
                self.hidden[row].extend(tapped_BMh[row, : len(tree) - start])
        return forward.logits_BMV

    def resumable(self, proposal: Proposal) -> Proposal:
        """The proposal with the hidden states to resume from.

        The last level drafted nothing, so its nodes have yet to run through the first layers.
        """
        if not self.first_skipped:
            return proposal
        starts = [len(hidden) for hidden in self.hidden]
        tokens = [
            row[start : len(tree)]
            for row, tree, start in zip(
                proposal.tokens_BN.tolist(), proposal.trees, starts, strict=True
            )
        ]
        if any(tokens):
            rest = frozenset(range(self.first_skipped, self.target.num_layers))
            self._run(pad_rows(tokens), proposal.trees, starts, rest, slice(0))
        num_nodes = proposal.tokens_BN.shape[1]
        hidden_BNh = torch.stack(
            [torch.stack((row + row[:1] * num_nodes)[:num_nodes]) for row in self.hidden]
        )
        return replace(proposal, resume=Resume(self.first_skipped, hidden_BNh))


def _layers_to_skip(target: Target, config: EarlyExitConfig) -> frozenset[int]:
    """The layers that the knobs name, or those that calibration chooses.

    Raises:
        ValueError: the target has no such layer, or none would be left.
    """
    last = target.num_layers - 1
    if last == 0:
        raise ValueError("early_exit needs a target of 2 layers or more")
    if config.exit_layer:
        if config.exit_layer > last:
            raise ValueError(
                f"exit_layer {config.exit_layer} is out of range; valid for this target: 1..{last}"
            )
        return frozenset(range(config.exit_layer, target.num_layers))
    if config.skip:
        if max(config.skip) > last or len(set(config.skip)) > last:
            raise ValueError(
                f"skip {config.skip} is out of range; valid for this target: some of 0..{last}"
            )
        return frozenset(config.skip)
    if config.num_skipped > last:
        raise ValueError(
            f"num_skipped {config.num_skipped} is out of range; valid for this target: 1..{last}"
        )
    return calibrate(target, config.depth, config.num_skipped)


def calibrate(target: Target, depth: int, num_skipped: int = 0) -> frozenset[int]:
    """Chooses layers to pass by: those without which the target's argmax changes least on a short
    text.

    Layers are ranked one at a time. Of the sets of the least important ones, the one is taken
    whose agreement and share of weights promise most speed at this depth (Leviathan et al. 2023,
    theorem 3.8), or the one of ``num_skipped`` layers.
    """
    tokens = _calibration_tokens(target)
    whole_T = _argmax(target, tokens, frozenset())

    def agreement(skip: frozenset[int]) -> float:
        return float((_argmax(target, tokens, skip) == whole_T).float().mean())

    alone = {layer: agreement(frozenset([layer])) for layer in range(target.num_layers)}
    ranked = sorted(alone, key=lambda layer: (-alone[layer], layer))
    if num_skipped:
        return frozenset(ranked[:num_skipped])
    share = _share_of_one_layer(target)
    best, best_speed = frozenset(ranked[:1]), 0.0
    for size in range(2, target.num_layers // 2 + 1, 2):
        skip = frozenset(ranked[:size])
        speed = _promised_speed(agreement(skip), 1 - size * share, depth)
        if speed > best_speed:
            best, best_speed = skip, speed
    return best


def _calibration_tokens(target: Target) -> list[int]:
    """The text's tokens, or any where the target has no tokenizer."""
    ids: Sequence[int] = range(3, 99)
    if target.tokenizer is not None:
        ids = target.tokenizer(_CALIBRATION_TEXT)["input_ids"]
    return [token % target.vocab_size for token in ids[: target.max_context]]


def _argmax(target: Target, tokens: Sequence[int], skip: frozenset[int]) -> torch.Tensor:
    """The most likely next token [T] at each position, without some layers."""
    cache = target.new_cache(1, len(tokens))
    cache.add_row()
    forward = target.forward(
        torch.tensor([tokens]), [Tree.chain(len(tokens) - 1)], cache, skip=skip
    )
    return forward.logits_BMV[0].argmax(-1)


def _share_of_one_layer(target: Target) -> float:
    """The share of a step's weights that one decoder layer holds; the head counts, the embedding
    does not."""
    head = target.vocab_size * target.hidden_size
    tied = getattr(target.config, "tie_word_embeddings", False)
    layers = target.num_parameters - (head if tied else 2 * head)
    return layers / target.num_layers / (layers + head)


def _promised_speed(agreement: float, cost: float, depth: int) -> float:
    """Expected tokens of a step over its cost in target forwards."""
    tokens = sum(agreement**i for i in range(depth + 1))
    return tokens / (1 + depth * cost)
