"""A distilled draft model: a few decoder layers of the target's own family between the target's
own embeddings and head, or some rows of the head.

Its checkpoint holds the layers and the final norm alone, by the names that they have in the
family's decoder, and ``d2t`` where the head is reduced.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from transformers import PreTrainedModel

from specbench.learned.checkpoint import (
    CONFIG,
    Checkpoint,
    fill,
    load_checkpoint,
    save_checkpoint,
)
from specbench.learned.vocabulary import DraftVocabulary
from specbench.target import Target
from specbench.target.copies import plain_layers
from specbench.target.packing import PackedLinear

KIND = "distilled"


@dataclass(frozen=True)
class Distilled:
    """A distilled draft model; its logits are over its own vocabulary, if it has one."""

    model: Target
    vocabulary: DraftVocabulary | None


def is_distilled(source: str) -> bool:
    """Whether a name is a folder with a checkpoint of this kind."""
    try:
        config = json.loads((Path(source).expanduser() / CONFIG).read_text())
    except (OSError, ValueError):
        return False
    return isinstance(config, dict) and config.get("drafter") == KIND


def own_weights(model: PreTrainedModel) -> dict[str, nn.Parameter]:
    """The decoder's weights by name, without the embeddings: what is trained and stored."""
    embedding = model.get_input_embeddings().weight
    found = model.get_decoder().named_parameters()
    return {name: weight for name, weight in found if weight is not embedding}


def save_distilled(
    folder: Path, target: Target, model: PreTrainedModel, vocabulary: DraftVocabulary | None
) -> None:
    """Writes the own weights of a model with layers like the target's."""
    tensors: dict[str, torch.Tensor] = dict(own_weights(model))
    config = {"drafter": KIND, **_made_for(target)}
    config["num_hidden_layers"] = model.config.get_text_config(decoder=True).num_hidden_layers
    if vocabulary is not None:
        tensors["d2t"] = vocabulary.offsets_D
        config["draft_vocab_size"] = len(vocabulary)
    save_checkpoint(folder, config, tensors)


def load_distilled(source: str | Path, target: Target) -> Distilled:
    """Reads a distilled draft model.

    Raises:
        ValueError: it is no such checkpoint, one for another target, or its tensors are not those
        of its layers.
    """
    checkpoint = load_checkpoint(source)
    with checkpoint.reading():
        return _load(checkpoint, target)


def _load(checkpoint: Checkpoint, target: Target) -> Distilled:
    if checkpoint.config.get("drafter") != KIND:
        raise checkpoint.error(f"is no drafter of kind {KIND!r}")
    checkpoint.check_made_for(_made_for(target))
    num_layers = checkpoint.config.get("num_hidden_layers")
    if not isinstance(num_layers, int) or not 1 <= num_layers <= target.num_layers:
        raise checkpoint.error(
            f"has num_hidden_layers {num_layers!r}; valid for this target: 1..{target.num_layers}"
        )
    tensors = dict(checkpoint.tensors)
    vocabulary = DraftVocabulary.of(tensors, checkpoint, target)
    model = plain_layers(target, num_layers)
    own = own_weights(model)
    decoder = model.get_decoder()
    fill(decoder, tensors, checkpoint, optional=decoder.state_dict().keys() - own.keys())
    model.set_input_embeddings(target.model.get_input_embeddings())
    model.set_output_embeddings(
        _shared_head(target) if vocabulary is None else vocabulary.head(target)
    )
    num_bytes = _num_bytes(own) + (_num_bytes(_head_weights(model)) if vocabulary else 0)
    drafter = Target(model.requires_grad_(False), target.tokenizer, name=checkpoint.name)
    drafter.num_weight_bytes = num_bytes
    return Distilled(drafter, vocabulary)


def _made_for(target: Target) -> dict[str, Any]:
    return {
        "model_type": target.config.model_type,
        "hidden_size": target.hidden_size,
        "vocab_size": target.vocab_size,
    }


def _shared_head(target: Target) -> nn.Module:
    """A head on the very weight of the target's, without what the target hung on its own."""
    head: Any = target.model.get_output_embeddings()
    if isinstance(head, PackedLinear):
        return PackedLinear(head.product, head.columns, head.sibling)
    shared = nn.Linear(head.in_features, head.out_features, head.bias is not None, device="meta")
    shared.weight, shared.bias = head.weight, head.bias
    return shared


def _head_weights(model: PreTrainedModel) -> dict[str, nn.Parameter]:
    return dict(cast(nn.Module, model.get_output_embeddings()).named_parameters())


def _num_bytes(weights: Mapping[str, torch.Tensor]) -> int:
    return sum(weight.numel() * weight.element_size() for weight in weights.values())
