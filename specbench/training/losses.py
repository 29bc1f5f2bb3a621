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
    """The predictions of a batch that count, M of them, and what they should be.

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
        logits_MD = logits_MD.detach()
        best_M = logits_MD.gather(-1, self.best_M[:, None].clamp_min(0))[:, 0]
        right_M = (best_M >= logits_MD.amax(-1)) & (self.best_M >= 0)
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
    def of(self, batch: Sequences) -> "Wanted":
        """What the target says of every token that it wrote."""
        written_BT = batch.written_BT[:, 1:]
        row_M, last_M = written_BT.nonzero(as_tuple=True)
        hidden_Mh = batch.hidden[FINAL][row_M, last_M].to(self.head.weight.dtype)
        place_BT = torch.full_like(batch.tokens_BT, -1)
        place_BT[row_M, last_M + 1] = torch.arange(len(row_M), device=row_M.device)
        token_M = batch.tokens_BT[row_M, last_M + 1]
        p_MD = self.head(hidden_Mh).float().softmax(-1)
        return Wanted(place_BT, p_MD, self.index_V[token_M])


@dataclass(frozen=True)
class Wanted:
    """The target's distribution at each of the M tokens that it wrote, and the token.

    Args:
        place_BT: which of them stands at a position; -1 for none.
        p_MD: renormalised over the draft vocabulary.
        best_M: the index of the token in it, -1 for one that is not drafted.
    """

    place_BT: torch.Tensor
    p_MD: torch.Tensor
    best_M: torch.Tensor

    def at(self, positions_E: torch.Tensor) -> Predictions:
        """What entries 0, 1, ... should say of the tokens at these positions; positions beyond the
        end do not count."""
        place_BE = F.pad(self.place_BT, (0, 1), value=-1)[
            :, positions_E.clamp_max(self.place_BT.shape[1])
        ]
        row_K, entry_K = (place_BE >= 0).nonzero(as_tuple=True)
        place_K = place_BE[row_K, entry_K]
        return Predictions(row_K, entry_K, self.p_MD[place_K], self.best_M[place_K])


def mean_of(values_M: torch.Tensor, counts_M: torch.Tensor) -> torch.Tensor:
    """The mean of those that count; 0 if none does."""
    return (values_M * counts_M).sum() / counts_M.sum().clamp_min(1)
