"""Packed linear layers give what the eager ones give."""

import copy
from itertools import permutations

import pytest
import torch
from torch import nn

from specbench.conformance.models import tiny_model
from specbench.target import Target, jit, matrix, packing
from specbench.target.packing import PackedLinear, Product, pack

needs_kernels = pytest.mark.skipif(
    packing.product_class(torch.float32) is None,
    reason="this build of torch has no packed operators",
)
needs_blocked = pytest.mark.skipif(
    not matrix.available(torch.float32), reason="no kernel of our own for this CPU"
)
HIDDEN, QUERY, KEY = 48, 64, 32


class Block(nn.Module):
    """The linear layers of a decoder layer: siblings that fuse, and others that do not."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.q_proj = nn.Linear(HIDDEN, QUERY, bias=bias)
        self.k_proj = nn.Linear(HIDDEN, KEY, bias=bias)
        self.v_proj = nn.Linear(HIDDEN, KEY, bias=bias)
        self.o_proj = nn.Linear(QUERY, HIDDEN, bias=bias)
        self.experts = nn.ModuleList([nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, 8)])

    def forward(self, x: torch.Tensor, order: tuple[str, ...]) -> dict[str, torch.Tensor]:
        """All siblings in an order, and another layer behind one."""
        found = {name: getattr(self, name)(x) for name in order}
        return found | {"o": self.o_proj(found["q_proj"]), "expert": self.experts[1](x)}


SIBLINGS = ("q_proj", "k_proj", "v_proj")


def kind_for(dtype: torch.dtype) -> type[Product]:
    kind = packing.product_class(dtype)
    assert kind is not None
    return kind


def blocks(bias: bool, dtype: torch.dtype = torch.float32) -> tuple[Block, Block]:
    """The same block, eager and packed."""
    torch.manual_seed(0)
    eager = Block(bias).to(dtype)
    packed = copy.deepcopy(eager)
    assert pack(packed, kind_for(dtype)) == 6
    return eager, packed


def product_of(layer: nn.Module) -> Product:
    assert isinstance(layer, PackedLinear)
    return layer.product


@needs_kernels
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("num_tokens", [0, 1, 3, 4, 9])
@torch.inference_mode()
def test_packed_layers_equal_eager_ones_in_float32(num_tokens: int, bias: bool) -> None:
    eager, packed = blocks(bias)
    for shape in ((1, num_tokens, HIDDEN), (num_tokens, HIDDEN), (2, num_tokens, HIDDEN)):
        x = torch.randn(shape)
        found, expected = packed(x, SIBLINGS), eager(x, SIBLINGS)
        assert found.keys() == expected.keys()
        for name, out in expected.items():
            torch.testing.assert_close(found[name], out, atol=1e-5, rtol=1e-5)


@pytest.mark.skipif(
    packing.product_class(torch.bfloat16) is None, reason="no packed bfloat16 kernels on this CPU"
)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("num_tokens", [1, 3, 4, 9])
@torch.inference_mode()
def test_packed_layers_are_as_good_as_eager_ones_in_bfloat16(num_tokens: int, bias: bool) -> None:
    eager, packed = blocks(bias, torch.bfloat16)
    x = torch.randn(1, num_tokens, HIDDEN, dtype=torch.bfloat16)
    found, exact = packed(x, SIBLINGS), copy.deepcopy(eager).float()(x.float(), SIBLINGS)
    for name, out in exact.items():
        assert found[name].dtype == torch.bfloat16
        torch.testing.assert_close(found[name].float(), out, atol=0.02, rtol=0.02)


KINDS = [
    pytest.param(kind, dtype, id=f"{kind.name}-{str(dtype).removeprefix('torch.')}")
    for dtype in (torch.float32, torch.bfloat16)
    for kind in dict.fromkeys((packing.product_class(dtype), packing.OneDnnProduct))
    if kind is not None
]


@needs_kernels
@pytest.mark.parametrize(("kind", "dtype"), KINDS)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("num_out", "num_in"), [(1, 1), (31, 7), (64, 48), (100, 130)])
@torch.inference_mode()
def test_a_product_has_the_numbers_of_the_exact_one_whatever_its_sizes(
    kind: type[Product], dtype: torch.dtype, bias: bool, num_out: int, num_in: int
) -> None:
    torch.manual_seed(0)
    for scale in (1.0, 1e-6, 3e5):
        weight = (scale * torch.randn(num_out, num_in)).to(dtype)
        offset = (scale * torch.randn(num_out)).to(dtype) if bias else None
        product = kind(weight, offset)
        assert torch.equal(product.dense(), weight)
        x = torch.randn(40, num_in).to(dtype)
        exact = x.double() @ weight.double().T + (0 if offset is None else offset.double())
        for num_tokens in (1, 2, 5, 11, 12, 13, 24, 37):
            found = product.multiply(x[:num_tokens])
            assert found.dtype == dtype and found.shape == (num_tokens, num_out)
            error = (found.double() - exact[:num_tokens]).abs().max()
            assert error <= exact.abs().max() * (2**-7 if dtype == torch.bfloat16 else 2**-20)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.inference_mode()
def test_in_our_own_kernel_no_token_depends_on_the_others(dtype: torch.dtype) -> None:
    if not matrix.available(dtype):
        pytest.skip(f"no kernel for {dtype} on this CPU, or more than one thread")
    torch.manual_seed(0)
    product = packing.BlockedProduct(torch.randn(96, 130).to(dtype), torch.randn(96).to(dtype))
    x = torch.randn(40, 130).to(dtype)
    alone = torch.cat([product.multiply(x[i : i + 1]) for i in range(len(x))])
    for num_tokens in range(1, 41):
        assert torch.equal(product.multiply(x[:num_tokens]), alone[:num_tokens])
        strided = torch.stack([x, x.flip(0)], dim=2)[:num_tokens, :, 0]
        assert torch.equal(product.multiply(strided), alone[:num_tokens])


@needs_blocked
def test_our_own_kernel_refuses_what_it_would_read_wrong() -> None:
    product = packing.BlockedProduct(torch.randn(40, 10), None)
    for x in (torch.randn(3, 9), torch.randn(3, 11), torch.randn(3, 10).bfloat16()):
        with pytest.raises(RuntimeError, match=r"a packed layer is \d+ wide"):
            product(x)
    with pytest.raises(RuntimeError, match="no gradient"):
        product(torch.randn(3, 10, requires_grad=True))


@needs_blocked
@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
def test_no_tokens_and_empty_layers_are_no_matter() -> None:
    product = packing.BlockedProduct(torch.randn(4096, 64), None)
    for _ in range(20):
        assert product.multiply(torch.empty(0, 64)).shape == (0, 4096)
    empty = nn.Sequential(nn.Linear(4, 3), nn.Linear(0, 3), nn.Linear(4, 0))
    assert pack(empty, packing.BlockedProduct) == 1


@needs_blocked
@pytest.mark.parametrize("default", [torch.float64, torch.float16, torch.bfloat16])
def test_torchs_default_type_does_not_matter(default: torch.dtype) -> None:
    weight, bias, x = torch.randn(40, 10), torch.randn(40), torch.randn(3, 10)
    expected = nn.functional.linear(x, weight, bias)
    before = torch.get_default_dtype()
    torch.set_default_dtype(default)
    try:
        found = packing.BlockedProduct(weight, bias).multiply(x)
    finally:
        torch.set_default_dtype(before)
    torch.testing.assert_close(found, expected)


def test_without_llvm_torchs_kernels_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jit, "llvm", None)
    jit.has.cache_clear()
    assert packing.product_class(torch.float32) in (packing.OneDnnProduct, None)
    jit.has.cache_clear()


def test_a_kernel_that_cannot_be_made_is_said_once_and_done_without() -> None:
    def no_memory() -> None:
        raise RuntimeError("no executable memory")

    with pytest.warns(UserWarning, match="no CPU kernels of our own: no executable memory"):
        assert not jit.compiles(no_memory)


@needs_blocked
def test_a_copied_product_lives_on_its_own() -> None:
    product = packing.BlockedProduct(torch.ones(40, 10), torch.ones(40))
    other = copy.deepcopy(product)
    product.blocked.blocks.zero_()
    assert torch.equal(other(torch.ones(2, 10)), torch.full((2, 40), 11.0))
    assert torch.equal(product(torch.ones(2, 10)), torch.ones(2, 40))


def test_our_own_kernel_is_left_alone_where_it_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    for where, name, value in (
        (torch, "get_num_threads", lambda: 2),
        (jit.platform, "machine", lambda: "arm64"),
        (jit.llvm, "get_host_cpu_features", lambda: {"avx2": True}),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(where, name, value)
            jit.has.cache_clear()
            assert packing.product_class(torch.float32) in (packing.OneDnnProduct, None)
    jit.has.cache_clear()
    assert not matrix.available(torch.float16)


@needs_kernels
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("order", list(permutations(SIBLINGS)))
@torch.inference_mode()
def test_siblings_may_be_called_in_any_order(order: tuple[str, ...], bias: bool) -> None:
    eager, packed = blocks(bias)
    for x in (torch.randn(1, 5, HIDDEN), torch.randn(1, 5, HIDDEN)):
        found, expected = packed(x, order), eager(x, order)
        for name, out in expected.items():
            torch.testing.assert_close(found[name], out, atol=1e-5, rtol=1e-5)


@needs_kernels
@torch.inference_mode()
def test_siblings_may_be_given_different_inputs() -> None:
    eager, packed = blocks(bias=True)
    first, second = torch.randn(1, 5, HIDDEN), torch.randn(1, 5, HIDDEN)
    calls = [("q_proj", first), ("k_proj", second), ("q_proj", second), ("v_proj", first)]
    for name, x in calls:
        expected = getattr(eager, name)(x)
        torch.testing.assert_close(getattr(packed, name)(x), expected, atol=1e-5, rtol=1e-5)


@needs_kernels
@torch.inference_mode()
def test_a_sibling_that_is_called_again_sees_what_became_of_its_input() -> None:
    eager, packed = blocks(bias=False)
    x = torch.randn(1, 5, HIDDEN)
    for _ in range(3):
        x += 1
        torch.testing.assert_close(packed.q_proj(x), eager.q_proj(x), atol=1e-5, rtol=1e-5)


@needs_kernels
@torch.inference_mode()
def test_siblings_share_one_product_and_keep_no_result_behind() -> None:
    _, packed = blocks(bias=False)
    product = product_of(packed.q_proj)
    assert product is product_of(packed.k_proj) is product_of(packed.v_proj)
    x = torch.randn(1, 5, HIDDEN)
    outs = [getattr(packed, name)(x) for name in SIBLINGS]
    assert len({out.untyped_storage().data_ptr() for out in outs}) == 1
    assert product._input is None and product._output is None


@needs_kernels
def test_siblings_of_which_only_some_have_a_bias_are_packed_one_by_one() -> None:
    block = Block(bias=False)
    block.k_proj = nn.Linear(HIDDEN, KEY, bias=True)
    assert pack(block, kind_for(torch.float32)) == 6
    assert product_of(block.q_proj) is not product_of(block.k_proj)


@needs_kernels
@pytest.mark.parametrize("bias", [False, True])
def test_the_weights_of_packed_layers_can_be_read_back(bias: bool) -> None:
    eager, packed = blocks(bias)
    for name, module in packed.named_modules():
        if isinstance(module, PackedLinear):
            plain = eager.get_submodule(name)
            assert isinstance(plain, nn.Linear)
            assert torch.equal(module.weight, plain.weight)
            assert (module.bias is None) is (plain.bias is None)
            assert module.bias is None or torch.equal(module.bias, plain.bias)
            sizes = (module.in_features, module.out_features)
            assert sizes == (plain.in_features, plain.out_features)


def test_a_target_falls_back_to_eager_layers_where_operators_are_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(packing, "product_class", lambda dtype: None)
    model = tiny_model()
    target = Target(model)
    assert target.kernels == "torch"
    assert all(type(layer) is not PackedLinear for layer in model.modules())


def test_operators_that_raise_count_as_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_kernel(*args: object) -> None:
        raise RuntimeError("no kernel on this CPU")

    monkeypatch.setattr(matrix, "available", lambda dtype: False)
    monkeypatch.setattr(torch.ops.mkldnn, "_reorder_linear_weight", no_kernel)
    assert packing.product_class(torch.float32) is None


@needs_kernels
def test_packing_can_be_left_out() -> None:
    assert Target(tiny_model()).kernels in ("blocked", "onednn")
    assert Target(tiny_model(), pack=False).kernels == "torch"
