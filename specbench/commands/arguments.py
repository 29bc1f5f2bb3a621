"""What the commands share: the parser, types of options, exit codes."""

import argparse
import contextlib
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from specbench.messages import option

if TYPE_CHECKING:
    from specbench.tables import Page

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


_SHARED: Mapping[str, Mapping[str, Any]] = {
    "--target": {
        "metavar": "T",
        "help": "Hub name, folder or GGUF file (SmolLM2-135M-Instruct)",
    },
    "--methods": {
        "metavar": "A,B",
        "type": names,
        "help": "names, see `specbench methods` (all)",
    },
    "--workloads": {
        "metavar": "X,Y",
        "type": names,
        "help": "names, data sets or files, see `specbench workloads` (humaneval,creative)",
    },
    "--max-new-tokens": {
        "metavar": "N",
        "type": int,
        "help": "token budget per request (64)",
    },
    "--temperature": {
        "metavar": "T",
        "type": float,
        "help": "0 is greedy (each workload's own)",
    },
    "--sampling": {
        "metavar": "RULE",
        "help": "for drawn drafts: rejection or coupled (rejection)",
    },
    "--workers": {
        "metavar": "W",
        "type": int,
        "help": "processes (one per GPU; on a CPU two)",
    },
    "--dtype": {
        "metavar": "D",
        "help": "float32, bfloat16 or float16 (what the device is good at)",
    },
    "--out": {
        "metavar": "DIR",
        "type": folder,
        "help": "a new folder for the results (runs/<time>)",
    },
}
"""Options that mean the same to several commands."""


def add_shared(parser: argparse.ArgumentParser, *options: str) -> None:
    """Adds some of the options that several commands have."""
    for name in options:
        parser.add_argument(name, default=argparse.SUPPRESS, **_SHARED[name])


def add_knobs(
    parser: argparse.ArgumentParser,
    help: str = "a method's knob; may be given again",
    metavar: str = "METHOD.KNOB=V",
) -> None:
    """Adds ``--set``."""
    parser.add_argument(
        "--set", metavar=metavar, dest="knobs", action="append", default=[], help=help
    )


def add_format(parser: argparse.ArgumentParser) -> None:
    """Adds ``--format``, of a page."""
    parser.add_argument("--format", choices=("rich", "md"), default="rich")


def show(page: "Page", format: str) -> None:
    """Prints a page in a format."""
    from specbench import tables

    if format == "rich":
        tables.print_page(page, Console())
    else:
        print(tables.markdown(page), flush=True)


def choose_methods(settings: dict[str, Any], target: str) -> list[str]:
    """Where no methods are named: enters all that can draft.

    Args:
        settings: a run's, of any kind.
        target: where none is named.

    Returns:
        What is left out, and why.
    """
    if "methods" in settings:
        return []
    from specbench import registry

    settings["methods"], problems = registry.usable(
        settings.get("target", target), settings["knobs"]
    )
    return [f"left out: {problem}" for problem in problems]


def out_folder(arguments: argparse.Namespace, kind: str = "") -> Path:
    """The folder that is named, else a new one in runs/ with the time in its name."""
    stamp = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
    found: Path = vars(arguments).get("out", Path("runs") / f"{kind}{stamp}")
    return found


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


def refuse_settings(
    arguments: argparse.Namespace, mode: str, of: str, allowed: Sequence[str]
) -> None:
    """Refuses settings beside an option that names a folder, which has its own.

    Args:
        mode: the option.
        of: what the folder holds.
        allowed: the options that may stand beside it.

    Raises:
        ValueError: there is another one.
    """
    extra = set(given(arguments, "knobs", mode, *allowed))
    if arguments.knobs:
        extra.add("set")
    if extra:
        raise ValueError(
            f"{option(mode)} takes the {of}'s own settings; remove "
            f"{', '.join(map(option, sorted(extra)))}; valid beside it: "
            f"{', '.join(map(option, allowed))}"
        )
