"""The target scores token trees as the plain model scores each branch alone, in many families.

The plain model is transformers' own, with its own attention and without a cache.
"""

import copy
import math
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import pytest
import torch
from accelerate import dispatch_model
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from specbench.conformance.models import tiny_model, tiny_target
from specbench.target import FINAL, KVCache, Resume, Target
from specbench.target import model as model_module
from specbench.target.loading import attention_name
from specbench.target.masks import tree_mask
from specbench.tree import Tree

VOCAB, LAYERS, WINDOW = 131, 4, 5
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MIXED = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
SLIDING: dict[str, Any] = {"sliding_window": WINDOW, "layer_types": MIXED}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen2 sliding": {"use_sliding_window": True, **SLIDING},
    "qwen3": {"head_dim": 8},
    "mistral": {"sliding_window": WINDOW},
    "gemma": {"head_dim": 8},
    "gemma2": {"head_dim": 8, "query_pre_attn_scalar": 8, "attn_logit_softcapping": 2.0, **SLIDING},
    "gemma3_text": {"head_dim": 8, "query_pre_attn_scalar": 8, **SLIDING},
    "phi3": {"sliding_window": WINDOW},
    "gpt_neox": {},
    "gpt2": {},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "olmo2": {},
    "cohere2": SLIDING,
    "granite": {"logits_scaling": 3.0, "residual_multiplier": 0.5},
    "smollm3": {"no_rope_layers": [1, 0, 1, 0]},
    "starcoder2": {"sliding_window": WINDOW},
    "stablelm": {},
    "falcon": {"alibi": False, "new_decoder_architecture": True, "num_kv_heads": 2},
    "gpt_oss": {"head_dim": 8, **EXPERTS, **SLIDING},
}
PROMPTS = ([7, 9, 64, 120, 5, 33, 8, 101, 77, 12, 90], [4, 4, 18], [55, 6, 7, 8, 9, 10, 93])
TREES = (
    Tree.of((-1, 0, 0, 1, 1, 2, 2, 5, 3)),
    Tree.of((-1, 0, 1, 0)),
    Tree.of((-1,)),
)
PATHS = ([0, 2, 5, 7], [0, 3], [0])


class Pair(NamedTuple):
    """A plain model and a target with the same weights."""

    plain: PreTrainedModel
    target: Target


def config_of(family: str, **overrides: Any) -> PreTrainedConfig:
    """A tiny config of a family."""
    settings = {**SIZES, **FAMILIES[family], **overrides}
    config: PreTrainedConfig = AutoConfig.for_model(family.split()[0], **settings)
    return config


def plain_model(config: PreTrainedConfig) -> PreTrainedModel:
    """A random model with its own eager attention."""
    torch.manual_seed(1)
    made = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    model: PreTrainedModel = made.eval()
    return model


@cache
def pair_of(family: str) -> Pair:
    """Both models of a family."""
    config = config_of(family)
    plain = plain_model(copy.deepcopy(config))
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention_name(config))
    model.load_state_dict(plain.state_dict())
    return Pair(plain, Target(model, name=family))


@pytest.fixture(params=FAMILIES)
def pair(request: pytest.FixtureRequest) -> Pair:
    """Every family in turn."""
    return pair_of(request.param)


def some_tokens(num_tokens: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    tokens: list[int] = torch.randint(3, VOCAB, (num_tokens,), generator=generator).tolist()
    return tokens


@torch.inference_mode()
def plain_logits(plain: PreTrainedModel, sequences: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """[N, V] for each sequence, from one plain forward; padding on the right changes nothing."""
    width = max(map(len, sequences))
    padded = [[*tokens, *[3] * (width - len(tokens))] for tokens in sequences]
    logits = plain(input_ids=torch.tensor(padded), use_cache=False).logits
    return [logits[row, : len(tokens)] for row, tokens in enumerate(sequences)]


def branch_logits(
    plain: PreTrainedModel, prefix: Sequence[int], tokens: Sequence[int], tree: Tree
) -> torch.Tensor:
    """[N, V]: the logits of each node, from the plain model over the prefix and one branch."""
    paths = [tree.path_to(leaf) for leaf in range(len(tree)) if not tree.children[leaf]]
    branches = [[*prefix, *(tokens[node] for node in path)] for path in paths]
    found: dict[int, torch.Tensor] = {}
    for path, logits in zip(paths, plain_logits(plain, branches), strict=True):
        found |= dict(zip(path, logits[len(prefix) :], strict=True))
    return torch.stack([found[node] for node in range(len(tree))])


def filled_cache(target: Target, prompts: Sequence[Sequence[int]], capacity: int = 16) -> KVCache:
    """A cache that holds each prompt in a row of its own."""
    cache = target.new_cache(len(prompts), capacity)
    for prompt in prompts:
        target.prefill(prompt, cache, cache.add_row())
    return cache


def batch_of(trees: Sequence[Tree], seed: int = 0) -> torch.Tensor:
    """Random tokens [B, N] for trees, the padding included."""
    width = max(map(len, trees))
    return torch.tensor([some_tokens(width, seed + row) for row in range(len(trees))])


def assert_same(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)


def assert_rows_score_like_branches(
    pair: Pair, cache: KVCache, prefixes: Sequence[Sequence[int]], trees: Sequence[Tree], seed: int
) -> torch.Tensor:
    """Runs trees behind the prefixes that the cache holds and compares them all; returns their
    tokens."""
    tokens_BN = batch_of(trees, seed)
    logits_BNV = pair.target.forward(tokens_BN, trees, cache).logits_BMV
    for row, (prefix, tree) in enumerate(zip(prefixes, trees, strict=True)):
        tokens = tokens_BN[row, : len(tree)].tolist()
        expected = branch_logits(pair.plain, prefix, tokens, tree)
        assert_same(logits_BNV[row, : len(tree)], expected)
    return tokens_BN


def committed(
    cache: KVCache, prefixes: Sequence[Sequence[int]], tokens_BN: torch.Tensor
) -> list[list[int]]:
    """Commits each row's path; returns the sequences that the cache then holds."""
    sequences = []
    for row, (prefix, path) in enumerate(zip(prefixes, PATHS, strict=False)):
        cache.commit(row, path)
        sequences.append([*prefix, *tokens_BN[row, path].tolist()])
        assert cache.lengths[row] == len(sequences[-1])
    return sequences


def test_a_tree_scores_like_each_branch_alone_before_and_after_a_commit(pair: Pair) -> None:
    cache = filled_cache(pair.target, PROMPTS[:1])
    tokens_BN = assert_rows_score_like_branches(pair, cache, PROMPTS[:1], TREES[:1], seed=0)
    prefixes = committed(cache, PROMPTS[:1], tokens_BN)
    assert_rows_score_like_branches(pair, cache, prefixes, [Tree.of((-1, 0, 0, 2))], seed=5)


def test_rows_of_different_lengths_and_trees_share_a_batch_and_may_leave_it(pair: Pair) -> None:
    cache = filled_cache(pair.target, PROMPTS)
    tokens_BN = assert_rows_score_like_branches(pair, cache, PROMPTS, TREES, seed=0)
    prefixes = committed(cache, PROMPTS, tokens_BN)
    trees = [Tree.chain(2), Tree.of((-1, 0, 0, 0)), Tree.of((-1, 0, 1, 1, 0))]
    tokens_BN = assert_rows_score_like_branches(pair, cache, prefixes, trees, seed=9)
    cache.keep([0, 2])
    kept = [prefixes[0], prefixes[2]]
    assert cache.lengths == [len(prefix) for prefix in kept]
    assert_rows_score_like_branches(pair, cache, kept, [trees[2], trees[0]], seed=4)


def test_a_tree_grown_level_by_level_scores_like_the_tree_at_once(pair: Pair) -> None:
    tree, target = TREES[0], pair.target
    tokens_BN = batch_of([tree])
    whole = target.forward(tokens_BN, [tree], filled_cache(target, PROMPTS[:1])).logits_BMV
    cache, parts = filled_cache(target, PROMPTS[:1]), []
    for start, stop in ((0, 1), (1, 3), (3, 7), (7, 9)):
        grown = Tree.of(tree.parents[:stop])
        out = target.forward(tokens_BN[:, start:stop], [grown], cache, start=start)
        parts.append(out.logits_BMV)
    assert_same(torch.cat(parts, dim=1), whole)
    prefixes = committed(cache, PROMPTS[:1], tokens_BN)
    assert_rows_score_like_branches(pair, cache, prefixes, [Tree.chain(3)], seed=2)


def test_trees_of_a_batch_grow_from_a_start_of_their_own() -> None:
    pair = pair_of("gemma2")
    tokens_BN = batch_of(TREES[:2])
    cache = filled_cache(pair.target, PROMPTS[:2])
    roots = [Tree.of(TREES[0].parents[:3]), Tree.of(TREES[1].parents[:1])]
    pair.target.forward(tokens_BN[:, :3], roots, cache)
    rest = torch.tensor([tokens_BN[0, 3:9].tolist(), [*tokens_BN[1, 1:4].tolist(), 0, 0, 0]])
    out = pair.target.forward(rest, TREES[:2], cache, start=[3, 1])
    for row, start in enumerate((3, 1)):
        tree, tokens = TREES[row], tokens_BN[row].tolist()
        expected = branch_logits(pair.plain, PROMPTS[row], tokens, tree)[start:]
        assert_same(out.logits_BMV[row, : len(expected)], expected)


@torch.inference_mode()
def test_taps_are_the_hidden_states_of_the_plain_model(pair: Pair) -> None:
    tokens = [*PROMPTS[0], *PROMPTS[1]]
    last: list[torch.Tensor] = []
    layer = next(
        module[LAYERS - 1]
        for module in pair.plain.modules()
        if isinstance(module, torch.nn.ModuleList) and len(module) == LAYERS
    )
    hook = layer.register_forward_hook(
        lambda _module, _inputs, out: last.append(out[0] if isinstance(out, tuple) else out)
    )
    expected = pair.plain(
        input_ids=torch.tensor([tokens]), use_cache=False, output_hidden_states=True
    ).hidden_states
    hook.remove()
    cache = filled_cache(pair.target, PROMPTS[:1])
    tree = Tree.chain(len(PROMPTS[1]) - 1)
    taps = pair.target.forward(
        torch.tensor([PROMPTS[1]]), [tree], cache, taps=(FINAL, *range(LAYERS))
    ).taps
    assert sorted(taps) == [FINAL, *range(LAYERS)]
    start = len(PROMPTS[0])
    for index in range(LAYERS - 1):
        assert_same(taps[index], expected[index + 1][:, start:])
    assert_same(taps[LAYERS - 1], last[0][:, start:])
    assert_same(taps[FINAL], expected[-1][:, start:])


def test_prefill_returns_taps_of_all_its_chunks() -> None:
    target = pair_of("llama").target
    tokens = some_tokens(300)
    cache = target.new_cache(1)
    taps = target.prefill(tokens, cache, cache.add_row(), taps=(1, FINAL))
    other = target.new_cache(1)
    other.add_row()
    whole = target.forward(torch.tensor([tokens]), [Tree.chain(299)], other, taps=(1, FINAL)).taps
    assert {tap: hidden.shape for tap, hidden in taps.items()} == {
        1: (1, 300, 32),
        FINAL: (1, 300, 32),
    }
    assert_same(taps[1], whole[1])
    assert_same(taps[FINAL], whole[FINAL])
    assert target.prefill([], cache, 0, taps=(1,)) == {}


@pytest.mark.parametrize("num_layers", [1, 3])
def test_skipping_the_upper_layers_is_the_truncated_model(pair: Pair, num_layers: int) -> None:
    config = copy.deepcopy(pair.plain.config)
    config.num_hidden_layers = num_layers
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:num_layers]
    truncated = plain_model(config)
    truncated.load_state_dict(pair.plain.state_dict(), strict=False)
    skip = frozenset(range(num_layers, LAYERS))
    cache = pair.target.new_cache(1)
    pair.target.prefill(PROMPTS[0], cache, cache.add_row(), skip=skip)
    tokens_BN = batch_of(TREES[:1])
    logits = pair.target.forward(tokens_BN, TREES[:1], cache, skip=skip).logits_BMV[0]
    expected = branch_logits(truncated, PROMPTS[0], tokens_BN[0].tolist(), TREES[0])
    assert_same(logits, expected)
    assert sorted(cache.keys) == list(range(num_layers))


@pytest.mark.parametrize("layer", [1, 2, LAYERS])
def test_resuming_at_a_layer_gives_the_same_logits_and_cache(pair: Pair, layer: int) -> None:
    target, trees, tokens_BN = pair.target, TREES[:2], batch_of(TREES[:2])
    whole_cache, cache = filled_cache(target, PROMPTS[:2]), filled_cache(target, PROMPTS[:2])
    whole = target.forward(tokens_BN, trees, whole_cache, taps=(layer - 1, FINAL))
    upper = frozenset(range(layer, LAYERS))
    lower = target.forward(
        tokens_BN, trees, cache, logits_at=slice(0), taps=(layer - 1,), skip=upper
    )
    assert lower.logits_BMV.shape == (2, 0, VOCAB)
    resume = Resume(layer, lower.taps[layer - 1])
    rest = target.forward(tokens_BN, trees, cache, taps=(layer - 1, FINAL), resume=resume)
    assert torch.equal(rest.logits_BMV, whole.logits_BMV)
    assert torch.equal(rest.taps[layer - 1], whole.taps[layer - 1])
    assert torch.equal(rest.taps[FINAL], whole.taps[FINAL])
    for index in range(LAYERS):
        assert torch.equal(cache.keys[index], whole_cache.keys[index])
        assert torch.equal(cache.values[index], whole_cache.values[index])


def test_a_node_sees_its_prefix_and_ancestors_and_a_padding_node_itself_alone() -> None:
    trees = [Tree.chain(0), Tree.of((-1, 0, 0))]
    mask = tree_mask([2, 4], trees, [0, 0], 3, 7, torch.float32)
    seen = [[node.nonzero().flatten().tolist() for node in row[0]] for row in mask == 0]
    assert seen[0] == [[0, 1, 2], [3], [4]]
    assert seen[1] == [[0, 1, 2, 3, 4], [0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 6]]
    assert set(mask.flatten().tolist()) == {0.0, torch.finfo(torch.float32).min}


def test_a_tap_of_a_layer_that_a_resumed_forward_does_not_run_is_an_error() -> None:
    target = pair_of("llama").target
    cache = filled_cache(target, PROMPTS[:1])
    with pytest.raises(AssertionError, match="a tap of a layer not run"):
        target.forward(
            torch.tensor([[5]]),
            [Tree.chain(0)],
            cache,
            taps=(0,),
            resume=Resume(2, torch.zeros(1, 1, 32)),
        )


@pytest.mark.parametrize("family", ["llama", "mistral", "gpt2"])
def test_the_cache_grows_beyond_its_slots_and_rows(family: str) -> None:
    pair = pair_of(family)
    prompts = [some_tokens(3, seed=1), some_tokens(254, seed=2)]
    cache = pair.target.new_cache(1, 4)
    for prompt in prompts:
        pair.target.prefill(prompt, cache, cache.add_row())
    assert cache.capacity == 256
    tokens_BN = assert_rows_score_like_branches(pair, cache, prompts, TREES[:2], seed=0)
    assert cache.capacity == 512
    prefixes = committed(cache, prompts, tokens_BN)
    assert_rows_score_like_branches(pair, cache, prefixes, [Tree.chain(2)] * 2, seed=3)


@pytest.mark.parametrize(
    "family", [name for name, kind in FAMILIES.items() if "sliding_window" in kind]
)
def test_a_window_counts_depths_and_not_slots(family: str) -> None:
    pair, prompts = pair_of(family), [PROMPTS[0], PROMPTS[1]]
    deep = Tree.of((-1, 0, 0, 2, 3, 4, 5, 6, 7, 1))
    assert deep.depth > WINDOW
    cache = filled_cache(pair.target, prompts)
    assert_rows_score_like_branches(pair, cache, prompts, [deep, Tree.chain(8)], seed=0)


def test_one_row_of_the_cache_can_be_run_alone() -> None:
    pair = pair_of("gemma3_text")
    cache = filled_cache(pair.target, PROMPTS)
    tokens_BN = batch_of(TREES[:1])
    out = pair.target.forward(tokens_BN, TREES[:1], cache, first_row=2)
    expected = branch_logits(pair.plain, PROMPTS[2], tokens_BN[0].tolist(), TREES[0])
    assert_same(out.logits_BMV[0], expected)


def test_logits_come_at_the_nodes_asked_for(pair: Pair) -> None:
    cache, tokens_BN = filled_cache(pair.target, PROMPTS[:2]), batch_of(TREES[:2])

    def logits(logits_at: slice | torch.Tensor) -> torch.Tensor:
        return pair.target.forward(tokens_BN, TREES[:2], cache, logits_at=logits_at).logits_BMV

    whole = logits(slice(None))
    index_BM = torch.tensor([[8, 0], [3, 1]])
    assert_same(logits(index_BM), torch.stack([whole[0, [8, 0]], whole[1, [3, 1]]]))
    assert_same(logits(slice(1, 3)), whole[:, 1:3])
    assert logits(slice(0)).shape == (2, 0, VOCAB)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss"])
def test_trees_can_be_scored_in_half_precision(family: str, dtype: torch.dtype) -> None:
    pair = pair_of(family)
    config = config_of(family)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention_name(config))
    model.load_state_dict(pair.plain.state_dict())
    target = Target(model.to(dtype), name=family)
    cache, tokens_BN = filled_cache(target, PROMPTS), batch_of(TREES)
    logits_BNV = target.forward(tokens_BN, TREES, cache).logits_BMV.float()
    for row, (prompt, tree) in enumerate(zip(PROMPTS, TREES, strict=True)):
        tokens = tokens_BN[row, : len(tree)].tolist()
        expected = branch_logits(pair.plain, prompt, tokens, tree)
        error = (logits_BNV[row, : len(tree)] - expected).pow(2).mean().sqrt()
        assert error < 0.1 * expected.std()


def test_a_model_with_hooks_of_accelerate_scores_the_same() -> None:
    # What a model spread over several GPUs has, as far as one CPU can show it.
    model = dispatch_model(tiny_model(), {"": "cpu"}, force_hooks=True)
    hooked, plain = Target(model, pack=False), tiny_target(pack=False)
    tokens_BN, found = batch_of(TREES), []
    for target in (hooked, plain):
        cache = filled_cache(target, PROMPTS)
        lower = target.forward(tokens_BN, TREES, cache, taps=(1,), skip=frozenset((2, 3)))
        resume = Resume(2, lower.taps[1])
        found.append(target.forward(tokens_BN, TREES, cache, resume=resume).logits_BMV)
    assert torch.equal(*found)


def test_settings_that_a_config_class_does_not_know_are_ignored_as_its_code_ignores_them() -> None:
    config = config_of("llama", sliding_window=2, layer_types=MIXED)
    plain = plain_model(copy.deepcopy(config))
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention_name(config))
    model.load_state_dict(plain.state_dict())
    pair = Pair(plain, Target(model))
    cache = filled_cache(pair.target, PROMPTS[:1])
    assert_rows_score_like_branches(pair, cache, PROMPTS[:1], TREES[:1], seed=0)


def all_visible(
    lengths: Any, trees: Any, starts: Any, num_nodes: int, num_slots: int, dtype: torch.dtype
) -> torch.Tensor:
    """A mask that hides nothing."""
    return torch.zeros(len(trees), 1, num_nodes, num_slots, dtype=dtype)


def by_slot(lengths: Any, trees: Any, starts: Any, num_nodes: int) -> torch.Tensor:
    """Positions that count slots."""
    return torch.tensor([[length + node for node in range(num_nodes)] for length in lengths])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("name", "wrong"), [("tree_mask", all_visible), ("tree_positions", by_slot)]
)
def test_wrong_masks_and_positions_are_noticed_at_load(
    name: str, wrong: Any, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_module, name, wrong)
    model = tiny_model(initializer_range=0.3)
    torch.nn.Module.to(model, dtype)
    with pytest.raises(ValueError, match="scores a branch of a token tree differently"):
        Target(model)


def test_a_model_that_scores_a_branch_differently_is_refused() -> None:
    config = AutoConfig.for_model("bert", **SIZES)
    config.is_decoder = False
    model = AutoModelForCausalLM.from_config(config)
    with pytest.raises(ValueError, match="some bert: BertLMHeadModel scores a branch of a token"):
        Target(model, name="some bert")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_whose_logits_are_no_numbers_is_refused(dtype: torch.dtype) -> None:
    model = tiny_model()
    torch.nn.Module.to(model, dtype)
    with torch.no_grad():
        model.get_input_embeddings().weight.fill_(math.nan)  # type: ignore[operator]
    with pytest.raises(ValueError, match="has logits that are no numbers in torch"):
        Target(model)


def test_a_model_that_takes_no_cache_is_refused() -> None:
    config = AutoConfig.for_model("openai-gpt", **SIZES)
    model = AutoModelForCausalLM.from_config(config)
    with pytest.raises(
        ValueError, match="OpenAIGPTLMHeadModel cannot be run over a token tree with a cache"
    ):
        Target(model, name="old")


def test_a_model_of_layers_that_cannot_be_masked_is_refused_by_their_name() -> None:
    config = AutoConfig.for_model("llama4_text", **SIZES, num_local_experts=2)
    model = AutoModelForCausalLM.from_config(config)
    with pytest.raises(ValueError, match="has layers of type chunked_attention"):
        Target(model)


def test_end_of_sequence_ids_are_those_of_the_generation_config() -> None:
    model = tiny_model()
    assert model.generation_config is not None
    model.generation_config.eos_token_id = [2, 9]
    assert Target(model).eos_ids == {2, 9}
    assert tiny_target().eos_ids == {2}
