"""Attention masks and positions of token trees: by depth in the tree and not by cache slot.

Built on the host, where lengths and trees live, in a handful of operations: this is in the way of
every step. Shapes: B rows, N nodes, S slots.
"""

from collections.abc import Sequence
from typing import Any

import torch

from specbench.target.attention import Extent
from specbench.tree import Tree

_KINDS = ("full_attention", "sliding_attention")


def mask_kinds(config: Any) -> dict[str, int | None]:
    """Attention window by layer type, None for full attention, as the modeling code of
    transformers names them.

    Raises:
        ValueError: layers that are neither of full nor of sliding attention.
    """
    # A checkpoint may carry settings that its config class does not have: its code ignores them.
    known = type(config)
    window = getattr(config, "sliding_window", None)
    types = list(dict.fromkeys(getattr(config, "layer_types", None) or ()))
    if not types or not hasattr(known, "layer_types"):
        slides = window and hasattr(known, "sliding_window")
        types = ["sliding_attention" if slides else "full_attention"]
    unknown = sorted(set(types).difference(_KINDS))
    if unknown:
        raise ValueError(
            f"has layers of type {', '.join(unknown)}, which cannot be given a tree's mask; "
            f"valid: {' or '.join(_KINDS)}"
        )
    return {kind: window if kind == "sliding_attention" else None for kind in types}


def tree_positions(
    lengths: Sequence[int], trees: Sequence[Tree], starts: Sequence[int], num_nodes: int
) -> torch.Tensor:
    """Positions [B, N] of each row's nodes from its start on: the row's length + depth; a padding
    node gets the root's."""
    rows = []
    for length, tree, start in zip(lengths, trees, starts, strict=True):
        depths = tree.depths[start : start + num_nodes]
        rows.append([length + depth for depth in depths] + [length] * (num_nodes - len(depths)))
    return torch.tensor(rows)


def row_extents(
    lengths: Sequence[int], trees: Sequence[Tree], starts: Sequence[int], num_nodes: int
) -> list[Extent]:
    """How many of the padded nodes, and of the slots, are each row's own."""
    extents = []
    for length, tree, start in zip(lengths, trees, starts, strict=True):
        num_real = max(0, min(num_nodes, len(tree) - start))
        extents.append(Extent(num_real, length + start + num_real))
    return extents


def tree_mask(
    lengths: Sequence[int],
    trees: Sequence[Tree],
    starts: Sequence[int],
    num_nodes: int,
    num_slots: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Additive mask [B, 1, N, S]: a node sees its row's committed tokens, its ancestors and itself;
    a padding node, itself alone."""
    mask = torch.full(
        (len(trees), 1, num_nodes, num_slots), torch.finfo(dtype).min, dtype=dtype, device="cpu"
    )
    for row, (length, tree, start) in enumerate(zip(lengths, trees, starts, strict=True)):
        stop = min(start + num_nodes, len(tree))
        num_real = max(0, stop - start)
        nodes = mask[row, 0]
        nodes[:num_real, :length] = 0
        ancestors = tree.ancestors_NN[start:stop, :stop]
        nodes[:num_real, length : length + stop].masked_fill_(ancestors, 0)
        if num_real < num_nodes:
            # Nothing to see at all would be 0 / 0 in some kernels.
            nodes[num_real:, length + start + num_real :].diagonal().fill_(0)
    return mask


def within_window(
    mask_B1NS: torch.Tensor,
    positions_BN: torch.Tensor,
    window: int,
    lengths: Sequence[int],
    trees: Sequence[Tree],
) -> torch.Tensor:
    """The mask without the keys that lie ``window`` positions or more before their node."""
    hidden_BN = positions_BN - window
    if int(hidden_BN.max()) < 0:
        return mask_B1NS
    batch, _, _, num_slots = mask_B1NS.shape
    keys_BS = torch.arange(num_slots).repeat(batch, 1)
    for row, (length, tree) in enumerate(zip(lengths, trees, strict=True)):
        depths = torch.tensor(tree.depths)[: num_slots - length]
        keys_BS[row, length : length + len(depths)] = length + depths
    hidden_B1NS = keys_BS[:, None, None] <= hidden_BN[:, None, :, None]
    return mask_B1NS.masked_fill(hidden_B1NS, torch.finfo(mask_B1NS.dtype).min)
