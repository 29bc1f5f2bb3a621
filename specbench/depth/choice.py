"""Which controller a method's knob names, ``NAME`` or ``NAME:KNOB=VALUE,KNOB=VALUE``; lists are
written with slashes: ``by_batch:depths=4:2/16:0``, ``ema:tiers=1/3/7``."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from specbench.depth.controller import Bounded, DepthController
from specbench.depth.feedback import Confidence, Ema, Heuristic
from specbench.depth.goodput import Goodput
from specbench.depth.load import ByBatch, Fixed, OffAboveBatch
from specbench.depth.survival import Survival
from specbench.depth.times import StepTimes
from specbench.messages import suggest
from specbench.method import MethodConfig

CONTROLLERS: Mapping[str, type[Bounded]] = {
    "fixed": Fixed,
    "off_above_batch": OffAboveBatch,
    "by_batch": ByBatch,
    "heuristic": Heuristic,
    "confidence": Confidence,
    "ema": Ema,
    "goodput": Goodput,
    "survival": Survival,
}
"""By name."""

MEASURED = ("times", "drafting", "calibration")
"""Knobs that are measured, not given."""


def _read_bool(text: str) -> bool:
    return {"true": True, "false": False}[text.lower()]


def _read_numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split("/"))


def _read_table(text: str) -> dict[int, int]:
    pairs = [entry.split(":") for entry in text.split("/")]
    table = {int(key): int(value) for key, value in pairs}
    if len(table) < len(pairs):
        raise ValueError("a batch size stands twice")
    return table


class _Reader(NamedTuple):
    """How a knob's text is read, what it may be, and an example."""

    read: Callable[[str], Any]
    what: str
    example: str

    @property
    def valid(self) -> str:
        """For messages."""
        return f"{self.what}, as {self.example}"


_READERS: Mapping[Any, _Reader] = {
    bool: _Reader(_read_bool, "true or false", "true"),
    int: _Reader(int, "a whole number", "4"),
    float: _Reader(float, "a number", "0.4"),
    Sequence: _Reader(_read_numbers, "whole numbers", "1/3/7"),
    Mapping: _Reader(_read_table, "batch sizes with their depths", "4:2/16:0"),
}
"""By type."""


@dataclass(frozen=True)
class Choice:
    """A controller and its knobs.

    Args:
        name: one of `CONTROLLERS`.
        knobs: its own, but for those that are measured.
    """

    name: str
    knobs: Mapping[str, Any]

    @staticmethod
    def read(text: str) -> "Choice":
        """From a method's knob.

        Raises:
            ValueError: there is no such controller, or a knob is unknown, missing or not valid.
        """
        name, _, settings = text.partition(":")
        _check_name(name)
        kinds, knobs = _kinds(name), dict[str, Any]()
        for setting in filter(None, settings.split(",")):
            knob, _, value = setting.partition("=")
            if knob not in kinds:
                raise ValueError(
                    f"controller {name} has no knob {knob!r}{suggest(knob, kinds)}; valid: "
                    f"{', '.join(kinds) or 'none'}"
                )
            if knob in knobs:
                raise ValueError(f"controller {name}: {knob} is given twice; valid: once")
            reader = _READERS[kinds[knob]]
            try:
                knobs[knob] = reader.read(value)
            except (ValueError, KeyError) as error:
                raise ValueError(
                    f"controller {name}: {knob} {value!r} is not valid; valid: {reader.valid}"
                ) from error
        _check_given(name, kinds, knobs)
        choice = Choice(name, knobs)
        choice.make(MethodConfig(), _NoTimes())
        return choice

    @property
    def needs_times(self) -> bool:
        """Whether it goes by what steps cost."""
        return "times" in _parameters(self.name)

    @property
    def takes_calibration(self) -> bool:
        """Whether it goes by the drafter's own chances, and how far these can be believed."""
        return "calibration" in _parameters(self.name)

    @property
    def needs_chances(self) -> bool:
        """Whether the drafter's chances are all that it goes by."""
        return CONTROLLERS[self.name].needs_chances

    def make(
        self,
        config: MethodConfig,
        times: StepTimes | None = None,
        **measured: Any,
    ) -> DepthController:
        """The controller, within a method's depth and nodes.

        Args:
            config: the method's.
            times, measured: what its class takes of `MEASURED`.

        Raises:
            ValueError: step times are missing, or a knob is missing or out of range.
        """
        if times is not None and self.needs_times:
            measured["times"] = times
        return make_controller(self.name, config.depth, config.max_nodes, **self.knobs, **measured)


class _NoTimes:
    """Step times to check a choice with."""

    def step_s(self, nodes: object) -> float:
        return 1.0


def _check_name(name: str) -> None:
    if name not in CONTROLLERS:
        raise ValueError(
            f"unknown controller {name!r}{suggest(name, CONTROLLERS)}; valid: "
            f"{', '.join(CONTROLLERS)}"
        )


def _parameters(name: str) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(CONTROLLERS[name]).parameters


def _kinds(name: str) -> dict[str, Any]:
    """The knobs of a controller that are given, and their types."""
    own = [p for p in _parameters(name).values() if p.kind is p.KEYWORD_ONLY]
    kinds = {p.name: getattr(p.annotation, "__origin__", p.annotation) for p in own}
    return {knob: kind for knob, kind in kinds.items() if knob not in MEASURED}


def _check_given(name: str, kinds: Mapping[str, Any], knobs: Mapping[str, Any]) -> None:
    """Holds a choice to the knobs that have no default."""
    for knob, kind in kinds.items():
        if knob not in knobs and _parameters(name)[knob].default is inspect.Parameter.empty:
            reader = _READERS[kind]
            raise ValueError(
                f"controller {name} needs its knob {knob}: {reader.what}; for example "
                f"{name}:{knob}={reader.example}"
            )


def make_controller(name: str, depth: int, max_nodes: int, **knobs: Any) -> DepthController:
    """A controller by its name.

    Args:
        name: one of `CONTROLLERS`.
        depth, max_nodes: the most that a row may draft.
        knobs: its own; see its class.

    Raises:
        ValueError: there is none of that name, or a knob is unknown, missing or out of range.
    """
    _check_name(name)
    try:
        made: DepthController = CONTROLLERS[name](depth, max_nodes, **knobs)
    except TypeError as error:
        raise ValueError(f"controller {name}: {error}") from error
    return made
