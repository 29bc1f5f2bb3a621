"""The settings of a training run, and how they are filed."""

import dataclasses
import json
import math
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from pydantic import ConfigDict, TypeAdapter

from specbench import registry
from specbench.messages import check_least, in_one_line, option
from specbench.target import DEFAULT_TARGET
from specbench.training.recipe import Recipe

_FILE = "settings.json"
_DTYPES = ("float32", "bfloat16")


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """What to train, and for how long.

    Args:
        method: a method with a recipe.
        target: what it will draft for.
        prompts: a data set or file, as for workloads; None: prompts that the target invents.
        tokens: of the target's answers, to train on.
        minutes: of training, in all; what is spent on data and evaluation does not count.
        max_new_tokens: of an answer.
        batch_size: prompts that the target answers together.
        batch_tokens: of sequences, for each update.
        learning_rate: at its height; 0 for the recipe's own.
        vocab: tokens that a reduced head may draft; 0 for the recipe's own.
        unroll, layers, exit_layer: see `Options`; 0 for the recipe's own.
        disk_gib: the most that hidden states may take on the disk.
        evaluate_minutes: of training between two evaluations.
        dtype: of the target; None for what the device computes in natively.
        seed: of all that is drawn.

    Raises:
        ValueError: a value out of range.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    method: str
    target: str = DEFAULT_TARGET
    prompts: str | None = None
    tokens: int = 300_000
    minutes: float = 60.0
    max_new_tokens: int = 128
    batch_size: int = 64
    batch_tokens: int = 768
    learning_rate: float = 0.0
    vocab: int = 0
    unroll: int = 0
    layers: int = 0
    exit_layer: int = 0
    disk_gib: float = 8.0
    evaluate_minutes: float = 10.0
    dtype: str | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in {
            "tokens": 1,
            "max_new_tokens": 1,
            "batch_size": 1,
            "batch_tokens": 1,
            "vocab": 0,
            "unroll": 0,
            "layers": 0,
            "exit_layer": 0,
        }.items():
            check_least(name, getattr(self, name), least)
        for name in ("minutes", "evaluate_minutes"):
            value = getattr(self, name)
            if not (value > 0 and math.isfinite(value)):
                raise ValueError(f"{option(name)} {value} is out of range; valid: above 0")
        for name, most in {"learning_rate": 1.0, "disk_gib": 1e6, "seed": 2**63 - 1}.items():
            if not 0 <= getattr(self, name) <= most:
                raise ValueError(
                    f"{option(name)} {getattr(self, name)} is out of range; valid: 0..{most:g}"
                )
        if self.dtype not in (None, *_DTYPES):
            raise ValueError(f"--dtype {self.dtype} is not valid; valid: {', '.join(_DTYPES)}")
        uses = recipe_of(self.method).uses
        for name in ("unroll", "layers", "exit_layer"):
            if getattr(self, name) and name not in uses:
                valid = ", ".join(option(one) for one in sorted(uses))
                raise ValueError(f"{option(name)} has no meaning for {self.method}; valid: {valid}")

    @property
    def command(self) -> str:
        """The command line that asks for this, without the output folder."""
        given = {
            name: value
            for name, value in dataclasses.asdict(self).items()
            if name != "method" and value != getattr(TrainConfig, name)
        }
        words = [word for name, value in given.items() for word in (option(name), str(value))]
        return shlex.join(["specbench", "train", self.method, *words])


def recipe_of(method: str) -> type[Recipe]:
    """How a method's drafter is trained.

    Raises:
        ValueError: it has nothing to train.
    """
    found = registry.load_method(method).Recipe
    if found is None:
        names, _ = registry.loadable()
        valid = [name for name in names if registry.load_method(name).Recipe is not None]
        raise ValueError(f"method {method!r} has nothing to train; valid: {', '.join(valid)}")
    return found


def settings_in(out: Path) -> dict[str, Any]:
    """The settings of the training run in a folder.

    Raises:
        ValueError: there is none.
    """
    try:
        found: dict[str, Any] = json.loads((out / _FILE).read_text())
        TypeAdapter(TrainConfig).validate_python(found)
    except (OSError, ValueError) as error:
        raise ValueError(f"no training run in {str(out)!r}: {in_one_line(error)}") from error
    return found


def file_settings(config: TrainConfig, out: Path) -> None:
    """Writes them into the run's folder, which is made if it is not there."""
    out.mkdir(parents=True, exist_ok=True)
    (out / _FILE).write_text(json.dumps(dataclasses.asdict(config), indent=2) + "\n")


def choose(given: Mapping[str, Any], out: Path, resume: bool) -> TrainConfig:
    """The settings of a new run, or of the one that is in a folder.

    Args:
        given: by name; beside ``resume`` those of the run that is there hold, and only ``minutes``
            may be others.
        out: the run's folder.
        resume: go on with what is there.

    Raises:
        ValueError: a setting is not valid or not that of the run, or the folder holds something
        else.
    """
    if not resume:
        if out.exists() and any(out.iterdir()):
            raise ValueError(f"--out {str(out)!r} is not empty; go on with it by --resume")
        return TrainConfig(**given)
    own = settings_in(out)
    for name, value in given.items():
        if name != "minutes" and own.get(name) != value:
            raise ValueError(
                f"{option(name)} {value} is not that of the run in {str(out)!r}, "
                f"{own.get(name)}; valid beside --resume: --minutes, and what it was begun with"
            )
    return TrainConfig(**{**own, **given})
