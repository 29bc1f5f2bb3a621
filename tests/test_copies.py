"""Tests of the copies that a target drafts with."""

import pytest
import torch

from specbench.target import Target
from specbench.target.copies import int8_copy, layers_copy
from specbench.tree import Tree
from tests.tiny import tiny_model, tiny_target


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
    assert torch.allclose(logits(copied, [TOKENS]), logits(target, [TOKENS]), atol=1e-5)


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


def test_a_row_of_the_int8_copy_does_not_depend_on_its_neighbours() -> None:
    copied = int8_copy(tiny_target())
    alone = logits(copied, [TOKENS])
    together = logits(copied, [TOKENS, [200] * len(TOKENS), TOKENS[::-1]])
    assert torch.allclose(together[:1], alone, atol=1e-6)


def test_the_int8_copy_keeps_the_positions_of_a_half_precision_target_exact() -> None:
    model = tiny_model()
    torch.nn.Module.to(model, torch.bfloat16)
    target = Target(model)
    copied = int8_copy(target)
    assert copied.dtype == torch.float32
    ours = dict(copied.model.named_buffers())
    for name, buffer in target.model.named_buffers():
        assert torch.equal(ours[name], buffer.float())
