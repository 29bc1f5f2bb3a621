"""What the recipes share that teach a drafter the target's next-token distribution.

Shapes: B sequences, T tokens, M predicted tokens, h hidden, V the target's vocabulary, D the
drafter's.
"""

from abc import abstractmethod
from pathlib import Path
from typing import ClassVar

import torch

from specbench.learned.vocabulary import DraftVocabulary, full_head
from specbench.target import FINAL, Target
from specbench.training.recipe import Options, Recipe, Sequences, draft_vocabulary


class Distillation(Recipe):
    """Soft cross entropy with the target's distribution over the draft vocabulary, renormalised, at
    every token that the target wrote and the drafter can.

    The whole head is taken where the draft vocabulary is as large as the target's.
    """

    default_vocab: ClassVar[int] = 16384
    variation: ClassVar[float] = 0.0
    """The weight of the total variation beside the cross entropy; 1 minus it is the chance that a
    drawn draft is accepted (Leviathan et al. 2023, corollary 3.6)."""

    def __init__(self, target: Target, options: Options) -> None:
        super().__init__(target, options)
        ids_D = draft_vocabulary(options.token_counts, options.vocab or self.default_vocab)
        ids_D = ids_D.to(target.device)
        self.vocabulary: DraftVocabulary | None = None
        if len(ids_D) < target.vocab_size:
            self.vocabulary = DraftVocabulary(ids_D, target.vocab_size)
            self.head = self.vocabulary.head(target, torch.float32)
        else:
            self.head = full_head(target, torch.float32)
        self.draft_ids_V = torch.full((target.vocab_size,), -1, device=target.device)
        self.draft_ids_V[ids_D] = torch.arange(len(ids_D), device=target.device)

    @abstractmethod
    def hidden(self, batch: Sequences) -> torch.Tensor:
        """The drafter's hidden states [B, T, h] for the head, float32; that of a token predicts the
        next."""

    def loss(self, batch: Sequences) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """The mean loss of a token, and ``acc1``: the share of all written tokens that the
        likeliest guess gets right, also those that the drafter cannot draft."""
        written_BT = batch.written_BT[:, 1:]
        next_M = self.draft_ids_V[batch.tokens_BT[:, 1:][written_BT]]
        known_M = next_M >= 0
        logits_MD = self.head(self.hidden(batch)[:, :-1][written_BT][known_M]).float()
        with torch.no_grad():
            final_Mh = batch.hidden[FINAL][:, :-1][written_BT][known_M]
            p_MD = self.head(final_Mh.float()).float().softmax(-1)
            right = (logits_MD.argmax(-1) == next_M[known_M]).sum()
        loss = distance(logits_MD, p_MD, self.variation) / max(1, len(p_MD))
        return loss, {"acc1": right / max(1, len(next_M))}

    @abstractmethod
    def write(self, folder: Path) -> None: ...


def distance(logits_MD: torch.Tensor, p_MD: torch.Tensor, variation: float = 0.0) -> torch.Tensor:
    """The summed cross entropy of a drafter's logits with the target's distribution, and
    ``variation`` times their total variation."""
    logq_MD = logits_MD.log_softmax(-1)
    loss = -(p_MD * logq_MD).sum()
    if variation:
        loss = loss + variation * (p_MD - logq_MD.exp()).abs().sum() / 2
    return loss
