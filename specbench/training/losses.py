"""What a drafter learns: the target's own distribution, over the tokens that it may draft.

Shapes: B sequences, T tokens, E entries of a sequence, M predictions that count, D draft
vocabulary, V vocabulary.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from specbench.learned.vocabulary import frozen_head
from specbench.target import FINAL, Target
from specbench.training.recipe import Sequences


@dataclass(frozen=True)
class Predictions:
    """The predictions of a batch that count, and what they should be.

    Args:
        row_M, entry_M: where they are made.
        p_MD: the target's distribution, renormalised over the draft vocabulary.
        best_M: the index of the token that the target wrote, -1 for one that is not drafted.
    """

    row_M: torch.Tensor
    entry_M: torch.Tensor
    p_MD: torch.Tensor
    best_M: torch.Tensor

    def loss(self, logits_MD: torch.Tensor, variation: float = 0.0) -> torch.Tensor:
        """The mean, over predictions whose token can be drafted, of the cross entropy in nats and
        ``variation`` times the total variation; 1 minus the latter is the chance that a drawn draft
        is accepted (Leviathan et al. 2023, corollary 3.6)."""
        logits_MD = logits_MD.float()
        loss_M = F.cross_entropy(logits_MD, self.p_MD, reduction="none")
        if variation:
            loss_M = loss_M + variation * (self.p_MD - logits_MD.softmax(-1)).abs().sum(-1) / 2
        return mean_of(loss_M, self.best_M >= 0)

    def accuracy(self, logits_MD: torch.Tensor) -> torch.Tensor:
        """The share of likeliest tokens that are those that the target wrote."""
        right_M = logits_MD.detach().argmax(-1) == self.best_M
        return mean_of(right_M.float(), torch.ones_like(right_M))


class DraftTargets:
    """The target's distributions over a draft vocabulary.

    Args:
        target: the target.
        ids_D: the tokens that may be drafted, ascending.
    """

    taps = (FINAL,)

    def __init__(self, target: Target, ids_D: torch.Tensor) -> None:
        self.head = frozen_head(target, ids_D)
        self.index_V = torch.full((target.vocab_size,), -1, device=target.device)
        self.index_V[ids_D.to(target.device)] = torch.arange(len(ids_D), device=target.device)

    @torch.no_grad()
    def at(self, batch: Sequences, ahead: int, num_entries: int) -> Predictions:
        """What entries 0, 1, ... should say of the token ``ahead`` + 1 places after their own
        position: the target's distribution after the token before it.

        Only where the target wrote that token.
        """
        written_BT = batch.written_BT[:, ahead + 1 : ahead + 1 + num_entries]
        row_M, entry_M = written_BT.nonzero(as_tuple=True)
        hidden_Mh = batch.hidden[FINAL][row_M, entry_M + ahead].to(self.head.weight.dtype)
        p_MD = self.head(hidden_Mh).float().softmax(-1)
        token_M = batch.tokens_BT[row_M, entry_M + ahead + 1]
        return Predictions(row_M, entry_M, p_MD, self.index_V[token_M])


def mean_of(values_M: torch.Tensor, counts_M: torch.Tensor) -> torch.Tensor:
    """The mean of those that count; 0 if none does."""
    return (values_M * counts_M).sum() / counts_M.sum().clamp_min(1)
