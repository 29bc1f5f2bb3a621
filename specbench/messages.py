"""What messages to a user are made of; imports nothing heavy."""

import difflib
import textwrap
from collections.abc import Iterable

from pydantic import ValidationError


def suggest(name: str, choices: Iterable[str]) -> str:
    """A hint at the nearest valid name, or nothing."""
    close = difflib.get_close_matches(name, list(choices), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def in_one_line(error: BaseException) -> str:
    """What a message quotes of another's error."""
    if isinstance(error, ValidationError):
        return _first_problem(error)
    missing = "no such key: " if isinstance(error, KeyError) else ""
    text = missing + textwrap.shorten(str(error), 240, placeholder=" ...").rstrip(".: ")
    return text or type(error).__name__


def _first_problem(error: ValidationError) -> str:
    """The first of the things that pydantic found wrong."""
    first = error.errors()[0]
    place = ".".join(map(str, first["loc"]))
    message = first["msg"].removeprefix("Value error, ")
    return f"{place}: {message}" if place else message


def counted(number: int, word: str) -> str:
    """So many of what a word, which takes an s or es, stands for: 1 batch, 2 batches."""
    ending = "es" if word.endswith("ch") else "s"
    return f"{number} {word}" if number == 1 else f"{number} {word}{ending}"


def are(number: int) -> str:
    """The verb of so many."""
    return "is" if number == 1 else "are"


def option(name: str) -> str:
    """A setting's name on the command line."""
    return f"--{name.replace('_', '-')}"


def check_least(name: str, value: float, least: float) -> None:
    """Holds a setting to its least value.

    Raises:
        ValueError: it is below.
    """
    if value < least:
        raise ValueError(f"{option(name)} {value} is out of range; valid: {least} or more")
