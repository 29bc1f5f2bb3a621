"""Drafters made for tests, every registered method in several settings, and what is asked of any
output."""

from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp
from typing import Any, NamedTuple, cast

import torch
from torch import nn
from transformers import PreTrainedModel

from specbench import registry
from specbench.decode import Decoder
from specbench.depth import DepthController, Fixed
from specbench.learned.exit_adapter import ExitDrafter
from specbench.method import Batch, Budget, Method, MethodConfig, Proposal, Request, Row, pad_rows
from specbench.records import RequestRecord
from specbench.sampling import Sampling, position_key, request_key, uniform
from specbench.target import KVCache, Target
from specbench.training.recipe import Options, Recipe, Sequences
from specbench.tree import Tree
from tests import eagle_heads
from tests.tiny import tiny_model, tiny_tokenizer

ASCII_VOCAB = 97
"""<unk>, <s>, </s>, and the 94 printable characters of ASCII, which come first in the tokenizer."""

BUDGET = Budget(depth=4, nodes=12)
"""The nodes run out in the fourth level of a tree that branches 2,2."""

GREEDY = Sampling()

MADE = "MADE"
"""Stands for weights that the method's recipe makes for the target, trained for a moment."""

_KNOBS: dict[str, list[dict[str, str]]] = {
    "ngram": [{}, {"branches": "3"}],
    "draft_model": [
        {},
        {"model": "layers", "layers": "2"},
        {"model": "layers", "layers": "3", "branching": "2,2"},
        {"model": "layers", "layers": "4"},
        {"model": "layers", "layers": "4", "branching": "2,2"},
        {"model": MADE},
        {"model": MADE, "branching": "2,2"},
    ],
    "eagle": [
        {"weights": MADE},
        {"weights": MADE, "tree": "chain"},
        {"weights": "good3"},
        {"weights": "good3-reduced", "top_k": "3"},
        {"weights": "good1", "tree": "static"},
        {"weights": "good1-reduced", "tree": "static", "branching": "2,2"},
        {"weights": "good1-reduced", "tree": "chain", "drafts": "drawn"},
        {"weights": "good3-reduced", "tree": "static", "branching": "2,2", "drafts": "drawn"},
    ],
    "early_exit": [
        {},
        {"exit_layer": "2"},
        {"skip": "1"},
        {"exit_layer": "2", "branching": "2,2"},
        {"skip": "0,2", "branching": "2,2"},
        {"weights": MADE},
        {"weights": MADE, "branching": "2,2"},
        {"weights": MADE, "branching": "2", "threshold": "0.3"},
    ],
    "medusa": [
        {"weights": MADE},
        {"weights": MADE, "tree": "1,1,1,1"},
        {"weights": MADE, "tree": "1,3,2"},
    ],
}
"""The settings to test a method in; a method that is not listed here is tested as it comes."""

_made = TemporaryDirectory()


def make_weights(target: Target, method: str, **options: int) -> Path:
    """A checkpoint of what a method's recipe begins with; it can draft most tokens."""
    recipe = registry.load_method(method).Recipe
    assert recipe is not None
    folder = Path(mkdtemp(dir=_made.name))
    counts = torch.arange(target.vocab_size)
    settings: dict[str, Any] = {"vocab": target.vocab_size * 9 // 10, "token_counts": counts}
    recipe(target, Options(**(settings | options))).write(folder)
    return folder


_WEIGHTS = {"eagle": eagle_heads.weights_for}
"""Of a method with trained weights, what makes them for a target, by the names used above."""


class Setting(NamedTuple):
    """A method and its knobs."""

    method: str
    knobs: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        return " ".join([self.method, *(f"{knob}={value}" for knob, value in self.knobs)])


SETTINGS = [
    Setting(name, tuple(knobs.items()))
    for name in registry.sources()
    for knobs in _KNOBS.get(name, [{}])
]


def looping_model(**settings: Any) -> PreTrainedModel:
    """A tiny model on which every method has some of its drafts accepted: the embedding outweighs
    the layers, so the next token depends mostly on the last one."""
    model = tiny_model(**({"vocab_size": ASCII_VOCAB} | settings))
    with torch.no_grad():
        cast(nn.Embedding, model.get_input_embeddings()).weight.mul_(20)
    return model


def looping_target(**settings: Any) -> Target:
    """A target around a looping model, with the byte tokenizer."""
    return Target(looping_model(**settings), tiny_tokenizer(), name="looping")


@cache
def make_method(target: Target, setting: Setting) -> Method:
    """A method, made once for all tests: what one leaves behind, the others must not see."""
    cls, knobs = registry.load_method(setting.method), dict(setting.knobs)
    named = knobs.get(cls.weights_knob, "")
    if named == MADE and cls.Recipe is not None:
        knobs[cls.weights_knob] = str(save_tiny_drafter(target, cls.Recipe))
    elif named and setting.method in _WEIGHTS:
        knobs[cls.weights_knob] = _WEIGHTS[setting.method](target, named)
    return cls(target, registry.make_config(setting.method, cls, knobs))


@cache
def save_tiny_drafter(target: Target, recipe: type[Recipe]) -> Path:
    """Trains a drafter for a moment on the target's own outputs, so that some of its drafts are
    accepted, and saves it; it drafts two thirds of the tokens."""
    token_counts = own_outputs(target).tokens_BT.flatten().bincount(minlength=target.vocab_size)
    torch.manual_seed(0)
    trained = recipe(target, Options(target.vocab_size * 2 // 3, token_counts))
    batch = own_outputs(target, trained.needed_taps())
    parameters = [p for p in trained.module.parameters() if p.requires_grad]
    optimiser = torch.optim.Adam(parameters, lr=1e-2)
    for _ in range(40):
        optimiser.zero_grad()
        trained.loss(batch)[0].backward()  # type: ignore[no-untyped-call]
        optimiser.step()
    folder = Path(mkdtemp(dir=_made.name))
    trained.write(folder)
    return folder


@cache
def own_outputs(target: Target, taps: tuple[int, ...] = ()) -> Sequences:
    """Prompts of random length and tokens with the target's answers, for training and
    calibration."""
    torch.manual_seed(7)
    prompts = [torch.randint(3, target.vocab_size, (2 + i % 5,)).tolist() for i in range(24)]
    requests = [make_request(prompt, 20, name=f"training {i}") for i, prompt in enumerate(prompts)]
    rows = decode(target, make_method(target, Setting("vanilla", ())), requests, max_rows=24)
    tokens_BT = pad_rows([row.tokens for row in rows])
    written = [[False] * len(row.request.prompt) + [True] * len(row.output) for row in rows]
    cache = target.new_cache(len(rows))
    for _ in rows:
        cache.add_row()
    trees = [Tree.chain(tokens_BT.shape[1] - 1)] * len(rows)
    hidden = target.forward(tokens_BT, trees, cache, taps=taps).taps
    # Clones are tensors outside of inference mode, which may enter a gradient.
    return Sequences(
        tokens_BT, pad_rows(written).bool(), {tap: states.clone() for tap, states in hidden.items()}
    )


def make_request(
    prompt: Sequence[int], max_new_tokens: int = 12, stop: tuple[str, ...] = (), name: str = ""
) -> Request:
    """A request whose random numbers depend on its prompt, or on its name if it has one."""
    name = name or " ".join(map(str, prompt[:8]))
    return Request(
        id=name,
        prompt=tuple(prompt),
        max_new_tokens=max_new_tokens,
        stop=stop,
        key=request_key(0, name),
    )


def decode(
    target: Target,
    method: Method,
    requests: Iterable[Request],
    sampling: Sampling = GREEDY,
    *,
    max_rows: int = 1,
    budget: Budget = BUDGET,
    audit: bool = False,
    controller: DepthController | None = None,
) -> list[Row]:
    """Decodes requests, of which at most ``max_rows`` run together; a free place is taken at once.
    With ``audit``, all caches are checked after every step.

    The controller stays within the budget; by default it is fixed.

    Returns:
        Their rows in order, checked by `check_row`.
    """
    decoder = Decoder(target, method, controller or Fixed(*budget), sampling, max_rows)
    waiting, rows, auditor = list(requests), list[Row](), Auditor()
    while waiting or decoder.rows:
        joining, waiting = waiting[: decoder.num_free], waiting[decoder.num_free :]
        rows += decoder.join(joining)
        decoder.step()
        if audit:
            auditor.take_down(decoder)
    auditor.check()
    for row in rows:
        check_row(row, target, budget)
    return rows


def reference(target: Target, request: Request, sampling: Sampling = GREEDY) -> list[int]:
    """What vanilla makes of a request."""
    return _reference(target, request, sampling, target.eos_ids)


@cache
def _reference(
    target: Target, request: Request, sampling: Sampling, eos_ids: frozenset[int]
) -> list[int]:
    row = decode(target, make_method(target, Setting("vanilla", ())), [request], sampling)[0]
    assert all(step == (0, 0, 0, 1, 0) for step in row.steps)
    return row.output


def as_record(row: Row) -> RequestRecord:
    """What is filed of a row, in a workload of no matter."""
    return RequestRecord(
        workload="any",
        request=row.request.id,
        method="any",
        tokens=row.output,
        finish=row.finish or "",
        steps=[list(step) for step in row.steps],
        lossless="exact",
    )


def check_row(row: Row, target: Target, budget: Budget = BUDGET) -> None:
    """Holds an output to its budget, to its end and to the invariants of a record."""
    as_record(row)
    assert all(step.nodes <= budget.nodes and step.depth <= budget.depth for step in row.steps)
    assert 1 <= len(row.output) <= row.request.max_new_tokens
    assert not target.eos_ids & set(row.output[:-1])
    assert (row.finish == "eos") == (row.output[-1] in target.eos_ids)
    if row.finish == "length":
        assert len(row.output) == row.request.max_new_tokens


class Auditor:
    """Takes down, after each step, what the cache of the target and that of a drafter beside it
    hold; `check` compares it with what a fresh forward over the committed tokens writes."""

    def __init__(self) -> None:
        self.held: dict[tuple[Target | ExitDrafter, Row], list[torch.Tensor]] = {}

    def take_down(self, decoder: Decoder) -> None:
        """Called after a step."""
        assert decoder.cache.lengths == [len(row.tokens) - 1 for row in decoder.rows]
        self._take_down(decoder.target, decoder.cache, decoder.rows)
        method: Any = decoder.method
        if hasattr(method, "drafter"):
            self._take_down(method.drafter, method.cache, decoder.rows)
        if getattr(method, "exit", None):
            self._take_down(method.exit, method.exit.cache, decoder.rows)

    def _take_down(self, model: Target | ExitDrafter, cache: KVCache, rows: Sequence[Row]) -> None:
        assert len(cache.lengths) == len(rows)
        for row, length, held in zip(rows, cache.lengths, _stores(cache), strict=False):
            assert length < len(row.tokens)
            if length:
                self.held.setdefault((model, row), []).append(held[:, :length].clone())

    def check(self) -> None:
        """Raises AssertionError where the two differ."""
        for (model, row), all_held in self.held.items():
            fresh = _fresh_cache(model, row.tokens[: all_held[-1].shape[1]])
            # An 8-bit value may round to its neighbour when its input differs in the last bit.
            tolerance = 0.1 if isinstance(model, Target) and "int8" in model.name else 1e-5
            for held in all_held:
                expected = _stores(fresh)[0, :, : held.shape[1]]
                torch.testing.assert_close(held, expected, rtol=0, atol=tolerance)


def _fresh_cache(model: Target | ExitDrafter, tokens: Sequence[int]) -> KVCache:
    """The cache of a model after a prefill of these tokens."""
    if isinstance(model, Target):
        cache = model.new_cache(1)
        model.prefill(tokens, cache, cache.add_row())
        return cache
    target, tap = model.target, model.adapter.exit_layer - 1
    cache = target.new_cache(1)
    hidden = target.prefill(tokens, cache, cache.add_row(), taps=[tap])[tap]
    fresh = ExitDrafter(target, model.adapter)
    fresh.start(hidden)
    return fresh.cache


def _stores(cache: KVCache) -> torch.Tensor:
    """All keys and values, [B, H, S, D], with the heads of all layers side by side."""
    if not cache.keys:
        return torch.empty(0)
    layers = sorted(cache.keys)
    return torch.cat([kind[layer] for kind in (cache.keys, cache.values) for layer in layers], 1)


class Scripted(Method):
    """Drafts a chain of the tokens that a script has for the next positions of a request's
    output."""

    def __init__(self, target: Target, script: Mapping[str, Sequence[int]]) -> None:
        super().__init__(target, MethodConfig())
        self.script = script

    def propose(self, batch: Batch, budgets: Sequence[Budget]) -> Proposal:
        """The next tokens of each script, as many as the budget allows."""
        drafted = [
            self.draft(row, budget.depth) for row, budget in zip(batch.rows, budgets, strict=True)
        ]
        return Proposal.from_rows(batch.rows, [Tree.chain(len(d)) for d in drafted], drafted)

    def draft(self, row: Row, depth: int) -> list[int]:
        """The next tokens of a row's script."""
        begin = len(row.output)
        return list(self.script[row.request.id][begin : begin + depth])


class Oracle(Scripted):
    """Knows the output, and drafts each next token right with a chance that depends on its depth.

    Args:
        script: the output of each request.
        law: by depth, the chance that the token is right if those before it are.
    """

    def __init__(
        self, target: Target, script: Mapping[str, Sequence[int]], law: Sequence[float]
    ) -> None:
        super().__init__(target, script)
        self.law = law

    def draft(self, row: Row, depth: int) -> list[int]:
        """The next tokens, some of them replaced by wrong ones."""
        tokens = super().draft(row, depth)
        position = len(row.tokens)
        for i, (token, chance) in enumerate(zip(tokens, self.law, strict=False)):
            key = position_key(row.request.key, position + i, "oracle")
            if float(uniform([key], torch.tensor([0]))) >= chance:
                tokens[i] = (token + 1) % self.target.vocab_size
        return tokens
