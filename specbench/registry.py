"""Names and loads methods: the files of methods/, and the entry point group "specbench.methods" of
installed packages.

Nothing is imported until a method is asked for, so a missing dependency of one method breaks that
method only.
"""

import difflib
import importlib
import inspect
import pkgutil
from collections.abc import Iterable
from dataclasses import MISSING, dataclass, fields
from importlib.metadata import entry_points
from typing import Any

import specbench_methods
from specbench.method import Method, MethodConfig

ENTRY_POINT_GROUP = "specbench.methods"


@dataclass(frozen=True)
class Source:
    """Where a method comes from: a module, and the class in it unless it is the module's only
    method."""

    name: str
    module: str
    attribute: str | None
    origin: str


def sources() -> dict[str, Source]:
    """All known methods by name, own ones first; none is imported.

    Raises:
        ValueError: two of them have the same name.
    """
    found: dict[str, Source] = {}
    for info in pkgutil.iter_modules(specbench_methods.__path__):
        if not info.name.startswith("_"):
            found[info.name] = Source(
                info.name, f"specbench_methods.{info.name}", None, "specbench"
            )
    for point in entry_points(group=ENTRY_POINT_GROUP):
        origin = point.dist.name if point.dist else "an installed package"
        if point.name in found:
            raise ValueError(
                f"method {point.name!r} of {origin} has the name of a method of "
                f"{found[point.name].origin}; rename its entry point"
            )
        found[point.name] = Source(point.name, point.module, point.attr or None, origin)
    return dict(sorted(found.items(), key=lambda item: (item[0] != "vanilla", item[0])))


def load_method(name: str) -> type[Method]:
    """The class of a method.

    Raises:
        ValueError: no such method; a dependency of it is missing; or its module defines no method.
    """
    known = sources()
    if name not in known:
        raise ValueError(
            f"unknown method {name!r}{suggest(name, known)}; valid: {', '.join(known)}"
        )
    source = known[name]
    try:
        module = importlib.import_module(source.module)
    except ImportError as error:
        missing = error.name or str(error)
        raise ValueError(
            f"method {name!r} cannot be loaded: {error}; "
            f"install {missing.split('.')[0]!r} to use it"
        ) from error
    except Exception as error:
        raise ValueError(f"method {name!r} is broken: {type(error).__name__}: {error}") from error
    if source.attribute:
        cls = getattr(module, source.attribute, None)
        candidates = [cls] if inspect.isclass(cls) else []
    else:
        candidates = [
            value
            for value in vars(module).values()
            if inspect.isclass(value) and value.__module__ == module.__name__
        ]
    methods = [cls for cls in candidates if issubclass(cls, Method) and not inspect.isabstract(cls)]
    if len(methods) != 1:
        raise ValueError(
            f"method {name!r} is broken: {source.module} defines {len(methods)} methods; "
            "valid: exactly one"
        )
    return methods[0]


def make_config(name: str, method: type[Method], knobs: dict[str, str]) -> MethodConfig:
    """A method's config from the text of its knobs.

    Raises:
        ValueError: an unknown knob, a value of the wrong type or out of range.
    """
    known = {field.name: field for field in fields(method.Config)}
    values: dict[str, Any] = {}
    for knob, text in knobs.items():
        if knob not in known:
            raise ValueError(
                f"method {name!r} has no knob {knob!r}{suggest(knob, known)}; "
                f"valid: {', '.join(known)}"
            )
        field = known[knob]
        default = field.default_factory() if field.default_factory is not MISSING else field.default
        values[knob] = _parse(f"{name}.{knob}", text, default)
    try:
        return method.Config(**values)
    except ValueError as error:
        raise ValueError(f"method {name!r}: {error}") from error


def _parse(knob: str, text: str, default: Any) -> Any:
    """A knob's value, of the type of its default."""
    kind = type(default)
    try:
        if kind is bool:
            return {"true": True, "1": True, "false": False, "0": False}[text.lower()]
        if kind is tuple:
            return tuple(int(part) for part in text.split(",") if part)
        return kind(text)
    except (ValueError, KeyError) as error:
        example = {bool: "true or false", int: "a whole number", float: "a number", tuple: "1,2,3"}
        raise ValueError(
            f"{knob}: {text!r} is not valid; valid: {example.get(kind, kind.__name__)}"
        ) from error


def suggest(name: str, choices: Iterable[str]) -> str:
    """A hint at the nearest valid name, or nothing."""
    close = difflib.get_close_matches(name, list(choices), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""
