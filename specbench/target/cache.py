"""The key-value cache: preallocated, one length per row, written behind the committed tokens.

Shapes: B rows, H key-value heads, S slots, D head dimension, N nodes of this forward.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import Cache

_GROWTH = 256
# A CPU's attention kernel reads whole vectors of slots.
_MULTIPLE = 16


@dataclass(frozen=True)
class _Window:
    """What one forward writes: rows [first_row, first_row + B), and for each the slot of its first
    node."""

    first_row: int
    starts: tuple[int, ...]
    num_slots: int
    row_index_B1: torch.Tensor | None
    slot_index_BN: torch.Tensor | None


class KVCache(Cache):
    """Keys and values of up to ``max_rows`` sequences, in the form that transformers' attention
    layers write to.

    ``lengths[b]`` counts the committed tokens of row b whose keys and values are stored. A forward
    writes its nodes behind that; ``commit`` keeps a root path of them. All bookkeeping lives on
    the host, so nothing synchronises. The stores are tensors of inference mode: write to them in
    that mode only.

    Args:
        max_rows: rows to allocate at first; more are allocated when needed.
        capacity: slots per row to allocate at first; more are allocated when needed.
    """

    def __init__(self, max_rows: int, capacity: int = _GROWTH) -> None:
        super().__init__(layers=[])
        self.max_rows = max_rows
        self.capacity = -(-capacity // _MULTIPLE) * _MULTIPLE
        self.lengths: list[int] = []
        self.keys: dict[int, torch.Tensor] = {}
        self.values: dict[int, torch.Tensor] = {}
        self._window = _Window(0, (), 0, None, None)

    def open(
        self, first_row: int, starts: Sequence[int], num_nodes: int, device: torch.device
    ) -> int:
        """Prepares the writing of ``num_nodes`` nodes a row, ``starts`` nodes behind each row's
        length.

        Returns:
            S, the slots that attention sees.
        """
        num_rows = len(starts)
        lengths = self.lengths[first_row : first_row + num_rows]
        begins = tuple(length + start for length, start in zip(lengths, starts, strict=True))
        num_slots = max(begins) + num_nodes
        self._reserve(num_slots)
        rows = slots = None
        if len(set(begins)) > 1:
            rows = torch.arange(first_row, first_row + num_rows)[:, None].to(device)
            slots = torch.tensor(begins)[:, None] + torch.arange(num_nodes)
            slots = slots.to(device, non_blocking=True)
        self._window = _Window(first_row, begins, num_slots, rows, slots)
        return num_slots

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Called by the attention layers: stores [B, H, N, D] and returns all keys and values
        seen, [B, H, S, D]."""
        if layer_idx not in self.keys:
            self.keys[layer_idx] = self._allocate(key_states)
            self.values[layer_idx] = self._allocate(value_states)
        return (
            self._write(self.keys[layer_idx], key_states),
            self._write(self.values[layer_idx], value_states),
        )

    def _allocate(self, states_BHND: torch.Tensor) -> torch.Tensor:
        _, heads, _, dim = states_BHND.shape
        # Zeros, not garbage: a masked slot still enters the product with weight 0, and 0 * NaN is
        # NaN.
        return states_BHND.new_zeros(self.max_rows, heads, self.capacity, dim)

    def _write(self, store: torch.Tensor, states_BHND: torch.Tensor) -> torch.Tensor:
        window = self._window
        rows = slice(window.first_row, window.first_row + len(window.starts))
        if window.row_index_B1 is None or window.slot_index_BN is None:
            start = window.starts[0]
            store[rows, :, start : start + states_BHND.shape[2]] = states_BHND
        else:
            # A model spread over several devices keeps each layer's store where the layer is.
            row_index_B1 = window.row_index_B1.to(store.device)
            slot_index_BN = window.slot_index_BN.to(store.device)
            store[row_index_B1, :, slot_index_BN] = states_BHND.transpose(1, 2)
        return store[rows, :, : window.num_slots]

    def _reserve(self, num_slots: int) -> None:
        if num_slots > self.capacity:
            self._grow(slots=-(-num_slots // _GROWTH) * _GROWTH - self.capacity)

    @torch.inference_mode()
    def _grow(self, rows: int = 0, slots: int = 0) -> None:
        self.max_rows += rows
        self.capacity += slots
        for stores in (self.keys, self.values):
            for layer, store in stores.items():
                stores[layer] = nn.functional.pad(store, (0, 0, 0, slots, 0, 0, 0, rows))

    def add_row(self) -> int:
        """Adds an empty row behind the others and returns its index."""
        if len(self.lengths) == self.max_rows:
            self._grow(rows=1)
        self.lengths.append(0)
        return len(self.lengths) - 1

    def extend(self, row: int, num_tokens: int) -> None:
        """Commits the first ``num_tokens`` nodes behind the row's length (a chain, as in
        prefill)."""
        self.lengths[row] += num_tokens

    @torch.inference_mode()
    def commit(self, row: int, path: Sequence[int]) -> None:
        """Keeps the nodes of a root path, in order, and forgets all others. Copies nothing if the
        path is 0, 1, 2, ..."""
        length = self.lengths[row]
        first_moved = next((i for i, node in enumerate(path) if i != node), len(path))
        moved = [length + node for node in path[first_moved:]]
        if moved:
            into, index = slice(length + first_moved, length + len(path)), torch.tensor(moved)
            for store in self._stores():
                if index.device != store.device:
                    index = index.to(store.device, non_blocking=True)
                store[row, :, into] = store[row].index_select(1, index)
        self.lengths[row] = length + len(path)

    @torch.inference_mode()
    def copy(self, row: int, to: int, num_tokens: int) -> None:
        """Gives an empty row the first tokens of another."""
        for store in self._stores():
            store[to, :, :num_tokens] = store[row, :, :num_tokens]
        self.lengths[to] = num_tokens

    @torch.inference_mode()
    def keep(self, rows: Sequence[int]) -> None:
        """Keeps these rows, in ascending order, and closes the gaps: the i-th kept row becomes row
        i."""
        for new, old in enumerate(rows):
            assert new <= old
            if new != old:
                for store in self._stores():
                    store[new, :, : self.lengths[old]] = store[old, :, : self.lengths[old]]
        self.lengths = [self.lengths[old] for old in rows]

    def _stores(self) -> list[torch.Tensor]:
        return [*self.keys.values(), *self.values.values()]

    # What transformers' models ask of a cache when they are given an explicit mask and positions.
    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Slots in front of this forward's nodes."""
        return max(self._window.starts, default=0)

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """Slots that attention sees, and their offset."""
        return self._window.num_slots, 0
