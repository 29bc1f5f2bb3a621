"""What of a run is left to do and how it is filed: a new run or one that goes on, its shards, their
retries and its folder."""

import contextlib
import json
import shlex
import tempfile
import textwrap
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from specbench import provenance
from specbench.bench import failures
from specbench.config import RunConfig
from specbench.files import remove_unfinished
from specbench.filing import Format, is_edited, shard_path
from specbench.merge import fingerprint, flat
from specbench.records import (
    RUN,
    FailureRecord,
    Record,
    read_info,
    read_shard,
    write_run,
    write_shard,
)
from specbench.shards import Shard, load_workloads, plan_shards, request_ids
from specbench.target.loading import refuse_unsupported, resolve
from specbench.worker import hush
from specbench.workloads import Workload

MAX_ATTEMPTS = 3
"""Times that a shard is tried before its prompts are recorded as failed."""
_MAY_CHANGE = {"provenance.workers", "provenance.threads_per_worker"}
"""What may be another in a run that goes on; every shard says how many threads it had."""


@dataclass
class Plan:
    """A run that is to be done.

    Args:
        config: its settings.
        folder: where it is filed.
        shards: all its shards.
        pending: those that are left.
        started: code, command and load at its start.
        before: the run's ``run.json``, if it goes on.
        notes: what its user should know.
    """

    config: RunConfig
    folder: Path
    workloads: Sequence[Workload]
    shards: Sequence[Shard]
    pending: deque[Shard]
    started: dict[str, Any]
    before: dict[str, Any] | None = None
    notes: list[str] = field(default_factory=list)
    _attempts: dict[str, int] = field(default_factory=dict)

    @property
    def num_done(self) -> int:
        """Shards that were finished before."""
        return len(self.shards) - len(self.pending)

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """While it lasts no other run writes to the folder.

        Raises:
            ValueError: another one does, or has begun there, or the folder cannot be written.
        """
        lock = FileLock(self.folder / ".lock", timeout=0)
        is_new = not self.folder.exists()

        def acquire() -> None:
            self.folder.mkdir(parents=True, exist_ok=True)
            try:
                lock.acquire()
            except Timeout as error:
                raise ValueError(
                    f"another run is writing to {self.folder}; wait for it or choose another --out"
                ) from error

        try:
            self._write(acquire)
            remove_unfinished(self.folder, shard_path(self.folder, "").parent)
            self._catch_up()
            yield
        finally:
            if lock.is_locked and is_new and not (self.folder / "run.json").exists():
                # A run that did not begin leaves nothing behind.
                with contextlib.suppress(OSError):
                    (self.folder / ".lock").unlink()
                    self.folder.rmdir()
            lock.release()

    def _catch_up(self) -> None:
        """Takes in what another run did in the folder since this one was planned."""
        if self.before is None:
            _check_free(self.folder)
        else:
            self.before = read_info(self.folder)
            left = open_shards(RUN, self.folder, [shard.id for shard in self.pending])
            self.pending = deque(shard for shard in self.pending if shard.id in left)

    def begin(self, described: Sequence[Mapping[str, Any]]) -> list[str]:
        """Files the run's settings and provenance; for a run that goes on, holds them against those
        it began with.

        Args:
            described: what each worker says of itself.

        Returns:
            What its user should know.

        Raises:
            ValueError: the workers do not measure the same, or not what the run began with.
        """
        info = self._info(described)
        if self.before is None:
            self._write(lambda: write_run(self.folder, info))
        else:
            go_on(RUN, self.folder, self.before, info)
            self._write(lambda: write_run(self.folder, self.before or {}))
        cpus = dict.fromkeys(str(one["machine"]["cpu"]) for one in described)
        if len(cpus) > 1:
            return [*self.notes, f"the workers run on different CPUs: {', '.join(cpus)}"]
        return self.notes

    def _info(self, described: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        names = [shard.id for shard in self.shards]
        return run_info(self.config.to_dict(), self.started, described, self.workloads, names)

    def finish(self, shard: Shard, records: Sequence[Record]) -> None:
        """Files a shard's records.

        Raises:
            ValueError: the folder cannot be written.
        """
        self._write(lambda: write_shard(self.folder, shard.id, records))

    def fail(self, shard: Shard, reason: str) -> bool:
        """Puts a shard back, or records its prompts as failed after the last attempt.

        Returns:
            Whether it is tried again.
        """
        self._attempts[shard.id] = self._attempts.get(shard.id, 0) + 1
        if self._attempts[shard.id] < MAX_ATTEMPTS:
            self.pending.append(shard)
            return True
        ids = [name for prompt in shard.workload.prompts for name in request_ids(prompt)]
        why = f"given up after {MAX_ATTEMPTS} attempts: {reason}"
        self.finish(shard, failures(shard.workload.name, ids, [why] * len(ids)))
        return False

    def _write(self, write: Callable[[], object]) -> None:
        try:
            write()
        except OSError as error:
            raise ValueError(
                f"cannot write to {self.folder}: {error.strerror or error}; "
                f"{what_is_kept(self.folder)}"
            ) from error


def run_info(
    settings: Mapping[str, Any],
    started: Mapping[str, Any],
    described: Sequence[Mapping[str, Any]],
    workloads: Sequence[Workload],
    shards: Sequence[str],
) -> dict[str, Any]:
    """A run's settings and provenance, as they read from their file.

    Args:
        settings: the run's.
        started: code, command and load at its start.
        described: what each worker says of itself.
        workloads: what is measured.
        shards: how its shards are called.

    Raises:
        ValueError: the workers do not measure the same.
    """
    first = described[0]
    for one in described[1:]:
        for key in ("target", "methods", "device", "template_sha256"):
            if one[key] != first[key]:
                raise ValueError(
                    f"the workers differ in their {key}: {first[key]} and {one[key]}; "
                    "give them the same machines, --dtype and models"
                )
    info = {
        "settings": settings,
        "provenance": {
            **started,
            **first["machine"],
            "device": first["device"],
            "dtype": first["target"]["dtype"],
            "threads_per_worker": first["num_threads"],
            "workers": len(described),
            "gpus": [one["gpus"] for one in described if one.get("gpus")],
            "weights_sha256": first["target"]["weights_sha256"],
            "template_sha256": first["template_sha256"],
        },
        "target": first["target"],
        "methods": first["methods"],
        "workloads": {w.name: provenance.describe_workload(w) for w in workloads},
        "shards": list(shards),
    }
    read_back: dict[str, Any] = json.loads(json.dumps(info))
    return read_back


def new(config: RunConfig, folder: Path) -> Plan:
    """A new run.

    Raises:
        ValueError: no such target or workload, or a folder that cannot be used.
    """
    started = provenance.collect()
    _check_free(folder)
    workloads, shards = _load(config)
    check_writable(folder)
    return Plan(config, folder, workloads, shards, deque(shards), started)


def resume(folder: Path, num_workers: int | None = None) -> Plan:
    """A run that goes on: its finished shards are kept, and what is damaged is done again.

    Raises:
        ValueError: the folder holds no run, what it ran on is no more, or it cannot be written.
    """
    info = read_info(folder)
    started = provenance.collect()
    config = RunConfig.from_dict(
        info["settings"] | ({"workers": num_workers} if num_workers is not None else {})
    )
    damaged = open_shards(RUN, folder, info["shards"])
    if not damaged:
        return Plan(config, folder, [], [], deque(), started, info)
    workloads, shards = _load(config)
    if [shard.id for shard in shards] != info["shards"]:
        raise ValueError(
            f"{folder} cannot go on: its workloads are cut into other shards now; "
            "start a new run with --out"
        )
    check_writable(folder)
    pending = deque(shard for shard in shards if shard.id in damaged)
    notes = [f"measured again: {reason}" for reason in damaged.values() if reason]
    notes += [
        f"{count} failures in {shard_path(folder, name)} are kept; remove the file to try them "
        "again"
        for name in info["shards"]
        if name not in damaged and (count := _count_failures(folder, name))
    ]
    return Plan(config, folder, workloads, shards, pending, started, info, notes)


def what_is_kept(folder: Path) -> str:
    """What is left of a run that stops, and how to go on with it."""
    if (folder / "run.json").is_file():
        if not any((folder / "shards").glob("*.jsonl")):
            return f"no shard is finished yet, begin again with `{resume_command(folder)}`"
        return f"what is finished is kept, go on with `{resume_command(folder)}`"
    return "nothing was measured yet"


def resume_command(folder: Path) -> str:
    """What to type to go on with a run."""
    return f"specbench run --resume {shlex.quote(str(folder))}"


def _load(config: RunConfig) -> tuple[list[Workload], list[Shard]]:
    """The run's workloads and shards; refuses a target that cannot be used."""
    hush()
    refuse_unsupported(resolve(config.target), config.target)
    workloads = load_workloads(config.workloads, config.prompts)
    return workloads, [shard for w in workloads for shard in plan_shards(w, config.batch_size)]


def open_shards(kind: Format[Any], folder: Path, shards: Sequence[str]) -> dict[str, str]:
    """The shards that are to be measured, and why; "" for those that were not yet."""
    found = {shard: _why_open(kind, folder, shard) for shard in shards}
    return {shard: reason for shard, reason in found.items() if reason is not None}


def _why_open(kind: Format[Any], folder: Path, shard: str) -> str | None:
    """Why a shard is to be measured, "" if it was not yet; None if it is done."""
    path = shard_path(folder, shard)
    if not path.exists():
        return ""
    try:
        kind.read_shard(path)
    except ValueError as error:
        return str(error)
    return None


def _count_failures(folder: Path, shard: str) -> int:
    return sum(
        isinstance(record, FailureRecord) for record in read_shard(shard_path(folder, shard))
    )


def _check_free(folder: Path) -> None:
    held = [name for name in ("run.json", "shards") if (folder / name).exists()]
    if held:
        raise ValueError(
            f"{folder} already holds a run ({held[0]}); go on with `{resume_command(folder)}` or "
            "choose another --out"
        )


def check_writable(folder: Path) -> None:
    """Makes and removes a file in the folder, or in the first one above it that there is.

    Raises:
        ValueError: that fails.
    """
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    try:
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as error:
        raise ValueError(
            f"cannot write to {folder}: {there}: {error.strerror or error}; valid: a folder that "
            "can be made or written"
        ) from error


def go_on(kind: Format[Any], folder: Path, before: dict[str, Any], now: Mapping[str, Any]) -> None:
    """Holds a run that goes on against what it began with, and adds to its provenance that it does.

    Args:
        kind: of run.
        before: its settings and provenance, which are added to.
        now: what they would be of a new run.

    Raises:
        ValueError: it would mix results, or was edited.
    """
    changed = _changes(before, now)
    if changed:
        raise ValueError(
            f"{folder} cannot go on, it would mix results: "
            f"{textwrap.shorten('; '.join(changed), 300, placeholder=' ...')}; "
            "start a new run with --out"
        )
    if is_edited(before):
        raise ValueError(f"{folder}/{kind.info} has been edited; start a new run with --out")
    keys = ("argv", "started", "load_average", "workers", "threads_per_worker")
    resumed = before["provenance"].setdefault("resumed", [])
    resumed.append({key: now["provenance"][key] for key in keys})


def _changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What is not as it was when a run began, a sentence for each."""
    was, is_ = _flatten(before), _flatten(now)
    return [
        f"{key} was {was.get(key)}, is {is_.get(key)}"
        for key in sorted(was.keys() | is_.keys())
        if key not in _MAY_CHANGE and was.get(key) != is_.get(key)
    ]


def _flatten(info: Mapping[str, Any]) -> dict[str, Any]:
    """The fingerprint, and what is to be measured."""
    asked = {part: info.get(part, {}) for part in ("methods", "workloads")}
    return fingerprint(info) | flat(asked)
