"""What can be wrong with a method or a loop, and where that first shows."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from transformers import PreTrainedTokenizerBase

from specbench.method import Row
from specbench.target import Target

RULE, CACHE, COUNTING = "wrong rule", "cache", "counting"
BUDGET, STATE, METADATA = "budget", "state", "metadata"
ERROR = "error"
KINDS = {
    METADATA: "a proposal is not what it says: its root, its shape, what its tokens come from",
    BUDGET: "more is drafted, or kept, than was allowed",
    COUNTING: "an output ends at the wrong place, or a step's counts are not what was committed",
    CACHE: "a cache does not hold what reading the committed tokens anew would write",
    STATE: "an output or a draft depends on other prompts, before it or beside it",
    RULE: "all of that is right, and a token is not the one that the target would choose",
    ERROR: "something was raised",
}
"""The kinds of fault, in the order in which they are looked for: a later one is named only where
the earlier ones were not found."""

_CONTEXT = 8


@dataclass(frozen=True)
class WrongToken:
    """The first token of an output that differs.

    Args:
        request: the request's id.
        position: its index in the output.
        context: the tokens before it.
        expected, found: the two tokens; None where an output had ended.
        tokenizer: spells them.
    """

    request: str
    position: int
    context: tuple[int, ...]
    expected: int | None
    found: int | None
    tokenizer: PreTrainedTokenizerBase | None

    def __str__(self) -> str:
        return (
            f"request {self.request!r}, output token {self.position}, after "
            f"{self._spell(self.context)}: {self._name(self.found)} instead of "
            f"{self._name(self.expected)}"
        )

    def _name(self, token: int | None) -> str:
        return "the end" if token is None else self._spell([token])

    def _spell(self, tokens: Sequence[int]) -> str:
        ids = " ".join(map(str, tokens))
        return f"{ids} ({self.tokenizer.decode(list(tokens))!r})" if self.tokenizer else ids


class Fault(AssertionError):
    """A case that failed.

    Args:
        kind: one of `KINDS`.
        message: what is wrong.
        wrong: the first wrong token, where one is.
    """

    def __init__(self, kind: str, message: str, wrong: WrongToken | None = None) -> None:
        assert kind in KINDS
        super().__init__(f"{kind}: {message}" + (f"; {wrong}" if wrong else ""))
        self.kind, self.message, self.wrong = kind, message, wrong

    def __reduce__(self) -> tuple[type["Fault"], tuple[str, str, WrongToken | None]]:
        return Fault, (self.kind, self.message, self.wrong)


class Difference(NamedTuple):
    """Where two outputs first differ, and whether one of them had ended there."""

    position: int
    is_end: bool


def difference(expected: Sequence[int], found: Sequence[int]) -> Difference | None:
    """Where an output leaves another; None if it does not."""
    shared = min(len(expected), len(found))
    for position in range(shared):
        if expected[position] != found[position]:
            return Difference(position, False)
    return None if len(expected) == len(found) else Difference(shared, True)


def wrong_token(target: Target, row: Row, expected: Sequence[int], position: int) -> WrongToken:
    """What stands there instead of what was expected."""
    output, begin = row.output, len(row.request.prompt) + position
    return WrongToken(
        row.request.id,
        position,
        tuple(row.tokens[max(0, begin - _CONTEXT) : begin]),
        expected[position] if position < len(expected) else None,
        output[position] if position < len(output) else None,
        target.tokenizer,
    )
