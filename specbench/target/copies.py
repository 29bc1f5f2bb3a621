"""Copies of a target, to draft for it: with 8-bit linear layers, or with only some layers."""

import copy
import itertools
import math
import warnings
from collections.abc import Sequence

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.initialization import no_init_weights

from specbench.target import packing
from specbench.target.model import Target
from specbench.target.packing import Product

# Without VNNI the 8-bit kernels add pairs of products in 16 bits, which overflow at full range.
_REDUCE_RANGE = not torch.cpu.get_capabilities().get("avx512_vnni", False)


class Int8Product(Product):
    """A product with 8-bit weights, one scale per output, and inputs quantised as they come.

    FBGEMM gives all its inputs one range. Here every token is scaled to a largest value of 1 first,
    and a first row of 1 and -1 fixes the range, so that no token depends on its neighbours.
    """

    name = "int8"

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None, num_siblings: int = 1
    ) -> None:
        super().__init__(weight, bias, num_siblings)
        weight = weight.detach().float()
        scales = (weight.abs().amax(dim=1) / 127).clamp_min(1e-12).double()
        zeros = torch.zeros(len(scales), dtype=torch.long)
        with warnings.catch_warnings():
            # Deprecated, but what replaces it has no fast CPU kernel for dynamic inputs yet.
            warnings.filterwarnings("ignore", message=".*quantized tensor", category=UserWarning)
            quantised = torch.quantize_per_channel(weight, scales, zeros, 0, torch.qint8)
        self.packed = torch.ops.quantized.linear_prepack(quantised, None)
        self.num_bytes = weight.numel() + 4 * len(scales)
        self._inputs = torch.zeros(1, self.in_features)

    def multiply(self, tokens_Ni: torch.Tensor) -> torch.Tensor:
        """[N, in] -> [N, out], float32."""
        num_tokens = tokens_Ni.shape[0]
        if len(self._inputs) <= num_tokens:
            self._inputs = torch.zeros(num_tokens + 1, self.in_features)
            self._inputs[0, :2] = torch.tensor([1.0, -1.0])
        inputs = self._inputs[: num_tokens + 1]
        scale_N1 = torch.linalg.vector_norm(tokens_Ni, ord=math.inf, dim=1, keepdim=True)
        torch.div(tokens_Ni, scale_N1.clamp_min(1e-30), out=inputs[1:])
        out: torch.Tensor = torch.ops.quantized.linear_dynamic(inputs, self.packed, _REDUCE_RANGE)
        out = out[1:].mul_(scale_N1)
        return out if self.bias is None else out + self.bias

    def dense(self) -> torch.Tensor:
        """The weight as quantised, [out, in], float32."""
        weight, _ = torch.ops.quantized.linear_unpack(self.packed)
        dense: torch.Tensor = weight.dequantize()
        return dense


def int8_copy(target: Target) -> Target:
    """The target with 8-bit linear layers, in float32 otherwise.

    Raises:
        ValueError: the target is not on a CPU, or this build of torch has no 8-bit kernels.
    """
    if target.device.type != "cpu":
        raise ValueError(
            "the int8 copy of the target needs a CPU; on a GPU give a draft model, or `layers` for "
            "some of the target's layers"
        )
    model = _plain_copy(target, range(target.num_layers))
    try:
        packing.pack(model, Int8Product)
    except RuntimeError as error:
        raise ValueError(f"this build of torch has no 8-bit kernels: {error}") from error
    products = {
        module.product for module in model.modules() if isinstance(module, packing.PackedLinear)
    }
    num_bytes = sum(product.num_bytes for product in products if isinstance(product, Int8Product))
    drafter = Target(
        model.float(), target.tokenizer, name=f"int8 copy of {target.name}", pack=False
    )
    drafter.num_weight_bytes += num_bytes
    drafter.num_parameters = target.num_parameters
    return drafter


def layers_copy(target: Target, num_layers: int) -> Target:
    """The target with some of its decoder layers, evenly spread, the first and last among them.

    Raises:
        ValueError: it does not have so many layers.
    """
    model = plain_layers(target, num_layers)
    return Target(model, target.tokenizer, name=f"{num_layers} layers of {target.name}")


def plain_layers(target: Target, num_layers: int) -> PreTrainedModel:
    """The same before it is wrapped: a plain model with copies of the target's weights.

    Raises:
        ValueError: the target does not have so many layers.
    """
    if not 1 <= num_layers <= target.num_layers:
        raise ValueError(f"layers {num_layers} is out of range; valid: 1..{target.num_layers}")
    last = target.num_layers - 1
    kept = sorted({round(i * last / max(1, num_layers - 1)) for i in range(num_layers)})
    model = _plain_copy(target, kept)
    nn.Module.to(model, target.device)
    return model


def _plain_copy(target: Target, layers: Sequence[int]) -> PreTrainedModel:
    """An unwrapped model with the same weights and the given layers."""
    config = copy.deepcopy(target.model.config)
    text = config.get_text_config(decoder=True)
    types = getattr(text, "layer_types", None)
    text.num_hidden_layers = len(layers)
    if types:
        text.layer_types = [types[layer] for layer in layers]
    with no_init_weights():
        model: PreTrainedModel = type(target.model)._from_config(config, dtype=target.dtype)
    modules = dict(target.model.named_modules())
    stack = next(name for name, module in modules.items() if module is target.layers[0])
    stack = stack.removesuffix("0")
    for name, value in itertools.chain(model.named_parameters(), model.named_buffers()):
        if name.startswith(stack):
            layer, _, rest = name.removeprefix(stack).partition(".")
            name = f"{stack}{layers[int(layer)]}.{rest}"
        owner, _, attribute = name.rpartition(".")
        value.data.copy_(getattr(modules[owner], attribute))
    return model
