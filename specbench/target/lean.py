"""The commonest decoder layer in fewer operations, for a CPU.

At a few tokens per step much of a layer's time goes into what lies between its matrix products:
rotating queries and keys apart, taking fused products to pieces, modules that call modules. The
layers of the families below are all the same, so one function runs them on their own weights, with
the same operations on the same numbers. `Target` compares it with the modeling code at load, within
rounding. It reads a layer once: what is changed in the layer later is not seen.

Shapes: B rows, N nodes, T of them that are no padding, or a few more, H query heads, K key-value
heads, D head dimension, h hidden, i inner.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from specbench.target import elementwise
from specbench.target.attention import Real, grouped_attention
from specbench.target.cache import KVCache
from specbench.target.packing import PackedLinear, Product, pad_tokens

_FAMILIES = frozenset(f"{family}DecoderLayer" for family in ("Llama", "Mistral", "Qwen2", "Qwen3"))


class Rotary:
    """Rotates heads to their nodes' positions, by cosines and sines that are prepared once for all
    layers of a forward."""

    def __init__(self) -> None:
        self.source: torch.Tensor | None = None
        self.fused = False
        self.cos = self.sin = torch.empty(0)

    def rotate(
        self, x_BNHD: torch.Tensor, cos_BND: torch.Tensor, sin_BND: torch.Tensor
    ) -> torch.Tensor:
        """Every head to its node's position; in place where there is a kernel for it."""
        if self.source is not sin_BND:
            self._prepare(x_BNHD, cos_BND, sin_BND)
        if self.fused:
            # A view, never a copy: of the rows of a product, or of some of its columns.
            elementwise.rotate(x_BNHD.view(-1, *x_BNHD.shape[2:]), self.cos, self.sin)
            return x_BNHD
        rolled = x_BNHD.roll(x_BNHD.shape[-1] // 2, -1)
        return (x_BNHD * self.cos).add_(rolled.mul_(self.sin))

    def _prepare(self, x_BNHD: torch.Tensor, cos_BND: torch.Tensor, sin_BND: torch.Tensor) -> None:
        dtype, half = cos_BND.dtype, cos_BND.shape[-1] // 2
        self.source = sin_BND
        self.fused = (
            (x_BNHD.device.type, x_BNHD.dtype) == ("cpu", dtype)
            and not torch.is_grad_enabled()
            and elementwise.available(dtype, half)
        )
        if self.fused:
            shape = (*x_BNHD.shape[:2], 2 * half)
            self.cos, self.sin = (
                x.expand(shape).flatten(0, 1).contiguous() for x in (cos_BND, sin_BND)
            )
        else:
            # A rotation is then x * cos + roll(x) * sin.
            signed_BND = torch.cat([-sin_BND[..., :half], sin_BND[..., half:]], dim=-1)
            self.cos, self.sin = cos_BND.unsqueeze(2), signed_BND.unsqueeze(2)


class LeanLayer:
    """One decoder layer: pre-norm, rotary attention, gated feed-forward.

    Args:
        layer: a layer that `is_common` knows.
        rotary: shared by all layers of a model.
    """

    def __init__(self, layer: Any, rotary: Rotary) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self.attention, self.rotary = attention, rotary
        self.norms = _norm(layer.input_layernorm), _norm(layer.post_attention_layernorm)
        self.qkv: Product = attention.q_proj.product
        self.out: Product = attention.o_proj.product
        self.gate_up: Product = mlp.gate_proj.product
        self.down: Product = mlp.down_proj.product
        self.head_dim: int = attention.head_dim
        self.num_kv: int = attention.k_proj.out_features // self.head_dim
        self.num_queries: int = attention.q_proj.out_features // self.head_dim
        self.gated = _gated(mlp, layer.input_layernorm.weight.dtype)

    def __call__(
        self,
        hidden_BNh: torch.Tensor,
        attention_mask: torch.Tensor,
        cache: KVCache,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        **_: Any,
    ) -> torch.Tensor:
        """[B, N, h] -> [B, N, h], the nodes' keys and values written to the cache; zeros at padding
        nodes, which no product is spent on."""
        real = Real(attention_mask)
        x_Th = real.pick(hidden_BNh)
        num_real = len(x_Th)
        # Padded to what the products want at once, and not by each of them.
        num_rows = self.qkv.padded_to(num_real)
        x_Th = pad_tokens(x_Th, num_rows)
        heads_BNi = real.place(self.qkv.multiply(self.norms[0](x_Th))[:num_real], hidden_BNh)
        mixed_BNHD = self._attend(
            heads_BNi.view(*heads_BNi.shape[:2], -1, self.head_dim),
            attention_mask,
            cache,
            position_embeddings,
        )
        mixed_Ti = pad_tokens(real.pick(mixed_BNHD.flatten(2)), num_rows)
        x_Th = x_Th + self.out.multiply(mixed_Ti)
        gate_up_Ti = self.gate_up.multiply(self.norms[1](x_Th))
        x_Th = x_Th + self.down.multiply(self.gated(gate_up_Ti))
        return real.place(x_Th[:num_real], hidden_BNh)

    def _attend(
        self,
        heads_BNHD: torch.Tensor,
        mask: torch.Tensor,
        cache: KVCache,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
    ) -> torch.Tensor:
        """The heads of queries, keys and values, H + 2 K of them -> [B, N, H, D]."""
        rotated, value = heads_BNHD[:, :, : -self.num_kv], heads_BNHD[:, :, -self.num_kv :]
        if hasattr(self.attention, "q_norm"):
            rotated = torch.cat(
                [
                    self.attention.q_norm(rotated[:, :, : self.num_queries]),
                    self.attention.k_norm(rotated[:, :, self.num_queries :]),
                ],
                dim=2,
            )
        rotated = self.rotary.rotate(rotated, *position_embeddings).transpose(1, 2)
        keys, values = cache.update(
            rotated[:, self.num_queries :], value.transpose(1, 2), self.attention.layer_idx
        )
        mixed_BNHD, _ = grouped_attention(
            self.attention,
            rotated[:, : self.num_queries],
            keys,
            values,
            mask,
            scaling=self.attention.scaling,
        )
        return mixed_BNHD


def _norm(module: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    """A root mean square norm; in one operation where there is one that rounds as the module
    does."""
    weight, eps = module.weight, module.variance_epsilon
    if elementwise.available(weight.dtype, len(weight)):
        return lambda x: elementwise.rms_norm(x, weight, eps)
    if weight.dtype == torch.float32:
        return lambda x: F.rms_norm(x, weight.shape, weight, eps)
    call: Callable[[torch.Tensor], torch.Tensor] = module.forward
    return call


def _gated(mlp: Any, dtype: torch.dtype) -> Callable[[torch.Tensor], torch.Tensor]:
    """From the fused product of gate and up, [T, 2 i], to the input of down, [T, i]."""
    width: int = mlp.gate_proj.out_features
    is_silu = type(mlp.act_fn).__name__ in ("SiLU", "SiLUActivation")
    if is_silu and elementwise.available(dtype, width):
        return elementwise.gated
    return lambda x_Ti: mlp.act_fn(x_Ti[:, :width]) * x_Ti[:, width:]


def is_common(layer: Any) -> bool:
    """Whether a layer is of a family whose layers are alike, with its products packed and fused."""
    if type(layer).__name__ not in _FAMILIES or any(map(_has_hooks, layer.modules())):
        return False
    attention, mlp = layer.self_attn, layer.mlp
    linears = (attention.q_proj, mlp.gate_proj, attention.o_proj, mlp.down_proj)
    return all(isinstance(one, PackedLinear) for one in linears) and all(
        one.columns is not None for one in linears[:2]
    )


def _has_hooks(module: nn.Module) -> bool:
    """Hooks of accelerate or torch, which only the modeling code calls."""
    return bool(hasattr(module, "_hf_hook") or module._forward_hooks or module._forward_pre_hooks)
