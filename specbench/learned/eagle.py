"""EAGLE heads: a small drafter on the target's hidden states (EAGLE and EAGLE-2: Li et al. 2024,
EAGLE-3: Li et al. 2025).

Entry i of a head pairs the feature of position i with token i + 1, sits at position i, and predicts
token i + 2. Its output is the feature of the next entry where the target's is not known yet. The
same small functions serve inference, on a token tree behind a cache, and training, on whole
sequences. Parameters have the published names, with ``layers.0`` for EAGLE-3's ``midlayer``.

Shapes: B rows, N entries, h hidden, w the target's hidden size, m taps, V vocabulary, D draft
vocabulary, P positions.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import nn
from transformers import LlamaConfig

from specbench.learned.layers import (
    DraftAttention,
    GatedMLP,
    Nodes,
    RMSNorm,
    Rotary,
    Rotations,
    prepare,
)
from specbench.learned.vocabulary import frozen_head
from specbench.target import FINAL, KVCache, Target

LAYER_SETTINGS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "rms_norm_eps",
    "attention_bias",
    "max_position_embeddings",
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
)
"""What of a config of transformers a head's layers are made from; any may be left out."""


@dataclass(frozen=True, kw_only=True)
class EagleShape:
    """What kind of head it is.

    Args:
        config: of its layers, a config of transformers like Llama's.
        taps: the target's hidden states that it reads, in this order.
        target_width: the target's hidden size.
        fused: EAGLE-3: several taps are fused into a feature, and the layer sees token and feature
            side by side. Else EAGLE-1 and 2: token and feature are projected to the layer's input.
        fc_bias: whether that projection has a bias (EAGLE-1 and 2).
        qk_norm: whether queries and keys are normed, as in Qwen3.
        input_norm: all taps are normed together before they are fused.
        fc_norm: each tap is normed before they are fused.
        norm_before_residual: the residual of a wide layer is the normed feature.
        head_norm: logits are of the normed output.
        feeds_normed: the normed output is the next feature.
        all_wide: all layers see token and feature, and not only the first.
        own_embeddings, own_head: whether it has its own, or the target's.
    """

    config: Any
    taps: tuple[int, ...]
    target_width: int
    fused: bool = True
    fc_bias: bool = False
    qk_norm: bool = False
    input_norm: bool = False
    fc_norm: bool = False
    norm_before_residual: bool = False
    head_norm: bool = True
    feeds_normed: bool = False
    all_wide: bool = False
    own_embeddings: bool = False
    own_head: bool = True

    @property
    def in_width(self) -> int:
        """Width of what ``fc`` projects."""
        width = self.config.hidden_size
        return len(self.taps) * self.target_width if self.fused else width + self.target_width


def first_shape(config: Any, *, fc_bias: bool = True, own_embeddings: bool = False) -> EagleShape:
    """The shape of an EAGLE-1 or 2 head; it has no norms and no head of its own."""
    return EagleShape(
        config=config,
        taps=(FINAL,),
        target_width=config.hidden_size,
        fused=False,
        fc_bias=fc_bias,
        head_norm=False,
        own_embeddings=own_embeddings,
        own_head=False,
    )


def like_target(target: Target) -> LlamaConfig:
    """The config of one layer like the target's, for a new head.

    Raises:
        ValueError: the target's layers are not like Llama's.
    """
    known = {key: getattr(target.config, key, None) for key in LAYER_SETTINGS}
    rope = known.pop("rope_parameters") or {}
    if not (known["num_key_value_heads"] and known["intermediate_size"] and "rope_theta" in rope):
        raise ValueError(
            f"no EAGLE head is like {target.name!r}, whose layers are not like Llama's"
        )
    known |= {"num_hidden_layers": 1, "attention_bias": False, "hidden_act": "silu"}
    known |= {"rope_parameters": {"rope_type": "default", "rope_theta": rope["rope_theta"]}}
    return LlamaConfig(**{key: value for key, value in known.items() if value is not None})


def usual_taps(num_layers: int) -> tuple[int, int, int]:
    """The three layers whose outputs EAGLE-3 fuses where nothing else is said: an early, a middle
    and a late one.

    Raises:
        ValueError: the target has less than four layers.
    """
    if num_layers < 4:
        raise ValueError(f"EAGLE-3 needs a target of 4 layers or more; this one has {num_layers}")
    return 1, num_layers // 2 - 1, num_layers - 4


class Entry(NamedTuple):
    """What a layer's attention reads, [B, N, h] or [B, N, 2h], and what is added to its output."""

    x: torch.Tensor
    residual: torch.Tensor


class EagleLayer(nn.Module):
    """One decoder layer of a head.

    Args:
        shape: the head's.
        index: which of its layers.
    """

    def __init__(self, shape: EagleShape, index: int) -> None:
        super().__init__()
        config, self.norm_before_residual = shape.config, shape.norm_before_residual
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.wide = shape.fused and (index == 0 or shape.all_wide)
        self.normed = shape.fused or index > 0
        self.self_attn = DraftAttention(config, hidden * (1 + self.wide), shape.qk_norm, index)
        self.mlp = GatedMLP(config)
        if self.wide:
            self.hidden_norm = RMSNorm(hidden, eps)
        if self.normed:
            self.input_layernorm = RMSNorm(hidden, eps)
        self.post_attention_layernorm = RMSNorm(hidden, eps)

    def enter(self, embeds_BNh: torch.Tensor, hidden_BNh: torch.Tensor) -> Entry:
        """From the tokens' embeddings and the hidden states to the attention."""
        if self.wide:
            normed = self.hidden_norm(hidden_BNh)
            x = torch.cat([self.input_layernorm(embeds_BNh), normed], dim=-1)
            return Entry(x, normed if self.norm_before_residual else hidden_BNh)
        x = self.input_layernorm(hidden_BNh) if self.normed else hidden_BNh
        return Entry(x, hidden_BNh)

    def leave(self, residual_BNh: torch.Tensor, mixed_BNh: torch.Tensor) -> torch.Tensor:
        """From the attention's output to the layer's, [B, N, h]."""
        hidden_BNh = residual_BNh + mixed_BNh
        out: torch.Tensor = hidden_BNh + self.mlp(self.post_attention_layernorm(hidden_BNh))
        return out


class EagleHead(nn.Module):
    """A head that drafts for a target.

    Without a head of its own it has the rows of the target's that it may draft, as a frozen linear
    layer; without a reduced vocabulary, the target's head itself, which only inference can use.

    Args:
        shape: what kind of head.
        target: what it drafts for.
        ids_D: the tokens that it may draft, ascending; None for all.
    """

    d2t: torch.Tensor
    """[D], from a draft token's index to its id, as an offset; only with a reduced vocabulary."""
    t2d: torch.Tensor
    """bool [V], which tokens may be drafted; only with a reduced vocabulary."""

    def __init__(
        self, shape: EagleShape, target: Target, ids_D: torch.Tensor | None = None
    ) -> None:
        super().__init__()
        self.shape, self.vocab_size = shape, target.vocab_size
        self.num_target_layers = target.num_layers
        config = shape.config
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.fc = nn.Linear(shape.in_width, hidden, bias=shape.fc_bias)
        self.layers = nn.ModuleList(EagleLayer(shape, i) for i in range(config.num_hidden_layers))
        if shape.fused:
            self.norm = RMSNorm(hidden, eps)
        if shape.input_norm:
            self.input_norm = RMSNorm(shape.in_width, eps)
        if shape.fc_norm:
            self.fc_norm = nn.ModuleList(RMSNorm(shape.target_width, eps) for _ in shape.taps)
        if shape.own_embeddings:
            self.embed_tokens = nn.Embedding(target.vocab_size, hidden)
        self.reduced = ids_D is not None
        self.num_draft_tokens = target.vocab_size if ids_D is None else len(ids_D)
        if ids_D is not None:
            t2d = torch.zeros(target.vocab_size, dtype=torch.bool)
            t2d[ids_D] = True
            self.register_buffer("d2t", ids_D - torch.arange(len(ids_D)))
            self.register_buffer("t2d", t2d)
        if shape.own_head:
            self.lm_head = nn.Linear(hidden, self.num_draft_tokens, bias=False)
        elif ids_D is not None:
            self.lm_head = frozen_head(target, ids_D, torch.float32)
        self._target = (target,)  # in a tuple: no part of this module
        self._rotary_P2D: torch.Tensor | None = None

    @property
    def num_parameters(self) -> int:
        """How many it has of its own, the rows of the target's head among them; before it is
        packed."""
        return sum(parameter.numel() for parameter in self.parameters())

    @property
    def dtype(self) -> torch.dtype:
        """What it computes in."""
        return cast(EagleLayer, self.layers[0]).post_attention_layernorm.weight.dtype

    def stack(self, hidden: Mapping[int, torch.Tensor]) -> torch.Tensor:
        """The target's hidden states by tap, [B, N, w] each -> [B, N, m * w]."""
        taps = [hidden[tap] for tap in self.shape.taps]
        return taps[0] if len(taps) == 1 else torch.cat(taps, dim=-1)

    def reduce(self, stacked_BNi: torch.Tensor) -> torch.Tensor:
        """Stacked hidden states -> features [B, N, h] ([B, N, w] before EAGLE-3)."""
        stacked_BNi = stacked_BNi.to(self.dtype)
        if not self.shape.fused:
            return stacked_BNi
        if self.shape.input_norm:
            stacked_BNi = self.input_norm(stacked_BNi)
        if self.shape.fc_norm:
            parts = stacked_BNi.chunk(len(self.fc_norm), dim=-1)
            normed = [norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)]
            stacked_BNi = torch.cat(normed, dim=-1)
        out: torch.Tensor = self.fc(stacked_BNi)
        return out

    def fuse(self, hidden: Mapping[int, torch.Tensor]) -> torch.Tensor:
        """The target's hidden states by tap -> features."""
        return self.reduce(self.stack(hidden))

    def embed(self, tokens_BN: torch.Tensor) -> torch.Tensor:
        """The tokens' embeddings [B, N, h]: its own, or the target's."""
        if self.shape.own_embeddings:
            weight = self.embed_tokens.weight
        else:
            weight = cast(torch.Tensor, self._target[0].model.get_input_embeddings().weight)
        return F.embedding(tokens_BN, weight).to(self.dtype)

    def begin(self, embeds_BNh: torch.Tensor, features_BNh: torch.Tensor) -> torch.Tensor:
        """The hidden states [B, N, h] that the first layer takes in."""
        if self.shape.fused:
            return features_BNh
        out: torch.Tensor = self.fc(torch.cat([embeds_BNh, features_BNh], dim=-1))
        return out

    def end(self, hidden_BNh: torch.Tensor) -> torch.Tensor:
        """The last layer's output -> the head's, which is the next entry's feature."""
        return self.norm(hidden_BNh) if self.shape.feeds_normed else hidden_BNh

    def logits(self, out_BNh: torch.Tensor) -> torch.Tensor:
        """The head's output -> logits [B, N, D]."""
        shape = self.shape
        if shape.fused and shape.head_norm and not shape.feeds_normed:
            out_BNh = self.norm(out_BNh)
        if shape.own_head or self.reduced:
            logits: torch.Tensor = self.lm_head(out_BNh)
        else:
            target = self._target[0]
            logits = cast(nn.Module, target.model.get_output_embeddings())(out_BNh.to(target.dtype))
        return logits

    def rotations(self, positions_BN: torch.Tensor, end: int) -> Rotations:
        """Cosines and sines at positions, all of them below ``end``."""
        table = self._rotary_P2D
        like = cast(EagleLayer, self.layers[0]).post_attention_layernorm.weight
        if table is None or len(table) < end or table.dtype != like.dtype:
            with torch.no_grad():
                positions_1P = torch.arange(max(end, 512) * 2, device=like.device)[None]
                rotary = Rotary(self.shape.config).to(like.device)
                table = torch.cat(rotary(like.detach(), positions_1P), dim=-1)[0]
            self._rotary_P2D = table
        cos, sin = table[positions_BN].chunk(2, dim=-1)
        return cos, sin

    def forward(
        self, tokens_BN: torch.Tensor, features_BNh: torch.Tensor, nodes: Nodes, cache: KVCache
    ) -> torch.Tensor:
        """Runs entries that were opened in its cache: tokens and features -> output [B, N, h]."""
        # No node's position is beyond its slot.
        rotations = self.rotations(nodes.positions_BN, nodes.mask_B1NS.shape[-1])
        embeds_BNh = self.embed(tokens_BN)
        hidden_BNh = self.begin(embeds_BNh, features_BNh)
        for layer in cast(list[EagleLayer], self.layers):
            x, residual = layer.enter(embeds_BNh, hidden_BNh)
            mixed_BNh = layer.self_attn(x, rotations, nodes.mask_B1NS, cache)
            hidden_BNh = layer.leave(residual, mixed_BNh)
        return self.end(hidden_BNh)

    def token_ids(self, index: torch.Tensor) -> torch.Tensor:
        """Ids of draft tokens, from their indices in the draft vocabulary."""
        return index + self.d2t[index] if self.reduced else index

    def over_vocabulary(self, logits_BND: torch.Tensor) -> torch.Tensor:
        """Logits over the target's vocabulary, float32 [B, N, V]: -inf for what it never drafts."""
        if not self.reduced:
            return logits_BND.float()
        ids_D = self.d2t + torch.arange(self.num_draft_tokens, device=self.d2t.device)
        full = logits_BND.new_full(
            (*logits_BND.shape[:2], self.vocab_size), -math.inf, dtype=torch.float32
        )
        return full.index_copy_(-1, ids_D, logits_BND.float())

    def for_inference(self) -> "EagleHead":
        """Itself, in the target's type and place, and `prepare`d."""
        target = self._target[0]
        prepare(self.to(target.device, target.dtype), target)
        return self
