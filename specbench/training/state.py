"""What a training run keeps to go on from: how far it is, the weights and the optimiser."""

import dataclasses
import io
import math
from dataclasses import dataclass, field
from pathlib import Path

import torch
from pydantic import TypeAdapter

from specbench.files import write_atomically
from specbench.messages import in_one_line
from specbench.training.recipe import Recipe

_FILE = "state.pt"


@dataclass
class Progress:
    """How far a run is; kept in its state."""

    seconds: float = 0.0
    target_seconds: float = 0.0
    """Of these, in the target, for its hidden states."""
    updates: int = 0
    tokens: int = 0
    """Written tokens that were learned from, those of repeated sequences each time."""
    epoch: int = 0
    place: int = 0
    """Of the next batch in this epoch's order."""
    tau: dict[str, float] = field(default_factory=dict)
    """By kind of workload, as last evaluated."""


def save(
    recipe: Recipe, optimiser: torch.optim.Optimizer, progress: Progress, folder: Path
) -> None:
    """Writes the state, whole or not at all.

    Raises:
        ValueError: it cannot be written; what was saved before is kept.
    """
    data = io.BytesIO()
    torch.save(
        {
            "target": recipe.target.fingerprint,
            "module": _trained(recipe),
            "optimiser": optimiser.state_dict(),
            "progress": dataclasses.asdict(progress),
        },
        data,
    )
    path = folder / _FILE
    try:
        write_atomically(path, data.getvalue())
    except OSError as error:
        raise ValueError(
            f"{path} cannot be written: {in_one_line(error)}; what was saved before is kept"
        ) from error


def load(
    recipe: Recipe, optimiser: torch.optim.Optimizer, progress: Progress, folder: Path
) -> bool:
    """Sets all three to what a folder holds.

    Returns:
        Whether it holds a state.

    Raises:
        ValueError: it is damaged, or of a run for another target.
    """
    path, target = folder / _FILE, recipe.target
    if not path.is_file():
        return False
    try:
        state = torch.load(path, map_location=target.device, weights_only=True)
        saved_progress = TypeAdapter(Progress).validate_python(state["progress"])
        _check(saved_progress)
        found, saved = _trained(recipe), state["module"]
        if {k: v.shape for k, v in found.items()} != {k: v.shape for k, v in saved.items()}:
            raise ValueError("weights of another shape")
        optimiser.load_state_dict(state["optimiser"])
        for parameter, kept in optimiser.state.items():
            if any(kept[name].shape != parameter.shape for name in ("exp_avg", "exp_avg_sq")):
                raise ValueError("an optimiser of another shape")
    except Exception as error:
        raise ValueError(
            f"{path} is damaged ({in_one_line(error)}); valid: remove it to begin again"
        ) from error
    if state.get("target", target.fingerprint) != target.fingerprint:
        raise ValueError(f"{path} is of a run with other weights of {target.name!r}")
    for name, value in found.items():
        value.copy_(saved[name])
    vars(progress).update(vars(saved_progress))
    return True


def _check(progress: Progress) -> None:
    """Holds numbers to what they must be."""
    for name, value in vars(progress).items():
        if not isinstance(value, dict) and not (math.isfinite(value) and value >= 0):
            raise ValueError(f"{name} {value}")


def _trained(recipe: Recipe) -> dict[str, torch.Tensor]:
    """What the optimiser changes, by name; not the frozen parts, which are the target's."""
    named = recipe.module.named_parameters()
    return {name: parameter.data for name, parameter in named if parameter.requires_grad}
