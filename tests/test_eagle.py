"""EAGLE: it drafts what its head says, on true features wherever there are any, and its cache holds
no others."""

import json
import math
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from specbench import registry
from specbench.conformance.decoding import ALLOWED, GREEDY, make_request, reference
from specbench.conformance.models import ASCII_VOCAB, looping_model, tiny_tokenizer
from specbench.decode import Decoder
from specbench.depth import DepthController, Fixed
from specbench.method import Batch, Budget, Drawer, Method, Proposal, Request, Row
from specbench.sampling import Sampling
from specbench.target import KVCache, Target
from tests.drafters import decode
from tests.eagle_heads import (
    HEADS,
    Dims,
    Maker,
    Plain,
    good_eagle1,
    good_eagle3,
    made_folder,
    write,
)

DRAWN = Sampling(temperature=0.6)
IDS = [i for i in range(ASCII_VOCAB) if i % 3]
PROMPT = (5, 40, 12, 77, 31, 5, 40)


@cache
def target() -> Target:
    return Target(looping_model(), tiny_tokenizer(), name="looping")


def make(weights: str | Path = "good3", **knobs: str) -> Any:
    """The method for our target, with a head of that name or in that folder."""
    return make_for(target(), weights, **knobs)


def make_for(model: Target, weights: str | Path, **knobs: str) -> Any:
    """The method for any target."""
    if str(weights).partition("-")[0] in HEADS:
        weights = made_folder(str(weights), model.vocab_size)
    cls = registry.load_method("eagle")
    return cls(model, registry.make_config("eagle", cls, {"weights": str(weights)} | knobs))


def start(method: Method, prompts: Sequence[Sequence[int]], sampling: Sampling = GREEDY) -> Batch:
    """Rows whose prompts just joined."""
    method.drawer = Drawer(sampling)
    method.reset()
    cache = method.target.new_cache(len(prompts))
    rows = [Row(make_request(prompt), list(prompt)) for prompt in prompts]
    taps = [
        method.target.prefill(row.tokens[:-1], cache, cache.add_row(), method.taps) for row in rows
    ]
    method.start(rows, taps)
    return Batch(rows, cache)


def paths(proposal: Proposal, row: int = 0) -> list[tuple[int, ...]]:
    """The tokens on the way to each drafted node."""
    tokens, tree = proposal.tokens_BN[row].tolist(), proposal.trees[row]
    return [tuple(tokens[at] for at in tree.path_to(node)[1:]) for node in range(1, len(tree))]


# What is drafted.


@cache
def plain(kind: str) -> Plain:
    """The reduced head of that name, written down again, with the target's own weights."""
    model: Any = looping_model()
    embed, head = model.model.embed_tokens.weight.detach(), model.lm_head.weight.detach()
    dims = Dims(kv=4)
    if kind == "good1":
        _, tensors = good_eagle1(dims, ASCII_VOCAB, IDS)
        return Plain(tensors, embed, head[IDS], dims, ["layers.0."])
    _, tensors = HEADS[kind](dims, ASCII_VOCAB, IDS)
    return Plain(tensors, embed, head[IDS], dims, ["midlayer."], wide=["midlayer."])


@torch.no_grad()
def scores_after(kind: str, tokens: Sequence[int], drafted: Sequence[int]) -> list[float]:
    """Log-probabilities [D] of what comes after the drafted tokens, with hidden states from
    transformers' own forward of the committed ones."""
    model, head = looping_model(), plain(kind)
    # The last token's hidden states are not known when the next ones are drafted.
    out = model(torch.tensor([tokens[:-1]]), output_hidden_states=True).hidden_states
    picked = [out[-1]] if kind == "good1" else [out[i] for i in (2, 2, 1)]
    features = head.features([hidden[0] for hidden in picked])
    logits = head.logits(head.after(tokens[1:], features, drafted))
    scores: list[float] = logits.log_softmax(-1).tolist()
    return scores


def best_paths(kind: str, tokens: Sequence[int], depth: int, nodes: int) -> set[tuple[int, ...]]:
    """The likeliest paths of all, by trying the children of every path that could matter."""
    found: dict[tuple[int, ...], float] = {(): 0.0}
    level = [()]  # type: list[tuple[int, ...]]
    for _ in range(depth):
        following: dict[tuple[int, ...], float] = {}
        for path in level:
            for token, score in zip(IDS, scores_after(kind, tokens, path), strict=True):
                following[*path, token] = found[path] + score
        found |= following
        level = sorted(following, key=lambda path: -following[path])[:nodes]
    del found[()]
    return set(sorted(found, key=lambda path: -found[path])[:nodes])


@pytest.mark.parametrize("kind", HEADS)
def test_the_first_tree_has_the_likeliest_paths(kind: str) -> None:
    method = make(f"{kind}-reduced", top_k="20")
    batch = start(method, [PROMPT, PROMPT[:2]])
    proposal = method.propose(batch, [Budget(3, 20), Budget(2, 4)])
    assert set(paths(proposal, 0)) == best_paths(kind, PROMPT, 3, 20)
    assert set(paths(proposal, 1)) == best_paths(kind, PROMPT[:2], 2, 4)


@pytest.mark.parametrize("kind", ["good1", "good3"])
def test_a_later_tree_stands_on_the_true_features_of_what_was_accepted(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(target(), "eos_ids", frozenset())
    method = make(f"{kind}-reduced")
    decoder = Decoder(target(), method, Fixed(3, 6), GREEDY)
    (row,) = decoder.join([make_request(PROMPT, 20)])
    while sum(step.accepted for step in row.steps) < 3:
        decoder.step()
    proposal = method.propose(Batch(decoder.rows, decoder.cache), [Budget(3, 6)])
    assert set(paths(proposal)) == best_paths(kind, row.tokens, 3, 6)


def by_rank(path: Sequence[int]) -> tuple[int, ...]:
    """The tokens on the path with these ranks below the prompt."""
    tokens: list[int] = []
    for rank in path:
        scores = torch.tensor(scores_after("wild3", PROMPT, tokens))
        tokens.append(IDS[int(scores.argsort(descending=True)[rank])])
    return tuple(tokens)


@pytest.mark.parametrize("sampling", [GREEDY, DRAWN], ids=["T=0", "T>0"])
def test_a_static_tree_and_a_chain_are_drafted_by_rank(sampling: Sampling) -> None:
    words = "0 1 00 11 2 000 111 112 0001 1121"
    ranks = json.dumps([list(map(int, word)) for word in words.split()])
    method = make("wild3-reduced", tree="static", ranks=ranks)
    proposal = method.propose(start(method, [PROMPT], sampling), [Budget(4, 20)])
    assert set(paths(proposal)) == {by_rank(list(map(int, word))) for word in words.split()}
    assert not any(proposal.logq or [])
    method = make("wild3-reduced", tree="chain")
    proposal = method.propose(start(method, [PROMPT], sampling), [Budget(3, 20)])
    assert paths(proposal) == [by_rank([0] * depth) for depth in (1, 2, 3)]


def test_the_default_static_tree_is_eagle1s() -> None:
    method = make(tree="static")
    assert set(method.ranks.paths) == PUBLISHED
    (tree,) = method.propose(start(method, [PROMPT]), [Budget(5, 40)]).trees
    assert [tree.depths.count(depth) for depth in range(6)] == [1, 4, 8, 8, 3, 2]


PUBLISHED = {
    tuple(map(int, path))
    for path in (
        *("0", "1", "2", "3", "00", "01", "02", "10", "11", "20", "21", "30"),
        *("000", "001", "002", "010", "011", "020", "021", "100"),
        *("0000", "0001", "0002", "00000", "00001"),
    )
}
"""mc_sim_7b_63 of EAGLE, 25 nodes."""


@pytest.mark.parametrize("tree", ["dynamic", "static", "chain"])
@pytest.mark.parametrize("budget", [Budget(1, 1), Budget(1, 5), Budget(4, 1), Budget(6, 30)])
def test_any_budget_is_kept_with_a_vocabulary_smaller_than_the_tree_is_wide(
    tree: str, budget: Budget, tmp_path: Path
) -> None:
    config, tensors = good_eagle3(Dims(kv=4), ASCII_VOCAB, [4, 50, 51])
    method = make(write(tmp_path, config, tensors), tree=tree)
    proposal = method.propose(start(method, [PROMPT]), [budget])
    (shape,) = proposal.trees
    assert shape.depth <= budget.depth and shape.num_drafted <= budget.nodes
    full = {"dynamic": 30, "static": len([p for p in PUBLISHED if max(p) < 3]), "chain": 6}
    widest = {1: {1: 1, 5: 3}, 4: {1: 1}, 6: {30: full[tree]}}
    assert shape.num_drafted == (
        1 if tree == "chain" and budget.depth == 1 else widest[budget.depth][budget.nodes]
    )
    assert set(proposal.tokens_BN[0, 1:].tolist()) <= {4, 50, 51}
    assert len(set(paths(proposal))) == shape.num_drafted


# Drawing.


@pytest.mark.parametrize("knobs", [{"tree": "chain"}, {"tree": "static", "branching": "2,2"}])
def test_drawn_tokens_come_from_the_heads_distribution_over_the_whole_vocabulary(
    knobs: dict[str, str],
) -> None:
    method = make("wild3-reduced", drafts="drawn", **knobs)
    proposal = method.propose(start(method, [PROMPT], DRAWN), [Budget(3, 9)])
    tree, tokens = proposal.trees[0], proposal.tokens_BN[0].tolist()
    assert proposal.logq is not None and not proposal.replacement
    for parent, logq in proposal.logq[0].items():
        above = [tokens[at] for at in tree.path_to(parent)[1:]]
        expected = torch.full((ASCII_VOCAB,), -math.inf)
        scores = torch.tensor(scores_after("wild3", PROMPT, above)) / DRAWN.temperature
        expected[IDS] = scores.log_softmax(-1)
        torch.testing.assert_close(logq, expected, rtol=1e-3, atol=1e-3)
        assert all(logq[tokens[child]].isfinite() for child in tree.children[parent])
    assert set(proposal.logq[0]) == {n for n, children in enumerate(tree.children) if children}
    assert tree.num_drafted == (3 if knobs["tree"] == "chain" else 9)


def test_drawn_drafts_are_the_top_ones_at_temperature_0() -> None:
    drawn, top = (make("good3-reduced", tree="chain", drafts=drafts) for drafts in ("drawn", "top"))
    proposals = [method.propose(start(method, [PROMPT]), [ALLOWED]) for method in (drawn, top)]
    assert torch.equal(proposals[0].tokens_BN, proposals[1].tokens_BN)


# The head's cache.


class Alternating(DepthController):
    """Lets every row draft in two of three steps only, and not all the same."""

    def __init__(self) -> None:
        self.num_steps = 0

    def choose(self, rows: Sequence[Row]) -> list[Budget]:
        """Depth 0 for one row of three."""
        self.num_steps += 1
        rests = [(self.num_steps + index) % 3 == 0 for index in range(len(rows))]
        return [Budget(0, 0) if rest else ALLOWED for rest in rests]


def stored(cache: KVCache, row: int) -> torch.Tensor:
    """The keys and values of a row, [2 * layers * K, S, D]."""
    stores = [*cache.keys.values(), *cache.values.values()]
    return torch.cat([store[row, :, : cache.lengths[row]] for store in stores])


def requests() -> Iterator[Request]:
    """Of many lengths, one of a single token."""
    for prompt in (PROMPT, (9,), range(10, 40), (50, 50), (3, 4, 3, 4), (60,)):
        yield make_request(prompt, 20 + len(prompt) % 5)


@pytest.mark.parametrize("sampling", [GREEDY, DRAWN], ids=["T=0", "T>0"])
@pytest.mark.parametrize("max_rows", [1, 4])
@pytest.mark.parametrize(
    "knobs",
    [
        {},
        {"weights": "good1", "tree": "static"},
        {"weights": "good1", "tree": "chain", "drafts": "drawn"},
    ],
    ids=str,
)
def test_the_cache_holds_what_true_features_alone_give(
    knobs: dict[str, str], max_rows: int, sampling: Sampling, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(target(), "eos_ids", frozenset())
    method, fresh = make(**knobs), make(**knobs)
    decoder = Decoder(target(), method, Alternating(), sampling, max_rows)
    waiting, rows, num_checked = list(requests()), list[Row](), 0
    while waiting or decoder.rows:
        joining, waiting = waiting[: decoder.num_free], waiting[decoder.num_free :]
        rows += decoder.join(joining)
        decoder.step()
        for index, row in enumerate(decoder.rows):
            assert (
                method.cache.lengths[index] + sum(map(len, method.pending[index]))
                == len(row.tokens) - 1
            )
            batch = start(fresh, [row.tokens])
            fresh.propose(batch, [Budget(1, 1)])
            expected = stored(fresh.cache, 0)[:, : method.cache.lengths[index]]
            if method.cache.lengths[index]:
                found = stored(method.cache, index)
                torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
                num_checked += 1
    assert num_checked > 20
    assert sum(step.accepted for row in rows for step in row.steps) > 5
    assert any(step.nodes == 0 for row in rows for step in row.steps)
    for row in rows:
        assert row.drawn or row.output == reference(target(), row.request, sampling)
        assert row.drawn == (sampling is DRAWN and "drafts" in knobs)


def test_a_prompt_of_one_token_is_drafted_for_from_the_second_step() -> None:
    (row,) = decode(target(), make(), [make_request((9,), 6)])
    assert [min(step.nodes, 1) for step in row.steps[:-1]] == [0] + [1] * (len(row.steps) - 2)


def test_long_prompts_and_long_rests_are_run_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, chunked = make(), make()
    prompt = [7, 8, 9, 60, 3] * 5
    first = whole.propose(start(whole, [prompt, PROMPT]), [ALLOWED, ALLOWED])
    monkeypatch.setattr("specbench_methods.eagle._CHUNK", 4)
    batch = start(chunked, [prompt, PROMPT])
    again = chunked.propose(batch, [ALLOWED, ALLOWED])
    assert [paths(first, row) for row in (0, 1)] == [paths(again, row) for row in (0, 1)]
    torch.testing.assert_close(stored(whole.cache, 0), stored(chunked.cache, 0))
    # The same when the entries were left over from steps that did not draft.
    rested = make()
    batch = start(rested, [prompt[:2]])
    (row,), (length,) = batch.rows, batch.cache.lengths
    hidden = target().prefill(prompt[1:-1], batch.cache, 0, rested.taps)
    assert length == 1
    rested.pending[0].append(rested.head.stack(hidden)[0])
    row.tokens[:] = prompt
    assert paths(rested.propose(batch, [ALLOWED])) == paths(first)


def test_a_level_is_one_run_of_the_head(monkeypatch: pytest.MonkeyPatch) -> None:
    method, widths = make(), []
    forward = method.head.forward

    def counting(tokens_BN: torch.Tensor, *rest: Any) -> torch.Tensor:
        widths.append(tokens_BN.shape[1])
        out: torch.Tensor = forward(tokens_BN, *rest)
        return out

    monkeypatch.setattr(method.head, "forward", counting)
    method.propose(start(method, [PROMPT]), [Budget(3, 6)])
    prefill, root, *levels = widths
    assert (prefill, root) == (len(PROMPT) - 2, 1)
    assert len(levels) <= 2 and max(levels, default=0) <= 5


# Settings.


def test_the_label_says_which_version_it_is() -> None:
    assert make("good3").label == "EAGLE-3"
    assert make("good3-reduced", tree="static").label == "EAGLE-3, 64 draft tokens"
    assert make("good1").label == "EAGLE-2"
    assert make("good1-reduced", tree="chain").label == "EAGLE-1, 64 draft tokens"


def test_it_says_what_it_reads_and_weighs() -> None:
    small, whole = make("good3-reduced"), make("good3")
    described = small.describe()
    assert described["taps"] == (1, 1, 0) and described["num_draft_tokens"] == 64
    assert described["weights"] == made_folder("good3-reduced", ASCII_VOCAB)
    assert described["fingerprint"] != whole.describe()["fingerprint"]
    # The rows of the target's head count, the head itself does not.
    assert small.num_extra_bytes - whole.num_extra_bytes == 64 * 32 * 4
    assert small.taps == (1, 0)


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"tree": "bush"}, "unknown tree 'bush'; valid: dynamic, static, chain"),
        ({"drafts": "best"}, "unknown drafts 'best'; valid: top, drawn"),
        ({"top_k": "0"}, "top_k 0 is out of range"),
        ({"tree": "static", "ranks": "[[0], [1, 0]]"}, r"path \[1, 0\] comes before \[1\]"),
        ({"tree": "static", "ranks": "0 1"}, "tree '0 1': .*valid: 1,7,6, a JSON list of paths"),
        ({"ranks": "1,2"}, "a dynamic tree has no branching and no ranks"),
        ({"tree": "chain", "branching": "2"}, "a chain tree has no branching"),
        ({"tree": "static", "ranks": "1,2", "branching": "2"}, "exclude each other"),
        ({"drafts": "drawn"}, "drawn drafts need a chain"),
        ({"tree": "static", "drafts": "drawn"}, "drawn drafts need a chain"),
    ],
)
def test_bad_knobs_are_refused(knobs: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(**knobs)


def test_without_weights_for_a_target_it_says_how_to_get_some() -> None:
    with pytest.raises(ValueError, match=r"no weights for target 'looping': train some"):
        make("")


def test_a_bfloat16_target_is_drafted_for_too() -> None:
    model = Target(looping_model().bfloat16(), tiny_tokenizer(), name="half")
    method = make_for(model, "good3-reduced")
    row = decode(model, method, [make_request(PROMPT, 12)])[0]
    assert sum(step.nodes for step in row.steps) > 0
    assert method.num_extra_bytes == make("good3-reduced").num_extra_bytes / 2


def test_heads_of_several_layers_draft_too(tmp_path: Path) -> None:
    made, dims = Maker(2), Dims()
    tensors = made.wide(dims, "layers.0.") | made.layer(dims, "layers.1.", 32)
    tensors |= {
        "layers.1.input_layernorm.weight": made.norm(32),
        "fc.weight": made.weight(32, 96),
        "norm.weight": made.norm(32),
        "lm_head.weight": made.weight(ASCII_VOCAB, 32),
    }
    layer = dims.config(vocab_size=ASCII_VOCAB, num_hidden_layers=2)
    config = {"speculators_model_type": "eagle3", "transformer_layer_config": layer}
    method = make(write(tmp_path, config, tensors))
    rows = decode(target(), method, requests(), max_rows=3)
    assert sorted(method.cache.keys) == [0, 1]
    for row in rows:
        assert row.output == reference(target(), row.request)
