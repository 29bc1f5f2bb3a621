"""Our own attention gives what the exact one gives, and a node's does not depend on the others."""

from collections.abc import Sequence

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from specbench.target import Target, attention_kernel
from specbench.target.attention import NAME, Extent, grouped_attention, note_extents
from specbench.tree import Tree

DTYPES = [
    pytest.param(
        dtype,
        marks=pytest.mark.skipif(
            not attention_kernel.available(dtype, 32), reason=f"no kernel for {dtype}"
        ),
    )
    for dtype in (torch.float32, torch.bfloat16)
]
TREE = Tree.of((-1, 0, 0, 1, 1, 2, 2, 5, 3))
SIZES = {
    "vocab_size": 131,
    "hidden_size": 128,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "initializer_range": 0.2,
}


def exact(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor, scale: float
) -> torch.Tensor:
    """[B, N, H, D] in float64."""
    groups = query.shape[1] // key.shape[1]
    keys, values = (x.repeat_interleave(groups, 1).double() for x in (key, value))
    scores = query.double() @ keys.transpose(2, 3) * scale + mask.double()
    return (scores.softmax(-1) @ values).transpose(1, 2)


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    extents: Sequence[tuple[int, int]],
) -> torch.Tensor:
    padded = any(nodes < query.shape[2] for nodes, _ in extents)
    scale = query.shape[-1] ** -0.5
    return attention_kernel.attend(query, key, value, mask, torch.tensor(extents), padded, scale)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [32, 64, 96, 128, 256])
@pytest.mark.parametrize(
    ("batch", "heads", "num_kv", "num_nodes", "num_slots"),
    [(1, 9, 3, 1, 5), (2, 4, 4, 7, 33), (1, 6, 2, 8, 257), (3, 4, 1, 5, 16), (1, 1, 1, 1, 1)],
)
def test_the_kernel_attends_like_the_exact_formula(
    dtype: torch.dtype,
    dim: int,
    batch: int,
    heads: int,
    num_kv: int,
    num_nodes: int,
    num_slots: int,
) -> None:
    torch.manual_seed(0)
    # Some of the stored slots are not to be seen.
    store = torch.randn(2, batch, num_kv, (num_slots + 15) // 16 * 16 + 32, dim).to(dtype)
    store[:, :, :, num_slots:] = torch.nan
    key, value = store[..., :num_slots, :]
    query = torch.randn(batch, num_nodes, heads + 2, dim).to(dtype)[:, :, :heads].transpose(1, 2)
    mask = torch.zeros(batch, 1, num_nodes, num_slots).to(dtype)
    mask[torch.rand(mask.shape) < 0.4] = torch.finfo(dtype).min
    mask[..., -1] = 0
    found = attend(query, key, value, mask, [(num_nodes, num_slots)] * batch)
    expected = exact(query, key, value, mask, dim**-0.5)
    assert found.dtype == dtype and found.is_contiguous()
    rounding = 2**-8 if dtype == torch.bfloat16 else 2e-6
    torch.testing.assert_close(found.double(), expected, rtol=rounding, atol=4e-6)


@pytest.mark.parametrize("dtype", DTYPES)
def test_scores_of_any_size_are_weighed_right(dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    for size in (1e-3, 1.0, 30.0, 300.0):
        query, key, value = (size**0.5 * torch.randn(1, 2, 24, 32).to(dtype) for _ in range(3))
        key = torch.nn.functional.pad(key, (0, 0, 0, 8))[:, :, :24]
        value = torch.nn.functional.pad(value, (0, 0, 0, 8))[:, :, :24]
        mask = torch.zeros(1, 1, 24, 24, dtype=dtype)
        found = attend(query, key, value, mask, [(24, 24)]).double()
        expected = exact(query, key, value, mask, 32**-0.5)
        rounding = 2**-8 if dtype == torch.bfloat16 else 1e-5 * max(1, size)
        torch.testing.assert_close(found, expected, rtol=rounding, atol=rounding * size**0.5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_keep_to_their_own_nodes_and_slots(dtype: torch.dtype) -> None:
    torch.manual_seed(2)
    extents = [(3, 20), (0, 7), (5, 11), (1, 32)]
    key, value = torch.randn(2, 4, 2, 32, 32).to(dtype)
    query, mask = torch.randn(4, 4, 5, 32).to(dtype), torch.zeros(4, 1, 5, 32).to(dtype)
    together = attend(query, key, value, mask, extents)
    for row, (nodes, slots) in enumerate(extents):
        assert not together[row, nodes:].any()
        if nodes:
            one = slice(row, row + 1)
            alone = attend(
                query[one, :, :nodes],
                key[one, :, :slots],
                value[one, :, :slots],
                mask[one, :, :nodes, :slots],
                [(nodes, slots)],
            )
            assert torch.equal(together[one, :nodes], alone)


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_no_number_stays_none(dtype: torch.dtype) -> None:
    key, value = torch.ones(2, 1, 1, 16, 32).to(dtype)
    query, mask = torch.ones(1, 1, 2, 32).to(dtype), torch.zeros(1, 1, 2, 16).to(dtype)
    query[0, 0, 1, 3] = torch.nan
    found = attend(query, key, value, mask, [(2, 16)])
    assert torch.equal(found[0, 0], torch.ones(1, 32).to(dtype)) and found[0, 1].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "why", ["ends early", "a window", "narrower values", "repeated keys", "another type of mask"]
)
def test_what_the_kernel_would_read_wrong_is_left_to_torch(
    why: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_kernel(*args: object) -> None:
        raise AssertionError("read what is not there")

    monkeypatch.setattr(attention_kernel, "attend", no_kernel)
    query, key, value = torch.randn(3, 1, 2, 16, 32).to(dtype)[..., :5, :]
    mask = torch.zeros(1, 1, 5, 5, dtype=dtype)
    if why == "ends early":
        query, key, value = query.contiguous(), key.contiguous(), value.contiguous()
    elif why == "a window":
        # The store goes on in front of the slots, but not behind them.
        key, value = torch.randn(2, 1, 2, 16, 32).to(dtype)[..., 11:, :]
    elif why == "repeated keys":
        key = key[:, :1].expand(-1, 2, -1, -1)
    elif why == "narrower values":
        value = value[..., :16]
    elif dtype == torch.bfloat16:
        mask = mask.float()
    else:
        pytest.skip("to float32, torch adds no other type")
    note_extents(mask, [Extent(5, 5)])
    found, _ = grouped_attention(torch.nn.Module(), query, key, value, mask)
    expected = exact(query, key, value, mask, 32**-0.5)
    torch.testing.assert_close(found.double(), expected, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("dtype", DTYPES)
def test_torchs_default_type_does_not_matter(dtype: torch.dtype) -> None:
    query, key, value = torch.randn(3, 1, 2, 16, 32).to(dtype)
    mask = torch.zeros(1, 1, 16, 16).to(dtype)
    expected = attend(query, key, value, mask, [(16, 16)])
    torch.set_default_dtype(torch.bfloat16)
    try:
        for _ in range(50):
            assert torch.equal(attend(query, key, value, mask, [(16, 16)]), expected)
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
@torch.inference_mode()
def test_a_node_is_scored_to_the_bit_as_if_it_came_alone(family: str, dtype: torch.dtype) -> None:
    """Over a tree, in a batch, token by token or in a prefill: what makes a method exact in half
    precision too."""
    torch.manual_seed(3)
    config = AutoConfig.for_model(family, **SIZES)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=NAME, dtype=dtype)
    target = Target(model, name=family)
    assert target.bitwise
    prompts = [torch.randint(0, 131, (length,)).tolist() for length in (37, 5)]
    tokens_BN = torch.randint(0, 131, (2, len(TREE)))

    cache = target.new_cache(2)
    for row, prompt in enumerate(prompts):
        target.prefill(prompt, cache, cache.add_row())
        assert cache.lengths[row] == len(prompt)
    together = target.forward(tokens_BN, [TREE, TREE], cache).logits_BMV

    for row, prompt in enumerate(prompts):
        for node in range(len(TREE)):
            alone = target.new_cache(1)
            alone.add_row()
            for token in [*prompt, *tokens_BN[row, TREE.path_to(node)].tolist()]:
                out = target.forward(torch.tensor([[token]]), [Tree.chain(0)], alone)
                alone.commit(0, [0])
            assert torch.equal(out.logits_BMV[0, 0], together[row, node])
