"""What the target is asked for training: prompts from a source, or prompts that it invents itself;
never one that it is evaluated on.

A chat model that is given its template up to where the user speaks goes on as the user: it invents
a prompt of the kind that it was tuned on (Magpie: Xu et al. 2024).
"""

import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from specbench.workloads import list_workloads, load_workload

_NGRAM = 13
_SENTINEL = "\u2603sentinel\u2603"
_LEAST_CHARACTERS = 12
OPENINGS = (
    *([""] * 6),
    "Write a Python function that",
    "Write a Python function called",
    "Complete this Python function:\n\n```python\ndef",
    "Fix the bug in this code:\n\n```python\n",
    "Write a short story about",
    "Write a poem about",
    "Continue this story:",
    "Solve this problem step by step:",
    "How many",
    "Explain",
    "Summarize the following text:",
    "Rewrite the following",
    "What",
)
"""How invented prompts begin, so that code, stories and sums are among them; half are free."""


class Evaluated:
    """The prompts of all workloads, to be kept out of training.

    Two texts overlap if they share 13 words in a row, letter case and punctuation aside (the rule
    of Brown et al. 2020, appendix C), or if one of fewer words stands whole in the other.
    """

    def __init__(self) -> None:
        self._ngrams: set[tuple[str, ...]] = set()
        self._shorter: dict[int, set[tuple[str, ...]]] = {}
        for card in list_workloads():
            for prompt in load_workload(card.name).prompts:
                for turn in prompt.turns:
                    self._add(_words(turn))

    def _add(self, words: tuple[str, ...]) -> None:
        if len(words) >= _NGRAM:
            self._ngrams |= set(_ngrams(words, _NGRAM))
        elif words:
            self._shorter.setdefault(len(words), set()).add(words)

    def overlap(self, text: str) -> bool:
        """Whether a text overlaps any of them."""
        words = _words(text)
        if any(ngram in self._ngrams for ngram in _ngrams(words, _NGRAM)):
            return True
        return any(
            ngram in short
            for size, short in self._shorter.items()
            # A question of three words may stand in any text.
            if size >= 6 or size == len(words)
            for ngram in _ngrams(words, size)
        )


def _words(text: str) -> tuple[str, ...]:
    return tuple(re.findall(r"[^\W_]+", text.lower()))


def _ngrams(words: Sequence[str], size: int) -> Iterator[tuple[str, ...]]:
    return (tuple(words[i : i + size]) for i in range(len(words) - size + 1))


def source_prompts(source: str, evaluated: Evaluated) -> tuple[list[str], int]:
    """The first turns of a source's prompts, without those that overlap the workloads.

    Returns:
        The prompts, and how many were dropped.

    Raises:
        ValueError: the source is a workload, or no prompt of it is left.
    """
    if source in {card.name for card in list_workloads()}:
        raise ValueError(f"{source!r} is a workload: what is measured is not trained on")
    found = [prompt.turns[0] for prompt in load_workload(source).prompts]
    kept = [text for text in dict.fromkeys(found) if not evaluated.overlap(text)]
    if not kept:
        raise ValueError(f"all {len(found)} prompts of {source!r} overlap the workloads")
    return kept, len(found) - len(kept)


@dataclass(frozen=True)
class UserTurn:
    """A chat template around what the user says.

    Args:
        before: token ids up to where the user's text begins.
        end: the text that ends it.
    """

    before: tuple[int, ...]
    end: str

    @staticmethod
    def of(tokenizer: PreTrainedTokenizerBase) -> "UserTurn":
        """The tokenizer's own.

        Raises:
            ValueError: it has no chat template, so a model of it cannot invent prompts.
        """
        if not tokenizer.chat_template:
            raise ValueError(
                "the target's tokenizer has no chat template, so it cannot invent prompts; give "
                "some with --prompts"
            )
        whole = tokenizer.apply_chat_template(
            [{"role": "user", "content": _SENTINEL}], add_generation_prompt=True, tokenize=False
        )
        before, sentinel, after = str(whole).partition(_SENTINEL)
        if not sentinel:
            raise ValueError("the target's chat template drops what the user says")
        ids = tokenizer.encode(before, add_special_tokens=False)
        # Up to the first line break or the end of a special token: enough to know it by.
        end = re.match(r"\s*(<\|?[^<>]*>|\[/?\w+\]|\S+)", after)
        return UserTurn(tuple(ids), end.group(1) if end else after)


def opening(seed: int, number: int) -> str:
    """How the invented prompt with a number begins."""
    return random.Random(f"{seed} {number}").choice(OPENINGS)


def usable(texts: Mapping[int, str], evaluated: Evaluated) -> list[int]:
    """Which invented prompts are worth asking: of some length, each once, those of no workload."""
    first = {text: number for number, text in reversed(list(texts.items()))}
    return sorted(
        number
        for text, number in first.items()
        if len(text) >= _LEAST_CHARACTERS and not evaluated.overlap(text)
    )
