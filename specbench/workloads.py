"""Workloads: named sets of prompts, how each is decoded by default, its prompts' token ids, and
whether an output loops.

A card (``datasets/<name>.toml``) describes a workload; its prompts lie beside the card or come with
a package. Heavy imports happen where they are used, so that listing the cards is quick.
"""

import dataclasses
import hashlib
import importlib.util
import re
import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specbench.messages import in_one_line, suggest
from specbench.sources import Prompt, Source, read_data_set, read_file

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

KINDS = ("code", "code_edit", "math", "extraction", "summarise", "creative", "chat", "other")
_FILE_SUFFIXES = (".jsonl", ".json", ".jsonl.gz", ".json.gz")
_LONGEST_PERIOD = 64
_LEAST_REPEATS = 3
LEAST_TAIL = 24
"""Outputs of fewer tokens are too short to tell whether they loop."""
_NGRAM = 8
_LEAST_TOKENS = 64
_LOOPING_SHARE = 0.2


@dataclass(frozen=True, kw_only=True)
class Decoding:
    """How a workload is decoded by default; `specbench.sampling.Sampling` says what the numbers
    mean and checks them.

    Args:
        temperature: 0 is greedy.
        top_k: 0 is off.
        top_p: 1 is off.
        stop: strings that end the output.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    stop: tuple[str, ...] = ()

    def override(
        self,
        *,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        stop: Sequence[str] | None = None,
    ) -> "Decoding":
        """The same with what is given in place of the card's; None keeps the card's."""
        return Decoding(
            temperature=self.temperature if temperature is None else temperature,
            top_k=self.top_k if top_k is None else top_k,
            top_p=self.top_p if top_p is None else top_p,
            stop=self.stop if stop is None else tuple(stop),
        )


@dataclass(frozen=True, kw_only=True)
class Card:
    """What is known of a workload without reading its prompts.

    Args:
        name: what it is called on the command line; fit for the name of a file.
        kind: what sort of text it asks for, one of `KINDS`.
        description: one sentence.
        origin: where the prompts come from.
        licence: their SPDX licence.
        rows: how many prompts the source holds.
        sha256: of the source file; of the prompts where they come from the Hub.
        decoding: how it is decoded by default.
        source: the file with the prompts: beside the card, or within ``package``.
        package: the distribution whose import package holds the file; "" if it is beside the card.
        instruction: what is said to a chat model, with ``{prompt}`` where the turn goes; for
        prompts that are beginnings, not requests.

    Raises:
        ValueError: an unknown kind, or an instruction without ``{prompt}``.
    """

    name: str
    kind: str
    description: str
    origin: str
    licence: str
    rows: int
    sha256: str
    decoding: Decoding
    source: str
    package: str = ""
    instruction: str = "{prompt}"

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(_unknown("kind", self.kind, KINDS))
        if "{prompt}" not in self.instruction:
            raise ValueError("its instruction has no {prompt}, where the turn goes")

    @property
    def num_prompts(self) -> int:
        """How many prompts there are."""
        return self.rows


# What a card's fields are written as, by the type that they have here.
_TOML_TYPES: dict[Any, tuple[Any, str]] = {
    str: (str, "a string"),
    int: (int, "a whole number"),
    float: ((int, float), "a number"),
    tuple[str, ...]: (list, "a list of strings"),
    Decoding: (dict, "a table"),
}


@dataclass(frozen=True, kw_only=True)
class Workload(Card):
    """A card and its prompts, or as many of them as were asked for."""

    prompts: tuple[Prompt, ...]

    @property
    def num_prompts(self) -> int:
        """How many prompts were taken; ``rows`` says out of how many."""
        return len(self.prompts)


def prompts_folder() -> Path:
    """The folder with the cards: datasets/ of the checkout, else the one that the wheel brings.

    Raises:
        ValueError: the installation holds no prompts.
    """
    package = Path(__file__).parent
    for folder in (package / "prompts", package.parent / "datasets"):
        # Beside an installed specbench, datasets/ is HuggingFace's package: it holds no cards.
        if any(folder.glob("*.toml")) and not (folder / "__init__.py").exists():
            return folder
    raise ValueError("this installation of specbench holds no prompts; install it anew")


def list_workloads() -> list[Card]:
    """The cards, by name; no prompt is read.

    Raises:
        ValueError: a card cannot be read.
    """
    return [_read_card(path) for path in sorted(prompts_folder().glob("*.toml"))]


def load_workload(source: str, num_prompts: int | None = None) -> Workload:
    """Loads a workload.

    Args:
        source: a card's name; a file of JSON or JSON lines; or a data set on the Hub or in a
        folder, ``owner/name``, ``owner/name:subset`` or ``owner/name:subset:split`` (by default the
        split ``test``, else ``train``, else the first). Files and Hub data sets are of the kind
        ``other`` and decoded greedily.
        num_prompts: take so many, spread evenly over the rows and in their order, the same ones
        each time; all if there are fewer or none is given.

    Raises:
        ValueError: no such workload, its source has been changed, or a row has no usable prompt.
    """
    if num_prompts is not None and num_prompts < 1:
        raise ValueError(f"num_prompts {num_prompts} is out of range; valid: 1 or more")
    workload = _load(source)
    if num_prompts is None or num_prompts >= len(workload.prompts):
        return workload
    size = len(workload.prompts)
    picked = tuple(workload.prompts[i * size // num_prompts] for i in range(num_prompts))
    return dataclasses.replace(workload, prompts=picked)


def build_prompt(
    tokenizer: "PreTrainedTokenizerBase",
    turns: Sequence[str],
    answers: Sequence[str] = (),
    instruction: str = "{prompt}",
) -> tuple[int, ...]:
    """Token ids of the conversation so far, up to where the next answer begins.

    With a chat template: the template's, with its generation prompt; line breaks around a turn are
    dropped. Without one: turns and answers as plain text, a blank line between them, and the
    tokenizer's own special tokens.

    Args:
        turns: what the user says; those behind the one that is to be answered now are left out.
        answers: the answers to the earlier turns; as many turns are over.
        instruction: the workload's, which each turn is put in if there is a chat template.

    Raises:
        ValueError: all turns are answered, the chat template cannot be applied, or the prompt has
        no token and the tokenizer no BOS.
    """
    if len(answers) >= len(turns):
        raise ValueError(f"{len(answers)} answers to {len(turns)} turns leave nothing to answer")
    turns = turns[: len(answers) + 1]
    if tokenizer.chat_template:
        ids = _chat_ids(tokenizer, turns, answers, instruction)
    else:
        ids = tokenizer.encode("\n\n".join(_alternate(turns, answers)))
    if not ids and tokenizer.bos_token_id is None:
        raise ValueError("the prompt encodes to nothing and the tokenizer has no BOS token")
    return tuple(ids) or (int(tokenizer.bos_token_id),)


def _chat_ids(
    tokenizer: "PreTrainedTokenizerBase",
    turns: Sequence[str],
    answers: Sequence[str],
    instruction: str,
) -> list[int]:
    asked = [instruction.replace("{prompt}", turn.strip("\n")) for turn in turns]
    messages = [
        {"role": "assistant" if i % 2 else "user", "content": text}
        for i, text in enumerate(_alternate(asked, answers))
    ]
    try:
        ids: Any = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=False
        )
    except Exception as error:  # A template can do anything.
        raise ValueError(
            f"the tokenizer's chat template cannot be applied: {in_one_line(error)}"
        ) from error
    return list(ids)


def _alternate(turns: Sequence[str], answers: Sequence[str]) -> list[str]:
    """turn, answer, turn, ..., turn."""
    texts = [text for pair in zip(turns, answers, strict=False) for text in pair]
    return [*texts, turns[-1]]


def template_sha256(tokenizer: "PreTrainedTokenizerBase") -> str | None:
    """sha256 of the chat template that `build_prompt` uses; None where there is none."""
    if not tokenizer.chat_template:
        return None
    return hashlib.sha256(tokenizer.get_chat_template().encode()).hexdigest()


def is_looping(tokens: Sequence[int]) -> bool:
    """Whether an output (token ids behind the prompt) runs into a loop.

    Either it ends in the middle of one: its last max(24, 3 p) tokens have a period p of at most 64.
    Or it goes round with small changes or in large circles: it has 64 tokens or more, and a fifth
    or more of its 8-grams are there for the third time or later. (Saying a thing twice, as an edit
    of quoted code does, is no loop; a long list of nearly equal lines is one.)
    """
    return _ends_periodic(list(tokens)) or _repeated_share(tokens) >= _LOOPING_SHARE


def _ends_periodic(tokens: list[int]) -> bool:
    for period in range(1, _LONGEST_PERIOD + 1):
        length = max(LEAST_TAIL, _LEAST_REPEATS * period)
        tail = tokens[-length:]
        if len(tail) == length and tail[period:] == tail[:-period]:
            return True
    return False


def _repeated_share(tokens: Sequence[int]) -> float:
    """Share of the 8-grams that are a third or later occurrence; 0 for short outputs."""
    if len(tokens) < _LEAST_TOKENS:
        return 0.0
    ngrams = Counter(tuple(tokens[i : i + _NGRAM]) for i in range(len(tokens) - _NGRAM + 1))
    return sum(max(0, count - 2) for count in ngrams.values()) / ngrams.total()


def _load(source: str) -> Workload:
    cards = {card.name: card for card in list_workloads()}
    if source in cards:
        return _load_card(cards[source])
    if source.endswith(_FILE_SUFFIXES):
        path = Path(source).expanduser()
        stem = path.name.removesuffix(".gz").rsplit(".", 1)[0]
        return _foreign(_file_name(path.name), source, read_file(path, stem))
    if "/" in source or ":" in source:
        name = _file_name(source)
        return _foreign(name, source, read_data_set(source, name))
    others = "a .jsonl or .json file, or a Hub data set owner/name[:subset[:split]]"
    raise ValueError(f"{_unknown('workload', source, list(cards))}, {others}")


def _read_card(path: Path) -> Card:
    try:
        fields = tomllib.loads(path.read_text(encoding="utf-8"))
        if fields.get("name") != path.name.removesuffix(".toml"):
            raise ValueError(f"it calls itself {fields.get('name')!r}")
        _check_fields(Card, fields)
        decoding = fields.pop("decoding")
        _check_fields(Decoding, decoding)
        stop = tuple(decoding.pop("stop", ()))
        return Card(**fields, decoding=Decoding(**decoding, stop=stop))
    except (OSError, ValueError) as error:
        raise ValueError(f"card {path.name} cannot be used: {error}") from error


def _check_fields(cls: type, given: Mapping[str, Any]) -> None:
    fields = {field.name: field for field in dataclasses.fields(cls)}
    for name, value in given.items():
        if name not in fields:
            raise ValueError(_unknown("field", name, list(fields)))
        types, valid = _TOML_TYPES[fields[name].type]
        if not isinstance(value, types):
            raise ValueError(f"its field {name!r} is {value!r}; valid: {valid}")
    for name, field in fields.items():
        if name not in given and field.default is dataclasses.MISSING:
            raise ValueError(f"it has no field {name!r}")


def _load_card(card: Card) -> Workload:
    found = read_file(_source_folder(card) / card.source, card.name)
    if found.sha256 != card.sha256:
        raise ValueError(
            f"{card.source} has been changed: its sha256 is {found.sha256}, the card says "
            f"{card.sha256}"
        )
    if len(found.prompts) != card.rows:
        raise ValueError(f"{card.source} has {len(found.prompts)} rows, the card says {card.rows}")
    fields = {field.name: getattr(card, field.name) for field in dataclasses.fields(card)}
    return Workload(**fields, prompts=found.prompts)


def _source_folder(card: Card) -> Path:
    if not card.package:
        return prompts_folder()
    spec = importlib.util.find_spec(card.package.replace("-", "_"))
    if spec is None or not spec.submodule_search_locations:
        raise ValueError(
            f"workload {card.name!r} comes with the package {card.package}, which is not "
            f"installed: pip install {card.package}"
        )
    return Path(spec.submodule_search_locations[0])


def _foreign(name: str, origin: str, source: Source) -> Workload:
    return Workload(
        name=name,
        kind="other",
        description=f"Prompts from {origin}.",
        origin=origin,
        licence=source.licence,
        rows=len(source.prompts),
        sha256=source.sha256,
        decoding=Decoding(),
        source=origin,
        prompts=source.prompts,
    )


def _file_name(text: str) -> str:
    """The text with everything replaced that is awkward in the name of a file."""
    return re.sub(r"[^\w.-]+", "-", text).strip("-")


def _unknown(what: str, name: str, valid: Sequence[str]) -> str:
    return f"unknown {what} {name!r}{suggest(name, valid)}; valid: {', '.join(valid)}"
