"""How Medusa's heads are trained: on the target's own distribution at each token ahead.

Shapes: B sequences, T tokens, M predictions, K heads, R ranks, D draft vocabulary.
"""

from collections.abc import Iterable
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from specbench.learned.medusa import MedusaHeads, save_heads
from specbench.learned.vocabulary import frozen_head
from specbench.ranks import RankTree
from specbench.target import FINAL, Target
from specbench.training.losses import DraftTargets
from specbench.training.recipe import DRAFT_VOCABULARY, Options, Recipe, Sequences, draft_vocabulary

_NUM_HEADS = 4
_NUM_RANKS = 16
_TREE_NODES = 128
_DECAY = 0.8
_PLACES_AT_ONCE = 512


class MedusaRecipe(Recipe):
    """Trains heads on a frozen copy of the target's head, cut to a draft vocabulary.

    The loss is the cross entropy of each head against the target's distribution after the tokens
    before, renormalised over the draft vocabulary, where the target's token is in it; head k
    weighs 0.8^k (Cai et al. 2024, section 2.2.1, with soft targets). ``options.unroll`` is the
    number of heads, ``options.num_layers`` that of blocks in each.
    """

    taps = (FINAL,)
    uses = frozenset({"unroll", "layers"})
    module: MedusaHeads

    def __init__(self, target: Target, options: Options) -> None:
        super().__init__(target, options)
        ids_D = draft_vocabulary(options.token_counts, options.vocab or DRAFT_VOCABULARY).to(
            target.device
        )
        self.module = MedusaHeads(
            target.hidden_size, options.unroll or _NUM_HEADS, options.num_layers or 1
        ).to(target.device)
        self.module.ids_D = ids_D
        self.module.lm_head = frozen_head(target, ids_D, torch.float32)
        self.targets = DraftTargets(target, ids_D)
        self.calibration: dict[str, Any] = {}

    def loss(self, batch: Sequences) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """The weighted mean over heads, in nats, and each head's share of right first guesses."""
        hidden_BTh, wanted = batch.hidden[FINAL], self.targets.of(batch)
        position_T = torch.arange(hidden_BTh.shape[1], device=hidden_BTh.device)
        total, weights, shown = torch.zeros((), device=hidden_BTh.device), 0.0, {}
        for head in range(self.module.num_heads):
            # The target's own head says the next token, the first of these the one after that.
            found = wanted.at(position_T + 2 + head)
            hidden_Mh = hidden_BTh[found.row_M, found.entry_M].float()
            logits_MD = self.module.logits(head, hidden_Mh)
            total = total + _DECAY**head * found.loss(logits_MD)
            weights += _DECAY**head
            shown[f"acc{head + 1}"] = found.accuracy(logits_MD)
        return total / weights, shown

    def calibrate(self, batches: Iterable[Sequences]) -> None:
        """Measures the heads on held-out sequences; `write` adds what the tree is built from."""
        found = [guess_ranks(self.module, batch) for batch in batches]
        if not sum(map(len, found)):
            return
        ranks_MK = torch.cat(found)
        seen = [
            list(takewhile(lambda rank: 0 <= rank < _NUM_RANKS, ranks))
            for ranks in ranks_MK.tolist()
        ]
        self.calibration = {
            "rank_accuracy": rank_accuracy(ranks_MK),
            "tree": RankTree.from_counts(seen, _TREE_NODES).paths,
        }

    def write(self, folder: Path) -> None:
        """Writes "version 2" heads with their draft vocabulary and calibration."""
        save_heads(
            self.module,
            folder,
            {
                "base_model_name_or_path": self.target.name,
                "hidden_size": self.target.hidden_size,
                "vocab_size": self.target.vocab_size,
                **self.calibration,
            },
        )


@torch.no_grad()
def guess_ranks(heads: MedusaHeads, batch: Sequences) -> torch.Tensor:
    """The rank of the right token under each head, int64 [M, K], at each place where a step could
    draft the target's own tokens: 16 where no guess is right, -1 from where on the target wrote no
    more."""
    num_heads = heads.num_heads
    tokens_BT = F.pad(batch.tokens_BT, (0, num_heads))
    written_BT = F.pad(batch.written_BT, (0, num_heads))
    row_M, first_M = batch.written_BT[:, 2:].nonzero(as_tuple=True)
    index_MK = first_M[:, None] + 2 + torch.arange(num_heads, device=first_M.device)
    token_MK = tokens_BT[row_M[:, None], index_MK]
    written_MK = written_BT[row_M[:, None], index_MK].cumprod(1).bool()
    hidden_Mh = batch.hidden[FINAL][row_M, first_M].float()
    starts = range(0, max(len(token_MK), 1), _PLACES_AT_ONCE)
    places = [slice(start, start + _PLACES_AT_ONCE) for start in starts]
    ranks = [_ranks(heads, hidden_Mh[some], token_MK[some]) for some in places]
    return torch.cat(ranks).masked_fill(~written_MK, -1)


def _ranks(heads: MedusaHeads, hidden_Mh: torch.Tensor, token_MK: torch.Tensor) -> torch.Tensor:
    assert heads.ids_D is not None
    num_ranks = min(_NUM_RANKS, len(heads.ids_D))
    guess_MKR = heads.ids_D[heads(hidden_Mh).topk(num_ranks).indices]
    is_right_MKR = guess_MKR == token_MK[..., None]
    return is_right_MKR.int().argmax(-1).masked_fill(~is_right_MKR.any(-1), _NUM_RANKS)


def rank_accuracy(ranks_MK: torch.Tensor) -> list[list[float]]:
    """How often the guess of each rank is right, by head and rank, from `guess_ranks`."""
    accuracy = []
    for ranks_M in ranks_MK.unbind(1):
        counts_R = ranks_M[ranks_M >= 0].bincount(minlength=_NUM_RANKS + 1)
        share_R = counts_R[:_NUM_RANKS] / counts_R.sum().clamp_min(1)
        accuracy.append([round(share, 5) for share in share_R.tolist()])
    return accuracy
