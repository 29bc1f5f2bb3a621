"""Self-speculation: the target drafts for itself with some of its layers passed by.

Three ways, one mechanism. An exit at layer e passes by all layers from e on (LayerSkip: Elhoushi et
al. 2024). A trained exit does so too, and an adapter takes their place (Kangaroo: Liu et al. 2024).
Otherwise a set of middle layers is passed by, chosen by a short calibration, with nothing trained
(Draft & Verify: Zhang et al. 2024; SWIFT: Xia et al. 2025). Drafts write to the target's own cache.
The layers before the first one that is passed by compute just what the target would, so
verification resumes behind them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from specbench.costs import Cost, shape_of
from specbench.drafter_costs import Draft, short_stack_cost
from specbench.drafting import BranchingConfig, draft_tree
from specbench.learned.exit_adapter import ExitDrafter, load_exit_adapter
from specbench.learned.shipped import shipped_weights
from specbench.method import Batch, Budget, Method, Proposal, Row, Verdict, pad_rows
from specbench.target import Forward, Resume, Target, fingerprint
from specbench.training.exit_adapter import ExitAdapterRecipe
from specbench.tree import Tree

_UNTRAINED = "none"

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
        weights: folder or Hub name of a trained exit, ours or Kangaroo's; empty for the one that
            comes with the project for this target, if there is one and no layers are named here;
            ``none`` to draft without training.
        exit_layer: leave the stack after this many layers; 0 for where a trained exit stands, or,
            without training, passes by middle layers instead.
        skip: the layers to pass by; empty and no ``exit_layer``: choose them by calibration.
        num_skipped: how many layers calibration passes by; 0 lets it choose that too.
        threshold: draft no further behind a token drawn while the likeliest one had less
            probability than this (Kangaroo's double early exit).
    """

    depth: int = 1
    branching: tuple[int, ...] = (4,)
    weights: str = ""
    exit_layer: int = 0
    skip: tuple[int, ...] = ()
    num_skipped: int = 0
    threshold: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.exit_layer < 0 or self.num_skipped < 0 or any(layer < 0 for layer in self.skip):
            raise ValueError("exit_layer, skip and num_skipped are out of range; valid: 0 or more")
        if self.exit_layer and self.skip:
            raise ValueError("exit_layer and skip exclude each other; valid: one of them")
        if self.weights not in ("", _UNTRAINED) and (self.skip or self.num_skipped):
            raise ValueError(
                "weights and skip or num_skipped exclude each other; valid: one of them"
            )
        if not 0 <= self.threshold <= 1:
            raise ValueError(f"threshold {self.threshold} is out of range; valid: 0..1")


class EarlyExit(Method):
    """The target without some of its layers drafts for the whole one."""

    Config = EarlyExitConfig
    Recipe = ExitAdapterRecipe
    config: EarlyExitConfig

    def __init__(self, target: Target, config: EarlyExitConfig) -> None:
        super().__init__(target, config)
        self.exit: ExitDrafter | None = None
        if weights := _weights(target, config):
            adapter = load_exit_adapter(weights, target, config.exit_layer)
            self.fingerprint = fingerprint(adapter)
            self.exit = ExitDrafter(target, adapter)
            self.skip = frozenset(range(adapter.exit_layer, target.num_layers))
            self.taps = (adapter.exit_layer - 1,)
        else:
            self.skip = _layers_to_skip(target, config)

    @property
    def label(self) -> str:
        """Which layers draft."""
        if self.exit or self.config.exit_layer:
            label = f"exit after layer {min(self.skip)} of {self.target.num_layers}"
            return f"trained {label}" if self.exit else label
        return f"{len(self.skip)} of {self.target.num_layers} layers passed by"

    @property
    def num_extra_bytes(self) -> int:
        """The trained exit's weights."""
        return self.exit.num_bytes if self.exit else 0

    @property
    def resumed_layers(self) -> int:
        """Those in front of the first one passed by."""
        return min(self.skip)

    def draft_cost(self, draft: Draft) -> Cost:
        """The layers that are not passed by, and what a trained exit has behind them."""
        adapter = None
        if self.exit:
            config, vocabulary = self.exit.adapter.config, self.exit.vocabulary
            adapter = shape_of(config.to_dict())
            adapter = replace(
                adapter,
                vocab=len(vocabulary) if vocabulary else self.target.vocab_size,
                inner=adapter.inner if self.exit.adapter.layer.full else 0,
            )
        num_layers = self.target.num_layers - len(self.skip)
        return short_stack_cost(
            self.target.shape,
            draft,
            num_layers=num_layers,
            resumed=self.resumed_layers,
            adapter=adapter,
        )

    def start(self, rows: Sequence[Row], taps: Sequence[Mapping[int, torch.Tensor]]) -> None:
        """Shows a trained exit the prompts."""
        if self.exit:
            for hidden in taps:
                self.exit.start(hidden.get(self.taps[0]))

    def propose(self, batch: Batch, budgets: Sequence[Budget]) -> Proposal:
        """A chain or tree from the shortened stack's logits."""
        if not any(budget.depth for budget in budgets):
            return Proposal.nothing(batch.rows)
        stack = _ShortStack(self.target, batch, self.skip, self.exit)
        roots_B1 = torch.tensor([[row.tokens[-1]] for row in batch.rows])
        logits_B1V = stack.expand(roots_B1, [Tree.chain(0)] * len(roots_B1), [0] * len(roots_B1))
        proposal = draft_tree(
            batch.rows,
            budgets,
            self.config.branching,
            self.exit.drawer(self.drawer) if self.exit else self.drawer,
            logits_B1V,
            stack.expand,
            self.config.threshold,
        )
        return stack.resumable(proposal)

    def update(self, verdict: Verdict) -> None:
        """Shows a trained exit what was accepted."""
        if self.exit:
            self.exit.commit(verdict.paths, verdict.taps[self.taps[0]])

    def keep(self, rows: Sequence[int]) -> None:
        """Keeps what a trained exit knows of the rows."""
        if self.exit:
            self.exit.keep(rows)

    def reset(self) -> None:
        """Forgets all rows."""
        self.keep([])

    def describe(self) -> dict[str, Any]:
        """The settings, which layers are passed by, and which weights draft."""
        return super().describe() | {
            "layers_passed_by": sorted(self.skip),
        }


class _ShortStack:
    """The target without some layers, on a batch's own cache, for one step; a trained exit reads
    what it says, where there is one.

    It collects each node's hidden state in front of the first layer that is passed by.
    """

    def __init__(
        self, target: Target, batch: Batch, skip: frozenset[int], trained: ExitDrafter | None
    ) -> None:
        self.target, self.batch, self.skip, self.trained = target, batch, skip, trained
        self.first_skipped = min(skip)
        self.hidden: list[list[torch.Tensor]] = [[] for _ in batch.rows]
        """By row, [n, h] of the nodes of each call."""

    def expand(
        self, tokens_BM: torch.Tensor, trees: Sequence[Tree], starts: Sequence[int]
    ) -> torch.Tensor:
        """Logits [B, M, V] of the trees' nodes from ``starts`` on; of a trained exit, over its own
        vocabulary."""
        if self.trained is None:
            return self._run(tokens_BM, trees, starts, self.skip, slice(None)).logits_BMV
        forward = self._run(tokens_BM, trees, starts, self.skip, slice(0))
        return self.trained.logits(forward.taps[self.first_skipped - 1], trees, starts)

    def _run(
        self,
        tokens_BM: torch.Tensor,
        trees: Sequence[Tree],
        starts: Sequence[int],
        skip: frozenset[int],
        logits_at: slice,
    ) -> Forward:
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
                self.hidden[row].append(tapped_BMh[row, : len(tree) - start])
        return forward

    def resumable(self, proposal: Proposal) -> Proposal:
        """The proposal with the hidden states to resume from.

        The last level drafted nothing, so its nodes have yet to run through the first layers.
        """
        if not self.first_skipped:
            return proposal
        starts = [sum(map(len, parts)) for parts in self.hidden]
        tokens = [
            row[start : len(tree)]
            for row, tree, start in zip(
                proposal.tokens_BN.tolist(), proposal.trees, starts, strict=True
            )
        ]
        if any(tokens):
            rest = frozenset(range(self.first_skipped, self.target.num_layers))
            self._run(pad_rows(tokens), proposal.trees, starts, rest, slice(0))
        hidden_BNh = pad_sequence([torch.cat(parts) for parts in self.hidden], batch_first=True)
        return replace(proposal, resume=Resume(self.first_skipped, hidden_BNh))


def _weights(target: Target, config: EarlyExitConfig) -> str:
    """The trained exit that drafts; empty for none."""
    if config.weights == _UNTRAINED:
        return ""
    if config.weights or config.exit_layer or config.skip or config.num_skipped:
        return config.weights
    return shipped_weights("early_exit", target.name)


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
