"""Which drafter a simulation takes where none is named: the one that a run's method had, by what
``run.json`` says of it."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from specbench.costs import Shape
from specbench.scenario import DRAFTERS

LOOK_UP = "0"


class Assumed(NamedTuple):
    """A drafter, as `specbench.scenario.make_drafter` takes it, and why it is taken."""

    drafter: str
    why: str


def recorded_drafter(info: Mapping[str, Any], method: str, target: Shape) -> Assumed:
    """The drafter that fits a recorded method: by the facts that the method filed, not by its name.

    Args:
        info: of ``run.json``.
        method: whose.
        target: what is simulated.

    Raises:
        ValueError: the run does not say enough; the message lists what can be named.
    """
    about = info["methods"].get(method, {})
    if about.get("layers_passed_by"):
        return _layers(about, method, target)
    if "num_heads" in about:
        return Assumed("heads", f"{method} has {about['num_heads']} heads on the target's")
    if "taps" in about:
        return Assumed("features", f"{method} drafts on the target's hidden states")
    if "num_parameters" in about:
        return _model(about, method, info["target"])
    if about.get("extra_bytes") == 0 and not about.get("fingerprint"):
        return Assumed(LOOK_UP, f"a free look-up: {method} has no weights")
    raise _unknown(method, "the run does not say what it is")


def _layers(about: Mapping[str, Any], method: str, target: Shape) -> Assumed:
    """A shortened stack, as large a share of the target. Only one that passes by all layers from
    some one on says how many there were."""
    passed, trained = about["layers_passed_by"], bool(about.get("extra_bytes"))
    if not (trained or about.get("exit_layer")):
        raise _unknown(method, "it passed by layers in the middle, of how many is not recorded")
    first, num_layers = min(passed), 1 + max(passed)
    own = min(max(1, round(first / num_layers * target.num_layers)), target.num_layers - 1)
    return Assumed(
        f"{'exit' if trained else 'layers'}:{own}",
        f"{method} ran {first} of {num_layers} layers{', and a trained exit' * trained}; here as "
        f"large a share, {own} of {target.num_layers}",
    )


def _model(about: Mapping[str, Any], method: str, recorded: Mapping[str, Any]) -> Assumed:
    """A model, as large a share of the target."""
    whole = recorded.get("num_parameters")
    if not whole or about["num_parameters"] >= whole:
        raise _unknown(method, "a model drafted that is not known to be smaller than the target")
    share = f"{about['num_parameters'] / whole:.3g}"
    return Assumed(
        share,
        f"{method} is a model of {about['num_parameters'] / 1e6:.1f} M parameters, {share} of its "
        "target's: a level takes as large a share of a step here, and of the memory",
    )


def _unknown(method: str, why: str) -> ValueError:
    return ValueError(
        f"which drafter {method} is on another machine: {why}; valid: --drafter {DRAFTERS}"
    )
