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
from transformers import AttentionInterface

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
    mask [B, 1, N, S].

    Returns:
        [B, N, H, D], and no weights.
    """
    if kwargs.get("s_aux") is not None or kwargs.get("position_bias") is not None:
        raise ValueError(
            f"{type(module).__name__}: attention sinks and position biases are not supported"
        )
    batch, heads, num_queries, dim = query.shape
    groups = heads // key.shape[1]
    query = query.reshape(batch, key.shape[1], groups * num_queries, dim)
    if attention_mask is not None and groups > 1:
        attention_mask = attention_mask.repeat(1, 1, groups, 1)
    if softcap is None:
        out = F.scaled_dot_product_attention(
            query, key, value, attn_mask=attention_mask, scale=scaling
        )
    else:
        scores = torch.matmul(query, key.transpose(2, 3)) * (
            dim**-0.5 if scaling is None else scaling
        )
        scores = torch.tanh(scores / softcap) * softcap
        if attention_mask is not None:
            scores = scores + attention_mask
        weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(value.dtype)
        out = torch.matmul(weights, value)
    return out.reshape(batch, heads, num_queries, value.shape[-1]).transpose(1, 2), None


AttentionInterface.register(NAME, grouped_attention)
