"""The contract between a learned method and the trainer: what is trained, on which hidden states,
with which loss.

A method that can be trained names its recipe in `Method.Recipe`. Shapes: B sequences, T tokens, h
hidden.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from torch import nn

from specbench.target import Target

DRAFT_VOCABULARY = 12288
"""Tokens that a reduced head may draft, if the user does not say."""


@dataclass(frozen=True)
class Sequences:
    """Prompts with the target's own answers, padded on the right.

    Args:
        tokens_BT: int64.
        written_BT: bool: the token is the target's own. Only predictions of such tokens count.
        hidden: the target's hidden states [B, T, h] by tap, float32 or bfloat16; at `FINAL` those
            after the final norm. Zeros at padding.
    """

    tokens_BT: torch.Tensor
    written_BT: torch.Tensor
    hidden: Mapping[int, torch.Tensor]


@dataclass(frozen=True)
class Options:
    """What a user may say about a recipe.

    Args:
        vocab: how many tokens a reduced head may draft.
        token_counts: [V], how often the target wrote each token in the training data.
        unroll: steps that a drafter is unrolled in training, where it feeds on its own outputs.
        num_layers: decoder layers, where there is a choice.
        exit_layer: where the target's stack is left, where that is part of the drafter.
    """

    vocab: int
    token_counts: torch.Tensor
    unroll: int = 0
    num_layers: int = 0
    exit_layer: int = 0


class Recipe(ABC):
    """How a drafter is trained for a target.

    Args:
        target: the target; frozen.
        options: a zero stands for the recipe's own default.
    """

    taps: ClassVar[tuple[int, ...]] = ()
    uses: ClassVar[frozenset[str]] = frozenset()
    """Of ``unroll``, ``layers`` and ``exit_layer``, the settings that have a meaning for it."""
    learning_rate: ClassVar[float] = 1e-3
    module: nn.Module
    """What is trained, in float32 on the target's device; only its parameters that require a
    gradient change."""

    def __init__(self, target: Target, options: Options) -> None:
        self.target, self.options = target, options

    def needed_taps(self) -> tuple[int, ...]:
        """The target's hidden states that the loss reads."""
        return self.taps

    @abstractmethod
    def loss(self, batch: Sequences) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """The mean loss of a predicted token, and detached scalars to show: ``acc1``, ``acc2``, ...
        the share of written tokens that the drafter's likeliest guess at depth 1, 2, ... gets right
        (given the true tokens before it)."""

    def calibrate(self, batches: Iterable[Sequences]) -> None:  # noqa: B027 - an optional hook
        """Measures the trained drafter on held-out sequences, for what `write` says of it and what
        its method decides by it."""

    @abstractmethod
    def write(self, folder: Path) -> None:
        """Writes a checkpoint that the method loads."""


def draft_vocabulary(token_counts: torch.Tensor, size: int) -> torch.Tensor:
    """The ids of a reduced draft vocabulary, ascending: the tokens that the target wrote, most
    frequent first, filled up with the lowest ids (merges of byte-pair encoding come in order of
    frequency)."""
    size = min(size, len(token_counts))
    order = torch.argsort(token_counts, descending=True, stable=True)
    return order[:size].sort().values
