"""The commonest decoder layer in fewer operations, for a CPU.

At a few tokens per step much of a layer's time goes into what lies between its matrix products:
rotating queries and keys apart, taking fused products to pieces, modules that call modules. The
layers of the families below are all the same, so one function runs them on their own weights, to
the same bits. `Target` holds it against the modeling code at load.

Shapes: B rows, N nodes, H query heads, K key-value heads, D head dimension, h hidden, S slots.
"""

from dataclasses import dataclass
from typing import Any

import torch

from specbench.target.attention import grouped_attention
from specbench.target.cache import KVCache
from specbench.target.packing import PackedLinear, Product

_FAMILIES = frozenset(f"{family}DecoderLayer" for family in ("Llama", "Mistral", "Qwen2", "Qwen3"))


@dataclass
class Rotary:
    """Cosines and sines [B, N, 1, D] of a forward, prepared once for all layers; the first half
    of the sines is negated, so that a rotation is x * cos + roll(x) * sin."""

    source: torch.Tensor | None = None
    cos_BN1D: torch.Tensor | None = None
    sin_BN1D: torch.Tensor | None = None

    def rotate(
        self, x_BNHD: torch.Tensor, cos_BND: torch.Tensor, sin_BND: torch.Tensor
    ) -> torch.Tensor:
        """Rotates every head to its node's position."""
        if self.source is not sin_BND:
            half = sin_BND.shape[-1] // 2
            signed = torch.cat([-sin_BND[..., :half], sin_BND[..., half:]], dim=-1)
            self.source, self.cos_BN1D, self.sin_BN1D = (
                sin_BND,
                cos_BND.unsqueeze(2),
                signed.unsqueeze(2),
            )
        assert self.cos_BN1D is not None and self.sin_BN1D is not None
        rolled = x_BNHD.roll(x_BNHD.shape[-1] // 2, -1)
        return (x_BNHD * self.cos_BN1D).add_(rolled.mul_(self.sin_BN1D))


class LeanLayer:
    """One decoder layer: pre-norm, rotary attention, gated feed-forward.

    Args:
        layer: a layer that `is_common` knows.
        rotary: shared by all layers of a model.
    """

    def __init__(self, layer: Any, rotary: Rotary) -> None:
        self.attention, self.mlp, self.rotary = layer.self_attn, layer.mlp, rotary
        self.norms = layer.input_layernorm, layer.post_attention_layernorm
        self.qkv: Product = self.attention.q_proj.product
        self.gate_up: Product = self.mlp.gate_proj.product
        self.head_dim: int = self.attention.head_dim
        self.num_kv: int = self.attention.k_proj.out_features // self.head_dim
        self.num_queries: int = self.attention.q_proj.out_features // self.head_dim
        self.width: int = self.mlp.gate_proj.out_features

    def __call__(
        self,
        hidden_BNh: torch.Tensor,
        attention_mask: torch.Tensor,
        cache: KVCache,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        **_: Any,
    ) -> torch.Tensor:
        """[B, N, h] -> [B, N, h], the nodes' keys and values written to the cache."""
        hidden_BNh = hidden_BNh + self._attend(
            self.norms[0](hidden_BNh), attention_mask, cache, position_embeddings
        )
        gate_up = self.gate_up(self.norms[1](hidden_BNh))
        inner = self.mlp.act_fn(gate_up[..., : self.width]) * gate_up[..., self.width :]
        out: torch.Tensor = hidden_BNh + self.mlp.down_proj(inner)
        return out

    def _attend(
        self,
        x_BNh: torch.Tensor,
        mask: torch.Tensor,
        cache: KVCache,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
    ) -> torch.Tensor:
        batch, num_nodes, _ = x_BNh.shape
        heads = self.qkv(x_BNh).view(batch, num_nodes, -1, self.head_dim)
        rotated, value = heads[:, :, : -self.num_kv], heads[:, :, -self.num_kv :]
        if hasattr(self.attention, "q_norm"):
            rotated = torch.cat(
                [
                    self.attention.q_norm(rotated[:, :, : self.num_queries]),
                    self.attention.k_norm(rotated[:, :, self.num_queries :]),
                ],
                dim=2,
            )
        rotated = self.rotary.rotate(rotated, *position_embeddings).transpose(1, 2)
        keys, values = cache.update(
            rotated[:, self.num_queries :], value.transpose(1, 2), self.attention.layer_idx
        )
        out, _ = grouped_attention(
            self.attention,
            rotated[:, : self.num_queries],
            keys,
            values,
            mask,
            scaling=self.attention.scaling,
        )
        mixed: torch.Tensor = self.attention.o_proj(out.view(batch, num_nodes, -1))
        return mixed


def is_common(layer: Any) -> bool:
    """Whether a layer is of a family whose layers are alike, with its products packed and fused."""
    if type(layer).__name__ not in _FAMILIES or hasattr(layer, "_hf_hook"):
        return False
    fused = (layer.self_attn.q_proj, layer.mlp.gate_proj)
    return all(isinstance(one, PackedLinear) and one.columns is not None for one in fused)
