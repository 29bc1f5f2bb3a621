"""Which weights a learned method drafts with: those that the user names, else those that come with
the project."""

from pathlib import Path

import specbench_methods
from specbench.learned.checkpoint import CONFIG
from specbench.target import DEFAULT_TARGET


def shipped_weights(method: str, target: str) -> str:
    """The folder of the weights that come with the project for a method and the target of this
    name; empty if there are none."""
    folder = Path(specbench_methods.__path__[0]) / "weights" / method
    return str(folder) if target == DEFAULT_TARGET and (folder / CONFIG).is_file() else ""


def weights_for(method: str, weights: str, target: str) -> str:
    """A folder or Hub name.

    Args:
        method: the method's name.
        weights: its knob; empty for the weights that come with the project.
        target: the name of the model that they must draft for.

    Raises:
        ValueError: none are named, and none come with the project for this target.
    """
    if problem := missing(method, weights, target):
        raise ValueError(problem)
    return weights or shipped_weights(method, target)


def missing(method: str, weights: str, target: str) -> str:
    """Why `weights_for` would raise; empty if it would not."""
    if weights or shipped_weights(method, target):
        return ""
    return (
        f"method {method!r} has no weights for target {target!r}: train some with "
        f"`specbench train {method} --target {target} --out DIR`, or name a checkpoint; then "
        f"`--set {method}.weights=DIR`"
    )
