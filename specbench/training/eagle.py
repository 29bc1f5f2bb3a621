"""How an EAGLE head is trained: unrolled on its own outputs as it will be when it drafts, against
the target's distribution (training-time test: Li et al. 2025, section 3.2).

Shapes: B sequences, E entries of a sequence (see `specbench.learned.eagle`), F those of the first
step, h hidden, H query heads, K key-value heads, D head dimension, M predictions that count.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import cast

import torch
import torch.nn.functional as F
from torch import nn

from specbench.learned.eagle import EagleHead, EagleLayer, EagleShape, like_target, usual_taps
from specbench.learned.eagle_files import save_eagle
from specbench.learned.layers import DraftAttention, Rotations
from specbench.target import Target
from specbench.training.losses import DraftTargets
from specbench.training.recipe import DRAFT_VOCABULARY, Options, Recipe, Sequences, draft_vocabulary

_UNROLL = 4
_STRIDE = 2
_DECAY = 0.8


class EagleRecipe(Recipe):
    """Trains an EAGLE-3 head whose own head is the target's, cut to a draft vocabulary.

    ``options.unroll`` is the number of steps it is unrolled; the loss of step j weighs 0.8^j.
    """

    learning_rate = 8e-4
    uses = frozenset({"unroll"})
    module: EagleHead

    def __init__(self, target: Target, options: Options) -> None:
        super().__init__(target, options)
        ids_D = draft_vocabulary(options.token_counts, options.vocab or DRAFT_VOCABULARY)
        shape = EagleShape(
            config=like_target(target),
            taps=usual_taps(target.num_layers),
            target_width=target.hidden_size,
            fc_norm=True,
            own_head=False,
        )
        self.module = EagleHead(shape, target, ids_D).float().to(target.device)
        self.targets = DraftTargets(target, ids_D)
        self.unroll = options.unroll or _UNROLL
        self.stride = _STRIDE
        _initialise(self.module, target)

    def needed_taps(self) -> tuple[int, ...]:
        """The fused layers, and the last hidden state, from which the target's distribution is."""
        return (*self.module.shape.taps, *self.targets.taps)

    def loss(self, batch: Sequences) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """The weighted mean over steps of the cross entropy, in nats."""
        wanted = self.targets.of(batch)
        total, weights, shown = torch.zeros((), device=batch.tokens_BT.device), 0.0, {}
        for step, (entries_E, out_BEh) in enumerate(self.steps(batch)):
            # An entry sees the token behind its own position and says the one after that.
            found = wanted.at(entries_E + 2 + step)
            logits_MD = self.module.logits(out_BEh[found.row_M, found.entry_M])
            total = total + _DECAY**step * found.loss(logits_MD)
            weights += _DECAY**step
            shown[f"acc{step + 1}"] = found.accuracy(logits_MD)
        return total / weights, shown

    def steps(self, batch: Sequences) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """At each step some entries, and the head's output [B, E, h] there; entry i of step j
        stands at position i + j, behind j tokens that it drafted after entry i, taken to be right.

        The first step runs all entries; the others only each ``stride``-th, since neighbours teach
        much the same.
        """
        head, tokens_BT = self.module, batch.tokens_BT
        num_entries = tokens_BT.shape[1] - 1
        layers = cast(list[EagleLayer], head.layers)
        chains = [_Chain(layer.self_attn) for layer in layers]
        entries_E = torch.arange(num_entries, device=tokens_BT.device)
        out_BEh = head.fuse({tap: batch.hidden[tap][:, :-1] for tap in head.shape.taps})
        for step in range(self.unroll):
            if step == 1:
                # Which ones must not depend on what was trained before, or a run that was cut would
                # not go on as it would have.
                kept = slice(tokens_BT.numel() % self.stride, None, self.stride)
                entries_E, out_BEh = entries_E[kept], out_BEh[:, kept]
            embeds_BEh = head.embed(_following(tokens_BT, entries_E + 1 + step))
            rotations = head.rotations((entries_E + step)[None], num_entries + self.unroll)
            hidden_BEh = head.begin(embeds_BEh, out_BEh)
            for layer, chain in zip(layers, chains, strict=True):
                x, residual = layer.enter(embeds_BEh, hidden_BEh)
                hidden_BEh = layer.leave(residual, chain.attend(x, rotations, entries_E))
            out_BEh = head.end(hidden_BEh)
            yield entries_E, out_BEh

    def write(self, folder: Path) -> None:
        """Writes SpecForge's layout."""
        save_eagle(folder, self.module)


class _Chain:
    """One layer's attention while it is unrolled: each entry sees the first step's keys and values
    up to itself, and those of its own later steps."""

    def __init__(self, attention: DraftAttention) -> None:
        self.attention = attention
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []

    def attend(
        self, x_BEi: torch.Tensor, rotations: Rotations, entries_E: torch.Tensor
    ) -> torch.Tensor:
        """[B, E, i] -> [B, E, h], at these entries; all of them at first, later the same ones."""
        query_BHED, key_BKED, value_BKED = self.attention.project(x_BEi, rotations)
        groups = query_BHED.shape[1] // key_BKED.shape[1]
        key, value = (x.repeat_interleave(groups, dim=1) for x in (key_BKED, value_BKED))
        self.keys.append(key)
        self.values.append(value)
        if len(self.keys) == 1:
            mixed = F.scaled_dot_product_attention(query_BHED, key, value, is_causal=True)
            return self.attention.mix(mixed.transpose(1, 2))
        num_first, scale = self.keys[0].shape[2], query_BHED.shape[-1] ** -0.5
        later_EF = torch.arange(num_first, device=entries_E.device) > entries_E[:, None]
        scores = (query_BHED @ self.keys[0].transpose(2, 3)).masked_fill(later_EF, -torch.inf)
        own = [(query_BHED * key).sum(-1, keepdim=True) for key in self.keys[1:]]
        weights = (torch.cat([scores, *own], dim=-1).float() * scale).softmax(-1).to(value.dtype)
        mixed = weights[..., :num_first] @ self.values[0]
        for step, value in enumerate(self.values[1:]):
            mixed = mixed + weights[..., num_first + step, None] * value
        return self.attention.mix(mixed.transpose(1, 2))


def _following(tokens_BT: torch.Tensor, positions_E: torch.Tensor) -> torch.Tensor:
    """The tokens at positions, [B, E]; zeros beyond the end."""
    return F.pad(tokens_BT, (0, 1))[:, positions_E.clamp_max(tokens_BT.shape[1])]


def _initialise(head: EagleHead, target: Target) -> None:
    """Small random weights, and the target's last norm before what is the target's head."""
    torch.manual_seed(0)
    for name, parameter in head.named_parameters():
        if parameter.requires_grad and parameter.dim() > 1:
            nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                nn.init.zeros_(parameter)
    norm = getattr(getattr(target.model.get_decoder(), "norm", None), "weight", None)
    if isinstance(norm, torch.Tensor):
        head.norm.weight.data.copy_(norm)
