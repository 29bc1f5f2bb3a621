"""The target's hidden states over the corpus: computed once and kept in a file where they fit into
a disk budget, else computed whenever they are wanted. What one training run kept, the next ones
over the same corpus find, also those that run beside it.

Shapes: B sequences, T tokens, h hidden.
"""

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from specbench.target import FINAL, Target
from specbench.training.corpus import Answered, Corpus
from specbench.training.recipe import Sequences


class Features:
    """Gives sequences of a corpus with the target's hidden states.

    Args:
        target: whose they are.
        corpus: must not grow from now on.
        taps: the hidden states wanted, see `Target.forward`.
        folder: where they are kept.
        disk_bytes: the most that may be kept there.
    """

    def __init__(
        self,
        target: Target,
        corpus: Corpus,
        taps: Sequence[int],
        folder: Path,
        disk_bytes: int,
    ) -> None:
        self.target, self.corpus, self.taps = target, corpus, tuple(taps)
        self.seconds = 0.0
        """Spent in the target."""
        lengths = [len(sequence.tokens) for sequence in corpus.sequences]
        self._starts = np.cumsum([0, *lengths])
        shape = (int(self._starts[-1]), target.hidden_size)
        self.num_bytes = len(self.taps) * (2 * shape[0] * shape[1] + len(lengths))
        self.kept = self.num_bytes <= disk_bytes
        if self.kept:
            folder.mkdir(parents=True, exist_ok=True)
            try:
                self._stores = {tap: _Store.open(folder, tap, shape, len(lengths)) for tap in taps}
            except OSError:
                # There is no room for them.
                self.kept = False

    def batch(self, indices: Sequence[int]) -> Sequences:
        """Sequences by their indices in the corpus, on the target's device."""
        sequences = [self.corpus.sequences[index] for index in indices]
        width = max(len(sequence.tokens) for sequence in sequences)
        device = self.target.device
        hidden = {tap: list[torch.Tensor]() for tap in self.taps}
        for index, sequence in zip(indices, sequences, strict=True):
            for tap, states_Th in self._hidden(index, sequence).items():
                missing = width - len(states_Th)
                hidden[tap].append(nn.functional.pad(states_Th, (0, 0, 0, missing)))
        return Sequences(
            _padded([sequence.tokens for sequence in sequences], width).to(device),
            _padded(
                [[0] * len(sequence.prompt) + [1] * len(sequence.answer) for sequence in sequences],
                width,
            )
            .bool()
            .to(device),
            {tap: torch.stack(states) for tap, states in hidden.items()},
        )

    def _hidden(self, index: int, sequence: Answered) -> dict[int, torch.Tensor]:
        if not self.kept:
            return self._computed(sequence, self.taps)
        place = slice(int(self._starts[index]), int(self._starts[index + 1]))
        unknown = [tap for tap, store in self._stores.items() if not store.known[index]]
        if unknown:
            for tap, states in self._computed(sequence, unknown).items():
                self._stores[tap].states[place] = states.cpu().view(torch.int16).numpy()
                self._stores[tap].known[index] = True
        return {
            tap: torch.from_numpy(np.array(store.states[place]))
            .view(torch.bfloat16)
            .to(self.target.device)
            for tap, store in self._stores.items()
        }

    def _computed(self, sequence: Answered, taps: Sequence[int]) -> dict[int, torch.Tensor]:
        begin = time.perf_counter()
        last = self.target.num_layers if FINAL in taps else max(taps) + 1
        cache = self.target.new_cache(1, len(sequence.tokens))
        found = self.target.prefill(
            sequence.tokens,
            cache,
            cache.add_row(),
            taps,
            skip=frozenset(range(last, self.target.num_layers)),
        )
        # A tensor of inference mode cannot be trained on, its copy can.
        states = {tap: states[0].clone().bfloat16() for tap, states in found.items()}
        self.seconds += time.perf_counter() - begin
        return states


class _Store(NamedTuple):
    """One tap's hidden states [T, h] of all sequences, in the bits of bfloat16, and which
    sequences' are there."""

    states: NDArray[Any]
    known: NDArray[Any]

    @staticmethod
    def open(folder: Path, tap: int, shape: tuple[int, int], num_sequences: int) -> "_Store":
        """What a folder holds for a tap, made with nothing known if it is not there whole.

        Raises:
            OSError: there is no room for it.
        """
        files = folder / f"hidden.{tap}.{shape[0]}.bf16", folder / f"known.{tap}.{shape[0]}"
        sizes = 2 * shape[0] * shape[1], num_sequences
        if any(not f.is_file() or f.stat().st_size != s for f, s in zip(files, sizes, strict=True)):
            for file, size in zip(files, sizes, strict=True):
                _reserve(file, size)
        return _Store(
            np.memmap(files[0], np.int16, "r+", shape=shape),
            np.memmap(files[1], np.bool_, "r+", shape=(num_sequences,)),
        )


def _reserve(file: Path, size: int) -> None:
    """A file of zeros that has all its room on the disk: a mapped file that finds none later kills
    the process."""
    with file.open("wb") as opened:
        try:
            opened.truncate(size)
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(opened.fileno(), 0, size)
        except OSError:
            file.unlink()
            raise


def _padded(rows: Sequence[Sequence[int]], width: int) -> torch.Tensor:
    return torch.tensor([[*row, *[0] * (width - len(row))] for row in rows], dtype=torch.long)
