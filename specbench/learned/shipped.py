"""Which weights a learned method drafts with: those that the user names, else those that come with
the project."""

from pathlib import Path

import specbench_methods
from specbench.learned.checkpoint import CONFIG
from specbench.target import DEFAULT_TARGET


def weights_for(method: str, weights: str, target: str) -> str:
    """A folder or Hub name.

    Args:
        method: the method's name.
        weights: its knob; empty for the weights that come with the project.
        target: the name of the model that they must draft for.

    Raises:
        ValueError: none are named, and none come with the project for this target.
    """
    problem = missing(method, weights, target)
    if problem:
        raise ValueError(problem)
    return weights or str(_folder(method))


def missing(method: str, weights: str, target: str) -> str:
    """Why `weights_for` would raise; empty if it would not."""
    if weights or (target == DEFAULT_TARGET and (_folder(method) / CONFIG).is_file()):
        return ""
    return (
        f"method {method!r} has no weights for target {target!r}: train some with "
        f"`specbench train {method} --target {target} --out DIR`, or name a checkpoint; then "
        f"`--set {method}.weights=DIR`"
    )


def _folder(method: str) -> Path:
    return Path(specbench_methods.__path__[0]) / "weights" / method
