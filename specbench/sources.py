"""Where prompts come from: reads and checks rows of JSON files and of data sets on the Hub, with
HuggingFace `datasets`.

A row has a ``prompt`` (text) or ``turns`` (a list of texts), and may have an id and a category.
"""

import glob
import hashlib
import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from specbench.messages import in_one_line

_ID_FIELDS = ("id", "question_id", "task_id", "prompt_id")
_TEXT_FIELDS = ("turns", "prompt")


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """What one user says: a turn or several, each but the first after the target's answer."""

    id: str
    turns: tuple[str, ...]
    category: str


@dataclass(frozen=True, kw_only=True)
class Source:
    """Prompts as they were found."""

    prompts: tuple[Prompt, ...]
    sha256: str
    """Of the file; of the prompts where they come from the Hub."""
    licence: str = "unknown"


def read_file(path: Path, name: str) -> Source:
    """Reads a file of JSON lines (or a JSON list), also a gzipped one.

    Args:
        name: rows without an id get the id ``<name>-<row number>``.

    Raises:
        ValueError: there is no such file, it is not JSON, or a row has no usable prompt.
    """
    if not path.is_file():
        raise ValueError(f"no file {str(path)!r}")
    data = path.read_bytes()
    if broken := _broken_row(path):
        raise ValueError(f"cannot read {path.name}: {broken}")
    rows = _read_rows(path) if data.strip() else []
    prompts = _prompts(rows, where=path.name, name=name)
    return Source(prompts=prompts, sha256=hashlib.sha256(data).hexdigest())


def read_data_set(source: str, name: str) -> Source:
    """Reads ``owner/name``, ``owner/name:subset`` or ``owner/name:subset:split`` from the Hub, or
    such a folder; where no split is named, ``test``, else ``train``, else the first.

    Args:
        name: rows without an id get the id ``<name>-<row number>``.

    Raises:
        ValueError: it cannot be loaded, or a row has no usable prompt.
    """
    import datasets
    from datasets.exceptions import DatasetsError

    repository, subset, split = (*source.split(":", 2), "", "")[:3]
    try:
        loaded = datasets.load_dataset(repository, subset or None, split=split or None)
    except (OSError, ValueError, ImportError, DatasetsError) as error:
        raise ValueError(f"cannot load data set {source!r}: {in_one_line(error)}") from error
    if not split:
        loaded = loaded[next((s for s in ("test", "train") if s in loaded), next(iter(loaded)))]
    prompts = _prompts(_rows(loaded, where=source), where=source, name=name)
    text = json.dumps([asdict(prompt) for prompt in prompts])
    return Source(
        prompts=prompts,
        sha256=hashlib.sha256(text.encode()).hexdigest(),
        licence=loaded.info.license or "unknown",
    )


def _read_rows(path: Path) -> list[dict[str, Any]]:
    import datasets
    from datasets.exceptions import DatasetsError

    # Read into memory: the user's cache may be read-only, and need not keep a copy.
    with tempfile.TemporaryDirectory() as cache, _quiet():
        try:
            loaded = datasets.load_dataset(
                "json",
                data_files=glob.escape(str(path)),
                split="train",
                cache_dir=cache,
                keep_in_memory=True,
            )
        except (OSError, EOFError, ValueError, DatasetsError) as error:
            reason = in_one_line(error.__cause__ or error)
            raise ValueError(f"cannot read {path.name}: {reason}") from error
        return _rows(loaded, where=path.name)


def _rows(loaded: Any, *, where: str) -> list[dict[str, Any]]:
    """The rows of a `datasets.Dataset`, with the fields that prompts are made of."""
    fields: list[str] = loaded.column_names
    if not set(fields) & set(_TEXT_FIELDS):
        valid = " or ".join(repr(name) for name in _TEXT_FIELDS)
        raise ValueError(f"{where} has the fields {', '.join(fields)}; valid: {valid} among them")
    wanted = (*_ID_FIELDS, *_TEXT_FIELDS, "category")
    rows: list[dict[str, Any]] = loaded.select_columns(
        [name for name in fields if name in wanted]
    ).to_list()
    return rows


def _broken_row(path: Path) -> str:
    """Which row of a .jsonl file is no JSON object; "" if none is."""
    if path.suffix != ".jsonl":
        return ""
    lines = path.read_bytes().split(b"\n")
    for number, line in enumerate((line for line in lines if line.strip()), start=1):
        try:
            if not isinstance(json.loads(line), dict):
                return f"row {number} is no JSON object"
        except (ValueError, RecursionError) as error:
            return f"row {number} is not JSON: {error}"
    return ""


def _prompts(rows: Sequence[Mapping[str, Any]], *, where: str, name: str) -> tuple[Prompt, ...]:
    if not rows:
        raise ValueError(f"{where} holds no prompts")
    prompts: dict[str, Prompt] = {}
    for number, row in enumerate(rows, start=1):
        try:
            prompt = _prompt(row, default_id=f"{name}-{number}")
            if prompt.id in prompts:
                raise ValueError(f"its id {prompt.id!r} is taken by an earlier row")
        except ValueError as error:
            raise ValueError(f"{where}, row {number}: {error}") from error
        prompts[prompt.id] = prompt
    return tuple(prompts.values())


def _prompt(row: Mapping[str, Any], default_id: str) -> Prompt:
    texts = [row[name] for name in _TEXT_FIELDS if row.get(name) is not None]
    if not texts:
        raise ValueError("it has no prompt; valid: a field 'prompt' or 'turns'")
    turns = [texts[0]] if isinstance(texts[0], str) else texts[0]
    if not isinstance(turns, list) or not all(isinstance(turn, str) for turn in turns):
        raise ValueError(f"its prompt is not text: {str(turns)[:60]!r}")
    if not turns or not all(turn.strip() for turn in turns):
        raise ValueError("its prompt has an empty turn or none")
    ids = [str(row[name]) for name in _ID_FIELDS if row.get(name) not in (None, "")]
    return Prompt(
        id=ids[0] if ids else default_id,
        turns=tuple(turns),
        category=str(row.get("category") or ""),
    )


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the progress bars and the log of `datasets`; its errors are ours to tell."""
    import datasets

    level, bars = datasets.logging.get_verbosity(), not datasets.are_progress_bars_disabled()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        datasets.logging.set_verbosity(level)
        if bars:
            datasets.enable_progress_bars()
