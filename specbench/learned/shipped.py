"""Which weights a learned method drafts with: those that the user names, else those that come with
the project."""

from pathlib import Path

import specbench_methods
from specbench.learned.checkpoint import CONFIG
from specbench.target import DEFAULT_TARGET, Target


def shipped_weights(method: str, target: Target) -> str:
    """The folder of the weights that come with the project for a method and target; empty if there
    are none."""
    folder = Path(specbench_methods.__path__[0]) / "weights" / method
    return str(folder) if target.name == DEFAULT_TARGET and (folder / CONFIG).is_file() else ""


def weights_for(method: str, weights: str, target: Target) -> str:
    """A folder or Hub name.

    Args:
        method: the method's name.
        weights: its knob; empty for the weights that come with the project.
        target: what they must draft for.

    Raises:
        ValueError: none are named, and none come with the project for this target.
    """
    if weights:
        return weights
    if shipped := shipped_weights(method, target):
        return shipped
    raise ValueError(
        f"method {method!r} has no weights for target {target.name!r}: train some with "
        f"`specbench train {method} --target {target.name} --out DIR`, or name a checkpoint; then "
        f"`--set {method}.weights=DIR`"
    )
