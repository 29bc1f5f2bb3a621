"""The analytic counts against torch's flop counter, on tiny models whose products torch computes
itself, and the shapes of known models."""

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop
from transformers import MixtralConfig, PreTrainedModel, Qwen3MoeConfig
from transformers.models.mixtral.modeling_mixtral import MixtralForCausalLM
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeForCausalLM

from specbench import registry
from specbench.conformance.decoding import make_request
from specbench.conformance.models import looping_model, tiny_model, tiny_tokenizer
from specbench.conformance.settings import MADE
from specbench.conformance.weights import save_tiny_drafter
from specbench.costs import Cost, Shape, forward_cost, memory, shape_of
from specbench.drafter_costs import Draft, levels_of
from specbench.method import Batch, Budget, Drawer, Method, Row
from specbench.sampling import Sampling
from specbench.target import KVCache, Target, packing
from specbench.target.attention import NAME as ATTENTION
from specbench.tree import Tree
from tests.drafters import Setting
from tests.eagle_heads import weights_for

CONTEXT = 20
TOLERANCE = 0.02


def count_flops(run: Callable[[], object]) -> float:
    """What torch's counter counts; it does not know a CPU's fused attention."""
    fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu

    def attention(query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> int:
        return int(sdpa_flop(query, key, value))

    with FlopCounterMode(display=False, custom_mapping={fused: attention}) as counter:
        run()
    return float(counter.get_total_flops())


@pytest.fixture(autouse=True)
def _unpacked(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Packed layers bypass torch's operators."""
    monkeypatch.setattr(packing, "pack_for", lambda *args: "torch")
    yield


def filled_cache(target: Target, rows: int) -> KVCache:
    """With tokens in each row."""
    held = target.new_cache(rows)
    for _ in range(rows):
        target.prefill(range(3, 3 + CONTEXT), held, held.add_row())
    return held


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"num_key_value_heads": 1},
        {"num_key_value_heads": 4, "tie_word_embeddings": True},
        {"head_dim": 24, "num_hidden_layers": 2},
    ],
)
@pytest.mark.parametrize(("rows", "tokens"), [(1, 1), (3, 5)])
def test_flops_of_a_forward_are_those_that_torch_counts(
    settings: dict[str, int], rows: int, tokens: int
) -> None:
    target = Target(tiny_model(**settings), pack=False)
    held = filled_cache(target, rows)
    nodes = torch.full((rows, tokens), 5)
    trees = [Tree.chain(tokens - 1)] * rows
    counted = count_flops(lambda: target.forward(nodes, trees, held))
    cost = forward_cost(target.shape, rows, tokens, CONTEXT, width=4)
    assert cost.flops == pytest.approx(counted, rel=TOLERANCE)


def test_flops_of_some_layers_are_those_that_torch_counts() -> None:
    target = Target(tiny_model(), pack=False)
    held, nodes = filled_cache(target, 1), torch.full((1, 2), 5)
    skip = frozenset([1, 2, 3])
    counted = count_flops(
        lambda: target.forward(nodes, [Tree.chain(1)], held, skip=skip, logits_at=slice(1))
    )
    cost = forward_cost(target.shape.part(1), 1, 2, CONTEXT, num_logits=1)
    assert cost.flops == pytest.approx(counted, rel=TOLERANCE)


_EXPERTS: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts_per_tok": 2,
    "eos_token_id": 2,
}


@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe"])
def test_flops_of_a_mixture_are_those_of_its_active_experts(kind: str) -> None:
    model: PreTrainedModel
    if kind == "mixtral":
        config = MixtralConfig(**_EXPERTS, num_local_experts=8, sliding_window=None)
        config._attn_implementation = ATTENTION
        config._experts_implementation = "eager"
        model = MixtralForCausalLM(config)
    else:
        own = Qwen3MoeConfig(
            **_EXPERTS, num_experts=8, moe_intermediate_size=24, mlp_only_layers=[0]
        )
        own._attn_implementation = ATTENTION
        own._experts_implementation = "eager"
        model = Qwen3MoeForCausalLM(own)
    target = Target(model, pack=False)
    held = filled_cache(target, 2)
    nodes, trees = torch.tensor([[5, 6, 7], [9, 8, 4]]), [Tree.chain(2)] * 2
    counted = count_flops(lambda: target.forward(nodes, trees, held))
    assert forward_cost(target.shape, 2, 3, CONTEXT).flops == pytest.approx(counted, rel=TOLERANCE)
    assert target.shape.num_weights == pytest.approx(target.num_parameters, rel=TOLERANCE)


@cache
def target_of_drafters() -> Target:
    return Target(looping_model(), tiny_tokenizer(), name="looping", pack=False)


CHAIN, TREE = Tree.chain(3), Tree.of((-1, 0, 0, 1, 1, 2, 2))
DRAFTERS = [
    (Setting("draft_model", (("model", "layers"), ("layers", "2"), ("branching", ""))), CHAIN),
    (Setting("draft_model", (("model", "layers"), ("branching", "2,2"))), TREE),
    (Setting("draft_model", (("model", MADE), ("branching", ""))), CHAIN),
    (Setting("medusa", (("weights", MADE), ("tree", "1,1,1,1"))), CHAIN),
    (Setting("eagle", (("weights", MADE), ("tree", "chain"))), CHAIN),
    (Setting("eagle", (("weights", "good3"), ("tree", "chain"))), CHAIN),
    (Setting("eagle", (("weights", "good1-reduced"), ("tree", "chain"))), CHAIN),
    (
        Setting("eagle", (("weights", "good1"), ("tree", "static"), ("branching", "2,2"))),
        TREE,
    ),
    (Setting("early_exit", (("exit_layer", "2"), ("branching", ""))), CHAIN),
    (Setting("early_exit", (("skip", "1"), ("branching", "2,2"))), TREE),
    (Setting("early_exit", (("weights", MADE), ("branching", ""))), CHAIN),
    (Setting("ngram", ()), CHAIN),
]


def make(setting: Setting) -> Method:
    """A method whose layers are not packed."""
    target, cls, knobs = (
        target_of_drafters(),
        registry.load_method(setting.method),
        dict(setting.knobs),
    )
    named = knobs.get(cls.weights_knob)
    if named == MADE:
        assert cls.Recipe is not None
        knobs[cls.weights_knob] = str(save_tiny_drafter(target, cls.Recipe))
    elif named and setting.method == "eagle":
        knobs[cls.weights_knob] = weights_for(target, named)
    method = cls(target, registry.make_config(setting.method, cls, knobs))
    method.drawer = Drawer(Sampling())
    return method


@pytest.mark.parametrize(("setting", "tree"), DRAFTERS, ids=str)
@pytest.mark.parametrize("rows", [1, 3])
def test_flops_of_a_draft_are_those_that_torch_counts(
    setting: Setting, tree: Tree, rows: int
) -> None:
    method, target = make(setting), target_of_drafters()
    requests = [make_request(range(3 + i, 4 + i + CONTEXT), 9, name=str(i)) for i in range(rows)]
    running = [Row(request, list(request.prompt)) for request in requests]
    held = target.new_cache(rows)
    taps = [target.prefill(row.tokens[:-1], held, held.add_row(), method.taps) for row in running]
    method.start(running, taps)
    budgets = [Budget(tree.depth, tree.num_drafted)] * rows
    trees: list[Tree] = []

    def propose() -> None:
        trees.extend(method.propose(Batch(running, held), budgets).trees)

    counted = count_flops(propose)
    assert trees == [tree] * rows or setting.method == "ngram"
    cost = method.draft_cost(
        Draft(rows=rows, context=CONTEXT, width=4, **levels_of(tree)._asdict())
    )
    assert cost.flops == pytest.approx(counted, rel=TOLERANCE)
    assert method.draft_cost(Draft(rows=rows, levels=[], context=CONTEXT)) == Cost()


LLAMA_70B = {
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
}


def test_a_known_model_has_its_known_weights_and_cache() -> None:
    shape = shape_of(LLAMA_70B)
    assert shape.num_weights == pytest.approx(70.6e9, rel=0.01)
    assert shape.kv_bytes(1, 2) == 2 * 80 * 8 * 128 * 2
    held = memory(shape, rows=4, context=1000)
    assert held.weights == 2 * shape.num_weights
    assert held.total - held.weights == 4 * 1000 * 327680


def test_a_step_of_one_reads_each_weight_once_and_does_two_flops_with_it() -> None:
    shape = shape_of(LLAMA_70B)
    cost = forward_cost(shape, 1)
    assert cost.weight_bytes == pytest.approx(2 * shape.num_active_weights)
    assert cost.intensity == pytest.approx(1, rel=0.01)
    assert forward_cost(shape, 16, 4).intensity == pytest.approx(64, rel=0.01)


def test_more_tokens_read_more_experts() -> None:
    shape = Shape(
        hidden=8,
        num_layers=1,
        num_heads=1,
        num_kv_heads=1,
        head_dim=8,
        vocab=16,
        inner=0,
        num_experts=4,
        num_active=1,
        expert_inner=8,
    )
    expert = 3 * 8 * 8
    one, two, many = (shape.weights_read(n) for n in (1, 2, 1000))
    assert two - one == pytest.approx(expert * 0.75)
    assert many - one == pytest.approx(expert * 3)


def test_sliding_layers_read_no_more_than_their_window() -> None:
    config = LLAMA_70B | {
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
        "sliding_window": 100,
    }
    assert shape_of(config).slots(1000) == 3 * 100 + 1000
    assert shape_of(config).part(2).num_windowed == 2


@pytest.mark.parametrize(
    "change",
    [{"layer_types": ["linear_attention"]}, {"kv_lora_rank": 8}, {"hidden_size": None}],
)
def test_what_is_not_counted_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"not counted|has no hidden_size"):
        shape_of(LLAMA_70B | change)


def test_a_draft_model_catches_up_on_what_was_committed() -> None:
    method = make(DRAFTERS[0][0])
    row = Row(make_request(range(3, 4 + CONTEXT), 9), list(range(3, 4 + CONTEXT)))
    method.start([row], [{}])
    row.tokens += [7, 9]
    held = target_of_drafters().new_cache(1)
    counted = count_flops(lambda: method.propose(Batch([row], held), [Budget(3, 3)]))
    draft = Draft(rows=1, levels=[1, 1, 1], context=CONTEXT + 2, unseen=3, width=4)
    assert method.draft_cost(draft).flops == pytest.approx(counted, rel=TOLERANCE)
