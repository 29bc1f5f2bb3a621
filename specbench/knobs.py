"""What the knobs of methods and depth controllers mean, by the docstrings of their classes."""

import inspect
import re
from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import NamedTuple

from specbench.depth import CONTROLLERS, DepthController
from specbench.depth.choice import MEASURED
from specbench.method import Method

_ARGUMENT = re.compile(r"([\w, ]+): (.*)")


class Knob(NamedTuple):
    """A knob as a user sees it."""

    name: str
    default: str
    meaning: str


def method_knobs(method: type[Method]) -> list[Knob]:
    """A method's own knobs first, then those that it has in common with others."""
    meanings = _meanings(method.Config)
    own = inspect.get_annotations(method.Config)
    found = [
        Knob(field.name, str(field.default), meanings.get(field.name, ""))
        for field in fields(method.Config)
    ]
    return sorted(found, key=lambda knob: knob.name not in own)


def controller_knobs() -> dict[str, list[Knob]]:
    """By controller; those that are measured are left out."""
    return {name: list(_given(kind)) for name, kind in CONTROLLERS.items()}


def _given(controller: type[DepthController]) -> Iterator[Knob]:
    meanings = _meanings(controller)
    for one in inspect.signature(controller).parameters.values():
        if one.kind is one.KEYWORD_ONLY and one.name not in MEASURED:
            default = "to be given" if one.default is one.empty else str(one.default)
            yield Knob(one.name, default, meanings.get(one.name, ""))


def first_line(documented: type) -> str:
    """What a class is, in a sentence."""
    text = inspect.cleandoc(documented.__doc__ or "").split("\n\n")[0]
    return " ".join(text.split())


def _meanings(documented: type) -> Mapping[str, str]:
    """Knobs by name, those of base classes too."""
    found: dict[str, str] = {}
    for kind in documented.__mro__:
        for name, meaning in _arguments(kind.__doc__ or ""):
            found.setdefault(name, meaning)
    return found


def _arguments(docstring: str) -> Iterator[tuple[str, str]]:
    """The entries of a docstring's ``Args``; one may name several."""
    _, _, behind = inspect.cleandoc(docstring).partition("Args:\n")
    block = re.split(r"\n(?=\S)", behind)[0]
    for entry in re.split(r"\n(?= {4}\S)", block):
        if match := _ARGUMENT.match(" ".join(entry.split())):
            for name in match[1].split(","):
                yield name.strip(), match[2]
