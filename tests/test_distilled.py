"""The distilled draft model: its format, what it shares with the target, and how it is trained."""

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from specbench import registry
from specbench.conformance.decoding import GREEDY, make_request, reference
from specbench.conformance.models import ASCII_VOCAB, looping_model, looping_target, tiny_target
from specbench.learned.distilled import is_distilled, load_distilled, own_weights
from specbench.method import Batch, Budget, Method, Proposal
from specbench.sampling import Sampling
from specbench.target import FINAL, Target
from specbench.training.distilled import DistilledRecipe
from specbench.training.recipe import Options
from specbench.tree import Tree
from specbench_methods import draft_model
from tests.drafters import Setting, decode, make_method, make_weights
from tests.test_exit_adapter import least_loss, sequences, train


@cache
def target() -> Target:
    return looping_target(eos_token_id=None)


def make_draft_model(for_target: Target, **knobs: str) -> Method:
    cls = registry.load_method("draft_model")
    return cls(for_target, registry.make_config("draft_model", cls, knobs))


def logits(model: Target, tokens: list[int]) -> torch.Tensor:
    rows = model.new_cache(1)
    rows.add_row()
    return model.forward(torch.tensor([tokens]), [Tree.chain(len(tokens) - 1)], rows).logits_BMV


TOKENS = [5, 6, 7, 60, 61, 5, 6]


# The checkpoint.


def test_with_all_layers_it_is_the_target_in_bfloat16_weights(tmp_path: Path) -> None:
    folder = make_weights(target(), "draft_model", num_layers=4, vocab=60)
    loaded = load_distilled(folder, target())
    assert loaded.vocabulary is not None and len(loaded.vocabulary) == 60
    expected = logits(target(), TOKENS)[..., ASCII_VOCAB - 60 :]
    found = logits(loaded.model, TOKENS)
    assert (found - expected).abs().mean() < 0.03 * expected.abs().mean()


def test_it_holds_layers_and_the_final_norm_and_no_embedding(tmp_path: Path) -> None:
    folder = make_weights(target(), "draft_model", vocab=ASCII_VOCAB)
    tensors = load_file(folder / "model.safetensors")
    assert {key.split(".")[0] for key in tensors} == {"layers", "norm"}
    assert {key.split(".")[1] for key in tensors if key != "norm.weight"} == {"0", "1"}
    assert is_distilled(str(folder)) and not is_distilled(str(tmp_path))


@pytest.mark.parametrize("pack", [True, False])
def test_embeddings_and_a_whole_head_are_the_targets_own(pack: bool) -> None:
    model = tiny_target(pack=pack, tie_word_embeddings=True)
    loaded = load_distilled(make_weights(model, "draft_model", vocab=259), model)
    ours, theirs = loaded.model.model, model.model
    assert ours.get_input_embeddings() is theirs.get_input_embeddings()
    before = logits(model, TOKENS)
    assert logits(loaded.model, TOKENS).shape == before.shape
    torch.testing.assert_close(logits(model, TOKENS), before, rtol=0, atol=0)
    layer = 2 * 32 * 32 + 2 * 16 * 32 + 3 * 64 * 32 + 2 * 32
    assert loaded.model.num_weight_bytes == 4 * (2 * layer + 32)
    reduced = load_distilled(make_weights(model, "draft_model", vocab=100), model)
    assert reduced.model.num_weight_bytes == 4 * (2 * layer + 32 + 100 * 32)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"hidden_size": 64}, "made for another target: hidden_size is 64; this target needs 32"),
        ({"vocab_size": 98}, "vocab_size is 98; this target needs 97"),
        ({"model_type": "gpt2"}, "model_type is gpt2; this target needs llama"),
        ({"num_hidden_layers": 5}, r"num_hidden_layers 5; valid for this target: 1\.\.4"),
        ({"num_hidden_layers": 1}, "has unknown tensors: layers.1.input_layernorm.weight"),
        ({"num_hidden_layers": 3}, "lacks layers.2.input_layernorm.weight"),
        ({"drafter": "exit_adapter"}, "is no drafter of kind 'distilled'"),
    ],
)
def test_checkpoints_for_another_target_are_refused(settings: dict[str, Any], message: str) -> None:
    folder = make_weights(target(), "draft_model")
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))
    with pytest.raises(ValueError, match=f"checkpoint .*{message}"):
        load_distilled(folder, target())


def test_a_layer_of_another_shape_is_named() -> None:
    folder = make_weights(target(), "draft_model")
    tensors = load_file(folder / "model.safetensors")
    tensors["layers.1.mlp.up_proj.weight"] = torch.ones(63, 32)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ValueError, match=r"layers.1.mlp.up_proj.weight of shape \(63, 32\)"):
        make_draft_model(target(), model=str(folder))


# The method.


@pytest.mark.parametrize("branching", ["", "4,2"])
@pytest.mark.parametrize("sampling", [GREEDY, Sampling(temperature=2.0)], ids=["T=0", "T=2"])
def test_tokens_beyond_the_draft_vocabulary_are_never_drafted_but_still_come(
    branching: str, sampling: Sampling, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_weights(target(), "draft_model", vocab=40)
    knobs = {"branching": branching} if branching else {}
    method = make_draft_model(target(), model=str(folder), **knobs)
    drafted = set[int]()
    propose = method.propose

    def watched(batch: Batch, budgets: Sequence[Budget]) -> Proposal:
        proposal = propose(batch, budgets)
        for tokens, tree in zip(proposal.tokens_BN.tolist(), proposal.trees, strict=True):
            drafted.update(tokens[1 : len(tree)])
        return proposal

    monkeypatch.setattr(method, "propose", watched)
    requests = [make_request((9 + i, 90 - i, 60), 12) for i in range(4)]
    rows = decode(target(), method, requests, sampling, max_rows=4, audit=True)
    assert drafted and min(drafted) >= ASCII_VOCAB - 40
    assert any(token < ASCII_VOCAB - 40 for row in rows for token in row.output)
    if sampling is GREEDY:
        assert [row.output for row in rows] == [reference(target(), r) for r in requests]


def test_with_all_layers_and_tokens_every_draft_is_accepted() -> None:
    folder = make_weights(target(), "draft_model", num_layers=4, vocab=ASCII_VOCAB)
    method = make_draft_model(target(), model=str(folder))
    (row,) = decode(target(), method, [make_request((5, 6, 7), 20)], audit=True)
    assert row.output == reference(target(), row.request)
    # Its weights are rounded to bfloat16, so it may err at a near tie.
    assert sum(step.accepted == step.depth for step in row.steps) >= len(row.steps) - 1


def test_it_is_named_in_the_tables_and_shipped_weights_come_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = str(make_weights(target(), "draft_model"))
    monkeypatch.setattr(draft_model, "shipped_weights", lambda method, target: folder)
    method = make_draft_model(target())
    assert method.label == "distilled, 2 layers"
    fresh = load_distilled(folder, target()).model
    assert method.describe()["fingerprint"] == fresh.fingerprint
    assert method.num_extra_bytes < target().num_weight_bytes
    assert make_draft_model(target(), model="copy").label == "int8 copy of the target"


@pytest.mark.parametrize("method", ["draft_model", "early_exit"])
def test_trained_drafters_run_in_the_targets_half_precision(method: str) -> None:
    model = looping_model(eos_token_id=None)
    torch.nn.Module.to(model, torch.bfloat16)
    half = Target(model, name="half")
    knob = {"draft_model": "model", "early_exit": "weights"}[method]
    made = make_method(half, Setting(method, ((knob, "MADE"), ("branching", "2"))))
    rows = decode(half, made, [make_request((5, 6, 7)), make_request((9,))], max_rows=2)
    assert any(step.accepted for row in rows for step in row.steps)


# Training.


def test_training_lowers_the_loss_and_what_it_writes_drafts_better(tmp_path: Path) -> None:
    recipe = DistilledRecipe(
        target(), Options(vocab=0, token_counts=torch.ones(ASCII_VOCAB), num_layers=2)
    )
    assert recipe.needed_taps() == (FINAL,) and recipe.vocabulary is None
    frozen = recipe.model.get_input_embeddings().weight.clone()
    batch = sequences(target(), recipe.needed_taps())
    recipe.write(tmp_path / "before")
    losses = train(recipe, batch, 60)
    least = least_loss(recipe, batch)
    assert least <= losses[-1] < least + 0.2 * (losses[0] - least)
    assert recipe.loss(batch)[1]["acc1"].item() > 0.8
    assert torch.equal(recipe.model.get_input_embeddings().weight, frozen)
    recipe.write(tmp_path / "after")
    requests = [make_request(tuple(range(10 + 7 * i, 14 + 8 * i)), 12 + i) for i in range(3)]
    num_steps = []
    for name in ("before", "after"):
        method = make_draft_model(target(), model=str(tmp_path / name))
        rows = decode(target(), method, requests, max_rows=3)
        assert [row.output for row in rows] == [reference(target(), r) for r in requests]
        num_steps.append(sum(len(row.steps) for row in rows))
    assert num_steps[1] < num_steps[0]


def test_in_training_it_says_what_it_says_when_it_drafts(tmp_path: Path) -> None:
    recipe = DistilledRecipe(
        target(), Options(vocab=60, token_counts=torch.arange(97), num_layers=3)
    )
    with torch.no_grad():
        for weight in own_weights(recipe.model).values():
            weight.copy_(weight.bfloat16())
    batch = sequences(target(), (FINAL,))
    hidden = recipe.hidden(batch)
    recipe.write(tmp_path)
    drafter = load_distilled(tmp_path, target()).model
    for b, written_T in enumerate(batch.written_BT):
        tokens = batch.tokens_BT[b, : int(written_T.nonzero().max()) + 1].tolist()
        expected = recipe.head(hidden[b, : len(tokens)])
        torch.testing.assert_close(logits(drafter, tokens)[0], expected, rtol=0, atol=1e-3)


def test_a_target_has_no_more_layers_than_it_has() -> None:
    with pytest.raises(ValueError, match=r"layers 5 is out of range; valid: 1\.\.4"):
        DistilledRecipe(target(), Options(vocab=0, token_counts=torch.ones(97), num_layers=5))
