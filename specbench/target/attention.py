"""Attention with grouped key-value heads: the queries of a group share one pass over their keys
and values.

transformers' own path copies every key and value once per query head when a mask is given; here
nothing is copied. Shapes: B rows, H query heads, K key-value heads, G = H / K, N queries, S slots,
D head dimension.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import eager_mask

NAME = "specbench_grouped"


def grouped_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention interface: query [B, H, N, D], key and value [B, K, S, D], additive
    mask [B, 1, N, S], logits of attention sinks [H] as ``s_aux``.

    Returns:
        [B, N, H, D], and no weights.
    """
    if kwargs.get("position_bias") is not None:
        raise ValueError(f"{type(module).__name__}: position biases are not supported")
    batch, heads, num_queries, dim = query.shape
    kv_heads = key.shape[1]
    groups = heads // kv_heads
    sinks = kwargs.get("s_aux")
    query = query.reshape(batch, kv_heads, groups * num_queries, dim)
    if attention_mask is not None and groups > 1 and num_queries > 1:
        attention_mask = _tiled(attention_mask, groups)
    if softcap is None and sinks is None:
        out = F.scaled_dot_product_attention(
            query, key, value, attn_mask=attention_mask, scale=scaling
        )
    else:
        scores = query @ key.transpose(2, 3) * (dim**-0.5 if scaling is None else scaling)
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        if attention_mask is not None:
            scores = scores + attention_mask
        if sinks is not None:
            # A sink, [H], takes its part of the softmax and has no value.
            sink = sinks.view(1, kv_heads, groups, 1).repeat_interleave(num_queries, dim=2)
            scores = torch.cat([scores, sink.expand(batch, -1, -1, -1).to(scores.dtype)], dim=-1)
        weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(value.dtype)
        out = weights[..., : key.shape[2]] @ value
    out = out.reshape(batch, heads, num_queries, value.shape[-1])
    return out.transpose(1, 2).contiguous(), None


def _tiled(mask_B1NS: torch.Tensor, groups: int) -> torch.Tensor:
    """The mask once for each query head of a group, [B, 1, G * N, S].

    All layers are given the same mask, so it is kept on the mask itself.
    """
    tiled: torch.Tensor | None = getattr(mask_B1NS, "tiled", None)
    if tiled is None or tiled.shape[2] != groups * mask_B1NS.shape[2]:
        tiled = mask_B1NS.repeat(1, 1, groups, 1)
        setattr(mask_B1NS, "tiled", tiled)  # noqa: B010 - tensors take attributes, mypy does not know
    return tiled


AttentionInterface.register(NAME, grouped_attention)
AttentionMaskInterface.register(NAME, eager_mask)
