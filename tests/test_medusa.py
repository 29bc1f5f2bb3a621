"""Medusa: the published formats of its heads, against plain computations on the same tensors, and
what it drafts."""

import json
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from specbench.conformance.decoding import GREEDY, make_request, reference
from specbench.conformance.models import ASCII_VOCAB, looping_model, looping_target
from specbench.conformance.weights import save_tiny_drafter
from specbench.learned.checkpoint import load_checkpoint
from specbench.learned.medusa import FILE, load_heads, save_heads
from specbench.method import Batch, Budget, Method, Proposal, Row
from specbench.ranks import RankTree
from specbench.sampling import Sampling
from specbench.target import Target
from specbench_methods.medusa import Medusa, MedusaConfig
from tests.drafters import decode

Tensors = dict[str, torch.Tensor]

HIDDEN, NUM_HEADS = 32, 3
IDS = torch.arange(3, ASCII_VOCAB, 2)
REQUESTS = [
    make_request((9,), 7),
    make_request(range(10, 27), 9),
    make_request((3, 4, 3, 4, 3), 1),
    make_request([20, 21, 22] * 5, 6),
    make_request((5, 40, 12, 77, 31, 5, 40), 9),
]


@cache
def target() -> Target:
    return looping_target(eos_token_id=None)


@cache
def target_head() -> torch.Tensor:
    """The target's head [V, h], from a model of its own."""
    model = looping_model(eos_token_id=None)
    return model.get_parameter("lm_head.weight").detach()


def numbers(*shape: int, seed: int) -> torch.Tensor:
    torch.manual_seed(seed)
    return (0.3 * torch.randn(shape)).half()


def hidden_states() -> torch.Tensor:
    torch.manual_seed(99)
    return torch.randn(6, HIDDEN)


def numbered_blocks(num_layers: int, repeated: bool = False) -> Tensors:
    """Tensors of blocks under Medusa's names; repeated ones are the same, saved again."""
    tensors: Tensors = {}
    for i in range(NUM_HEADS):
        for j in range(num_layers):
            seed = 10 * i + (0 if repeated else j)
            tensors[f"{i}.{j}.linear.weight"] = numbers(HIDDEN, HIDDEN, seed=seed)
            tensors[f"{i}.{j}.linear.bias"] = numbers(HIDDEN, seed=100 + seed)
    return tensors


def own_heads(num_layers: int) -> Tensors:
    return {
        f"{i}.{num_layers}.weight": numbers(ASCII_VOCAB, HIDDEN, seed=1000 + i)
        for i in range(NUM_HEADS)
    }


def plain_blocks(x: torch.Tensor, weights: Sequence[tuple[torch.Tensor, ...]]) -> torch.Tensor:
    """The blocks' equation, on the tensors themselves."""
    for weight, *bias in weights:
        z = x @ weight.float().T
        for b in bias:
            z = z + b.float()
        x = x + z / (1 + (-z).exp())
    return x


def plain_numbered(tensors: Tensors, num_layers: int, heads: list[torch.Tensor]) -> torch.Tensor:
    """Logits [M, K, V] of `hidden_states`, from Medusa's own names."""
    logits = []
    for i, head in enumerate(heads):
        blocks = [
            (tensors[f"{i}.{j}.linear.weight"], tensors[f"{i}.{j}.linear.bias"])
            for j in range(num_layers)
        ]
        logits.append(plain_blocks(hidden_states(), blocks) @ head.float().T)
    return torch.stack(logits, dim=1)


def write(folder: Path, config: Mapping[str, object], name: str, tensors: Tensors) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if name.endswith(".safetensors"):
        save_file(tensors, folder / name)
    else:
        torch.save(tensors, folder / name)
    return folder


def check(folder: Path, expected_MKD: torch.Tensor, ids: torch.Tensor | None = None) -> None:
    heads = load_heads(folder, target()).heads
    assert heads.num_heads == NUM_HEADS
    torch.testing.assert_close(heads(hidden_states()), expected_MKD, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(heads(hidden_states(), 2), expected_MKD[:, :2], rtol=1e-4, atol=1e-4)
    assert (heads.ids_D is None) if ids is None else torch.equal(heads.ids_D, ids)  # type: ignore[arg-type]


V01_CONFIG: dict[str, object] = {
    "base_model_name_or_path": "lmsys/vicuna-7b-v1.3",
    "medusa_num_heads": 2,
    "medusa_num_layers": 1,
    "transformers_version": "4.31.0",
}


@pytest.mark.parametrize("name", ["medusa_lm_head.pt", FILE])
@pytest.mark.parametrize("num_layers", [1, 2])
def test_v01_heads_have_language_model_heads_of_their_own(
    num_layers: int, name: str, tmp_path: Path
) -> None:
    """The published configs say 2 heads, whatever the file holds; TGI's files are safetensors."""
    tensors = numbered_blocks(num_layers, repeated=True) | own_heads(num_layers)
    folder = write(tmp_path, V01_CONFIG, name, tensors)
    check(folder, plain_numbered(tensors, num_layers, list(own_heads(num_layers).values())))


@pytest.mark.parametrize("num_layers", [1, 3])
def test_version_2_heads_share_the_targets_head(num_layers: int, tmp_path: Path) -> None:
    tensors = numbered_blocks(num_layers)
    folder = write(tmp_path, V01_CONFIG | {"version": "2"}, FILE, tensors)
    check(folder, plain_numbered(tensors, num_layers, [target_head()] * NUM_HEADS))


def test_a_reduced_vocabulary_takes_rows_of_the_targets_head(tmp_path: Path) -> None:
    offsets = {"d2t": IDS - torch.arange(len(IDS))}
    tensors = numbered_blocks(1)
    folder = write(tmp_path, V01_CONFIG | {"version": "2"}, FILE, tensors | offsets)
    check(folder, plain_numbered(tensors, 1, [target_head()[IDS]] * NUM_HEADS), IDS)


@pytest.mark.parametrize("is_sharded", [False, True])
def test_v1_heads_are_taken_out_of_a_whole_model(is_sharded: bool, tmp_path: Path) -> None:
    own, blocks = own_heads(1), numbered_blocks(1)
    medusa = {f"medusa_head.{key}": value for key, value in (blocks | own).items()}
    model = {key: value.clone() for key, value in looping_model().state_dict().items()}
    config = {"hidden_size": HIDDEN, "vocab_size": ASCII_VOCAB, "medusa_num_heads": NUM_HEADS}
    if is_sharded:
        shards = {"model-1-of-2.safetensors": model, "model-2-of-2.safetensors": medusa}
        for name, tensors in shards.items():
            write(tmp_path, config, name, tensors)
        weight_map = {key: name for name, tensors in shards.items() for key in tensors}
        index = tmp_path / "model.safetensors.index.json"
        index.write_text(json.dumps({"weight_map": weight_map}))
    else:
        write(tmp_path, config, "pytorch_model.bin", model | medusa)
    check(tmp_path, plain_numbered(blocks, 1, list(own.values())))


def test_v1_heads_are_for_the_model_that_they_come_with(tmp_path: Path) -> None:
    medusa = {f"medusa_head.{key}": value for key, value in numbered_blocks(1).items()}
    model = {"lm_head.weight": looping_model(seed=1).state_dict()["lm_head.weight"].clone()}
    folder = write(tmp_path, {}, "pytorch_model.bin", model | medusa)
    with pytest.raises(ValueError, match=r"is a whole model, .* not for target 'looping'"):
        load_heads(folder, target())


VLLM_CONFIG: dict[str, object] = {
    "architectures": ["MedusaModel"],
    "hidden_size": HIDDEN,
    "num_heads": NUM_HEADS,
    "num_hidden_layers": 2,
    "vocab_size": ASCII_VOCAB,
}


@pytest.mark.parametrize("prefix", ["", "medusa_heads."])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("heads", ["own", "shared", "lm_head"])
@pytest.mark.parametrize("vocab", ["whole", "truncated", "to be cut"])
def test_vllms_heads(heads: str, vocab: str, bias: bool, prefix: str, tmp_path: Path) -> None:
    blocks = {
        f"blocks.{i}.layers.{j}.weight": numbers(HIDDEN, HIDDEN, seed=10 * i + j)
        for i in range(NUM_HEADS)
        for j in range(2)
    }
    if bias:
        blocks |= {
            key.replace("weight", "bias"): numbers(HIDDEN, seed=50 + n)
            for n, key in enumerate(blocks)
        }
    ids = torch.arange(ASCII_VOCAB) if vocab == "whole" else IDS.flip(0)
    whole = [numbers(ASCII_VOCAB, HIDDEN, seed=1000 + i) for i in range(NUM_HEADS)]
    if heads != "own":
        whole = whole[:1] * NUM_HEADS
    names = (
        ["lm_head.weight"]
        if heads == "lm_head"
        else [f"lm_heads.{i}.weight" for i in range(1 if heads == "shared" else NUM_HEADS)]
    )
    lm_heads = {
        name: (head[ids] if vocab == "truncated" else head).clone()
        for name, head in zip(names, whole, strict=False)
    }
    token_map = {} if vocab == "whole" else {"token_map": ids}
    config = VLLM_CONFIG | {
        "medusa_fc_bias": bias,
        "original_lm_head": heads != "own",
        "truncated_vocab_size": len(ids),
    }
    tensors = {f"{prefix}{key}": value for key, value in (blocks | lm_heads | token_map).items()}
    folder = write(tmp_path, config, "model.safetensors", tensors)
    expected = []
    for i, head in enumerate(whole):
        layers = [
            tuple(
                blocks[f"blocks.{i}.layers.{j}.{kind}"]
                for kind in (("weight", "bias") if bias else ("weight",))
            )
            for j in range(2)
        ]
        expected.append(plain_blocks(hidden_states(), layers) @ head[ids].float().T)
    check(folder, torch.stack(expected, dim=1), None if vocab == "whole" else ids)


def drop(key: str) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.__delitem__(key)


def put(key: str, value: torch.Tensor) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.update({key: value})


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (drop("1.0.linear.bias"), "lacks 1.0.linear.bias"),
        (drop("2.1.weight"), "lacks 2.1.weight"),
        (put("0.5.linear.scale", torch.ones(1)), "has unknown tensors: 0.5.linear.scale"),
        (
            put("0.0.linear.weight", torch.ones(64, 64)),
            r"has 0.0.linear.weight of shape \(64, 64\); this target needs \(32, 32\)",
        ),
        (
            put("1.1.weight", torch.ones(500, HIDDEN)),
            r"has 1.1.weight of shape \(500, 32\); this target needs \(97, 32\)",
        ),
        (Tensors.clear, "has no Medusa heads, but ; valid: tensors such as"),
        (
            put("d2t", torch.full((9,), 200)),
            "has a draft vocabulary that leaves .*, 0..96",
        ),
        (
            put("d2t", torch.tensor([1, 0])),
            "has a draft vocabulary with one token twice",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_named(
    change: Callable[[Tensors], None], problem: str, tmp_path: Path
) -> None:
    tensors = numbered_blocks(1) | own_heads(1)
    change(tensors)
    folder = write(tmp_path / "heads", V01_CONFIG, "medusa_lm_head.pt", tensors)
    with pytest.raises(ValueError, match=f"checkpoint '.*heads' {problem}"):
        load_heads(folder, target())


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        ({"hidden_size": 4096}, "is for a target of hidden_size 4096; target 'looping' has 32"),
        ({"vocab_size": 32000}, "is for a target of vocab_size 32000; target 'looping' has 97"),
        ({"tree": [[0], [1, 0]]}, r"has no valid tree .*path \[1, 0\] comes before \[1\]"),
        ({"rank_accuracy": [0.5, 0.2]}, "has no valid tree or rank_accuracy"),
    ],
)
def test_a_config_for_another_target_or_of_nonsense_is_refused(
    config: dict[str, object], problem: str, tmp_path: Path
) -> None:
    folder = write(tmp_path, V01_CONFIG | config, FILE, numbered_blocks(1))
    with pytest.raises(ValueError, match=problem):
        load_heads(folder, target())


def test_heads_are_saved_in_the_layout_that_they_are_loaded_from(tmp_path: Path) -> None:
    offsets = {"d2t": IDS - torch.arange(len(IDS))}
    for name, tensors in (
        ("own", numbered_blocks(2) | own_heads(2)),
        ("shared", numbered_blocks(2)),
        ("reduced", numbered_blocks(2) | offsets),
    ):
        heads = load_heads(write(tmp_path / name, V01_CONFIG, FILE, tensors), target()).heads
        save_heads(heads, tmp_path / f"{name} again", {"base_model_name_or_path": "looping"})
        found = load_file(tmp_path / f"{name} again" / FILE)
        assert found.keys() == tensors.keys()
        for key, value in tensors.items():
            narrow = value.bfloat16() if value.is_floating_point() else value
            assert torch.equal(found[key], narrow)
        config = load_checkpoint(tmp_path / f"{name} again", [FILE]).config
        assert (config["medusa_num_heads"], config["medusa_num_layers"]) == (NUM_HEADS, 2)
        assert config.get("version") == (None if name == "own" else "2")


def medusa(folder: Path, **knobs: Any) -> Medusa:
    return Medusa(target(), MedusaConfig(weights=str(folder), **knobs))


@pytest.mark.parametrize(
    ("config", "paths"),
    [
        ({"tree": [[2], [2, 1]], "rank_accuracy": [[0.5]]}, [(2,), (2, 1)]),
        ({"rank_accuracy": [[0.2, 0.4], [0.5, 0.3]]}, [(1,), (0,), (1, 0), (1, 1)]),
        ({}, [(0,), (0, 0), (1,), (0, 1)]),
    ],
)
def test_the_tree_comes_from_calibration_else_from_published_accuracies(
    config: dict[str, object], paths: list[tuple[int, ...]], tmp_path: Path
) -> None:
    folder = write(tmp_path, V01_CONFIG | config, FILE, numbered_blocks(1))
    assert list(medusa(folder).tree.paths[:4]) == paths


def test_a_tree_that_the_heads_cannot_fill_is_refused(tmp_path: Path) -> None:
    d2t = {"d2t": torch.arange(4) * 2}
    folder = write(tmp_path, V01_CONFIG, FILE, numbered_blocks(1) | d2t)
    with pytest.raises(ValueError, match="depth 4 needs as many heads; these are 3"):
        medusa(folder, tree="1,1,1,1,1")
    with pytest.raises(ValueError, match="takes 5 guesses at a token; these heads know 4 tokens"):
        medusa(folder, tree="1,5")


class Watched(Medusa):  # type: ignore[misc,unused-ignore]
    """Takes down what it proposed, and for which tokens."""

    def propose(self, batch: Batch, budgets: Sequence[Budget]) -> Proposal:
        proposal: Proposal = super().propose(batch, budgets)
        for row, tree, tokens in zip(
            batch.rows, proposal.trees, proposal.tokens_BN.tolist(), strict=True
        ):
            self.seen.append((list(row.tokens), tokens[1 : len(tree)], row))
        return proposal

    def __init__(self, model: Target, config: MedusaConfig) -> None:
        super().__init__(model, config)
        self.seen: list[tuple[list[int], list[int], Row]] = []


@pytest.mark.parametrize("max_rows", [1, 4])
@pytest.mark.parametrize("sampling", [GREEDY, Sampling(temperature=0.8, top_p=0.9)], ids=str)
def test_guesses_come_from_the_hidden_state_of_the_token_before_the_root(
    sampling: Sampling, max_rows: int
) -> None:
    """Read from a plain model over the committed tokens, at every step of rows that join and
    leave; nothing is drafted while no token has run."""
    folder = save_tiny_drafter(target(), Medusa.Recipe)
    method = Watched(target(), MedusaConfig(weights=str(folder), tree="1,3,2,1"))
    rows = decode(target(), method, REQUESTS, sampling, max_rows=max_rows)
    tensors = load_file(folder / FILE)
    ids = tensors["d2t"] + torch.arange(len(tensors["d2t"]))
    model = looping_model(eos_token_id=None).model
    assert len(method.seen) == sum(len(row.steps) for row in rows)
    assert any(step.accepted for row in rows for step in row.steps)
    for tokens, drafted, row in method.seen:
        budget = Budget(
            min(4, row.request.max_new_tokens - len(tokens) + len(row.request.prompt) - 1), 12
        )
        if len(tokens) == 1 or budget.depth == 0:
            assert drafted == []
            continue
        with torch.no_grad():
            hidden = model(input_ids=torch.tensor([tokens])).last_hidden_state[0, -2:-1]
        tree, ranks = RankTree.dense([1, 3, 2, 1]).within(*budget)
        expected = []
        for depth, rank in zip(tree.depths[1:], ranks, strict=True):
            block = (tensors[f"{depth - 1}.0.linear.weight"], tensors[f"{depth - 1}.0.linear.bias"])
            logits = (plain_blocks(hidden, [block]) @ target_head()[ids].T)[0]
            expected.append(int(ids[logits.argsort(descending=True)[rank]]))
        assert drafted == expected


def test_a_row_without_a_budget_drafts_nothing_beside_one_that_does() -> None:
    method = medusa(save_tiny_drafter(target(), Medusa.Recipe))
    short, long = make_request((5, 6, 7), 1), make_request((7, 6, 5), 9)
    rows = decode(target(), method, [short, long], max_rows=2)
    assert [step.nodes for step in rows[0].steps] == [0]
    assert rows[1].steps[0].nodes > 0
    assert [row.output for row in rows] == [reference(target(), r) for r in (short, long)]


def test_typical_acceptance_is_greedy_at_temperature_0_and_lossy_above() -> None:
    folder = save_tiny_drafter(target(), Medusa.Recipe)
    exact: Method = medusa(folder)
    typical = medusa(folder, typical=True, epsilon=1e-4, delta=1e-4)
    assert exact.typical is None
    assert typical.typical is not None and typical.typical.epsilon == 1e-4
    hot = Sampling(temperature=1.0)
    for sampling in (GREEDY, hot):
        outputs = [
            [row.output for row in decode(target(), method, REQUESTS, sampling, max_rows=4)]
            for method in (exact, typical)
        ]
        plain = [reference(target(), request, sampling) for request in REQUESTS]
        assert outputs[0] == plain
        assert (outputs[1] == plain) == (sampling is GREEDY)


@pytest.mark.parametrize("knob", ["epsilon", "delta"])
def test_thresholds_out_of_range_are_refused(knob: str) -> None:
    knobs: dict[str, Any] = {knob: 0.0}
    with pytest.raises(ValueError, match=r"are out of range; valid: above 0"):
        MedusaConfig(**knobs)


def test_weights_must_be_named_where_none_come_with_the_project() -> None:
    with pytest.raises(ValueError, match=r"method 'medusa' has no weights for target 'looping'"):
        Medusa(target(), MedusaConfig())


def test_what_it_is_said_to_be_and_to_weigh(tmp_path: Path) -> None:
    folder = write(tmp_path, V01_CONFIG, FILE, numbered_blocks(1))
    method = medusa(folder, tree="1,2,1", max_nodes=3)
    assert method.label == f"3 heads of {folder}"
    assert method.num_extra_bytes == 4 * NUM_HEADS * (HIDDEN * HIDDEN + HIDDEN)
    described = json.loads(json.dumps(method.describe()))
    assert described["tree_paths"] == [[0], [1], [0, 0]]
    assert described["draft_vocab_size"] == ASCII_VOCAB
