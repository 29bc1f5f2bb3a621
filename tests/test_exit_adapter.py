"""The trained exit: its formats, its numbers against a plain reimplementation, its cache, and how
it is trained."""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from specbench.conformance.decoding import GREEDY, make_request, reference
from specbench.conformance.models import ASCII_VOCAB, looping_target, tiny_model
from specbench.decode import Decoder
from specbench.depth import Fixed
from specbench.learned.exit_adapter import ExitAdapter, ExitDrafter, load_exit_adapter
from specbench.target import FINAL, Target
from specbench.training.exit_adapter import ExitAdapterRecipe
from specbench.training.losses import Predictions
from specbench.training.recipe import Options, Sequences
from specbench.tree import Tree
from tests.drafters import Auditor, decode, make_weights
from tests.test_early_exit import make_early_exit

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, THETA, EPS = 32, 4, 2, 8, 5e4, 1e-5
TOKENS = (5, 40, 12, 77, 31, 5, 40, 9)


@cache
def target() -> Target:
    return looping_target(eos_token_id=None)


def write_kangaroo(folder: Path, change: Callable[[dict[str, Any]], None] = lambda t: None) -> Path:
    """An adapter with exactly the files and keys that Kangaroo publishes."""
    torch.manual_seed(3)
    attention = "layers.0.self_attn"
    shapes = {
        "norm.weight": (HIDDEN,),
        "layers.0.input_layernorm.weight": (HIDDEN,),
        f"{attention}.q_proj.weight": (HEADS * HEAD_DIM, HIDDEN),
        f"{attention}.k_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
        f"{attention}.v_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
        f"{attention}.o_proj.weight": (HIDDEN, HEADS * HEAD_DIM),
    }
    tensors: dict[str, Any] = {key: torch.randn(shape) / 4 for key, shape in shapes.items()}
    change(tensors)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": HIDDEN,
        "intermediate_size": 64,
        "max_position_embeddings": 512,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "num_hidden_layers": 1,
        "rms_norm_eps": EPS,
        "rope_scaling": None,
        "rope_theta": THETA,
        "tie_word_embeddings": False,
        "torch_dtype": "float16",
        "vocab_size": ASCII_VOCAB,
    }
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    torch.save(tensors, folder / "pytorch_model.bin")
    return folder


def change_config(folder: Path, **settings: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))


def plain_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


def plain_rotate(x_THD: torch.Tensor, theta: float) -> torch.Tensor:
    """By complex numbers: entry i and i + D/2 of a head are one."""
    half = x_THD.shape[-1] // 2
    angles = torch.arange(len(x_THD))[:, None] * theta ** (-torch.arange(half) / half)
    z = torch.complex(x_THD[..., :half], x_THD[..., half:]) * torch.polar(
        torch.ones_like(angles), angles
    ).unsqueeze(1)
    return torch.cat([z.real, z.imag], -1)


def plain_adapter(
    hidden_Th: torch.Tensor, weights: dict[str, torch.Tensor], theta: float, eps: float
) -> torch.Tensor:
    """Kangaroo's adapter, token by token and head by head; with a feed-forward if there is one."""

    def weight(name: str) -> torch.Tensor:
        return weights[f"layers.0.{name}.weight"].float()

    x_Th = plain_norm(hidden_Th, weight("input_layernorm"), eps)
    query, key, value = (
        (x_Th @ weight(f"self_attn.{name}_proj").T).view(len(x_Th), -1, HEAD_DIM) for name in "qkv"
    )
    query, key = plain_rotate(query, theta), plain_rotate(key, theta)
    mixed = torch.zeros_like(query)
    for t in range(len(x_Th)):
        for head in range(HEADS):
            kv = head // (HEADS // KV_HEADS)
            scores = key[: t + 1, kv] @ query[t, head] / HEAD_DIM**0.5
            mixed[t, head] = scores.softmax(0) @ value[: t + 1, kv]
    out = hidden_Th + mixed.flatten(1) @ weight("self_attn.o_proj").T
    if "layers.0.mlp.up_proj.weight" in weights:
        x_Th = plain_norm(out, weight("post_attention_layernorm"), eps)
        gate = torch.nn.functional.silu(x_Th @ weight("mlp.gate_proj").T)
        out = out + (gate * (x_Th @ weight("mlp.up_proj").T)) @ weight("mlp.down_proj").T
    return plain_norm(out, weights["norm.weight"].float(), eps)


def hidden_after(model: Target, layer: int, tokens: tuple[int, ...] = TOKENS) -> torch.Tensor:
    """The target's hidden states [1, T, h] after so many layers, by its own forward."""
    found = model.new_cache(1)
    return model.prefill(tokens, found, found.add_row(), taps=[layer - 1])[layer - 1].clone()


def drafted_logits(drafter: ExitDrafter, hidden_1Th: torch.Tensor) -> torch.Tensor:
    """Logits [T, D] of a row: a few tokens as its prompt, two one by one, the others in a chain."""
    drafter.keep([])
    drafter.start(hidden_1Th[:, :3])
    logits = []
    for i in (3, 4):
        logits.append(drafter.logits(hidden_1Th[:, i : i + 1], [Tree.chain(0)], [0]).clone())
        drafter.commit([[0]], hidden_1Th[:, i : i + 1])
    rest = hidden_1Th[:, 5:]
    logits.append(drafter.logits(rest, [Tree.chain(rest.shape[1] - 1)], [0]))
    return torch.cat(logits, 1)[0]


# Formats.


def test_a_published_adapter_of_kangaroo_has_the_logits_of_a_plain_reimplementation(
    tmp_path: Path,
) -> None:
    folder = write_kangaroo(tmp_path)
    drafter = ExitDrafter(target(), load_exit_adapter(folder, target(), exit_layer=2))
    hidden_1Th = hidden_after(target(), 2)
    weights = torch.load(folder / "pytorch_model.bin", weights_only=True)
    normed_Th = plain_adapter(hidden_1Th[0], weights, THETA, EPS)
    head: Any = target().model.get_output_embeddings()
    torch.testing.assert_close(
        drafted_logits(drafter, hidden_1Th), normed_Th[3:] @ head.weight.T, rtol=0, atol=1e-4
    )
    whole = load_exit_adapter(folder, target(), exit_layer=2).whole(hidden_1Th)
    torch.testing.assert_close(whole[0], normed_Th, rtol=0, atol=1e-4)


def test_an_adapter_of_ours_has_the_logits_of_a_plain_reimplementation_over_its_vocabulary() -> (
    None
):
    folder = make_weights(target(), "early_exit", exit_layer=3, vocab=50)
    adapter = load_exit_adapter(folder, target())
    assert adapter.exit_layer == 3
    drafter = ExitDrafter(target(), adapter)
    hidden_1Th = hidden_after(target(), 3)
    weights = load_file(folder / "model.safetensors")
    rope: dict[str, float] = target().config.rope_parameters
    normed_Th = plain_adapter(hidden_1Th[0], weights, rope["rope_theta"], 1e-6)
    ids = torch.arange(50) + weights["d2t"]
    # The most frequent tokens are the last ones: their counts rise with their ids.
    assert ids.tolist() == list(range(ASCII_VOCAB - 50, ASCII_VOCAB))
    head: Any = target().model.get_output_embeddings()
    torch.testing.assert_close(
        drafted_logits(drafter, hidden_1Th), normed_Th[3:] @ head.weight[ids].T, rtol=0, atol=1e-3
    )


def test_extra_bytes_are_those_of_the_adapter_and_of_its_head() -> None:
    whole = make_weights(target(), "early_exit", vocab=ASCII_VOCAB)
    reduced = make_weights(target(), "early_exit", vocab=40)
    sizes = [make_early_exit(target(), weights=str(f)).num_extra_bytes for f in (whole, reduced)]
    layer = 2 * 32 * 32 + 2 * 16 * 32 + 3 * 64 * 32 + 2 * 32
    assert sizes == [4 * (layer + 32), 4 * (layer + 32 + 40 * 32)]


def test_stored_rotary_frequencies_are_passed_over(tmp_path: Path) -> None:
    def add(tensors: dict[str, Any]) -> None:
        tensors["layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)

    assert load_exit_adapter(write_kangaroo(tmp_path, add), target(), exit_layer=1).exit_layer == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("norm.weight"), "lacks norm.weight"),
        (
            lambda t: t.update({"layers.0.mlp.up_proj.weight": torch.ones(64, 32)}),
            "has unknown tensors: layers.0.mlp.up_proj.weight",
        ),
        (lambda t: t.update({"norm.weight": torch.ones(31)}), r"norm.weight of shape \(31,\)"),
        (
            lambda t: t.update(d2t=torch.ones(9)),
            "is no list of whole numbers",
        ),
        (lambda t: t.update(d2t=torch.tensor([0, 96])), r"draft vocabulary that leaves .* 0\.\.96"),
        (lambda t: t.update(d2t=torch.tensor([1, 0])), "draft vocabulary with one token twice"),
    ],
)
def test_tensors_that_are_not_an_adapters_are_refused_by_name(
    change: Callable[[dict[str, Any]], None], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=f"checkpoint .*{message}"):
        load_exit_adapter(write_kangaroo(tmp_path, change), target(), exit_layer=2)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"hidden_size": 64}, "made for another target: hidden_size is 64; this target needs 32"),
        ({"vocab_size": 98}, "made for another target: vocab_size is 98; this target needs 97"),
        ({"num_target_layers": 9}, "num_target_layers is 9; this target needs 4"),
        ({"drafter": "distilled"}, "is a drafter of kind 'distilled'; valid: 'exit_adapter'"),
        ({"exit_layer": 4}, "stands behind layer 4 of the target; exit_layer is 2"),
        ({"exit_layer": "2"}, r"has exit_layer '2'; valid: 1\.\.3"),
        ({"rms_norm_eps": "small"}, "config.json that is no Llama's"),
    ],
)
def test_adapters_for_another_target_or_exit_are_refused(
    settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    change_config(write_kangaroo(tmp_path), **settings)
    with pytest.raises(ValueError, match=f"checkpoint .*{message}"):
        load_exit_adapter(tmp_path, target(), exit_layer=2)


def test_an_adapter_that_does_not_say_its_exit_must_be_told(tmp_path: Path) -> None:
    write_kangaroo(tmp_path)
    with pytest.raises(ValueError, match=r"does not say behind which layer .* of 1\.\.3"):
        load_exit_adapter(tmp_path, target())
    with pytest.raises(ValueError, match=r"exit_layer 4 is out of range"):
        load_exit_adapter(tmp_path, target(), exit_layer=4)
    change_config(tmp_path, exit_layer=4)
    with pytest.raises(ValueError, match=r"does not fit: exit_layer 4 is out of range; .* 1\.\.3"):
        load_exit_adapter(tmp_path, target())


# The cache.


class _Fixed(Fixed):
    """Two rows in three draft, another one at each step."""

    num_steps = 0

    def choose(self, rows: Any) -> Any:
        self.num_steps += 1
        budgets = super().choose(rows)
        return [
            budget if (self.num_steps + b) % 3 else budget._replace(depth=0)
            for b, budget in enumerate(budgets)
        ]


@pytest.mark.parametrize("branching", ["", "2,2"])
@pytest.mark.parametrize("depth", [1, 3])
def test_its_cache_holds_what_the_targets_does_whatever_was_accepted(
    branching: str, depth: int
) -> None:
    folder = make_weights(target(), "early_exit", exit_layer=2)
    knobs = {"branching": branching} if branching else {}
    method: Any = make_early_exit(target(), weights=str(folder), **knobs)
    decoder = Decoder(target(), method, _Fixed(depth, 9), GREEDY, max_rows=3)
    rows = decoder.join([make_request((3 + i, 50 - i), 14 - 3 * i) for i in range(2)])
    rows += decoder.join([make_request((60,), 12)])
    auditor, accepted = Auditor(), set()
    while decoder.rows:
        decoder.step()
        assert method.exit.cache.lengths == decoder.cache.lengths
        accepted |= {(step.accepted, step.depth) for row in rows for step in row.steps}
        auditor.take_down(decoder)
    auditor.check()
    # Drafts of each fate: none, some or all accepted; and steps without a draft.
    assert {(0, 0), (0, depth), (depth, depth)} <= accepted
    assert [row.output for row in rows] == [reference(target(), row.request) for row in rows]


# Training.


def sequences(model: Target, taps: tuple[int, ...], num: int = 3) -> Sequences:
    """The target's own greedy answers to prompts of different lengths, padded on the right."""
    rows = []
    for i in range(num):
        prompt = tuple(range(10 + 7 * i, 14 + 8 * i))
        rows.append((prompt, reference(model, make_request(prompt, 12 + i))))
    width = max(len(prompt) + len(answer) for prompt, answer in rows)
    tokens_BT = torch.zeros(num, width, dtype=torch.long)
    written_BT = torch.zeros(num, width, dtype=torch.bool)
    hidden = {tap: torch.zeros(num, width, model.hidden_size) for tap in taps}
    for b, (prompt, answer) in enumerate(rows):
        tokens = [*prompt, *answer]
        tokens_BT[b, : len(tokens)] = torch.tensor(tokens)
        written_BT[b, len(prompt) : len(tokens)] = True
        found = model.new_cache(1)
        for tap, states in model.prefill(tokens, found, found.add_row(), taps).items():
            hidden[tap][b, : len(tokens)] = states[0]
    return Sequences(tokens_BT, written_BT, hidden)


def train(recipe: Any, batch: Sequences, steps: int) -> list[float]:
    """The losses of some updates on one batch."""
    weights = [weight for weight in recipe.module.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=3e-3)
    losses = []
    for _ in range(steps):
        loss, _ = recipe.loss(batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def least_loss(recipe: Any, batch: Sequences) -> float:
    """The mean entropy of the target's distribution: no cross entropy with it is less."""
    final_Mh = batch.hidden[FINAL][:, :-1][batch.written_BT[:, 1:]]
    p_MD = recipe.head(final_Mh).softmax(-1)
    return float(-(p_MD * p_MD.log()).sum(-1).mean())


def test_training_lowers_the_loss_and_what_it_writes_drafts_better(tmp_path: Path) -> None:
    counts = torch.ones(ASCII_VOCAB)
    recipe = ExitAdapterRecipe(target(), Options(vocab=0, token_counts=counts, exit_layer=1))
    assert recipe.needed_taps() == (0, FINAL) and recipe.vocabulary is None
    batch = sequences(target(), recipe.needed_taps())
    before = recipe.loss(batch)[1]["acc1"].item()
    recipe.write(tmp_path / "before")
    losses = train(recipe, batch, 60)
    least = least_loss(recipe, batch)
    assert least <= losses[-1] < least + 0.1 * (losses[0] - least)
    assert recipe.loss(batch)[1]["acc1"].item() > max(before, 0.8)
    recipe.write(tmp_path / "after")
    requests = [make_request(tuple(range(10 + 7 * i, 14 + 8 * i)), 12 + i) for i in range(3)]
    num_steps = []
    for name in ("before", "after"):
        method = make_early_exit(target(), weights=str(tmp_path / name))
        rows = decode(target(), method, requests, max_rows=3)
        assert [row.output for row in rows] == [reference(target(), r) for r in requests]
        num_steps.append(sum(len(row.steps) for row in rows))
    assert num_steps[1] < num_steps[0]


def test_the_recipes_exit_is_a_fifth_of_the_layers_in_and_begins_as_the_last_layer() -> None:
    model = Target(tiny_model(num_hidden_layers=6, hidden_size=32))
    recipe = ExitAdapterRecipe(model, Options(vocab=0, token_counts=torch.zeros(259)))
    assert recipe.module.exit_layer == 1 and recipe.module.config.num_hidden_layers == 1
    last: Any = model.layers[-1]
    for name, weight in recipe.module.layer.named_parameters():
        owner, _, attribute = name.rpartition(".")
        assert torch.equal(weight, getattr(last.get_submodule(owner), attribute))
    with pytest.raises(ValueError, match=r"exit_layer 6 is out of range; valid .* 1\.\.5"):
        ExitAdapterRecipe(model, Options(vocab=0, token_counts=torch.zeros(259), exit_layer=6))


@pytest.mark.parametrize("variation", [0.0, 0.5])
def test_the_loss_is_the_mean_over_written_tokens_in_the_vocabulary(
    variation: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ExitAdapterRecipe, "variation", variation)
    recipe = ExitAdapterRecipe(target(), Options(vocab=60, token_counts=torch.arange(97)))
    batch = sequences(target(), recipe.needed_taps())
    loss, shown = recipe.loss(batch)
    head: Any = target().model.get_output_embeddings()
    ids = list(range(37, 97))
    hidden = recipe.module.whole(batch.hidden[0])
    terms, num_right, num_written = [], 0, 0
    for b, t in batch.written_BT.nonzero().tolist():
        token = int(batch.tokens_BT[b, t])
        num_written += 1
        if token in ids:
            logq = (head.weight[ids] @ hidden[b, t - 1]).log_softmax(0)
            p = (head.weight[ids] @ batch.hidden[FINAL][b, t - 1]).softmax(0)
            terms.append(-(p * logq).sum() + variation * (1 - torch.minimum(p, logq.exp()).sum()))
            num_right += ids[int(logq.argmax())] == token
    assert 0 < len(terms) < num_written
    torch.testing.assert_close(loss, sum(terms) / len(terms), rtol=1e-4, atol=1e-5)
    assert shown["acc1"].item() == pytest.approx(num_right / num_written)


def test_padding_and_what_follows_a_token_change_nothing() -> None:
    recipe = ExitAdapterRecipe(target(), Options(vocab=60, token_counts=torch.arange(97)))
    batch = sequences(target(), recipe.needed_taps())
    wider = Sequences(
        torch.nn.functional.pad(batch.tokens_BT, (0, 5), value=9),
        torch.nn.functional.pad(batch.written_BT, (0, 5)),
        {k: torch.nn.functional.pad(v, (0, 0, 0, 5), value=3.0) for k, v in batch.hidden.items()},
    )
    torch.testing.assert_close(recipe.loss(wider)[0], recipe.loss(batch)[0])


def test_a_batch_without_written_tokens_has_no_loss() -> None:
    recipe = ExitAdapterRecipe(target(), Options(vocab=60, token_counts=torch.arange(97)))
    batch = sequences(target(), recipe.needed_taps(), num=1)
    loss, shown = recipe.loss(
        Sequences(batch.tokens_BT, torch.zeros_like(batch.written_BT), batch.hidden)
    )
    assert (loss.item(), shown["acc1"].item()) == (0.0, 0.0)


def test_the_loss_is_least_where_the_two_are_equal() -> None:
    p_MD = torch.tensor([[0.7, 0.2, 0.1]])
    first = torch.zeros(1, dtype=torch.long)
    found = Predictions(first, first, p_MD, first)
    equal = found.loss(p_MD.log(), variation=1.0).item()
    assert equal == pytest.approx(-(p_MD * p_MD.log()).sum().item())
    assert found.loss(p_MD.flip(1).log(), variation=1.0).item() == pytest.approx(
        -(p_MD * p_MD.flip(1).log()).sum().item() + 0.6
    )


@pytest.mark.parametrize("family", ["qwen3", "qwen2", "gpt_neox"])
def test_targets_of_other_families_get_an_exit_too(family: str, tmp_path: Path) -> None:
    model = Target(_other(family), name=family)
    recipe = ExitAdapterRecipe(model, Options(vocab=40, token_counts=torch.arange(64)))
    recipe.write(tmp_path)
    method = make_early_exit(model, weights=str(tmp_path))
    (row,) = decode(model, method, [make_request((5, 6, 7), 8)], audit=True)
    assert row.output == reference(model, row.request)
    assert any(step.depth for step in row.steps)


def _other(family: str) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    from specbench.target.attention import NAME

    torch.manual_seed(0)
    config = AutoConfig.for_model(
        family,
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        initializer_range=0.3,
        max_position_embeddings=128,
        bos_token_id=1,
        eos_token_id=None,
    )
    config._attn_implementation = NAME
    return AutoModelForCausalLM.from_config(config).eval()


def test_a_written_adapter_is_small_and_holds_no_head(tmp_path: Path) -> None:
    recipe = ExitAdapterRecipe(target(), Options(vocab=60, token_counts=torch.arange(97)))
    recipe.write(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    assert set(tensors) == {"d2t", *ExitAdapter(recipe.module.config).state_dict()}
    assert {str(t.dtype) for t in tensors.values()} == {"torch.bfloat16", "torch.int64"}
    assert json.loads((tmp_path / "config.json").read_text())["draft_vocab_size"] == 60
    save_file({**tensors, "lm_head.weight": torch.ones(60, 32)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"has unknown tensors: lm_head\.weight"):
        load_exit_adapter(tmp_path, target())
