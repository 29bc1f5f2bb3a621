"""Linear layers packed once for the CPU's matrix kernels, with sibling layers fused into one
product.

An eager `linear` on a CPU lays its weight out anew for the kernel at every call, or runs n tokens
as n vector products. Packing at load removes both. Swapping modules keeps this independent of the
architecture: the siblings of a block (query, key and value; gate and up) share one packed weight;
the first of them to be called computes the product for all.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial

import torch
from torch import nn

_SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
# Below this number of tokens the kernels fall back to slower vector code.
_MIN_TOKENS = 4
# Up to this number FBGEMM's kernel is the faster one.
_MAX_NARROW = 4
_LARGEST_HALF = 65504
_MOST_BYTES_TWICE = 4 * 2**30


def available(dtype: torch.dtype = torch.float32) -> bool:
    """Whether this build of torch has the packed operators, and this CPU the kernels for a type."""
    plain = torch.zeros(8, 8, dtype=dtype)
    try:
        packed = torch.ops.mkldnn._reorder_linear_weight(plain, _MIN_TOKENS)
        torch.ops.mkldnn._linear_pointwise(plain, packed, None, "none", [], "")
    except (AttributeError, RuntimeError, NotImplementedError):
        return False
    return True


class Product(ABC):
    """A matrix product with one prepared weight, [out, in], that sibling layers may share.

    Args:
        weight: [out, in].
        bias: [out], if there is one.
        num_siblings: layers that ask for it in turn.
    """

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None, num_siblings: int = 1
    ) -> None:
        self.out_features, self.in_features = weight.shape
        self.bias = None if bias is None else bias.detach().clone()
        self.num_siblings = num_siblings
        self._waiting: set[int] = set()
        self._input: torch.Tensor | None = None
        self._output: torch.Tensor | None = None

    @abstractmethod
    def multiply(self, tokens_Ni: torch.Tensor) -> torch.Tensor:
        """[N, in] -> [N, out], the bias added; N is 1 at least."""

    def padded_to(self, num_tokens: int) -> int:
        """The number of rows at which this many tokens are multiplied fastest; no fewer."""
        return num_tokens

    @abstractmethod
    def dense(self) -> torch.Tensor:
        """The weight as a plain tensor again, [out, in]; laid out anew at every call."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in] -> [..., out]"""
        tokens_Ni = x.reshape(-1, x.shape[-1])
        if tokens_Ni.shape[0] == 0:
            return x.new_zeros(*x.shape[:-1], self.out_features)
        return self.multiply(tokens_Ni).view(*x.shape[:-1], self.out_features)

    def shared(self, x: torch.Tensor, sibling: int) -> torch.Tensor:
        """As a call, computed once for siblings that ask in turn, each once, about one input."""
        if self._input is not x or sibling not in self._waiting:
            self._input, self._output = x, self(x)
            self._waiting = set(range(self.num_siblings))
        out = self._output
        self._waiting.remove(sibling)
        if not self._waiting:
            self._input = self._output = None
        assert out is not None
        return out


class PackedProduct(Product):
    """A product with the weight laid out once for oneDNN; the numbers stay the same.

    In bfloat16 one to four tokens take FBGEMM's kernel for 16-bit weights instead, which reads
    memory nearly twice as fast and computes in float32. It wants float16, which holds every
    bfloat16 between 2^-17 and 65504 exactly, and smaller ones to within 2^-25; the weight is then
    held twice.

    Args:
        narrow: whether to use it.
    """

    def __init__(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        num_siblings: int = 1,
        *,
        narrow: bool = True,
    ) -> None:
        super().__init__(weight, bias, num_siblings)
        weight = weight.detach()
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight, _MIN_TOKENS)
        self.narrow = None
        narrow &= weight.dtype == torch.bfloat16 and _has_fbgemm()
        if narrow and weight.abs().max() < _LARGEST_HALF:
            bias = None if bias is None else bias.detach().float()
            self.narrow = torch.ops.quantized.linear_prepack_fp16(weight.float(), bias)

    def multiply(self, tokens_Ni: torch.Tensor) -> torch.Tensor:
        """[N, in] -> [N, out]; for oneDNN few tokens are filled up to where its fast kernels
        begin."""
        num_tokens = tokens_Ni.shape[0]
        if self._is_narrow(num_tokens):
            out: torch.Tensor = torch.ops.quantized.linear_dynamic_fp16(
                tokens_Ni.float(), self.narrow
            )
            return out.to(tokens_Ni.dtype)
        tokens_Ni = pad_tokens(tokens_Ni, self.padded_to(num_tokens))
        out = torch.ops.mkldnn._linear_pointwise(tokens_Ni, self.packed, self.bias, "none", [], "")
        return out[:num_tokens]

    def padded_to(self, num_tokens: int) -> int:
        """Few tokens are slower than four, but for FBGEMM."""
        return num_tokens if self._is_narrow(num_tokens) else max(num_tokens, _MIN_TOKENS)

    def _is_narrow(self, num_tokens: int) -> bool:
        return self.narrow is not None and num_tokens <= _MAX_NARROW

    def dense(self) -> torch.Tensor:
        """The weight as a plain tensor again, [out, in]."""
        dense: torch.Tensor = self.packed.to_dense()
        return dense


def pad_tokens(tokens_Ni: torch.Tensor, num_rows: int) -> torch.Tensor:
    """With rows of zeros behind, up to so many."""
    missing = num_rows - tokens_Ni.shape[0]
    return nn.functional.pad(tokens_Ni, (0, 0, 0, missing)) if missing else tokens_Ni


def _has_fbgemm() -> bool:
    fast = torch.cpu.get_capabilities().get("avx512_f", False)
    return bool(fast) and torch.backends.quantized.engine in ("x86", "fbgemm")


class PackedLinear(nn.Module):
    """A linear layer, or one sibling's share of a fused one, on a packed weight."""

    def __init__(self, product: Product, columns: slice | None = None, sibling: int = 0) -> None:
        super().__init__()
        self.product, self.columns, self.sibling = product, columns, sibling
        width = columns.stop - columns.start if columns else product.out_features
        self.in_features, self.out_features = product.in_features, width

    @property
    def weight(self) -> torch.Tensor:
        """The weight as a plain tensor again, [out, in]; laid out anew at every call."""
        dense = self.product.dense()
        return dense if self.columns is None else dense[self.columns]

    @property
    def bias(self) -> torch.Tensor | None:
        """The bias, [out], if there is one."""
        bias = self.product.bias
        return bias if bias is None or self.columns is None else bias[self.columns]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.columns is None:
            return self.product(x)
        return self.product.shared(x, self.sibling)[..., self.columns]


def _fuse(parent: nn.Module, names: tuple[str, ...], make: Callable[..., Product]) -> bool:
    layers = [getattr(parent, name, None) for name in names]
    linears = [layer for layer in layers if type(layer) is nn.Linear]
    if len(linears) != len(names) or len({layer.in_features for layer in linears}) > 1:
        return False
    biases: list[torch.Tensor] = [layer.bias for layer in linears if layer.bias is not None]
    if len(biases) not in (0, len(linears)):
        return False
    weights: list[torch.Tensor] = [layer.weight for layer in linears]
    product = make(
        torch.cat(weights), torch.cat(biases) if biases else None, num_siblings=len(names)
    )
    start = 0
    for sibling, (name, layer) in enumerate(zip(names, linears, strict=True)):
        columns = slice(start, start + layer.out_features)
        setattr(parent, name, PackedLinear(product, columns, sibling))
        start = columns.stop
    return True


def pack(model: nn.Module, make: Callable[..., Product] | None = None) -> int:
    """Replaces every `nn.Linear` of a CPU model by one on a prepared weight, in place.

    Args:
        model: the model.
        make: how a weight is prepared; None for `PackedProduct`, which holds the weights of a small
            model twice.

    Returns:
        The number of layers replaced.
    """
    if make is None:
        num_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
        make = partial(PackedProduct, narrow=num_bytes <= _MOST_BYTES_TWICE)
    count = 0
    # No list holds a linear layer: its weight is freed as soon as it is replaced.
    for parent in [module for module in model.modules() if type(module) is not nn.Linear]:
        for names in _SIBLINGS:
            if _fuse(parent, names, make):
                count += len(names)
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                setattr(parent, name, PackedLinear(make(child.weight, child.bias)))
                count += 1
    return count
