"""A reduced draft vocabulary: a drafter's head with only some rows of the target's.

Shapes: V the target's vocabulary, D the drafter's.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import nn

from specbench.learned.checkpoint import Checkpoint
from specbench.method import Drawer, Draws, Row
from specbench.target import Target


class DraftVocabulary:
    """The tokens that a drafter can draft.

    Args:
        ids_D: their ids in the target's vocabulary, int64, distinct.
        size: V.
    """

    def __init__(self, ids_D: torch.Tensor, size: int) -> None:
        self.ids_D, self.size = ids_D, size

    @staticmethod
    def from_ids(ids_D: torch.Tensor, checkpoint: Checkpoint, target: Target) -> "DraftVocabulary":
        """From the ids that a checkpoint lists.

        Raises:
            ValueError: they are no whole numbers, leave the target's vocabulary, or one is there
            twice.
        """
        if ids_D.dim() != 1 or ids_D.is_floating_point() or ids_D.is_complex():
            raise checkpoint.error("has a draft vocabulary that is no list of whole numbers")
        ids_D = ids_D.long()
        if not len(ids_D) or ids_D.min() < 0 or ids_D.max() >= target.vocab_size:
            raise checkpoint.error(
                "has a draft vocabulary that leaves the target's tokens, "
                f"0..{target.vocab_size - 1}"
            )
        if len(set(ids_D.tolist())) < len(ids_D):
            raise checkpoint.error("has a draft vocabulary with one token twice")
        return DraftVocabulary(ids_D.to(target.device), target.vocab_size)

    @staticmethod
    def from_offsets(
        offsets_D: torch.Tensor, checkpoint: Checkpoint, target: Target
    ) -> "DraftVocabulary":
        """From EAGLE-3's ``d2t``: draft token i is the target's token i + d2t[i].

        Raises:
            ValueError: as `from_ids`.
        """
        places_D = torch.arange(offsets_D.numel()).view(offsets_D.shape)
        return DraftVocabulary.from_ids(offsets_D + places_D, checkpoint, target)

    @staticmethod
    def of(
        tensors: dict[str, torch.Tensor], checkpoint: Checkpoint, target: Target
    ) -> "DraftVocabulary | None":
        """Takes EAGLE-3's ``d2t`` out of a checkpoint's tensors; None where the config says nothing
        of fewer tokens than the target's either.

        Raises:
            ValueError: as `from_ids`, or it has not as many as the config says.
        """
        size = checkpoint.config.get("draft_vocab_size")
        offsets_D = tensors.pop("d2t", None)
        if offsets_D is None:
            if size in (None, target.vocab_size):
                return None
            raise checkpoint.error(f"lacks d2t for its {size} draft tokens")
        found = DraftVocabulary.from_offsets(offsets_D, checkpoint, target)
        if size not in (None, len(found)):
            raise checkpoint.error(f"has d2t for {len(found)} draft tokens; its config says {size}")
        return found

    def __len__(self) -> int:
        return len(self.ids_D)

    @property
    def offsets_D(self) -> torch.Tensor:
        """``d2t``, on the CPU."""
        return self.ids_D.cpu() - torch.arange(len(self))

    @cached_property
    def ids(self) -> list[int]:
        """The ids as a list."""
        ids: list[int] = self.ids_D.tolist()
        return ids

    def head(self, target: Target, dtype: torch.dtype | None = None) -> nn.Linear:
        """These rows of the target's head, frozen; of its type by default."""
        return frozen_head(target, self.ids_D, dtype)

    def widen(self, logits_D: torch.Tensor) -> torch.Tensor:
        """Logits [V]; tokens that cannot be drafted get the lowest finite value."""
        lowest = torch.finfo(logits_D.dtype).min
        return logits_D.new_full((self.size,), lowest).index_copy_(0, self.ids_D, logits_D)

    def drawer(self, drawer: Drawer) -> Drawer:
        """A drawer that is given logits [D] and draws tokens of the target."""
        return _ReducedDrawer(drawer.sampling, self, drawer, rates=drawer.rates)


@dataclass(frozen=True, eq=False)
class _ReducedDrawer(Drawer):
    vocabulary: DraftVocabulary
    drawer: Drawer

    def draw(self, logits_V: torch.Tensor, row: Row, position: int, num_children: int = 1) -> Draws:
        """Greedy draws need only the order of the logits, which stay narrow."""
        if not self.sampling.greedy:
            return self.drawer.draw(self.vocabulary.widen(logits_V), row, position, num_children)
        drawn = self.drawer.draw(logits_V, row, position, num_children)
        return drawn._replace(tokens=[self.vocabulary.ids[token] for token in drawn.tokens])


def frozen_head(target: Target, ids_D: torch.Tensor, dtype: torch.dtype | None = None) -> nn.Linear:
    """A frozen copy of the target's head, with the rows of some tokens; of its type by default."""
    ids_D = ids_D.to(target.device)
    head = target.model.get_output_embeddings()
    assert head is not None
    weight, bias = head.weight.detach(), getattr(head, "bias", None)
    rows = nn.Linear(target.hidden_size, len(ids_D), bias=bias is not None, device="meta")
    rows.weight = nn.Parameter(weight[ids_D].to(dtype or target.dtype), requires_grad=False)
    if bias is not None:
        rows.bias = nn.Parameter(bias.detach()[ids_D].to(dtype or target.dtype), False)
    return rows
