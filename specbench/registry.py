"""Names and loads methods: the files of methods/, and the entry point group "specbench.methods" of
installed packages.

Nothing is imported until a method is asked for, so a missing dependency of one method breaks that
method only.
"""

import hashlib
import importlib
import inspect
import math
import pkgutil
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import specbench_methods
from specbench.depth import Choice
from specbench.messages import suggest
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

    Args:
        name: as it is known by; ``name@label`` is the same method under a name of its own, so that
            one run can compare it with itself in other settings.

    Raises:
        ValueError: no such method; a dependency of it is missing; or it is not one method with
        knobs that can be set.
    """
    known = sources()
    name, at, label = name.partition("@")
    if at and not re.fullmatch(r"[\w-]+", label):
        raise ValueError(
            f"method {name}{at}{label!r} has no label; valid: letters, digits, _ and - behind the @"
        )
    if name not in known:
        raise ValueError(
            f"unknown method {name!r}{suggest(name, known)}; valid: {', '.join(known)}"
        )
    return _load(known[name])


def load_path(path: str) -> type[Method]:
    """The class at a path ``package.module:Class``, which need not be installed.

    Raises:
        ValueError: it cannot be loaded, or is no method with knobs that can be set.
    """
    module, _, attribute = path.partition(":")
    if not module or not attribute:
        raise ValueError(f"{path!r} is no path of a method; valid: package.module:Class")
    return _load(Source(path, module, attribute, "a path"))


def _load(source: Source) -> type[Method]:
    name = source.name
    try:
        module = importlib.import_module(source.module)
    except ImportError as error:
        raise ValueError(f"method {name!r} cannot be loaded: {error}{_hint(error)}") from error
    except (Exception, SystemExit) as error:
        raise ValueError(f"method {name!r} is broken: {type(error).__name__}: {error}") from error
    methods = _methods_in(module, source.attribute)
    if len(methods) != 1:
        place = f"{source.module}:{source.attribute}" if source.attribute else source.module
        raise ValueError(
            f"method {name!r} is broken: {place} defines {len(methods)} methods; valid: exactly one"
        )
    config = methods[0].Config
    for knob in vars(config).get("__annotations__", {}):
        if knob not in config.__dataclass_fields__:
            raise ValueError(
                f"method {name!r} is broken: {config.__name__}.{knob} is no field; "
                "decorate the class with @dataclass(frozen=True, kw_only=True)"
            )
    for knob, default in _defaults(config).items():
        if type(default) not in _KINDS:
            raise ValueError(
                f"method {name!r} is broken: knob {knob!r} has no default of a known type; "
                f"valid: {', '.join(kind.__name__ for kind in _KINDS)}"
            )
    return methods[0]


def loadable() -> tuple[tuple[str, ...], list[str]]:
    """The names of the methods that can be loaded, and why each of the others cannot."""
    names, problems = [], []
    for name in sources():
        try:
            load_method(name)
            names.append(name)
        except ValueError as error:
            problems.append(str(error))
    return tuple(names), problems


def usable(
    target: str, knobs: Mapping[str, Mapping[str, str]]
) -> tuple[tuple[str, ...], list[str]]:
    """The names of the methods that can be loaded and lack nothing to draft for a target, and why
    each of the others cannot.

    Args:
        target: its name.
        knobs: by method, the text of its knobs.

    Raises:
        ValueError: a knob of one of them is not valid.
    """
    names, problems = loadable()
    lacking = {}
    for name in names:
        method = load_method(name)
        if problem := method.lacks(make_config(name, method, knobs.get(name, {})), target):
            lacking[name] = problem
    return tuple(name for name in names if name not in lacking), [*problems, *lacking.values()]


def source_sha256(method: type[Method]) -> str:
    """sha256 of the file that a method is written in: the commit does not tell of a file that is
    not checked in."""
    return hashlib.sha256(Path(inspect.getfile(method)).read_bytes()).hexdigest()


def _hint(error: ImportError) -> str:
    """What to install, where a whole package is missing."""
    missing = (error.name or "").split(".")[0]
    is_missing = isinstance(error, ModuleNotFoundError) and missing not in sys.modules
    return f"; install {missing!r} to use it" if missing and is_missing else ""


def _methods_in(module: ModuleType, attribute: str | None) -> list[type[Method]]:
    """The methods that a module defines, or the one that an attribute of it names."""
    if attribute:
        candidates = [getattr(module, attribute, None)]
    else:
        candidates = [
            value
            for value in vars(module).values()
            if getattr(value, "__module__", None) == module.__name__
        ]
    return [
        value
        for value in candidates
        if inspect.isclass(value) and issubclass(value, Method) and not inspect.isabstract(value)
    ]


def make_config(name: str, method: type[Method], knobs: Mapping[str, str]) -> MethodConfig:
    """A method's config from the text of its knobs.

    Raises:
        ValueError: an unknown knob, a value of the wrong type or out of range.
    """
    defaults = _defaults(method.Config)
    values: dict[str, Any] = {}
    for knob, text in knobs.items():
        if knob not in defaults:
            raise ValueError(
                f"method {name!r} has no knob {knob!r}{suggest(knob, defaults)}; "
                f"valid: {', '.join(defaults)}"
            )
        kind = _KINDS[type(defaults[knob])]
        try:
            values[knob] = kind.read(text)
        except (ValueError, KeyError) as error:
            raise ValueError(
                f"{name}.{knob}: {text!r} is not valid; valid: {kind.valid}"
            ) from error
    try:
        config = method.Config(**values)
        Choice.read(config.controller)
    except ValueError as error:
        raise ValueError(f"method {name!r}: {error}") from error
    return config


def read_knob(kind: type, text: str) -> Any:
    """A knob's value from its text.

    Raises:
        ValueError, KeyError: it is none of this type.
    """
    return _KINDS[kind].read(text)


def _defaults(config: type[MethodConfig]) -> dict[str, Any]:
    """Every knob's default; `MISSING` where it has none."""
    return {
        field.name: field.default if field.default_factory is MISSING else field.default_factory()
        for field in fields(config)
    }


class _Kind(NamedTuple):
    """How a knob is read from text, and what its text may be."""

    read: Callable[[str], Any]
    valid: str


def _read_finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is not finite")
    return value


_BOOLS = {"true": True, "1": True, "false": False, "0": False}
_KINDS = {
    bool: _Kind(lambda text: _BOOLS[text.lower()], "true or false"),
    int: _Kind(int, "a whole number"),
    float: _Kind(_read_finite, "a number"),
    str: _Kind(str, "any text"),
    tuple: _Kind(lambda text: tuple(map(int, text.split(","))) if text else (), "1,2,3"),
}
"""By the type of its default, what a knob may be; a tuple holds whole numbers."""
