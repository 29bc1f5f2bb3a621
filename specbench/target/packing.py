"""Linear layers packed once for the CPU's matrix kernels, with sibling layers fused into one
product.

An eager `linear` on a CPU lays its weight out anew for the kernel at every call, or runs n tokens
as n vector products. Packing at load removes both. Swapping modules keeps this independent of the
architecture: the siblings of a block (query, key and value; gate and up) share one packed weight;
the first of them to be called computes the product for all.
"""

from typing import Any

import torch
from torch import nn

_SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
# Below this number of tokens the kernels fall back to slower vector code.
_MIN_TOKENS = 4


def available() -> bool:
    """Whether this build of torch has the packed operators."""
    try:
        weight = torch.ops.mkldnn._reorder_linear_weight(torch.zeros(8, 8), _MIN_TOKENS)
        torch.ops.mkldnn._linear_pointwise(torch.zeros(1, 8), weight, None, "none", [], "")
    except (AttributeError, RuntimeError, NotImplementedError):
        return False
    return True


class _Product:
    """One packed weight, [out, in], and the last input that it was applied to."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), _MIN_TOKENS)
        self.bias = None if bias is None else bias.detach().clone()
        self.padded = weight.new_zeros(_MIN_TOKENS, weight.shape[1])
        self.out_features = weight.shape[0]
        self._input: torch.Tensor | None = None
        self._output: torch.Tensor | None = None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in] -> [..., out]"""
        tokens = x.reshape(-1, x.shape[-1])
        num_tokens = tokens.shape[0]
        if num_tokens == 0:
            return x.new_zeros(*x.shape[:-1], self.out_features)
        if num_tokens < _MIN_TOKENS:
            self.padded[:num_tokens] = tokens
            tokens = self.padded
        out = torch.ops.mkldnn._linear_pointwise(tokens, self.packed, self.bias, "none", [], "")
        out = out[:num_tokens].view(*x.shape[:-1], self.out_features)
        assert isinstance(out, torch.Tensor)
        return out

    def shared(self, x: torch.Tensor, last: bool) -> torch.Tensor:
        """As a call, computed once for the siblings that are given the same input in turn."""
        if self._input is not x or self._output is None:
            self._input, self._output = x, self(x)
        out = self._output
        if last:
            self._input = self._output = None
        return out


class PackedLinear(nn.Module):
    """A linear layer, or one sibling's share of a fused one, on a packed weight."""

    def __init__(self, product: _Product, columns: slice | None = None, last: bool = True) -> None:
        super().__init__()
        self.product, self.columns, self.last = product, columns, last
        width = columns.stop - columns.start if columns else product.out_features
        self.in_features, self.out_features = product.padded.shape[1], width

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.columns is None:
            return self.product(x)
        return self.product.shared(x, self.last)[..., self.columns]


def _fuse(parent: nn.Module, names: tuple[str, ...]) -> bool:
    layers = [getattr(parent, name, None) for name in names]
    linears = [layer for layer in layers if type(layer) is nn.Linear]
    if len(linears) != len(names) or len({layer.in_features for layer in linears}) > 1:
        return False
    biases: list[torch.Tensor] = [layer.bias for layer in linears if layer.bias is not None]
    if len(biases) not in (0, len(linears)):
        return False
    weights: list[torch.Tensor] = [layer.weight for layer in linears]
    product = _Product(torch.cat(weights), torch.cat(biases) if biases else None)
    start = 0
    for name, layer in zip(names, linears, strict=True):
        columns = slice(start, start + layer.out_features)
        setattr(parent, name, PackedLinear(product, columns, last=name == names[-1]))
        start = columns.stop
    return True


def pack(model: nn.Module) -> int:
    """Replaces every `nn.Linear` of a CPU model by a packed one, in place; the weights stay the
    same numbers.

    Returns:
        The number of layers replaced.
    """
    count = 0
    parents: list[tuple[nn.Module, Any]] = [(m, dict(m.named_children())) for m in model.modules()]
    for parent, children in parents:
        for names in _SIBLINGS:
            if _fuse(parent, names):
                count += len(names)
        for name, child in children.items():
            if type(child) is nn.Linear and getattr(parent, name) is child:
                setattr(parent, name, PackedLinear(_Product(child.weight, child.bias)))
                count += 1
    return count
