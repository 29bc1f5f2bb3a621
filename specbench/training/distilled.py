"""How a distilled draft model is made: a few layers of the target, its first and last among them,
learn to say what the whole says."""

from pathlib import Path

import torch

from specbench.learned.distilled import own_weights, save_distilled
from specbench.target import FINAL, Target
from specbench.target.copies import plain_layers
from specbench.training.distillation import Distillation
from specbench.training.recipe import Options, Sequences


class DistilledRecipe(Distillation):
    """Two layers by default; the embeddings and the head are the target's and stay as they are."""

    taps = (FINAL,)
    learning_rate = 5e-4
    uses = frozenset({"layers"})

    def __init__(self, target: Target, options: Options) -> None:
        super().__init__(target, options)
        num_layers = options.num_layers or min(2, target.num_layers)
        self.model = plain_layers(target, num_layers).float().eval().requires_grad_(False)
        # It runs over whole sequences here, where causal attention needs no mask.
        self.model.set_attn_implementation("sdpa" if self.model._supports_sdpa else "eager")
        for weight in own_weights(self.model).values():
            weight.requires_grad_(True)
        self.model.set_output_embeddings(self.head)
        self.module = self.model.get_decoder()

    def hidden(self, batch: Sequences) -> torch.Tensor:
        """The drafter's own hidden states, after its final norm."""
        out: torch.Tensor = self.module(
            input_ids=batch.tokens_BT, use_cache=False
        ).last_hidden_state
        return out

    def write(self, folder: Path) -> None:
        """Writes the layers and the final norm."""
        save_distilled(folder, self.target, self.model, self.vocabulary)
