"""Self-speculation: verification goes on where drafting stopped, and calibration finds the layers
that matter least."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from specbench import registry
from specbench.conformance.decoding import GREEDY, make_request, reference
from specbench.conformance.models import ASCII_VOCAB, looping_model, looping_target, tiny_tokenizer
from specbench.method import Batch, Budget, Drawer, Method, Proposal, Row
from specbench.sampling import Sampling
from specbench.target import KVCache, Target, load_target
from specbench.tree import Tree
from specbench_methods import early_exit
from specbench_methods.early_exit import calibrate
from tests.drafters import Setting, decode, make_method, make_weights


@cache
def target() -> Target:
    return looping_target(eos_token_id=None)


def make_early_exit(model: Target, **knobs: str) -> Method:
    """A chain, unless the knobs say otherwise."""
    if knobs.get("weights") == "MADE":
        knobs["weights"] = str(make_weights(model, "early_exit"))
    cls = registry.load_method("early_exit")
    return cls(model, registry.make_config("early_exit", cls, {"branching": ""} | knobs))


def idle_model(layers: Iterable[int], **settings: Any) -> PreTrainedModel:
    """A looping model in which these layers add nothing."""
    model = looping_model(**settings)
    with torch.no_grad():
        for layer in layers:
            block: Any = model.get_decoder().layers[layer]
            block.self_attn.o_proj.weight.zero_()
            block.mlp.down_proj.weight.zero_()
    return model


@dataclass(frozen=True)
class _Drafted:
    """A proposal, and the cache that it was drafted on."""

    proposal: Proposal
    cache: KVCache


def draft(
    method: Method,
    prompts: Sequence[Sequence[int]],
    budgets: Sequence[Budget],
    sampling: Sampling = GREEDY,
) -> _Drafted:
    """The first proposal behind prompts."""
    method.drawer = Drawer(sampling)
    rows = [Row(make_request(prompt), list(prompt)) for prompt in prompts]
    cache = method.target.new_cache(len(rows))
    for row in rows:
        taps = method.target.prefill(row.tokens[:-1], cache, cache.add_row(), method.taps)
        method.start([row], [taps])
    return _Drafted(method.propose(Batch(rows, cache), budgets), cache)


# Resuming.


@pytest.mark.parametrize(
    "knobs",
    [
        {"exit_layer": "2"},
        {"exit_layer": "1", "branching": "3,2"},
        {"skip": "3"},
        {"skip": "1,3", "branching": "2,2"},
        {"weights": "MADE"},
        {"weights": "MADE", "branching": "3,2"},
    ],
    ids=str,
)
@pytest.mark.parametrize("sampling", [GREEDY, Sampling(temperature=1.0)], ids=["T=0", "T=1"])
def test_a_resumed_forward_has_the_logits_of_a_whole_one(
    knobs: dict[str, str], sampling: Sampling
) -> None:
    drafted = draft(
        make_early_exit(target(), **knobs),
        [(5, 6, 7), (9,), range(20, 50), (8, 8)],
        [Budget(3, 15), Budget(1, 9), Budget(0, 0), Budget(4, 5)],
        sampling,
    )
    proposal, cache = drafted.proposal, drafted.cache
    assert [tree.depth for tree in proposal.trees[:3]] == [3, 1, 0]
    assert proposal.resume is not None
    tokens_BN, trees = proposal.tokens_BN, proposal.trees
    resumed = target().forward(tokens_BN, trees, cache, resume=proposal.resume).logits_BMV
    written = {layer: store.clone() for layer, store in cache.keys.items()}
    whole = target().forward(tokens_BN, trees, cache).logits_BMV
    for b, tree in enumerate(trees):
        torch.testing.assert_close(
            resumed[b, : len(tree)], whole[b, : len(tree)], rtol=0, atol=1e-5
        )
        held = slice(cache.lengths[b], cache.lengths[b] + len(tree))
        for layer, store in written.items():
            torch.testing.assert_close(
                store[b, :, held], cache.keys[layer][b, :, held], rtol=0, atol=1e-5
            )


def test_when_the_first_layer_is_passed_by_the_whole_stack_verifies() -> None:
    proposal = draft(make_early_exit(target(), skip="0"), [(5, 6, 7)], [Budget(2, 9)]).proposal
    assert (proposal.trees, proposal.resume) == ([Tree.chain(2)], None)


def test_an_exit_drafts_what_a_model_of_the_first_layers_says() -> None:
    short = looping_model(eos_token_id=None, num_hidden_layers=2)
    short.load_state_dict(looping_model(eos_token_id=None).state_dict(), strict=False)
    method = make_early_exit(target(), exit_layer="2")
    proposal = draft(method, [(5, 6, 7)], [Budget(4, 4)]).proposal
    request = make_request((5, 6, 7), 4)
    drafted = proposal.tokens_BN[0, 1:].tolist()
    assert drafted == reference(Target(short), request) != reference(target(), request)


def test_passing_by_idle_layers_drafts_the_targets_own_tokens() -> None:
    model = Target(idle_model([1, 2], eos_token_id=None), tiny_tokenizer())
    for knobs in ({"skip": "1,2"}, {"skip": "2", "branching": "2"}):
        (row,) = decode(model, make_early_exit(model, **knobs), [make_request((5, 6, 7), 15)])
        assert row.output == reference(model, row.request)
        assert [step.accepted for step in row.steps] == [step.depth for step in row.steps]
        assert row.steps[0].depth == 4


def test_a_checkpoint_made_for_early_exits_is_a_plain_model(tmp_path: Path) -> None:
    """LayerSkip's: nothing beside the model is on disk; where to leave it is a knob."""
    looping_model(eos_token_id=None).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    loaded = load_target(str(tmp_path), dtype="float32")
    request = make_request((5, 6, 7))
    method = make_early_exit(loaded, exit_layer="3")
    (row,) = decode(loaded, method, [request])
    assert row.output == reference(loaded, request) == reference(target(), request)
    assert any(step.accepted for step in row.steps)


# A trained exit.


def test_a_trained_exit_that_is_right_is_accepted_in_full(tmp_path: Path) -> None:
    """Layers 2 and 3 add nothing, and the adapter neither; so its norm and head say what the
    target says."""
    model = Target(idle_model([2, 3], eos_token_id=None), tiny_tokenizer())
    folder = make_weights(model, "early_exit", exit_layer=2, vocab=ASCII_VOCAB)
    for branching in ("", "2"):
        knobs = {"branching": branching} if branching else {}
        method = make_early_exit(model, weights=str(folder), **knobs)
        requests = [make_request((5, 6, 7), 15), make_request((9,), 11)]
        for row in decode(model, method, requests, max_rows=2, audit=True):
            assert row.output == reference(model, row.request)
            assert [step.accepted for step in row.steps] == [step.depth for step in row.steps]
            assert row.steps[0].depth == 4


def test_only_tokens_of_the_draft_vocabulary_are_drafted() -> None:
    folder = make_weights(target(), "early_exit", vocab=20)
    for sampling in (GREEDY, Sampling(temperature=2.0)):
        method = make_early_exit(target(), weights=str(folder), branching="4,4")
        drafted = draft(method, [(5, 6, 7), (9,)], [Budget(3, 40)] * 2, sampling).proposal
        assert int(drafted.tokens_BN[:, 1:].min()) >= ASCII_VOCAB - 20


def test_behind_a_token_drawn_unsurely_nothing_is_drafted() -> None:
    budget = Budget(5, 30)
    depths = []
    for threshold in ("0", "0.3", "0.6", "1"):
        proposals = [
            draft(
                make_early_exit(target(), exit_layer="2", threshold=threshold), [prompt], [budget]
            )
            for prompt in [(5, 6, 7), (9,), (60, 2), (33, 34)]
        ]
        depths.append([drafted.proposal.trees[0].depth for drafted in proposals])
    assert set(depths[0]) == {5} and set(depths[-1]) == {1}
    assert depths[0] >= depths[1] >= depths[2] >= depths[3]
    assert len({depth for row in depths for depth in row}) > 2


@pytest.mark.parametrize("branching", ["", "3"])
def test_the_shape_of_a_drawn_tree_depends_on_distributions_not_on_draws(branching: str) -> None:
    """A node has children if the drafter was sure where the node itself was drawn."""
    knobs = {"exit_layer": "2", "threshold": "0.35"}
    method = make_early_exit(target(), **knobs, **({"branching": branching} if branching else {}))
    fates = set()
    for begin in range(3, 90, 4):
        sampling = Sampling(temperature=1.0)
        drafted = draft(method, [(begin, begin + 1)], [Budget(3, 30)], sampling).proposal
        assert drafted.logq is not None
        (tree,), (logq,) = drafted.trees, drafted.logq
        for node, children in enumerate(tree.children[1:], start=1):
            if tree.depths[node] < 3:
                sure = float(logq[tree.parents[node]].exp().max()) >= 0.35
                assert bool(children) == sure
                fates.add(sure)
    assert fates == {True, False}


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(temperature=0.8, rule="coupled")])
def test_with_a_threshold_the_output_stays_the_targets(sampling: Sampling) -> None:
    for knobs in ({"exit_layer": "2"}, {"weights": "MADE"}, {"exit_layer": "2", "branching": "3"}):
        method = make_early_exit(target(), threshold="0.35", **knobs)
        requests = [make_request((begin, begin + 1)) for begin in range(3, 90, 20)]
        for row in decode(target(), method, requests, sampling, max_rows=3):
            assert row.output == reference(target(), row.request, sampling)


def test_shipped_weights_draft_unless_layers_are_named_or_none_are_wanted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = str(make_weights(target(), "early_exit", exit_layer=1))
    shipped = {"early_exit": folder}
    monkeypatch.setattr(early_exit, "shipped_weights", lambda method, target: shipped[method])
    trained = make_early_exit(target())
    assert trained.label == "trained exit after layer 1 of 4"
    assert trained.describe()["fingerprint"] and trained.num_extra_bytes > 0
    for knobs in ({"exit_layer": "1"}, {"skip": "1"}, {"num_skipped": "1"}, {"weights": "none"}):
        untrained = make_early_exit(target(), **knobs)
        assert "trained" not in untrained.label and untrained.num_extra_bytes == 0
        assert untrained.taps == () and not untrained.describe()["fingerprint"]


# Calibration.


def test_calibration_passes_by_the_layers_that_change_nothing() -> None:
    model = Target(idle_model([1, 2]), tiny_tokenizer())
    assert calibrate(model, depth=4) == {1, 2}
    assert calibrate(model, depth=4, num_skipped=1) == {1}
    assert calibrate(model, depth=4, num_skipped=2) == {1, 2}
    assert len(calibrate(model, depth=4, num_skipped=3)) == 3


def test_calibration_comes_to_the_same_every_time_and_leaves_the_target_as_it_was() -> None:
    model = looping_target(seed=3)
    request = make_request((5, 6, 7), 8)
    before = decode(model, make_method(model, Setting("vanilla", ())), [request])[0].output
    found = [calibrate(model, depth=2) for _ in range(3)]
    assert found[0] == found[1] == found[2]
    assert calibrate(looping_target(seed=3), depth=2) == found[0]
    after = decode(model, make_method(model, Setting("vanilla", ())), [request])[0].output
    assert after == before


@pytest.mark.parametrize("settings", [{}, {"max_position_embeddings": 16}])
def test_calibration_needs_no_tokenizer(settings: dict[str, int]) -> None:
    model = Target(idle_model([2], **settings))
    assert calibrate(model, depth=4, num_skipped=1) == {2}


def test_calibration_stays_within_the_targets_context() -> None:
    model = Target(idle_model([1], max_position_embeddings=16), tiny_tokenizer())
    assert calibrate(model, depth=4, num_skipped=1) == {1}


@pytest.mark.parametrize("num_layers", [2, 3])
def test_a_shallow_target_can_be_calibrated(num_layers: int) -> None:
    model = looping_target(num_hidden_layers=num_layers)
    assert 1 <= len(calibrate(model, depth=2)) < num_layers


# Knobs and description.


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"exit_layer": "4"}, r"exit_layer 4 is out of range; valid for this target: 1\.\.3"),
        ({"skip": "1,4"}, r"skip \(1, 4\) is out of range; valid for this target: some of 0\.\.3"),
        ({"skip": "0,1,2,3"}, r"some of 0\.\.3"),
        ({"num_skipped": "4"}, r"num_skipped 4 is out of range; valid for this target: 1\.\.3"),
        ({"exit_layer": "-1"}, "out of range; valid: 0 or more"),
        ({"skip": "-1"}, "out of range; valid: 0 or more"),
        ({"exit_layer": "1", "skip": "2"}, "exclude each other; valid: one of them"),
        ({"threshold": "1.5"}, r"threshold 1\.5 is out of range; valid: 0\.\.1"),
        ({"weights": "some/where", "skip": "1"}, "exclude each other; valid: one of them"),
        ({"weights": "./nowhere"}, r"no checkpoint folder '\./nowhere'"),
        ({"branching": "0"}, r"branching \(0,\) is out of range; valid: 1 or more"),
    ],
    ids=str,
)
def test_knobs_out_of_range_are_refused(knobs: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_early_exit(target(), **knobs)


def test_a_target_of_one_layer_cannot_draft_for_itself() -> None:
    model = looping_target(num_hidden_layers=1)
    for knobs in ({}, {"exit_layer": "1"}, {"skip": "0"}, {"num_skipped": "1"}):
        with pytest.raises(ValueError, match="needs a target of 2 layers or more"):
            make_early_exit(model, **knobs)


def test_it_says_which_layers_draft() -> None:
    exiting, skipping = (
        make_early_exit(target(), exit_layer="3"),
        make_early_exit(target(), skip="2,1"),
    )
    assert exiting.label == "exit after layer 3 of 4"
    assert skipping.label == "2 of 4 layers passed by"
    assert skipping.describe()["layers_passed_by"] == [1, 2]
    assert skipping.num_extra_bytes == 0
