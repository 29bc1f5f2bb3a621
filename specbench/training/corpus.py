"""The target's own answers, made in batches by the loop that is measured, and kept as token ids.

A corpus is a folder with one file of JSON lines, which only grows: what is there is not made again.
Half of the answers are greedy, half are drawn.
"""

import hashlib
import json
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from pydantic import TypeAdapter

from specbench import registry
from specbench.decode import Decoder
from specbench.depth import Fixed
from specbench.messages import in_one_line
from specbench.method import Request, Row
from specbench.records import BASELINE
from specbench.sampling import Sampling, request_key
from specbench.target import Target
from specbench.training.display import Display
from specbench.training.prompts import Evaluated, UserTurn, opening, usable
from specbench.workloads import build_prompt

GREEDY = Sampling()
DRAWN = Sampling(temperature=0.8, top_p=0.95)
_INVENTING = Sampling(temperature=1.0, top_p=0.95)
_LONGEST_PROMPT = 192
_FILE = "sequences.jsonl"
_CHUNK = 256
"""Prompts that are asked, and filed, together."""
_HELD_OUT = 20
"""Every 20th sequence is kept out of training."""


@dataclass(frozen=True)
class Answered:
    """A prompt's token ids and those of the target's answer.

    Args:
        number: of the prompt, in the order of asking.
        temperature: at which the answer was drawn; 0 for a greedy one.
    """

    number: int
    prompt: list[int]
    answer: list[int]
    temperature: float

    @property
    def tokens(self) -> list[int]:
        """All of them."""
        return [*self.prompt, *self.answer]


class Corpus:
    """Sequences in a folder.

    Args:
        folder: made if it is not there. A last line that was cut off is dropped.
        vocab_size: of the target.

    Raises:
        ValueError: a line of it is damaged.
    """

    def __init__(self, folder: Path, vocab_size: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / _FILE
        # The first of a number counts: two runs at once may have made the same.
        found: dict[int, Answered] = {}
        for one in _read(self.path, vocab_size):
            found.setdefault(one.number, one)
        self.sequences = list(found.values())

    def __len__(self) -> int:
        return len(self.sequences)

    @property
    def num_answered(self) -> int:
        """Tokens that the target wrote."""
        return sum(len(sequence.answer) for sequence in self.sequences)

    @property
    def next_number(self) -> int:
        """Of the prompt to ask next."""
        return max((one.number for one in self.sequences), default=-1) + 1

    def add(self, sequences: Iterable[Answered]) -> None:
        """Appends sequences, on the disk at once."""
        new = list(sequences)
        with self.path.open("a") as file:
            file.writelines(json.dumps(asdict(one)) + "\n" for one in new)
        self.sequences += new

    def cut(self, num_tokens: int) -> None:
        """Goes on with the first so many tokens of answers, and leaves the file as it is."""
        total = 0
        for index, sequence in enumerate(self.sequences):
            total += len(sequence.answer)
            if total >= num_tokens:
                self.sequences = self.sequences[: index + 1]
                return

    def indices(self, held_out: bool) -> list[int]:
        """Of the sequences to train on, or of the others."""
        return [i for i in range(len(self)) if (i % _HELD_OUT == _HELD_OUT - 1) is held_out]

    def token_counts(self, vocab_size: int) -> torch.Tensor:
        """[V], how often the target wrote each token in the sequences to train on."""
        written = [token for i in self.indices(False) for token in self.sequences[i].answer]
        return torch.bincount(torch.tensor(written, dtype=torch.long), minlength=vocab_size)


def _read(path: Path, vocab_size: int) -> Iterator[Answered]:
    if not path.is_file():
        return
    try:
        text = path.read_text(encoding="utf-8")
    except ValueError as error:
        raise ValueError(f"{path}: {in_one_line(error)}; remove the file") from error
    whole, newline, rest = text.rpartition("\n")
    if rest:
        path.write_text(whole + newline)
    adapter = TypeAdapter(Answered)
    for number, line in enumerate(whole.splitlines(), start=1):
        try:
            found: Answered = adapter.validate_json(line)
            if not all(0 <= token < vocab_size for token in found.tokens):
                raise ValueError(f"a token that the target has not; valid: 0..{vocab_size - 1}")
        except ValueError as error:
            raise ValueError(
                f"{path}, line {number}: {in_one_line(error)}; remove the line or the file"
            ) from error
        yield found


def corpus_name(target: Target, source: str, num_new_tokens: int) -> str:
    """A folder's name that tells corpora apart: by target, its type of weights, and what it was
    asked."""
    text = f"{target.fingerprint} {target.dtype} {source} {num_new_tokens}"
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass
class Speed:
    """Tokens, and the seconds in which they were made."""

    tokens: int = 0
    seconds: float = 0.0

    def __str__(self) -> str:
        return f"{self.tokens / self.seconds:.0f} tokens/s" if self.seconds else "nothing"


class Writer:
    """Has the target answer prompts, many at a time.

    Args:
        target: answers.
        batch_size: prompts that it answers together; as one is done the next one joins.
    """

    def __init__(self, target: Target, batch_size: int) -> None:
        self.target, self.batch_size = target, batch_size
        self.speed = Speed()
        self._method = registry.load_method(BASELINE)
        self._seconds = {"prefill": 0.0, "forward": 0.0}

    def answers(self, requests: Sequence[Request], sampling: Sampling) -> list[Row]:
        """Decodes requests to their ends, in the order in which they end."""
        method = self._method(self.target, self._method.Config())
        decoder = Decoder(
            self.target,
            method,
            Fixed(0, 0),
            sampling,
            self.batch_size,
            self._lap,
            share_prefixes=True,
        )
        waiting, done = list(requests), list[Row]()
        self._last = begin = time.perf_counter()
        while waiting or decoder.rows:
            joining, waiting = waiting[: decoder.num_free], waiting[decoder.num_free :]
            decoder.join(joining)
            done += decoder.step()
        self.speed.seconds += time.perf_counter() - begin
        self.speed.tokens += sum(len(row.output) for row in done)
        return done

    def _lap(self, phase: str) -> None:
        now = time.perf_counter()
        if phase in self._seconds:
            self._seconds[phase] += now - self._last
        self._last = now

    @property
    def target_share(self) -> float:
        """The share of the time that went into target forwards, those of prompts included."""
        return sum(self._seconds.values()) / max(self.speed.seconds, 1e-9)

    @property
    def prefill_share(self) -> float:
        """That of prompts alone."""
        return self._seconds["prefill"] / max(self.speed.seconds, 1e-9)

    def invent(self, seed: int, numbers: Sequence[int]) -> dict[int, str]:
        """Prompts that the target invents, by number; those that came to no end are left out."""
        tokenizer = self.target.tokenizer
        assert tokenizer is not None
        turn = UserTurn.of(tokenizer)
        requests, begun = [], {}
        for number in numbers:
            name = f"invented-{number}"
            begun[name] = number, opening(seed, number)
            ids = tokenizer.encode(begun[name][1], add_special_tokens=False)
            requests.append(
                Request(
                    id=name,
                    prompt=(*turn.before, *ids),
                    max_new_tokens=_LONGEST_PROMPT,
                    stop=(turn.end,),
                    key=request_key(seed, name),
                )
            )
        found = {}
        for row in self.answers(requests, _INVENTING):
            if row.finish != "length":
                number, begin = begun[row.request.id]
                text = begin + str(tokenizer.decode(row.output, skip_special_tokens=True))
                found[number] = text.partition(turn.end)[0].strip()
        return found


def write(
    corpus: Corpus,
    writer: Writer,
    prompts: Sequence[str] | None,
    evaluated: Evaluated,
    *,
    num_tokens: int,
    num_new_tokens: int,
    seed: int,
    display: Display,
) -> None:
    """Has the target answer prompts until the corpus holds so many tokens of answers.

    Args:
        corpus: grows, by all answers to 256 prompts at a time.
        writer: of the target.
        prompts: what is asked, in turn; None: what the target invents.
        evaluated: what must not be asked.
        num_tokens: of answers, wanted in all.
        num_new_tokens: the budget of an answer.
        seed: of all that is drawn.
        display: told how far it is.

    Raises:
        ValueError: a whole chunk of prompts cannot be answered.
    """
    tokenizer = writer.target.tokenizer
    assert tokenizer is not None, "a target without a tokenizer cannot be asked anything"
    longest = writer.target.max_context - num_new_tokens
    next_number = corpus.next_number
    while corpus.num_answered < num_tokens:
        numbers = range(next_number, next_number + _CHUNK)
        next_number += _CHUNK
        if prompts is None:
            texts = writer.invent(seed, numbers)
            texts = {number: texts[number] for number in usable(texts, evaluated)}
        else:
            texts = {number: prompts[number] for number in numbers if number < len(prompts)}
            if not texts:
                display.say(f"all {len(prompts)} prompts are answered")
                return
        new = []
        for sampling in (GREEDY, DRAWN):
            requests = {}
            for number, text in texts.items():
                if (number % 2 == 0) is sampling.greedy:
                    ids, name = build_prompt(tokenizer, [text]), f"answer-{number}"
                    if len(ids) <= longest:
                        key = request_key(seed, name)
                        requests[name] = (
                            number,
                            Request(id=name, prompt=ids, max_new_tokens=num_new_tokens, key=key),
                        )
            for row in writer.answers([request for _, request in requests.values()], sampling):
                number, request = requests[row.request.id]
                new.append(Answered(number, list(request.prompt), row.output, sampling.temperature))
        if not new:
            raise ValueError(
                f"of prompts {numbers[0]} to {numbers[-1]} none can be answered: the target "
                f"invents none that ends, or {num_new_tokens} tokens more do not fit into its "
                f"context of {writer.target.max_context}; valid: other --prompts, fewer "
                "--max-new-tokens"
            )
        corpus.add(sorted(new, key=lambda one: one.number))
        display.show("corpus", corpus.num_answered, num_tokens, "tokens", f"{writer.speed}")
