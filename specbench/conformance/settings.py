"""The settings to check a method in, from the types, the defaults and the messages of its knobs.

Every value of a knob is tried together with every value of every other one that the config accepts
beside it (pairwise testing), in as few settings as a greedy search finds.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from itertools import combinations, islice, product
from typing import Any, cast

from specbench import registry
from specbench.conformance.weights import save_tiny_drafter
from specbench.method import Method, MethodConfig
from specbench.target import Target

MADE = "MADE"
"""Stands for weights that the method's recipe makes for the target, trained for a moment."""

Knobs = Mapping[str, str]
_Setting = tuple[tuple[str, str], ...]

_TRIED = {int: ("2", "3", "1"), float: ("0.3", "0.5"), tuple: ("2,2", "1")}
"""By type, the values to try, of which the first is taken that is valid and not the default."""
_MOST_COMBINED = 4096
_TARGET = "a tiny target"  # no weights come with the project for it


@dataclass(frozen=True)
class Subject:
    """A method and its knobs.

    Args:
        name: its name, or the path of its class.
        method: the class.
        knobs: by name, their text.
    """

    name: str
    method: type[Method]
    knobs: _Setting = ()

    def __str__(self) -> str:
        return " ".join([self.name, *(f"{knob}={value}" for knob, value in self.knobs)])

    def make(self, target: Target, trained_on: Target | None = None) -> Method:
        """The method for a target, with weights made for it, or for a target that has the same.

        Raises:
            ValueError: it refuses the knobs or the target.
        """
        knobs, recipe = dict(self.knobs), self.method.Recipe
        if knobs.get(self.method.weights_knob) == MADE and recipe:
            knobs[self.method.weights_knob] = str(save_tiny_drafter(trained_on or target, recipe))
        return self.method(target, registry.make_config(self.name, self.method, knobs))


def settings(name: str, method: type[Method], fixed: Knobs) -> list[Subject]:
    """The settings to check a method in.

    Args:
        name: its name.
        method: its class.
        fixed: knobs that are not to vary.

    Raises:
        ValueError: a fixed knob is not valid.
    """
    registry.make_config(name, method, fixed)
    values = {knob: _values(name, method, knob, fixed) for knob in _own_knobs(method)}
    values = {knob: found for knob, found in values.items() if len(found) > 1 or found != [""]}
    valid = list(_valid(name, method, fixed, values))
    return [Subject(name, method, setting) for setting in _cover(valid)]


def _own_knobs(method: type[Method]) -> list[str]:
    """The knobs that are not every method's: how deep to draft is the run's to say."""
    common = {field.name for field in fields(MethodConfig)}
    return [field.name for field in fields(method.Config) if field.name not in common]


def _values(name: str, method: type[Method], knob: str, fixed: Knobs) -> list[str]:
    """Values of a knob, the default first; an empty text stands for it."""
    if knob in fixed:
        return [fixed[knob]]
    if knob == method.weights_knob and method.Recipe is not None:
        needed = bool(method.lacks(registry.make_config(name, method, fixed), _TARGET))
        made = [MADE] if needed else ["", MADE]
        return [*made, *method.trials.get(knob, ())]
    default = getattr(method.Config(), knob)
    return ["", *_others(method.Config, knob, default), *method.trials.get(knob, ())]


def _others(config: type[MethodConfig], knob: str, default: Any) -> list[str]:
    if isinstance(default, bool):
        return [str(not default).lower()]
    if isinstance(default, str):
        return [choice for choice in _choices(config, knob) if choice != default]
    kind = type(default)
    others = [text for text in _TRIED[kind] if registry.read_knob(kind, text) != default]
    off = ["0"] if kind is int and default > 1 and _accepts(config, knob, 0) else []
    return others[:1] + off


def _choices(config: type[MethodConfig], knob: str) -> list[str]:
    """What the config's message lists as valid for a text that is not."""
    try:
        config(**cast(Any, {knob: "?"}))
    except ValueError as error:
        listed = str(error).rpartition("valid: ")[2].split(", ")
        return [choice for choice in listed if choice.isidentifier()]
    return []


def _accepts(config: type[MethodConfig], knob: str, value: Any) -> bool:
    try:
        config(**{knob: value})
    except ValueError:
        return False
    return True


def _valid(
    name: str, method: type[Method], fixed: Knobs, values: Mapping[str, list[str]]
) -> Iterator[_Setting]:
    """The combinations that the config accepts, those near the defaults first."""
    for combined in islice(_combined(values), _MOST_COMBINED):
        given = {**fixed, **{knob: value for knob, value in combined.items() if value}}
        try:
            registry.make_config(name, method, given)
        except ValueError:
            continue
        yield tuple(given.items())


def _combined(values: Mapping[str, list[str]]) -> Iterator[dict[str, str]]:
    first = {knob: found[0] for knob, found in values.items()}
    for size in range(len(values) + 1):
        for varied in combinations(values, size):
            for chosen in product(*(values[knob][1:] for knob in varied)):
                yield first | dict(zip(varied, chosen, strict=True))


def _cover(valid: list[_Setting]) -> list[_Setting]:
    """Few of the settings, in which every pair of values stands that stands in any."""
    knobs = sorted({knob for setting in valid for knob, _ in setting})

    def pairs(setting: _Setting) -> set[Any]:
        given = dict(setting)
        return set(combinations([(knob, given.get(knob, "")) for knob in knobs], 2)) | {
            (knob, given.get(knob, "")) for knob in knobs
        }

    left = {setting: pairs(setting) for setting in valid}
    chosen: list[_Setting] = []
    while any(left.values()) or not chosen:
        best = max(left, key=lambda setting: len(left[setting])) if chosen else valid[0]
        chosen.append(best)
        covered = left[best].copy()
        for uncovered in left.values():
            uncovered -= covered
    return chosen
