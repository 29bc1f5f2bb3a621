"""Weights for a learned method and a tiny target, made by the method's own recipe."""

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp
from typing import Any

import torch

from specbench.conformance.decoding import Nothing, decode, make_request
from specbench.method import MethodConfig, pad_rows
from specbench.target import Target
from specbench.training.recipe import Options, Recipe, Sequences
from specbench.tree import Tree

_UPDATES = 40


@cache
def _folder() -> "TemporaryDirectory[str]":
    """Gone when the process ends."""
    return TemporaryDirectory()


def new_folder() -> Path:
    """An empty folder, gone when the process ends."""
    return Path(mkdtemp(dir=_folder().name))


def make_weights(target: Target, recipe: type[Recipe], **options: int) -> Path:
    """A checkpoint of what a recipe begins with; it can draft most tokens."""
    counts = torch.arange(target.vocab_size)
    settings: dict[str, Any] = {"vocab": target.vocab_size * 9 // 10, "token_counts": counts}
    folder = new_folder()
    recipe(target, Options(**(settings | options))).write(folder)
    return folder


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
    for _ in range(_UPDATES):
        optimiser.zero_grad()
        trained.loss(batch)[0].backward()  # type: ignore[no-untyped-call]
        optimiser.step()
    folder = new_folder()
    trained.write(folder)
    return folder


@cache
def own_outputs(target: Target, taps: tuple[int, ...] = ()) -> Sequences:
    """Prompts of random length and tokens with the target's answers, for training and
    calibration."""
    torch.manual_seed(7)
    prompts = [torch.randint(3, target.vocab_size, (2 + i % 5,)).tolist() for i in range(24)]
    requests = [make_request(prompt, 20, name=f"training {i}") for i, prompt in enumerate(prompts)]
    rows = decode(target, Nothing(target, MethodConfig()), requests, max_rows=24)
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
