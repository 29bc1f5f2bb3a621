"""Linear layers packed once for a CPU's matrix kernels, with sibling layers fused into one product.

An eager `linear` on a CPU lays its weight out anew for the kernel at every call, or runs n tokens
as n vector products. Packing at load removes both. Swapping modules keeps this independent of the
architecture: the siblings of a block (query, key and value; gate and up) share one packed weight;
the first of them to be called computes the product for all.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar

import torch
from torch import nn

from specbench.target import matrix

_SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
# Below this number of tokens oneDNN falls back to slower vector code.
_MIN_TOKENS = 4


class Product(ABC):
    """A matrix product with one prepared weight, [out, in], that sibling layers may share.

    Args:
        weight: [out, in].
        bias: [out], if there is one.
        num_siblings: layers that ask for it in turn.
    """

    name: ClassVar[str]
    """What the provenance of a run calls its kernels."""

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
        return self.multiply(tokens_Ni).reshape(*x.shape[:-1], self.out_features)

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


class BlockedProduct(Product):
    """A product by our own kernel, at the speed of memory; the numbers stay the same."""

    name = "blocked"

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None, num_siblings: int = 1
    ) -> None:
        super().__init__(weight, bias, num_siblings)
        self.blocked = matrix.BlockedWeight(weight, bias)

    def multiply(self, tokens_Ni: torch.Tensor) -> torch.Tensor:
        """[N, in] -> [N, out]; no token's product depends on the others."""
        return self.blocked.multiply(tokens_Ni)

    def dense(self) -> torch.Tensor:
        """The weight as a plain tensor again, [out, in]."""
        return self.blocked.dense()


class OneDnnProduct(Product):
    """A product with the weight laid out once for oneDNN; the numbers stay the same."""

    name = "onednn"

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None, num_siblings: int = 1
    ) -> None:
        super().__init__(weight, bias, num_siblings)
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), _MIN_TOKENS)

    def multiply(self, tokens_Ni: torch.Tensor) -> torch.Tensor:
        """[N, in] -> [N, out]; few tokens are filled up to where the fast kernels begin."""
        num_tokens = tokens_Ni.shape[0]
        tokens_Ni = pad_tokens(tokens_Ni, self.padded_to(num_tokens))
        out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
            tokens_Ni, self.packed, self.bias, "none", [], ""
        )
        return out[:num_tokens]

    def padded_to(self, num_tokens: int) -> int:
        """Few tokens are slower than four."""
        return max(num_tokens, _MIN_TOKENS)

    def dense(self) -> torch.Tensor:
        """The weight as a plain tensor again, [out, in]."""
        dense: torch.Tensor = self.packed.to_dense()
        return dense


def product_class(dtype: torch.dtype) -> type[Product] | None:
    """The fastest product for a type on this CPU and number of threads; None where there is only
    torch's own `linear`."""
    if matrix.available(dtype):
        return BlockedProduct
    plain = torch.zeros(8, 8, dtype=dtype)
    try:
        OneDnnProduct(plain, None).multiply(plain)
    except (AttributeError, RuntimeError, NotImplementedError):
        return None
    return OneDnnProduct


def pad_tokens(tokens_Ni: torch.Tensor, num_rows: int) -> torch.Tensor:
    """With rows of zeros behind, up to so many."""
    missing = num_rows - tokens_Ni.shape[0]
    return nn.functional.pad(tokens_Ni, (0, 0, 0, missing)) if missing else tokens_Ni


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
    linears = [layer for layer in layers if type(layer) is nn.Linear and layer.weight.numel()]
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


def pack(model: nn.Module, make: Callable[..., Product]) -> int:
    """Replaces every `nn.Linear` of a CPU model by one on a prepared weight, in place.

    Args:
        model: the model.
        make: how a weight is prepared: a kind of `Product`.

    Returns:
        The number of layers replaced.
    """
    count = 0
    # No list holds a linear layer: its weight is freed as soon as it is replaced.
    for parent in [module for module in model.modules() if type(module) is not nn.Linear]:
        for names in _SIBLINGS:
            if _fuse(parent, names, make):
                count += len(names)
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear and child.weight.numel():
                setattr(parent, name, PackedLinear(make(child.weight, child.bias)))
                count += 1
    return count


def pack_for(model: nn.Module, dtype: torch.dtype, device: torch.device) -> str:
    """Packs a model for its device's fastest product, and says which; "torch" if nothing is
    packed."""
    make = product_class(dtype) if device.type == "cpu" else None
    return make.name if make is not None and pack(model, make) else "torch"
