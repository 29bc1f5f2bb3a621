"""What the commands share: the parser, types of options, exit codes."""

import argparse
import contextlib
import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

EXIT_DONE, EXIT_FAILURES, EXIT_USAGE, EXIT_OPEN, EXIT_INTERRUPTED = 0, 1, 2, 3, 130

Call = Callable[[argparse.Namespace], int]
"""Runs a command; returns its exit code."""


class Parser(argparse.ArgumentParser):
    """Bad usage is one line, like every other bad input."""

    def error(self, message: str) -> Any:
        raise ValueError(f"{message}; `{self.prog} --help` lists what is valid")


if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[Parser]
else:
    Commands = Any


def folder(text: str) -> Path:
    if not text:
        raise argparse.ArgumentTypeError("'' names no folder")
    return Path(text)


def names(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    if not names:
        raise argparse.ArgumentTypeError(f"{text!r} names nothing; valid: names with commas")
    return names


def numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in names(text))


def floats(text: str) -> tuple[float, ...]:
    return tuple(float(number) for number in names(text))


def controllers(text: str) -> tuple[str, ...]:
    """Controllers with commas between them, and between the knobs of one: what has ``=`` in its
    first part goes on with the one before it."""
    found: list[str] = []
    for part in names(text):
        if found and "=" in part.partition(":")[0]:
            found[-1] += f",{part}"
        else:
            found.append(part)
    return tuple(found)


def read_knobs(settings: Sequence[str]) -> dict[str, dict[str, str]]:
    knobs: dict[str, dict[str, str]] = {}
    for setting in settings:
        name, equals, value = setting.partition("=")
        method, dot, knob = name.partition(".")
        if not (equals and dot and method and knob):
            raise ValueError(f"--set {setting!r} is not valid; valid: METHOD.KNOB=VALUE")
        knobs.setdefault(method, {})[knob] = value
    return knobs


@contextlib.contextmanager
def terminable() -> Iterator[None]:
    """SIGTERM ends a run as Ctrl-C does; another signal does not disturb what then puts things in
    order."""
    signals = (signal.SIGINT, signal.SIGTERM)
    before = {one: signal.getsignal(one) for one in signals}

    def interrupt(number: int, frame: object) -> None:
        for one in signals:
            signal.signal(one, signal.SIG_IGN)
        raise KeyboardInterrupt

    for one in signals:
        if before[one] is not signal.SIG_IGN:
            signal.signal(one, interrupt)
    try:
        yield
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)


def given(arguments: argparse.Namespace, *but: str) -> dict[str, Any]:
    """What was said on the command line, by name."""
    return {k: v for k, v in vars(arguments).items() if k not in ("command", *but)}
