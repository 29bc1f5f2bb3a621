"""A decoder layer's parts for drafters, on a token tree behind a cache or over whole sequences.

Shapes: B rows, N nodes, i the width of the attention's input, h hidden, H query heads, K key-value
heads, D head dimension, S slots.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import nn
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from specbench.learned.checkpoint import Checkpoint
from specbench.target import KVCache, Target, elementwise, lean, packing
from specbench.target.attention import grouped_attention, note_extents
from specbench.target.masks import row_extents, tree_mask, tree_positions
from specbench.tree import Tree

Rotations = tuple[torch.Tensor, torch.Tensor]
"""Cosines and sines, each [B, N, D]."""

Rotary = LlamaRotaryEmbedding
"""From a config with ``rope_parameters``; called with any tensor of the wanted type and positions
[B, N], gives `Rotations`."""


_ROPE_BY_LENGTH = frozenset({"dynamic", "longrope"})


def check_layer(config: Any, checkpoint: Checkpoint) -> None:
    """Holds a checkpoint's config to what the parts here compute.

    Raises:
        ValueError: names what it has beyond that.
    """
    rope: dict[str, Any] = dict(config.rope_parameters or {})
    for problem, is_there in (
        (f"hidden_act {config.hidden_act!r}; valid: 'silu'", config.hidden_act != "silu"),
        (
            f"rotary embeddings of type {rope.get('rope_type')!r}; valid: any that do not change "
            "with the length",
            rope.get("rope_type") in _ROPE_BY_LENGTH,
        ),
        ("partial rotary embeddings", rope.get("partial_rotary_factor", 1) != 1),
    ):
        if is_there:
            raise checkpoint.error(f"has {problem}")
    with checkpoint.reading():
        Rotary(config)


class Nodes(NamedTuple):
    """Where a forward's nodes are, and what they see."""

    positions_BN: torch.Tensor
    mask_B1NS: torch.Tensor


def open_nodes(
    cache: KVCache,
    trees: Sequence[Tree],
    starts: Sequence[int],
    num_nodes: int,
    dtype: torch.dtype,
    device: torch.device,
    first_row: int = 0,
) -> Nodes:
    """Prepares a forward over nodes ``starts`` and on of each row's tree, as `Target.forward` does:
    their keys and values go behind the row's length and the nodes before."""
    num_slots = cache.open(first_row, starts, num_nodes, device)
    lengths = cache.lengths[first_row : first_row + len(trees)]
    positions_BN = tree_positions(lengths, trees, starts, num_nodes)
    mask = tree_mask(lengths, trees, starts, num_nodes, num_slots, dtype)
    if device.type == "cpu":
        note_extents(mask, row_extents(lengths, trees, starts, num_nodes))
        return Nodes(positions_BN, mask)
    return Nodes(positions_BN.to(device, non_blocking=True), mask.to(device, non_blocking=True))


class RMSNorm(nn.Module):
    """Root mean square norm, in float32 (Zhang and Sennrich 2019)."""

    def __init__(self, width: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps, self.fused = eps, False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., width] -> the same."""
        if self.fused:
            return elementwise.rms_norm(x, self.weight, self.eps)
        normed = F.rms_norm(x.float(), self.weight.shape, eps=self.eps)
        return self.weight * normed.to(x.dtype)


class DraftAttention(nn.Module):
    """Rotary attention with grouped key-value heads, as in Llama and, with norms of queries and
    keys, Qwen3; its input may be wider than its output.

    Args:
        config: of the drafter, a Llama-like config of transformers: hidden_size,
            num_attention_heads, num_key_value_heads, head_dim, rms_norm_eps, attention_bias.
        in_width: width of the input; by default the hidden size.
        qk_norm: whether queries and keys are normed by head.
        layer: the index under which its keys and values are cached.
    """

    def __init__(
        self, config: Any, in_width: int | None = None, qk_norm: bool = False, layer: int = 0
    ) -> None:
        super().__init__()
        hidden, heads = config.hidden_size, config.num_attention_heads
        self.head_dim: int = getattr(config, "head_dim", None) or hidden // heads
        self.num_kv: int = config.num_key_value_heads
        bias = bool(getattr(config, "attention_bias", False))
        width = in_width or hidden
        self.q_proj = nn.Linear(width, heads * self.head_dim, bias=bias)
        self.k_proj = nn.Linear(width, self.num_kv * self.head_dim, bias=bias)
        self.v_proj = nn.Linear(width, self.num_kv * self.head_dim, bias=bias)
        self.o_proj = nn.Linear(heads * self.head_dim, hidden, bias=bias)
        if qk_norm:
            self.q_norm = RMSNorm(self.head_dim, config.rms_norm_eps)
            self.k_norm = RMSNorm(self.head_dim, config.rms_norm_eps)
        self.qk_norm, self.layer = qk_norm, layer
        self.rotary = lean.Rotary()

    def project(
        self, x_BNi: torch.Tensor, rotations: Rotations
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries [B, H, N, D], keys and values [B, K, N, D], rotated to their positions."""
        shape = (*x_BNi.shape[:2], -1, self.head_dim)
        query, key = self.q_proj(x_BNi).view(shape), self.k_proj(x_BNi).view(shape)
        if self.qk_norm:
            query, key = self.q_norm(query), self.k_norm(key)
        query, key = (self.rotary.rotate(x, *rotations) for x in (query, key))
        value = self.v_proj(x_BNi).view(shape)
        return query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)

    def mix(self, mixed_BNHD: torch.Tensor) -> torch.Tensor:
        """[B, N, H, D] -> [B, N, h]"""
        out: torch.Tensor = self.o_proj(mixed_BNHD.flatten(2))
        return out

    def forward(
        self, x_BNi: torch.Tensor, rotations: Rotations, mask_B1NS: torch.Tensor, cache: KVCache
    ) -> torch.Tensor:
        """[B, N, i] -> [B, N, h], over what the cache holds and the nodes opened there."""
        query, key, value = self.project(x_BNi, rotations)
        keys, values = cache.update(key, value, self.layer)
        mixed_BNHD, _ = grouped_attention(
            self, query, keys, values, mask_B1NS, scaling=self.head_dim**-0.5
        )
        return self.mix(mixed_BNHD)


class GatedMLP(nn.Module):
    """SiLU-gated feed-forward.

    Args:
        config: hidden_size, intermediate_size.
    """

    def __init__(self, config: Any) -> None:
        super().__init__()
        hidden, inner = config.hidden_size, config.intermediate_size
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)
        self.fused = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., h] -> [..., h]"""
        if self.fused:
            gate_up = cast(packing.PackedLinear, self.gate_proj).product(x)
            inner = elementwise.gated(gate_up.flatten(0, -2))
            fused: torch.Tensor = self.down_proj(inner.view(*x.shape[:-1], -1))
            return fused
        out: torch.Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


def prepare(module: nn.Module, target: Target) -> None:
    """Makes a drafter that is in the target's type and place ready to draft: packed as the target
    is, and with its small operations in one where there are kernels. It can neither be trained nor
    saved then."""
    module.requires_grad_(False).eval()
    packed = packing.pack_for(module, target.dtype, target.device) != "torch"
    for part in module.modules():
        if isinstance(part, RMSNorm):
            width = part.weight.shape[0]
            part.fused = packed and elementwise.available(part.weight.dtype, width)
        elif isinstance(part, GatedMLP):
            width = part.gate_proj.out_features
            part.fused = packed and elementwise.available(target.dtype, width)
