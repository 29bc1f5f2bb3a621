"""Every registered method in the settings to test it in, and the caches that drafters keep."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

from specbench import registry
from specbench.conformance import decoding, weights
from specbench.conformance.decoding import ALLOWED, GREEDY, stores
from specbench.conformance.settings import MADE, Subject
from specbench.decode import Decoder
from specbench.depth import DepthController
from specbench.learned.exit_adapter import ExitDrafter
from specbench.method import Budget, Method, Request, Row
from specbench.records import RequestRecord
from specbench.sampling import Sampling
from specbench.target import KVCache, Target
from tests import eagle_heads

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


@dataclass(frozen=True)
class Made(Subject):
    """A subject whose weights, where the recipe does not make them, are heads made for tests."""

    def make(self, target: Target, trained_on: Target | None = None) -> Method:
        """The method for a target."""
        knobs = dict(self.knobs)
        named = knobs.get(self.method.weights_knob, "")
        if named not in ("", MADE) and self.name in _WEIGHTS and not Path(named).exists():
            knobs[self.method.weights_knob] = _WEIGHTS[self.name](target, named)
        return Subject(self.name, self.method, tuple(knobs.items())).make(target, trained_on)


def subject(setting: Setting) -> Made:
    """A setting for the kit."""
    return Made(setting.method, registry.load_method(setting.method), setting.knobs)


@cache
def make_method(target: Target, setting: Setting) -> Method:
    """A method, made once for all tests: what one leaves behind, the others must not see."""
    return subject(setting).make(target)


def make_weights(target: Target, method: str, **options: int) -> Path:
    """A checkpoint of what a method's recipe begins with."""
    recipe = registry.load_method(method).Recipe
    assert recipe is not None
    return weights.make_weights(target, recipe, **options)


def decode(
    target: Target,
    method: Method,
    requests: Iterable[Request],
    sampling: Sampling = GREEDY,
    *,
    max_rows: int = 1,
    budget: Budget = ALLOWED,
    audit: bool = False,
    controller: DepthController | None = None,
) -> list[Row]:
    """Decodes requests as the kit does; with ``audit``, all caches are checked after every
    step."""
    rows = decoding.decode(
        target,
        method,
        requests,
        sampling,
        max_rows=max_rows,
        budget=budget,
        auditor=Auditor() if audit else None,
        controller=controller,
    )
    for row in rows:
        as_record(row)
    return rows


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


class Auditor(decoding.Auditor):
    """Also audits the cache of a drafter beside the target."""

    def __init__(self) -> None:
        super().__init__()
        self.held_by: dict[tuple[Target | ExitDrafter, Row], list[torch.Tensor]] = {}

    def take_down(self, loop: Decoder) -> None:
        """Called after a step."""
        super().take_down(loop)
        method: Any = loop.method
        if hasattr(method, "drafter"):
            self._take_down(method.drafter, method.cache, loop.rows)
        if getattr(method, "exit", None):
            self._take_down(method.exit, method.exit.cache, loop.rows)

    def _take_down(self, model: Target | ExitDrafter, cache: KVCache, rows: Sequence[Row]) -> None:
        assert len(cache.lengths) == len(rows)
        for row, length, held in zip(rows, cache.lengths, stores(cache), strict=False):
            assert length < len(row.tokens)
            if length:
                self.held_by.setdefault((model, row), []).append(held[:, :length].clone())

    def check(self) -> None:
        """Raises AssertionError where what was held differs from what a fresh forward writes."""
        super().check()
        for (model, row), all_held in self.held_by.items():
            fresh = _fresh_cache(model, row.tokens[: all_held[-1].shape[1]])
            # An 8-bit value may round to its neighbour when its input differs in the last bit.
            tolerance = 0.1 if isinstance(model, Target) and "int8" in model.name else 1e-5
            for held in all_held:
                expected = stores(fresh)[0, :, : held.shape[1]]
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
