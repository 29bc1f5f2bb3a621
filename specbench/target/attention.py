"""Attention with grouped key-value heads, and on a CPU row by row.

transformers' own path copies every key and value once per query head when a mask is given; here
the queries of a group share one pass over their keys and values, and nothing is copied.

Where there is one, our own kernel does it. torch's sum in an order that depends on how many queries
and slots they are given; so on a CPU each row is given its own nodes and slots only: what it
computes does not depend, to the last bit, on the rows beside it, and no time is lost on padding.

Shapes: B rows, H query heads, K key-value heads, G = H / K, N queries, S slots, D head dimension.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import eager_mask

from specbench.target import attention_kernel

NAME = "specbench_grouped"


class Extent(NamedTuple):
    """How much of a padded batch is a row's own."""

    num_nodes: int
    num_slots: int


@dataclass
class _Notes:
    """What is kept on a mask, which all layers are given.

    Args:
        extents: of each row.
        extents_B2: the same.
        padded: whether any row has padding nodes.
        real_T: places among the B * N nodes of those that are no padding; None where all are, or
            none is.
        tiled: by the size of a group, what `_tiled` made of the mask.
    """

    extents: tuple[Extent, ...]
    extents_B2: torch.Tensor
    padded: bool
    real_T: torch.Tensor | None
    tiled: dict[int, list[torch.Tensor]] = field(default_factory=dict)


def note_extents(mask_B1NS: torch.Tensor, extents: Sequence[Extent]) -> None:
    """Notes on a mask how much of it is each row's own. The mask is the only thing that reaches
    the attention of every model."""
    num_nodes, num_slots = mask_B1NS.shape[2:]
    assert all(
        extent.num_nodes <= num_nodes and extent.num_slots <= num_slots for extent in extents
    )
    extents_B2 = torch.tensor(extents, dtype=torch.int64, device="cpu")
    padded = any(extent.num_nodes < num_nodes for extent in extents)
    real_T = None
    if padded and any(extent.num_nodes for extent in extents):
        real_T = (torch.arange(num_nodes) < extents_B2[:, :1]).flatten().nonzero()[:, 0]
    notes = _Notes(tuple(extents), extents_B2, padded, real_T)
    setattr(mask_B1NS, "notes", notes)  # noqa: B010 - mypy knows no attributes of tensors


class Real:
    """The nodes of a padded batch that are no padding, by what is noted on a mask; else all.

    Args:
        mask: as attention is given it.
    """

    def __init__(self, mask: torch.Tensor | None) -> None:
        notes: _Notes | None = getattr(mask, "notes", None)
        self.places_T = notes.real_T if notes else None

    def pick(self, x_BNi: torch.Tensor) -> torch.Tensor:
        """[B, N, i] -> [T, i]."""
        x_i = x_BNi.flatten(0, 1)
        return x_i if self.places_T is None else x_i.index_select(0, self.places_T)

    def place(self, x_Ti: torch.Tensor, like_BNh: torch.Tensor) -> torch.Tensor:
        """[T, i] -> [B, N, i], B and N as another's; zeros at padding."""
        shape = (*like_BNh.shape[:2], x_Ti.shape[1])
        if self.places_T is None:
            return x_Ti.view(shape)
        whole_BNi = x_Ti.new_zeros(shape)
        whole_BNi.view(-1, x_Ti.shape[1]).index_copy_(0, self.places_T, x_Ti)
        return whole_BNi


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
        [B, N, H, D], and no weights; zeros at padding nodes where the mask's extents are known.
    """
    if kwargs.get("position_bias") is not None:
        raise ValueError(f"{type(module).__name__}: position biases are not supported")
    sinks = kwargs.get("s_aux")
    notes: _Notes | None = getattr(attention_mask, "notes", None)
    plain = softcap is None and sinks is None
    if (
        attention_mask is not None
        and notes
        and plain
        and _has_kernel(query, key, value, attention_mask)
    ):
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        return attention_kernel.attend(
            query, key, value, attention_mask, notes.extents_B2, notes.padded, scale
        ), None
    groups = query.shape[1] // key.shape[1]
    masks = [None] if attention_mask is None else _tiled(attention_mask, groups, notes)
    if len(masks) == 1:
        out = _attend(query, key, value, masks[0], scaling, softcap, sinks)
    else:
        assert notes is not None
        out = query.new_zeros(*query.shape[:3], value.shape[-1])
        for row, ((num_nodes, num_slots), mask) in enumerate(
            zip(notes.extents, masks, strict=True)
        ):
            if num_nodes:
                one = slice(row, row + 1)
                out[one, :, :num_nodes] = _attend(
                    query[one, :, :num_nodes],
                    key[one, :, :num_slots],
                    value[one, :, :num_slots],
                    mask,
                    scaling,
                    softcap,
                    sinks,
                )
    return out.transpose(1, 2).contiguous(), None


def _has_kernel(
    query_BHND: torch.Tensor,
    key_BKSD: torch.Tensor,
    value_BKSD: torch.Tensor,
    mask_B1NS: torch.Tensor,
) -> bool:
    """Whether our own kernel can work on tensors like these."""
    batch, heads, num_nodes, dim = query_BHND.shape
    num_kv, num_slots = key_BKSD.shape[1:3]
    dtype = query_BHND.dtype
    return (
        attention_kernel.available(dtype, dim)
        and key_BKSD.dtype == value_BKSD.dtype == mask_B1NS.dtype == dtype
        and key_BKSD.shape == value_BKSD.shape == (batch, num_kv, num_slots, dim)
        and heads % num_kv == 0
        and mask_B1NS.shape == (batch, 1, num_nodes, num_slots)
        and key_BKSD.stride() == value_BKSD.stride()
        and query_BHND.stride(3) == mask_B1NS.stride(3) == 1
        and _is_padded(key_BKSD)
        and _is_padded(value_BKSD)
        and not (
            torch.is_grad_enabled()
            and (query_BHND.requires_grad or key_BKSD.requires_grad or value_BKSD.requires_grad)
        )
    )


def _is_padded(store_BKSD: torch.Tensor) -> bool:
    """Whether slots lie one behind the other, with memory up to the next multiple of 16 of them."""
    row, head, slot, one = store_BKSD.stride()
    batch, num_kv, num_slots, dim = store_BKSD.shape
    last = store_BKSD.storage_offset() + (batch - 1) * row + (num_kv - 1) * head
    end = last + (num_slots + 15) // 16 * 16 * dim
    room = store_BKSD.untyped_storage().nbytes() // store_BKSD.element_size()
    return (slot, one) == (dim, 1) and end <= room


def _attend(
    query_BHND: torch.Tensor,
    key_BKSD: torch.Tensor,
    value_BKSD: torch.Tensor,
    mask_B1MS: torch.Tensor | None,
    scaling: float | None,
    softcap: float | None,
    sinks_H: torch.Tensor | None,
) -> torch.Tensor:
    """[B, H, N, D]; the mask's M is G * N."""
    batch, heads, num_queries, dim = query_BHND.shape
    kv_heads = key_BKSD.shape[1]
    groups = heads // kv_heads
    query = query_BHND.reshape(batch, kv_heads, groups * num_queries, dim)
    if softcap is None and sinks_H is None:
        out = F.scaled_dot_product_attention(
            query, key_BKSD, value_BKSD, attn_mask=mask_B1MS, scale=scaling
        )
    else:
        scores = query @ key_BKSD.transpose(2, 3) * (dim**-0.5 if scaling is None else scaling)
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        if mask_B1MS is not None:
            scores = scores + mask_B1MS
        if sinks_H is not None:
            # A sink takes its part of the softmax and has no value.
            sink = sinks_H.view(1, kv_heads, groups, 1).repeat_interleave(num_queries, dim=2)
            scores = torch.cat([scores, sink.expand(batch, -1, -1, -1).to(scores.dtype)], dim=-1)
        weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(value_BKSD.dtype)
        out = weights[..., : key_BKSD.shape[2]] @ value_BKSD
    return out.reshape(batch, heads, num_queries, value_BKSD.shape[-1])


def _tiled(mask_B1NS: torch.Tensor, groups: int, notes: _Notes | None) -> list[torch.Tensor]:
    """The mask once for each query head of a group, [B, 1, G * N, S]; for each row of its own
    where their extents differ. Made once for all layers."""
    if notes and groups in notes.tiled:
        return notes.tiled[groups]
    parts = (
        [mask_B1NS]
        if notes is None or len(notes.extents) < 2
        else [
            mask_B1NS[row : row + 1, :, :num_nodes, :num_slots]
            for row, (num_nodes, num_slots) in enumerate(notes.extents)
        ]
    )
    repeats = [part.shape[2] > 1 and groups > 1 for part in parts]
    tiled = [
        part.repeat(1, 1, groups, 1) if repeat else part
        for part, repeat in zip(parts, repeats, strict=True)
    ]
    if notes:
        notes.tiled[groups] = tiled
    return tiled


AttentionInterface.register(NAME, grouped_attention)
AttentionMaskInterface.register(NAME, eager_mask)
