"""The key-value cache: preallocated, one length per row, written behind the committed tokens.

Shapes: B rows, H key-value heads, S slots, D head dimension, N nodes of this forward.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import Cache

_GROWTH = 256


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
    the host, so nothing synchronises.

    Args:
        max_rows: rows that can be held at once.
        capacity: slots per row to allocate at first; more are allocated when needed.
    """

    def __init__(self, max_rows: int, capacity: int = _GROWTH) -> None:
        super().__init__(layers=[])
        self.max_rows = max_rows
        self.capacity = capacity
        self.lengths: list[int] = []
        self.keys: dict[int, torch.Tensor] = {}
        self.values: dict[int, torch.Tensor] = {}
        self._window = _Window(0, (), 0, None, None)

    def open(
        self, first_row: int, num_rows: int, start: int, num_nodes: int, device: torch.device
    ) -> int:
        """Prepares the writing of ``num_nodes`` nodes a row, ``start`` nodes behind each row's
        length.

        Returns:
            S, the slots that attention sees.
        """
        starts = tuple(self.lengths[b] + start for b in range(first_row, first_row + num_rows))
        num_slots = max(starts) + num_nodes
        self._reserve(num_slots)
        rows = slots = None
        if len(set(starts)) > 1:
            rows = torch.arange(first_row, first_row + num_rows, device=device)[:, None]
            slots = torch.tensor(starts, device=device)[:, None] + torch.arange(
                num_nodes, device=device
            )
        self._window = _Window(first_row, starts, num_slots, rows, slots)
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
        if window.slot_index_BN is None:
            start = window.starts[0]
            store[rows, :, start : start + states_BHND.shape[2]] = states_BHND
        else:
            store[window.row_index_B1, :, window.slot_index_BN] = states_BHND.transpose(1, 2)
        return store[rows, :, : window.num_slots]

    def _reserve(self, num_slots: int) -> None:
        if num_slots <= self.capacity:
            return
        extra = -(-num_slots // _GROWTH) * _GROWTH - self.capacity
        self.capacity += extra
        for stores in (self.keys, self.values):
            for layer, store in stores.items():
                stores[layer] = torch.nn.functional.pad(store, (0, 0, 0, extra))

    def add_row(self) -> int:
        """Adds an empty row behind the others and returns its index."""
        assert len(self.lengths) < self.max_rows, "the cache is full"
        self.lengths.append(0)
        return len(self.lengths) - 1

    def extend(self, row: int, num_tokens: int) -> None:
        """Commits the first ``num_tokens`` nodes behind the row's length (a chain, as in
        prefill)."""
        self.lengths[row] += num_tokens

    def commit(self, row: int, path: Sequence[int]) -> None:
        """Keeps the nodes of a root path, in order, and forgets all others. Copies nothing if the
        path is 0, 1, 2, ..."""
        length = self.lengths[row]
        first_moved = next((i for i, node in enumerate(path) if i != node), len(path))
        moved = [length + node for node in path[first_moved:]]
        if moved:
            into = slice(length + first_moved, length + len(path))
            for stores in (self.keys, self.values):
                for store in stores.values():
                    store[row, :, into] = store[row, :, moved]
        self.lengths[row] = length + len(path)

    def crop(self, row: int, length: int) -> None:  # type: ignore[override]
        """Forgets all but the first ``length`` tokens of a row."""
        assert 0 <= length <= self.lengths[row]
        self.lengths[row] = length

    def keep(self, rows: Sequence[int]) -> None:
        """Keeps these rows, in ascending order, and closes the gaps: the i-th kept row becomes row
        i."""
        for new, old in enumerate(rows):
            assert new <= old
            if new != old:
                for stores in (self.keys, self.values):
                    for store in stores.values():
                        store[new, :, : self.lengths[old]] = store[old, :, : self.lengths[old]]
        self.lengths = [self.lengths[old] for old in rows]

    def num_bytes(self) -> int:
        """Bytes allocated."""
        stores = [*self.keys.values(), *self.values.values()]
        return sum(store.numel() * store.element_size() for store in stores)

    # What transformers' models ask of a cache when they are given an explicit mask and positions.
    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Slots in front of this forward's nodes."""
        return max(self._window.starts, default=0)

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """Slots that attention sees, and their offset."""
        return self._window.num_slots, 0
