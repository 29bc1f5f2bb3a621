"""Trained weights that are not whole are refused by name, for every method that has some."""

import json
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from specbench import registry
from specbench.conformance.models import looping_target
from specbench.conformance.weights import make_weights
from specbench.learned.checkpoint import CARD, save_checkpoint
from specbench.method import Method
from specbench.target import Target

LEARNED = ("medusa", "eagle", "draft_model", "early_exit")
Tensors = dict[str, torch.Tensor]


def without_d2t(tensors: Tensors) -> None:
    del tensors["d2t"]


def with_short_d2t(tensors: Tensors) -> None:
    tensors["d2t"] = tensors["d2t"][:-3]


def _matrix(tensors: Tensors) -> str:
    return next(key for key, value in tensors.items() if value.dim() == 2)


def with_nan(tensors: Tensors) -> None:
    tensors[_matrix(tensors)][0, 0] = torch.nan


def as_int8(tensors: Tensors) -> None:
    tensors[_matrix(tensors)] = tensors[_matrix(tensors)].to(torch.int8)


def without_one(tensors: Tensors) -> None:
    del tensors[_matrix(tensors)]


def with_one_more(tensors: Tensors) -> None:
    tensors["something.weight"] = torch.zeros(2, 2)


def of_another_shape(tensors: Tensors) -> None:
    tensors[_matrix(tensors)] = tensors[_matrix(tensors)][:-1].contiguous()


DAMAGE: dict[Callable[[Tensors], None], str] = {
    without_d2t: "lacks d2t for its 40 draft tokens",
    with_short_d2t: "has d2t for 37 draft tokens; its config says 40",
    with_nan: "that are no numbers",
    as_int8: "that are no numbers",
    without_one: "lacks |unknown|shape|made for",
    with_one_more: "something.weight",
    of_another_shape: "shape",
}


def load(target: Target, name: str, folder: Path) -> Method:
    method = registry.load_method(name)
    knobs = {method.weights_knob: str(folder)}
    return method(target, registry.make_config(name, method, knobs))


@pytest.fixture(scope="module", params=LEARNED)
def made(request: pytest.FixtureRequest) -> tuple[str, Target, Path]:
    """A method, a tiny target, and weights by the method's own recipe, of 40 draft tokens."""
    target = looping_target()
    recipe = registry.load_method(request.param).Recipe
    assert recipe is not None
    return request.param, target, make_weights(target, recipe, vocab=40)


@pytest.mark.parametrize("damage", DAMAGE, ids=lambda damage: damage.__name__)
def test_damaged_weights_are_refused(
    damage: Callable[[Tensors], None], made: tuple[str, Target, Path], tmp_path: Path
) -> None:
    name, target, folder = made
    load(target, name, folder)
    (weights,) = folder.glob("*.safetensors")
    tensors = load_file(weights)
    damage(tensors)
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    save_file(tensors, tmp_path / weights.name)
    with pytest.raises(ValueError, match=DAMAGE[damage]) as raised:
        load(target, name, tmp_path)
    assert str(tmp_path) in str(raised.value)


def test_weights_that_are_not_those_of_their_card_are_refused(
    made: tuple[str, Target, Path], tmp_path: Path
) -> None:
    name, target, folder = made
    (weights,) = folder.glob("*.safetensors")
    for file in (folder / "config.json", weights):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    digest = sha256(weights.read_bytes()).hexdigest()
    (tmp_path / CARD).write_text(json.dumps({"sha256": {weights.name: digest}}))
    load(target, name, tmp_path)
    tensors = load_file(weights)
    tensors[_matrix(tensors)] += 1
    save_file(tensors, tmp_path / weights.name)
    with pytest.raises(ValueError, match=r"is not the file that card\.json describes"):
        load(target, name, tmp_path)


def test_new_weights_do_not_keep_an_old_card(tmp_path: Path) -> None:
    (tmp_path / CARD).write_text("{}")
    save_checkpoint(tmp_path, {}, {"weight": torch.zeros(2)})
    assert not (tmp_path / CARD).exists()
