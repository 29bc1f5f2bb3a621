"""The shortened decoder layer computes what the modeling code does: to the bit, or with kernels
of our own between the products, within rounding."""

from collections.abc import Sequence
from typing import Any, cast

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from specbench.target import FINAL, Target, elementwise, lean, packing
from specbench.target.attention import NAME
from specbench.target.packing import Product
from specbench.tree import Tree

SIZES = {
    "vocab_size": 131,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "initializer_range": 0.2,
}
FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
TREE = Tree.of((-1, 0, 0, 1, 1, 2, 2, 5, 3))
DTYPES = [
    pytest.param(
        dtype,
        marks=pytest.mark.skipif(
            packing.product_class(dtype) is None,
            reason=f"no packed kernels for {dtype}",
        ),
    )
    for dtype in (torch.float32, torch.bfloat16)
]


def target_of(family: str, dtype: torch.dtype) -> Target:
    """A tiny random model, norms and biases too; the same for the same arguments."""
    torch.manual_seed(2)
    config = AutoConfig.for_model(family, **SIZES)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=NAME, dtype=dtype)
    with torch.no_grad():
        for weight in (p for p in model.parameters() if p.dim() == 1):
            weight.add_(torch.randn_like(weight), alpha=0.3)
    return Target(model, name=family)


def run(target: Target, trees: Sequence[Tree]) -> list[torch.Tensor]:
    """Logits, hidden states and cached keys and values of ragged rows, without their padding."""
    cache = target.new_cache(len(trees), 16)
    for row in range(len(trees)):
        target.prefill([7, 9, 64, 120, 5][row:], cache, cache.add_row())
    tokens = torch.arange(3, 3 + len(TREE)).repeat(len(trees), 1)
    out = target.forward(tokens, trees, cache, taps=(0, 1, FINAL))
    found = []
    for row, tree in enumerate(trees):
        num_nodes, num_slots = len(tree), 5 - row + len(tree)
        found += [x[row, :num_nodes] for x in (out.logits_BMV, *out.taps.values())]
        found += [x[row, :, :num_slots] for x in (*cache.keys.values(), *cache.values.values())]
    return found


@pytest.mark.parametrize("kernels", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_shortened_layer_gives_the_same(
    family: str, dtype: torch.dtype, kernels: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kernels and not elementwise.available(dtype):
        pytest.skip(f"no kernels for {dtype}")
    monkeypatch.setattr(elementwise, "available", lambda *_: kernels)
    short = target_of(family, dtype)
    ran = set()
    attend = lean.LeanLayer._attend

    def noted(self: lean.LeanLayer, *args: Any) -> torch.Tensor:
        ran.add(self)
        out = attend(self, *args)
        assert self.rotary.fused is kernels
        return out

    monkeypatch.setattr(lean.LeanLayer, "_attend", noted)
    run(short, [TREE])
    assert len(ran) == len(short.layers)
    monkeypatch.setattr(lean, "is_common", lambda layer: False)
    plain = target_of(family, dtype)
    for trees in ([TREE], [Tree.chain(0)], [TREE, Tree.chain(2), Tree.of((-1, 0, 0))]):
        for ours, theirs in zip(run(short, trees), run(plain, trees), strict=True):
            if kernels or len(trees) > 1:  # products of other sizes, as padding has no part in them
                within = 1e-4 if dtype == torch.float32 else 0.06
                torch.testing.assert_close(ours, theirs, atol=within, rtol=within)
            else:
                assert torch.equal(ours, theirs)


def test_no_product_is_spent_on_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    target = target_of("llama", torch.float32)
    seen = set()
    own = cast(Product, target.layers[0].get_submodule("mlp.down_proj").product)
    multiply = own.multiply

    def noted(x_Ti: torch.Tensor) -> torch.Tensor:
        seen.add(len(x_Ti))
        return multiply(x_Ti)

    monkeypatch.setattr(own, "multiply", noted)
    trees = [TREE, Tree.chain(0), Tree.chain(1)]
    run(target, trees)
    prefilled = {own.padded_to(tokens) for tokens in (5, 4, 3)}
    assert seen == prefilled | {own.padded_to(sum(map(len, trees)))}
    assert own.padded_to(sum(map(len, trees))) < len(trees) * len(TREE)


def test_layers_that_differ_keep_their_own_code() -> None:
    torch.manual_seed(2)
    for family in ("olmo2", "gemma2", "smollm3"):
        config = AutoConfig.for_model(family, **SIZES, pad_token_id=0)
        target = Target(AutoModelForCausalLM.from_config(config, attn_implementation=NAME))
        assert not any(lean.is_common(layer) for layer in target.layers)


def test_layers_with_hooks_keep_their_own_code() -> None:
    for part in ("", "self_attn", "mlp.down_proj", "input_layernorm"):
        target = target_of("llama", torch.float32)
        module = target.layers[0].get_submodule(part)
        module.register_forward_pre_hook(lambda module, inputs: None)
        assert not lean.is_common(target.layers[0])
        assert lean.is_common(target.layers[1])


def test_layers_that_are_not_packed_keep_their_own_code() -> None:
    torch.manual_seed(2)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model("llama", **SIZES), attn_implementation=NAME
    )
    assert not any(lean.is_common(layer) for layer in Target(model, pack=False).layers)


@pytest.mark.parametrize("dtype", DTYPES)
def test_heads_are_rotated_alike_with_and_without_a_kernel(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the strides of the tables; one table may stand for all rows."""
    heads = torch.randn(2, 5, 7, 64).to(dtype)
    angles = torch.randn(1, 5, 32).repeat(1, 1, 2)
    halves = torch.cat([angles.cos(), angles.sin()], dim=-1).to(dtype).chunk(2, dim=-1)
    with torch.inference_mode():
        for cos, sin in (halves, [half.contiguous() for half in halves]):
            found = lean.Rotary().rotate(heads.clone()[:, :, :4], cos, sin)
            with monkeypatch.context() as patch:
                patch.setattr(elementwise, "available", lambda *_: False)
                expected = lean.Rotary().rotate(heads[:, :, :4], cos, sin)
            torch.testing.assert_close(found, expected)
