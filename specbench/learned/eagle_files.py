"""EAGLE checkpoints, by folder or Hub name: the official ones (EAGLE-1 and 2, EAGLE-3), SpecForge,
speculators and DeepSpec; our own are SpecForge's.

Own settings in ``config.json``, all optional: ``"draft_head": "target"`` says that the rows of the
target's own head stand in for ``lm_head.weight``; an EAGLE-1 head may have a reduced vocabulary too
(``d2t``); ``num_target_layers`` says what target it is for, as in DeepSpec.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, Qwen3Config

from specbench.learned.checkpoint import Checkpoint, fill, load_checkpoint, save_checkpoint
from specbench.learned.eagle import (
    LAYER_SETTINGS,
    EagleHead,
    EagleShape,
    first_shape,
    usual_taps,
)
from specbench.learned.layers import check_layer
from specbench.learned.vocabulary import DraftVocabulary
from specbench.messages import in_one_line
from specbench.target import Target

_VOCABULARY = ("d2t", "t2d")


def load_eagle(source: str | Path, target: Target) -> EagleHead:
    """Loads a head for a target, in float32 on the CPU.

    Raises:
        ValueError: it is of no format known here; it lacks tensors or has others; or it is made for
        another target.
    """
    checkpoint = load_checkpoint(source)
    with checkpoint.reading():
        return _load(checkpoint, target)


def _load(checkpoint: Checkpoint, target: Target) -> EagleHead:
    tensors = {
        key.replace("midlayer.", "layers.0.", 1): value for key, value in checkpoint.tensors.items()
    }
    shape = _reader(checkpoint)(checkpoint, tensors, target)
    _check_target(checkpoint, shape, target)
    ids_D = _draft_ids(checkpoint, tensors, target)
    head = EagleHead(shape, target, ids_D)
    if ids_D is None:
        tensors = {key: value for key, value in tensors.items() if key not in _VOCABULARY}
    optional = {"t2d"} if shape.own_head else {"t2d", "lm_head.weight"}
    fill(head, tensors, checkpoint, optional)
    return head


_Reader = Callable[[Checkpoint, Mapping[str, torch.Tensor], Target], EagleShape]


def _reader(checkpoint: Checkpoint) -> _Reader:
    config, keys = checkpoint.config, checkpoint.tensors.keys()
    if "speculators_model_type" in config:
        return _speculators
    if "target_layer_ids" in config:
        return _deepspec
    if any(key.startswith("midlayer.") for key in keys):
        return _eagle3
    if "fc.weight" in keys and any(key.startswith("layers.0.") for key in keys):
        return _eagle1
    raise checkpoint.error(
        "is no EAGLE head; valid: the formats of EAGLE-1 and 2, EAGLE-3, SpecForge, speculators "
        "and DeepSpec"
    )


def _eagle1(
    checkpoint: Checkpoint, tensors: Mapping[str, torch.Tensor], target: Target
) -> EagleShape:
    return first_shape(
        _layer_config(checkpoint, checkpoint.config),
        fc_bias="fc.bias" in tensors,
        own_embeddings="embed_tokens.weight" in tensors,
    )


def _eagle3(
    checkpoint: Checkpoint, tensors: Mapping[str, torch.Tensor], target: Target
) -> EagleShape:
    """The official files, and SpecForge's, which number layers by their outputs."""
    config = checkpoint.config
    ids = (config.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    layer = _layer_config(checkpoint, config | {"num_hidden_layers": 1})
    return EagleShape(
        taps=usual_taps(target.num_layers) if ids is None else tuple(ids),
        head_norm=config.get("norm_output", True),
        **_common(config, tensors, layer),
    )


def _speculators(
    checkpoint: Checkpoint, tensors: Mapping[str, torch.Tensor], target: Target
) -> EagleShape:
    """speculators number layers by their inputs."""
    config = checkpoint.config
    if config["speculators_model_type"] != "eagle3":
        raise checkpoint.error(
            f"has speculators_model_type {config['speculators_model_type']!r}; valid: 'eagle3'"
        )
    ids = config.get("eagle_aux_hidden_state_layer_ids")
    layer = _layer_config(checkpoint, config.get("transformer_layer_config") or {})
    return EagleShape(
        taps=usual_taps(target.num_layers) if ids is None else tuple(i - 1 for i in ids),
        norm_before_residual=config.get("norm_before_residual", False),
        feeds_normed=config.get("norm_output", False),
        **_common(config, tensors, layer),
    )


def _deepspec(
    checkpoint: Checkpoint, tensors: Mapping[str, torch.Tensor], target: Target
) -> EagleShape:
    """DeepSpec numbers layers by their outputs; every layer sees token and feature."""
    config = checkpoint.config
    layer = _layer_config(checkpoint, config)
    return EagleShape(
        taps=tuple(config["target_layer_ids"]),
        all_wide=True,
        **_common(config, tensors, layer),
    )


def _common(
    config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], layer: Any
) -> dict[str, Any]:
    """What all formats of EAGLE-3 say in the same way."""
    return {
        "config": layer,
        "target_width": config.get("target_hidden_size") or layer.hidden_size,
        "qk_norm": "layers.0.self_attn.q_norm.weight" in tensors,
        "input_norm": config.get("norm_before_fc", False) or "input_norm.weight" in tensors,
        "fc_norm": config.get("fc_norm", False) or "fc_norm.0.weight" in tensors,
        "own_embeddings": "embed_tokens.weight" in tensors,
        "own_head": config.get("draft_head") != "target",
    }


def _layer_config(checkpoint: Checkpoint, settings: Mapping[str, Any]) -> Any:
    """The config of transformers for a head's layers; what it leaves out is its class's default."""
    known = {key: settings[key] for key in LAYER_SETTINGS if settings.get(key) is not None}
    kind = Qwen3Config if settings.get("model_type") == "qwen3" else LlamaConfig
    try:
        config = kind(**known)
    except Exception as error:  # transformers has its own for a bad value
        raise checkpoint.error(f"has a bad config: {in_one_line(error)}") from error
    if "sliding_attention" in (settings.get("layer_types") or ()):
        raise checkpoint.error("has layers of sliding attention")
    check_layer(config, checkpoint)
    return config


def _check_target(checkpoint: Checkpoint, shape: EagleShape, target: Target) -> None:
    """Refuses a head that is made for another target."""
    shares = not (shape.own_embeddings and shape.own_head)
    for what, its, ours in (
        ("hidden size", shape.target_width, target.hidden_size),
        (
            "embeddings or head of hidden size",
            shape.config.hidden_size if shares else target.hidden_size,
            target.hidden_size,
        ),
        ("vocabulary", shape.config.vocab_size, target.vocab_size),
        (
            "number of layers",
            checkpoint.config.get("num_target_layers", target.num_layers),
            target.num_layers,
        ),
    ):
        if its != ours:
            raise checkpoint.error(
                f"is made for a target with {what} {its}; {target.name!r} has {ours}"
            )
    layers = [
        tap
        for tap in shape.taps
        if shape.fused and not (type(tap) is int and 0 <= tap < target.num_layers)
    ]
    if layers:
        raise checkpoint.error(
            f"reads the output of layer {layers[0]}; {target.name!r} has layers "
            f"0..{target.num_layers - 1}"
        )


def _draft_ids(
    checkpoint: Checkpoint, tensors: Mapping[str, torch.Tensor], target: Target
) -> torch.Tensor | None:
    """The ids of a reduced vocabulary; None where all tokens may be drafted."""
    vocabulary = DraftVocabulary.of(dict(tensors), checkpoint, target)
    if vocabulary is None:
        return None
    ids_D = vocabulary.ids_D.cpu()
    if (ids_D.diff() <= 0).any():
        raise checkpoint.error("has d2t whose tokens do not ascend")
    found = tensors.get("t2d")
    if found is not None and not torch.equal(found.nonzero().squeeze(-1), ids_D):
        raise checkpoint.error("has t2d and d2t of different tokens")
    return None if len(ids_D) == target.vocab_size else ids_D


def save_eagle(folder: Path, head: EagleHead) -> None:
    """Writes a head: EAGLE-3 in SpecForge's layout, EAGLE-1 and 2 in their own. What is the
    target's, its embeddings or its head, is not written.

    Raises:
        ValueError: it has what these layouts cannot express.
    """
    shape = head.shape
    for name in ("input_norm", "norm_before_residual", "feeds_normed"):
        if getattr(shape, name):
            raise ValueError(f"an EAGLE head with {name} cannot be saved in SpecForge's layout")
    if shape.config.num_hidden_layers != 1:
        raise ValueError("an EAGLE head of several layers cannot be saved in SpecForge's layout")
    tensors = head.state_dict()
    if not shape.own_head:
        tensors.pop("lm_head.weight", None)
    if shape.fused:
        tensors = {key.replace("layers.0.", "midlayer.", 1): t for key, t in tensors.items()}
    save_checkpoint(folder, _config_of(head), tensors)


def _config_of(head: EagleHead) -> dict[str, Any]:
    shape, layer = head.shape, head.shape.config
    rope = dict(layer.rope_parameters)
    theta = rope.pop("rope_theta")
    target_layers = {"num_target_layers": head.num_target_layers}
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLMEagle3" if shape.fused else "LlamaForCausalLM"],
        "model_type": "llama",
        **{key: getattr(layer, key) for key in LAYER_SETTINGS if not key.startswith("rope")},
        "rope_theta": theta,
        "rope_scaling": None if rope.get("rope_type", "default") == "default" else rope,
        **target_layers,
    }
    if head.reduced:
        config["draft_vocab_size"] = head.num_draft_tokens
    if not shape.fused:
        return config | {"bias": shape.fc_bias}
    config |= {
        "draft_vocab_size": head.num_draft_tokens,
        "norm_output": shape.head_norm,
        "fc_norm": shape.fc_norm,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(shape.taps)},
    }
    if shape.target_width != layer.hidden_size:
        config["target_hidden_size"] = shape.target_width
    if not shape.own_head:
        config["draft_head"] = "target"
    return config
