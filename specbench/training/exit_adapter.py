"""How a trained exit is made: a full decoder layer behind an early layer of the target learns what
the layers after it would say.

Kangaroo (Liu et al. 2024, section 3.1) trains its smaller adapter in the same way, by cross
entropy with the target's distribution.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from specbench.learned.exit_adapter import ExitAdapter, adapter_config, save_exit_adapter
from specbench.target import FINAL, Target
from specbench.training.distillation import Distillation
from specbench.training.recipe import Options, Sequences


class ExitAdapterRecipe(Distillation):
    """The adapter starts as the target's last layer, behind a fifth of the layers by default."""

    learning_rate = 5e-4
    uses = frozenset({"exit_layer"})
    module: ExitAdapter

    def __init__(self, target: Target, options: Options) -> None:
        super().__init__(target, options)
        exit_layer = options.exit_layer or max(1, target.num_layers // 5)
        config = adapter_config(target, exit_layer, full_layer=True)
        self.module = ExitAdapter(config, self.vocabulary).place(target.device, torch.float32)
        _copy_into(self.module.layer, target.layers[-1])
        if isinstance(norm := getattr(target.model.get_decoder(), "norm", None), nn.Module):
            _copy_into(self.module.norm, norm)

    def needed_taps(self) -> tuple[int, ...]:
        """What the adapter reads, and what the head of the target reads."""
        return (self.module.exit_layer - 1, FINAL)

    def hidden(self, batch: Sequences) -> torch.Tensor:
        """The adapter's output from the target's hidden states at the exit."""
        return self.module.whole(batch.hidden[self.module.exit_layer - 1].float())

    def write(self, folder: Path) -> None:
        """Writes the adapter."""
        save_exit_adapter(folder, self.module)


@torch.no_grad()
def _copy_into(module: nn.Module, source: nn.Module) -> None:
    """Copies the weights that the source has by the same names in the same shapes; packed ones
    too."""
    owners: Mapping[str, Any] = dict(source.named_modules())
    for name, weight in module.named_parameters():
        owner, _, attribute = name.rpartition(".")
        found = getattr(owners.get(owner), attribute, None)
        if isinstance(found, torch.Tensor) and found.shape == weight.shape:
            weight.copy_(found)
