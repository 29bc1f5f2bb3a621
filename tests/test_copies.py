"""Tests of the copies that a target drafts with."""

import pytest
import torch

from specbench.conformance.models import tiny_model, tiny_target
from specbench.target import Target
from specbench.target.copies import int8_copy, layers_copy
from specbench.tree import Tree


def logits(target: Target, tokens: list[list[int]]) -> torch.Tensor:
    """Logits [B, N, V] of fresh rows."""
    cache = target.new_cache(len(tokens))
    for _ in tokens:
        cache.add_row()
    trees = [Tree.chain(len(row) - 1) for row in tokens]
    return target.forward(torch.tensor(tokens), trees, cache).logits_BMV


TOKENS = list(range(3, 15))


@pytest.mark.parametrize("pack", [True, False])
def test_a_copy_with_all_layers_has_the_targets_logits(pack: bool) -> None:
    target = tiny_target(pack=pack)
    copied = layers_copy(target, target.num_layers)
    assert torch.allclose(logits(copied, [TOKENS]), logits(target, [TOKENS]), atol=1e-4)


def test_a_copy_with_some_layers_is_the_target_without_the_others() -> None:
    target = tiny_target()
    copied = layers_copy(target, 2)
    cache = target.new_cache(1)
    cache.add_row()
    chain = [Tree.chain(len(TOKENS) - 1)]
    skipped = target.forward(torch.tensor([TOKENS]), chain, cache, skip=frozenset([1, 2]))
    assert torch.allclose(logits(copied, [TOKENS]), skipped.logits_BMV, atol=1e-5)


def test_a_copy_cannot_have_more_layers_than_the_target() -> None:
    with pytest.raises(ValueError, match=r"layers 5 is out of range; valid: 1\.\.4"):
        layers_copy(tiny_target(), 5)


def test_the_int8_copy_is_close_to_the_target_and_a_quarter_of_its_size() -> None:
    target = tiny_target(tie_word_embeddings=True)
    copied = int8_copy(target)
    exact, close = logits(target, [TOKENS]), logits(copied, [TOKENS])
    assert (close - exact).abs().mean() < 0.08 * exact.abs().mean()
    embedding = 259 * 32 * 4
    assert copied.num_weight_bytes - embedding < 0.35 * target.num_weight_bytes


def ragged_logits(target: Target, rows: list[int]) -> dict[int, torch.Tensor]:
    """Logits of these rows of a ragged batch, each with a prefix and a tree of its own."""
    trees = (Tree.chain(2), Tree.of((-1, 0, 0, 1)), Tree.chain(0), Tree.chain(6))
    cache = target.new_cache(len(rows))
    for row in rows:
        target.prefill(
            [(7 * row + i) % 250 + 3 for i in range(90 * row + 1)], cache, cache.add_row()
        )
    width = max(len(trees[row]) for row in rows)
    tokens = torch.arange(3, 3 + width).repeat(len(rows), 1)
    out = target.forward(tokens, [trees[row] for row in rows], cache).logits_BMV
    return {row: out[index, : len(trees[row])] for index, row in enumerate(rows)}


def test_a_row_of_the_int8_copy_does_not_depend_on_its_neighbours() -> None:
    """To the bit: rounding to 8 bits would make another draft of a last digit."""
    copied = int8_copy(tiny_target(max_position_embeddings=512))
    together = ragged_logits(copied, [0, 1, 2, 3])
    for row, expected in together.items():
        assert torch.equal(ragged_logits(copied, [row])[row], expected)


def test_the_int8_copy_keeps_the_positions_of_a_half_precision_target_exact() -> None:
    model = tiny_model()
    torch.nn.Module.to(model, torch.bfloat16)
    target = Target(model)
    copied = int8_copy(target)
    assert copied.dtype == torch.float32
    ours = dict(copied.model.named_buffers())
    for name, buffer in target.model.named_buffers():
        assert torch.equal(ours[name], buffer.float())
