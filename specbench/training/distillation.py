"""What the recipes share that teach a drafter the target's next-token distribution.

Shapes: B sequences, T tokens, M predicted tokens, h hidden, V the target's vocabulary, D the
drafter's.
"""

from abc import abstractmethod
from pathlib import Path
from typing import ClassVar

import torch

from specbench.learned.vocabulary import DraftVocabulary, frozen_head
from specbench.target import Target
from specbench.training.losses import DraftTargets
from specbench.training.recipe import DRAFT_VOCABULARY, Options, Recipe, Sequences, draft_vocabulary


class Distillation(Recipe):
    """Soft cross entropy with the target's distribution over the draft vocabulary, renormalised, at
    every token that the target wrote and the drafter can.

    The whole head is taken where the draft vocabulary is as large as the target's.
    """

    variation: ClassVar[float] = 0.0
    """The weight of the total variation beside the cross entropy."""

    def __init__(self, target: Target, options: Options) -> None:
        super().__init__(target, options)
        ids_D = draft_vocabulary(options.token_counts, options.vocab or DRAFT_VOCABULARY)
        ids_D = ids_D.to(target.device)
        reduced = len(ids_D) < target.vocab_size
        self.vocabulary = DraftVocabulary(ids_D, target.vocab_size) if reduced else None
        self.head = frozen_head(target, ids_D, torch.float32)
        self.targets = DraftTargets(target, ids_D)

    @abstractmethod
    def hidden(self, batch: Sequences) -> torch.Tensor:
        """The drafter's hidden states [B, T, h] for the head, float32; that of a token predicts the
        next."""

    def loss(self, batch: Sequences) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """The mean loss of a token, and ``acc1``: the share of all written tokens that the
        likeliest guess gets right, also those that the drafter cannot draft."""
        positions_E = torch.arange(1, batch.tokens_BT.shape[1], device=batch.tokens_BT.device)
        found = self.targets.of(batch).at(positions_E)
        logits_MD = self.head(self.hidden(batch)[found.row_M, found.entry_M])
        return found.loss(logits_MD, self.variation), {"acc1": found.accuracy(logits_MD)}

    @abstractmethod
    def write(self, folder: Path) -> None: ...
