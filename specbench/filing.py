"""How runs of any kind are filed: a file of settings and provenance, and ``shards/*.jsonl``.

Files appear whole or not at all, and what is cut, edited, copied or of another schema is refused by
name. What the records are, each kind of run says for itself.
"""

import hashlib
import json
import shlex
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

from pydantic import ConfigDict, TypeAdapter

from specbench.files import write_atomically
from specbench.messages import in_one_line

SCHEMA_VERSION = 3
_NESTED_PARTS = ("methods", "workloads")
_KINDS = {
    "run.json": "it is a run, which `specbench report {}` shows",
    "sweep.json": "it is a sweep, which `specbench sweep --report {}` shows; the batch-* in it are "
    "runs",
    "serving.json": "it is a serving run, which `specbench serve --report {}` shows",
}
"""By the file of its settings, what a folder holds."""
_INFO_PARTS = ("settings", "provenance", "target", *_NESTED_PARTS)

R = TypeVar("R")


class Strict:
    """Files are read as they were written: no other type, no unknown field, no NaN."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(
        strict=True, extra="forbid", allow_inf_nan=False
    )


@dataclass(frozen=True)
class Format(Generic[R]):
    """How one kind of run is filed.

    Args:
        info: the name of the file of its settings and provenance.
        kinds: what its shards hold, by the name of the kind.
        check: holds the records of a shard against each other.
    """

    info: str
    kinds: Mapping[str, type]
    check: Callable[[Path, Sequence[R]], None] = lambda path, records: None

    @property
    def names(self) -> dict[type, str]:
        """Of each type of record, the name of its kind."""
        return {cls: kind for kind, cls in self.kinds.items()}

    def write_info(self, folder: Path, info: dict[str, Any]) -> None:
        """Files a run's settings and provenance. A new run gets an id, which all its shards
        bear."""
        whole = {"schema": SCHEMA_VERSION, "id": uuid.uuid4().hex} | info
        whole["sha256"] = _info_sha256(whole)
        write_atomically(folder / self.info, json.dumps(whole, indent=1) + "\n")

    def read_info(self, folder: Path) -> dict[str, Any]:
        """A run's settings and provenance.

        Raises:
            ValueError: the folder holds no run, or one of another schema.
        """
        try:
            info: dict[str, Any] = json.loads((folder / self.info).read_text(encoding="utf-8"))
            if not isinstance(info, dict):
                raise TypeError(f"{self.info} is no JSON object")
            schema = info["schema"]
        except FileNotFoundError:
            raise ValueError(
                f"{folder} holds no run: there is no {self.info} in it{what_else(folder)}"
            ) from None
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise ValueError(f"{folder} holds no readable run: {in_one_line(error)}") from error
        _check_schema(folder / self.info, schema)
        if problem := _what_is_wrong(info):
            raise ValueError(f"{folder} holds no readable run: {self.info} {problem}")
        return info

    def run_id(self, folder: Path) -> str | None:
        """The id of a folder's run; None where none has begun there."""
        if not (folder / self.info).exists():
            return None
        return str(self.read_info(folder)["id"])

    def write_shard(self, folder: Path, shard: str, records: Sequence[R]) -> None:
        """Files a finished shard: a header line that says of which run it is and what follows, then
        the records."""
        names = self.names
        lines = ({"kind": names[type(record)], **_values(record)} for record in records)
        body = "".join(json.dumps(line) + "\n" for line in lines)
        header = {
            "kind": "shard",
            "schema": SCHEMA_VERSION,
            "run": self.run_id(folder),
            "shard": shard,
            "num_records": len(records),
            "sha256": _sha256(body),
        }
        write_atomically(shard_path(folder, shard), json.dumps(header) + "\n" + body)

    def read_shard(self, path: Path) -> list[R]:
        """The records of a shard.

        Raises:
            ValueError: the file is not a whole shard of this schema and of the run in its folder,
            or not as it was written; the message names the file and what is wrong.
        """
        try:
            text = path.read_text(encoding="utf-8")
            lines: list[Any] = [json.loads(line) for line in text.splitlines()]
            header: Any = lines.pop(0) if lines else None
            if not isinstance(header, dict):
                raise TypeError("it has no header")
            schema = header["schema"]
        except (OSError, ValueError, IndexError, KeyError, TypeError, RecursionError) as error:
            raise ValueError(
                f"{path} is not a readable result file: {in_one_line(error)}"
            ) from error
        _check_schema(path, schema)
        shard, expected = str(header.get("shard")), header.get("num_records")
        if shard_path(Path(), shard).name != path.name:
            raise ValueError(f"{path} holds shard {shard!r}; a shard's file bears its name")
        if expected != len(lines):
            raise ValueError(f"{path} holds {len(lines)} records, its header says {expected}")
        if header.get("run") != self.run_id(path.parent.parent):
            raise ValueError(f"{path} belongs to another run; it has been copied here")
        records = [self._record(path, number, line) for number, line in enumerate(lines, start=2)]
        self.check(path, records)
        if header.get("sha256") != _sha256(text.partition("\n")[2]):
            raise ValueError(f"{path} has been edited: its sha256 is not that of its records")
        return records

    def _record(self, path: Path, number: int, line: Any) -> R:
        try:
            fields = dict(line)
            adapter = _adapter(self.kinds[fields.pop("kind")])
            record: R = adapter.validate_json(json.dumps(fields))
            return record
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"{path} holds a broken record in line {number}: {in_one_line(error)}"
            ) from error


@cache
def _adapter(cls: type) -> TypeAdapter[Any]:
    return TypeAdapter(cls)


def _values(record: Any) -> dict[str, Any]:
    return asdict(record)


def shard_path(folder: Path, shard: str) -> Path:
    """The file of a shard."""
    return folder / "shards" / f"{shard}.jsonl"


def what_else(folder: Path) -> str:
    """What a folder that is not of the kind asked for holds instead, and what shows that; empty
    where it is of no known kind."""
    for info, found in _KINDS.items():
        if (folder / info).is_file():
            return "; " + found.format(shlex.quote(str(folder)))
    return ""


def is_edited(info: Mapping[str, Any]) -> bool:
    """Whether a run's settings and provenance are not as they were written; those of a run in
    memory, without an id, never were."""
    return "id" in info and info.get("sha256") != _info_sha256(info)


def _info_sha256(info: Mapping[str, Any]) -> str:
    rest = {key: value for key, value in info.items() if key != "sha256"}
    return _sha256(json.dumps(rest, sort_keys=True))


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _check_schema(path: Path, schema: Any) -> None:
    if schema != SCHEMA_VERSION:
        raise ValueError(
            f"{path} has schema version {schema}; this version of specbench reads {SCHEMA_VERSION}"
        )


def _what_is_wrong(info: Mapping[str, Any]) -> str:
    """What settings and provenance lack; empty if nothing."""
    shards = info.get("shards")
    if not isinstance(shards, list) or not all(isinstance(shard, str) for shard in shards):
        return "lists no shards"
    if len(set(shards)) < len(shards):
        return "lists a shard twice"
    for part in _INFO_PARTS:
        value = info.get(part)
        nested = value.values() if isinstance(value, dict) and part in _NESTED_PARTS else ()
        if not isinstance(value, dict) or not all(isinstance(inner, dict) for inner in nested):
            return f"has no {part}"
    return "" if isinstance(info.get("id"), str) else "has no id"
