"""EAGLE checkpoints of every published format, with exactly the published keys and shapes, against
a plain reimplementation: over a chain of true features, and over a tree behind it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from specbench.conformance.models import tiny_model, tiny_tokenizer
from specbench.learned.eagle import EagleHead, EagleShape, first_shape, like_target, usual_taps
from specbench.learned.eagle_files import load_eagle, save_eagle
from specbench.learned.layers import open_nodes
from specbench.target import FINAL, KVCache, Target
from specbench.tree import Tree
from tests.eagle_heads import Dims, Maker, Plain, Tensors, write

VOCAB = 97
LAYERS = 9
IDS = [3, 4, 7, 11, 20, 21, 22, 40, 41, 59, 60, 61, 77, 80, 90, 96]
DIMS = Dims()


@dataclass
class World:
    """A target, and its embeddings [V, h] and head [V, h] as they were before it was packed."""

    target: Target
    embed: torch.Tensor
    head: torch.Tensor


@cache
def world() -> World:
    model: Any = tiny_model(vocab_size=VOCAB, num_hidden_layers=LAYERS)
    embed, head = (
        layer.weight.detach().clone() for layer in (model.model.embed_tokens, model.lm_head)
    )
    return World(Target(model, tiny_tokenizer(), name="tiny"), embed, head)


@dataclass
class Case:
    """A checkpoint, what it computes, and the taps that it reads."""

    config: dict[str, Any]
    tensors: Tensors
    plain: Plain
    taps: tuple[int, ...]
    ids: Sequence[int] = range(VOCAB)
    file: str = "model.safetensors"

    def write(self, folder: Path) -> Path:
        return write(folder, self.config, self.tensors, self.file)


def eagle1(bias: bool, embeddings: bool, reduced: bool = False) -> Case:
    make = Maker(bias + 2 * embeddings)
    tensors = {"fc.weight": make.weight(32, 64)} | make.layer(DIMS, "layers.0.", 32)
    config = DIMS.config(architectures=["LlamaForCausalLM"], vocab_size=VOCAB)
    embed, head, ids = world().embed, world().head, list(range(VOCAB))
    theta = 10000.0
    if bias:
        tensors["fc.bias"] = make.weight(32)
    else:
        theta = 500000.0
        config |= {"bias": False, "rope_theta": theta}
    if embeddings:
        embed = tensors["embed_tokens.weight"] = make.weight(VOCAB, 32)
    if reduced:
        ids = IDS
        tensors |= make.vocabulary(IDS, VOCAB)
        head, config["draft_vocab_size"] = head[IDS], len(IDS)
    plain = Plain(tensors, embed, head, DIMS, ["layers.0."], theta)
    file = "pytorch_model.bin" if embeddings else "model.safetensors"
    return Case(config, tensors, plain, (FINAL,), ids, file)


def eagle3(dims: Dims = DIMS, sliced: bool = False, **flags: Any) -> Case:
    """The official layout, and SpecForge's with flags."""
    make = Maker(7)
    tensors = make.vocabulary(IDS, VOCAB) | make.wide(dims, "midlayer.")
    tensors |= {"fc.weight": make.weight(dims.h, 3 * dims.w), "norm.weight": make.norm(dims.h)}
    config = dims.config(
        architectures=["LlamaForCausalLM"], vocab_size=VOCAB, draft_vocab_size=len(IDS)
    )
    config |= flags
    embed, head = world().embed, world().head[IDS]
    if not sliced:
        head = tensors["lm_head.weight"] = make.weight(len(IDS), dims.h)
    if dims.h != dims.w:
        embed = tensors["embed_tokens.weight"] = make.weight(VOCAB, dims.h)
        config["target_hidden_size"] = dims.w
    plain = Plain(tensors, embed, head, dims, ["midlayer."], wide=["midlayer."])
    if flags.get("fc_norm"):
        plain.parts = [f"fc_norm.{i}.weight" for i in range(3)]
        tensors |= {key: make.norm(dims.w) for key in plain.parts}
    plain.norm_out = flags.get("norm_output", True)
    return Case(config, tensors, plain, (1, 3, 5), IDS)


def official() -> Case:
    case = eagle3(rope_scaling={"type": "linear", "factor": 2.0}, rope_theta=20000.0)
    case.file, case.plain.theta, case.plain.scale = "pytorch_model.bin", 20000.0, 2.0
    return case


def specforge_whole_vocabulary() -> Case:
    case = eagle3(architectures=["LlamaForCausalLMEagle3"], draft_vocab_size=VOCAB)
    head = Maker(8).weight(VOCAB, 32)
    case.tensors |= {"lm_head.weight": head, "d2t": torch.zeros(VOCAB, dtype=torch.long)}
    case.tensors |= {"t2d": torch.ones(VOCAB, dtype=torch.bool)}
    case.plain.head, case.ids = head, range(VOCAB)
    return case


def sliced_from_the_target() -> Case:
    ids = {"eagle_aux_hidden_state_layer_ids": [0, 2, 8]}
    case = eagle3(sliced=True, draft_head="target", eagle_config=ids, num_target_layers=LAYERS)
    case.taps = (0, 2, 8)
    return case


def speculators(qwen3: bool, **flags: Any) -> Case:
    """Two layers, of which only the first sees the token, or one of Qwen3."""
    make, dims = Maker(9), Dims(d=16) if qwen3 else DIMS
    tensors = make.vocabulary(IDS, VOCAB) | make.wide(dims, "layers.0.")
    layers = ["layers.0."]
    if qwen3:
        tensors |= make.qk_norms(dims, "layers.0.")
    else:
        tensors |= make.layer(dims, "layers.1.", 32)
        tensors["layers.1.input_layernorm.weight"] = make.norm(32)
        layers += ["layers.1."]
    ids = flags.get("eagle_aux_hidden_state_layer_ids")
    num_taps = len(ids or [2, LAYERS // 2, LAYERS - 3])
    tensors |= {
        "fc.weight": make.weight(32, num_taps * 32),
        "norm.weight": make.norm(32),
        "lm_head.weight": make.weight(len(IDS), 32),
    }
    plain = Plain(tensors, world().embed, tensors["lm_head.weight"], dims, layers, 30000.0)
    plain.wide, plain.residual_normed = layers[:1], flags.get("norm_before_residual", False)
    plain.feed_normed = flags.get("norm_output", False)
    if flags.get("norm_before_fc"):
        plain.whole = "input_norm.weight"
        tensors[plain.whole] = make.norm(num_taps * 32)
    if flags.get("fc_norm"):
        plain.parts = [f"fc_norm.{i}.weight" for i in range(num_taps)]
        tensors |= {key: make.norm(32) for key in plain.parts}
    layer = dims.config(vocab_size=VOCAB, num_hidden_layers=len(layers))
    layer |= {"rope_parameters": {"rope_type": "default", "rope_theta": 30000.0}}
    if qwen3:
        layer |= {"model_type": "qwen3", "head_dim": 16}
    config = {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "draft_vocab_size": len(IDS),
        "transformer_layer_config": layer,
        "target_hidden_size": None,
        **flags,
    }
    taps = tuple(i - 1 for i in ids) if ids else (1, 3, 5)
    return Case(config, tensors, plain, taps, IDS)


def deepspec() -> Case:
    """Five layers, and the target's whole head and embeddings in the file."""
    make, dims = Maker(11), Dims(d=16)
    tensors = {
        "embed_tokens.weight": make.weight(VOCAB, 32),
        "lm_head.weight": make.weight(VOCAB, 32),
        "fc.weight": make.weight(32, 5 * 32),
        "norm.weight": make.norm(32),
        **make.wide(dims, "layers.0."),
        **make.qk_norms(dims, "layers.0."),
    }
    config = dims.config(
        architectures=["Qwen3Eagle3Model"],
        model_type="qwen3",
        head_dim=16,
        vocab_size=VOCAB,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        target_layer_ids=[0, 2, 4, 6, 7],
        num_target_layers=LAYERS,
        ttt_length=7,
        step_loss_decay=0.8,
    )
    plain = Plain(
        tensors, tensors["embed_tokens.weight"], tensors["lm_head.weight"], dims, ["layers.0."], 1e6
    )
    plain.wide = ["layers.0."]
    return Case(config, tensors, plain, (0, 2, 4, 6, 7))


FLAGS = ["norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"]
CASES: dict[str, Callable[[], Case]] = {
    "EAGLE-1 with bias": lambda: eagle1(bias=True, embeddings=False),
    "EAGLE-1 with bias and embeddings": lambda: eagle1(bias=True, embeddings=True),
    "EAGLE-1 with embeddings": lambda: eagle1(bias=False, embeddings=True),
    "EAGLE-2 without": lambda: eagle1(bias=False, embeddings=False),
    "EAGLE-1 reduced": lambda: eagle1(bias=False, embeddings=False, reduced=True),
    "EAGLE-3": official,
    "EAGLE-3 of another width": lambda: eagle3(Dims(h=16, d=4)),
    "EAGLE-3 sliced from the target": sliced_from_the_target,
    "SpecForge": lambda: eagle3(architectures=["LlamaForCausalLMEagle3"], norm_output=True),
    "SpecForge fc_norm": lambda: eagle3(fc_norm=True),
    "SpecForge no norm_output": lambda: eagle3(norm_output=False),
    "SpecForge whole vocabulary": specforge_whole_vocabulary,
    "speculators": lambda: speculators(qwen3=False),
    **{
        f"speculators {flag}": partial(speculators, False, **dict.fromkeys([flag], True))
        for flag in FLAGS
    },
    "speculators all flags and layers": lambda: speculators(
        False, eagle_aux_hidden_state_layer_ids=[1, 2, 5, 9], **dict.fromkeys(FLAGS, True)
    ),
    "speculators Qwen3": lambda: speculators(qwen3=True),
    "DeepSpec": deepspec,
}

every_case = pytest.mark.parametrize("name", CASES)
TOKENS = [5, 40, 12, 77, 31, 6]
TREE = Tree.of((-1, 0, 0, 1, 1, 2, 3))
NODES = [TOKENS[-1], 8, 9, 50, 33, 2, 61]
"""The root's is the last entry of true features."""


def hidden_states(taps: Sequence[int]) -> dict[int, torch.Tensor]:
    """Of the entries, [1, T, w] by tap."""
    make = torch.Generator().manual_seed(5)
    return {tap: torch.randn(1, len(TOKENS), 32, generator=make) for tap in dict.fromkeys(taps)}


def expected(case: Case) -> torch.Tensor:
    """Outputs of the true entries, and of the tree's nodes below the root."""
    hidden = hidden_states(case.taps)
    features = case.plain.features([hidden[tap][0] for tap in case.taps])
    paths = [[NODES[node] for node in TREE.path_to(node)[1:]] for node in range(1, len(TREE))]
    drafted = [case.plain.after(TOKENS, features, path) for path in paths]
    return torch.cat([case.plain.run(TOKENS, features), torch.stack(drafted)])


@torch.inference_mode()
def outputs(head: EagleHead, taps: Sequence[int]) -> torch.Tensor:
    """The same of a head on a cache: two entries, then the others, then level by level."""
    features = head.fuse(hidden_states(taps))
    cache = KVCache(1)
    cache.add_row()
    found = []

    def run(tokens: list[int], features: torch.Tensor, tree: Tree, start: int) -> torch.Tensor:
        nodes = open_nodes(cache, [tree], [start], len(tokens), head.dtype, features.device)
        out: torch.Tensor = head(torch.tensor([tokens]), features, nodes, cache)
        found.append(out)
        return out

    run(TOKENS[:2], features[:, :2], Tree.chain(1), 0)
    cache.extend(0, 2)
    last = len(TOKENS) - 3
    out = run(TOKENS[2:], features[:, 2:], Tree.chain(last), 0)[:, -1:]
    cache.extend(0, last)
    start = 0
    for depth in range(1, TREE.depth + 1):
        level = [node for node, its in enumerate(TREE.depths) if its == depth]
        parents = [TREE.parents[node] - start for node in level]
        start = level[0]
        out = run([NODES[node] for node in level], out[:, parents], TREE, start)
    return torch.cat(found, dim=1)[0]


@every_case
@pytest.mark.parametrize("packed", [False, True], ids=["plain", "packed"])
def test_a_head_computes_what_is_published(name: str, packed: bool, tmp_path: Path) -> None:
    case = CASES[name]()
    head = load_eagle(case.write(tmp_path), world().target)
    assert head.shape.taps == case.taps
    assert head.token_ids(torch.arange(head.num_draft_tokens)).tolist() == list(case.ids)
    if packed:
        head.for_inference()
    out = outputs(head, case.taps)
    torch.testing.assert_close(out, expected(case), rtol=1e-4, atol=1e-4)
    with torch.inference_mode():
        logits = head.logits(out[None])
        full = head.over_vocabulary(logits)[0]
    torch.testing.assert_close(logits[0], case.plain.logits(out), rtol=1e-4, atol=1e-4)
    assert torch.equal(full[:, list(case.ids)], logits[0])
    assert full.isfinite().sum() == logits.numel()
    assert full.shape[-1] == VOCAB


def on_whole_sequence(head: EagleHead, hidden: dict[int, torch.Tensor]) -> torch.Tensor:
    """As a trainer does it: without a cache, from the parts of each layer."""
    embeds, length = head.embed(torch.tensor([TOKENS])), len(TOKENS)
    rotations = head.rotations(torch.arange(length)[None], length)
    out = head.begin(embeds, head.fuse(hidden))
    layers: Any = head.layers
    for layer in layers:
        x, residual = layer.enter(embeds, out)
        query, key, value = layer.self_attn.project(x, rotations)
        mixed = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, enable_gqa=True
        )
        out = layer.leave(residual, layer.self_attn.mix(mixed.transpose(1, 2)))
    return head.end(out)


@every_case
def test_its_parts_do_the_same_on_a_whole_sequence_and_have_gradients(
    name: str, tmp_path: Path
) -> None:
    case = CASES[name]()
    head = load_eagle(case.write(tmp_path), world().target)
    outputs(head, case.taps)  # inference leaves nothing behind that training could not use
    out = on_whole_sequence(head, hidden_states(case.taps))
    torch.testing.assert_close(out[0], expected(case)[: len(TOKENS)], rtol=1e-4, atol=1e-4)
    loss = (head.logits(out) if hasattr(head, "lm_head") else out).pow(2).sum()
    torch.autograd.backward(loss)
    unused = {"norm.weight"} if not head.shape.head_norm else set()
    for key, parameter in head.named_parameters():
        if parameter.requires_grad and key not in unused:
            assert parameter.grad is not None and parameter.grad.abs().sum() > 0, key
    assert name != "EAGLE-1 reduced" or not head.lm_head.weight.requires_grad


# Saving.


def rounded(head: EagleHead) -> EagleHead:
    """With its own parameters as they will be saved."""
    for parameter in head.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.bfloat16().float()
    return head


def saved_keys(folder: Path) -> set[str]:
    return set(load_file(folder / "model.safetensors"))


@pytest.mark.parametrize("name", [name for name in CASES if "spec" not in name.lower()[:9]])
def test_a_saved_head_is_read_back_as_it_was(name: str, tmp_path: Path) -> None:
    case = CASES[name]()
    head = rounded(load_eagle(case.write(tmp_path / "given"), world().target))
    save_eagle(tmp_path / "saved", head)
    assert saved_keys(tmp_path / "saved") == set(case.tensors)
    again = load_eagle(tmp_path / "saved", world().target)
    config, other = head.shape.config.to_dict(), again.shape.config.to_dict()
    assert all(config[key] == other[key] for key in ("head_dim", "rms_norm_eps", "vocab_size"))
    assert [getattr(head.shape, key) for key in FIELDS] == [
        getattr(again.shape, key) for key in FIELDS
    ]
    before, after = head.state_dict(), again.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(value, after[key]) for key, value in before.items())
    assert torch.equal(outputs(head, case.taps), outputs(again, case.taps))


FIELDS = [field for field in EagleShape.__dataclass_fields__ if field != "config"]


def test_a_new_head_can_be_made_saved_and_loaded(tmp_path: Path) -> None:
    target, ids = world().target, torch.tensor(IDS)
    layer = like_target(target)
    shapes = [
        EagleShape(config=layer, taps=usual_taps(LAYERS), target_width=32, own_head=False),
        first_shape(layer),
    ]
    for shape in shapes:
        head = rounded(EagleHead(shape, target, ids))
        save_eagle(tmp_path, head)
        assert "lm_head.weight" not in saved_keys(tmp_path)
        again = load_eagle(tmp_path, target)
        assert torch.equal(outputs(head, shape.taps), outputs(again, shape.taps))
        assert torch.equal(again.lm_head.weight, world().head[IDS])


@pytest.mark.parametrize("flag", ["norm_before_residual", "norm_before_fc", "norm_output"])
def test_what_the_layout_cannot_express_is_not_saved(flag: str, tmp_path: Path) -> None:
    case = CASES[f"speculators {flag}"]()
    head = load_eagle(case.write(tmp_path), world().target)
    with pytest.raises(ValueError, match=r"an EAGLE head with .* cannot be saved"):
        save_eagle(tmp_path / "saved", head)


def test_several_layers_are_not_saved(tmp_path: Path) -> None:
    head = load_eagle(CASES["speculators"]().write(tmp_path), world().target)
    with pytest.raises(ValueError, match="several layers"):
        save_eagle(tmp_path / "saved", head)


# What is refused.

Spoil = Callable[[Case], object]
REFUSED: dict[str, tuple[str, Spoil, str]] = {
    "unknown": (
        "EAGLE-3",
        lambda case: case.tensors.update(odd=torch.ones(1)),
        r"has unknown tensors: odd",
    ),
    "missing": (
        "EAGLE-3",
        lambda case: case.tensors.pop("midlayer.mlp.up_proj.weight"),
        r"lacks layers.0.mlp.up_proj.weight",
    ),
    "missing head": (
        "SpecForge",
        lambda case: case.tensors.pop("lm_head.weight"),
        r"lacks lm_head.weight",
    ),
    "missing flagged norm": (
        "SpecForge fc_norm",
        lambda case: case.tensors.pop("fc_norm.1.weight"),
        r"lacks fc_norm.1.weight",
    ),
    "wrong shape": (
        "EAGLE-3",
        lambda case: case.tensors.update({"fc.weight": torch.ones(32, 64)}),
        r"has fc.weight of shape \(32, 64\); this target needs \(32, 96\)",
    ),
    "hidden size": (
        "EAGLE-2 without",
        lambda case: case.config.update(hidden_size=64),
        r"target with hidden size 64; 'tiny' has 32",
    ),
    "hidden size of a fused head": (
        "EAGLE-3",
        lambda case: case.config.update(target_hidden_size=48),
        r"target with hidden size 48; 'tiny' has 32",
    ),
    "width without embeddings": (
        "EAGLE-3 of another width",
        lambda case: case.tensors.pop("embed_tokens.weight"),
        r"target with embeddings or head of hidden size 16; 'tiny' has 32",
    ),
    "vocabulary": (
        "EAGLE-3",
        lambda case: case.config.update(vocab_size=98),
        r"target with vocabulary 98; 'tiny' has 97",
    ),
    "layers": (
        "DeepSpec",
        lambda case: case.config.update(num_target_layers=36),
        r"target with number of layers 36; 'tiny' has 9",
    ),
    "a layer that is not there": (
        "DeepSpec",
        lambda case: case.config.update(target_layer_ids=[0, 1, 2, 3, 9]),
        r"reads the output of layer 9; 'tiny' has layers 0..8",
    ),
    "the embeddings as a layer": (
        "speculators all flags and layers",
        lambda case: case.config.update(eagle_aux_hidden_state_layer_ids=[0, 2, 3, 4]),
        r"reads the output of layer -1",
    ),
    "no d2t": ("EAGLE-3", lambda case: case.tensors.pop("d2t"), r"lacks d2t for its 16 draft"),
    "d2t of another size": (
        "EAGLE-3",
        lambda case: case.config.update(draft_vocab_size=15),
        r"has d2t for 16 draft tokens; its config says 15",
    ),
    "d2t beyond the vocabulary": (
        "EAGLE-3",
        lambda case: case.tensors["d2t"].add_(1),
        r"has a draft vocabulary that leaves the target's tokens, 0..96",
    ),
    "ids in place of offsets": (
        "EAGLE-3",
        lambda case: case.tensors.update(d2t=torch.tensor([*IDS[:-2], IDS[-1], IDS[-2]]) - 15),
        r"draft vocabulary that leaves",
    ),
    "d2t that gives a token twice": (
        "EAGLE-3",
        lambda case: case.tensors["d2t"][1:2].sub_(1),
        r"has a draft vocabulary with one token twice",
    ),
    "d2t that does not ascend": (
        "EAGLE-3",
        lambda case: case.tensors["d2t"][:2].add_(torch.tensor([1, -1])),
        r"has d2t whose tokens do not ascend",
    ),
    "t2d of other tokens": (
        "EAGLE-3",
        lambda case: case.tensors["t2d"].logical_not_(),
        r"has t2d and d2t of different tokens",
    ),
    "activation": (
        "EAGLE-3",
        lambda case: case.config.update(hidden_act="gelu"),
        r"has hidden_act 'gelu'; valid: 'silu'",
    ),
    "rope": (
        "EAGLE-3",
        lambda case: case.config.update(rope_scaling={"type": "dynamic", "factor": 2.0}),
        r"has rotary embeddings of type 'dynamic'",
    ),
    "sliding": (
        "DeepSpec",
        lambda case: case.config.update(layer_types=["sliding_attention"]),
        r"has layers of sliding attention",
    ),
    "bad value": (
        "EAGLE-3",
        lambda case: case.config.update(num_attention_heads="four"),
        r"has a bad config",
    ),
    "another speculator": (
        "speculators",
        lambda case: case.config.update(speculators_model_type="medusa"),
        r"has speculators_model_type 'medusa'; valid: 'eagle3'",
    ),
    "no head at all": (
        "EAGLE-2 without",
        lambda case: case.tensors.pop("fc.weight"),
        r"is no EAGLE head; valid: the formats of EAGLE-1 and 2, EAGLE-3, SpecForge",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_wrong_checkpoint_is_refused_by_name(name: str, tmp_path: Path) -> None:
    base, spoil, message = REFUSED[name]
    case = CASES[base]()
    load_eagle(case.write(tmp_path / "right"), world().target)
    spoil(case)
    folder = case.write(tmp_path / "wrong")
    with pytest.raises(ValueError, match=message) as caught:
        load_eagle(folder, world().target)
    assert str(folder) in str(caught.value)


def test_eagle3_needs_four_layers() -> None:
    assert usual_taps(30) == (1, 14, 26)
    with pytest.raises(ValueError, match="4 layers or more; this one has 3"):
        usual_taps(3)


def test_a_head_like_no_llama_is_refused() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(vocab_size=20, n_embd=8, n_layer=4, n_head=2, n_inner=8))
    with pytest.raises(ValueError, match="layers are not like Llama's"):
        like_target(Target(model, name="gpt2"))
