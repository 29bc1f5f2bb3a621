"""Hints at what a user may have meant; imports nothing heavy."""

import difflib
from collections.abc import Iterable


def suggest(name: str, choices: Iterable[str]) -> str:
    """A hint at the nearest valid name, or nothing."""
    close = difflib.get_close_matches(name, list(choices), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""
