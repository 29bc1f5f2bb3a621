"""Runs a sweep: one run after the other, each in its folder ``batch-N``; goes on with one that was
cut. ``sweep.json`` holds the settings that all of them follow from."""

import contextlib
import dataclasses
import gc
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from specbench import cluster, plan
from specbench.files import write_atomically
from specbench.filing import what_else
from specbench.messages import counted, in_one_line
from specbench.records import Run, read_run
from specbench.shards import load_workloads
from specbench.stats import MIN_CLUSTERS
from specbench.sweep.config import SweepConfig

SCHEMA_VERSION = 1
_FOLDER = re.compile(r"batch-(\d+)")


_KEPT: dict[str, Any] = {
    "settings": dict[str, Any],
    "batches": list[int],
    "unready": dict[str, str],
    "notes": list[str],
}
"""What ``sweep.json`` holds beside its schema."""


@dataclass
class Sweep:
    """A sweep that is to be done or to go on.

    Args:
        folder: where it is filed.
        config: its settings.
        batches: the batch sizes that the workloads have prompts for.
        unready: by name, why a method could not be set up.
        notes: what its user should know.
        shortages: likewise, where too few prompts are to come for a verdict; not filed, as the page
            says it of what came.
    """

    folder: Path
    config: SweepConfig
    batches: tuple[int, ...]
    unready: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    shortages: list[str] = field(default_factory=list)

    def run(self, use_ray: bool, say: Callable[[str], None]) -> None:
        """Measures what is left, the smallest batch first.

        Raises:
            ValueError: what a run finds wrong with the settings or the folder.
        """
        for note in (*self.notes, *self.shortages):
            say(note)
        try:
            for batch in self.batches:
                self._run(batch, use_ray, say)
        except ValueError:
            self._clear()
            raise

    def _run(self, batch: int, use_ray: bool, say: Callable[[str], None]) -> None:
        todo = self._plan(batch)
        if not todo.pending:
            return
        num_names, num_shards = len(todo.config.methods), len(todo.shards)
        say(f"batch size {batch}: {counted(num_names, 'setting')}, {counted(num_shards, 'shard')}")
        try:
            cluster.run(todo, use_ray=use_ray)
        except ValueError:
            if not self._leave_out(todo, use_ray, say):
                raise
            cluster.run(self._plan(batch), use_ray=use_ray)
        # Without Ray the run's target and methods were in this process, out of the collector's
        # sight.
        gc.unfreeze()
        gc.collect()

    def _plan(self, batch: int) -> plan.Plan:
        folder = run_folder(self.folder, batch)
        if (folder / "run.json").is_file():
            return plan.resume(folder, self.config.workers)
        todo = plan.new(self.config.run_config(batch, self.unready), folder)
        self._write()
        return todo

    def _leave_out(self, todo: plan.Plan, use_ray: bool, say: Callable[[str], None]) -> bool:
        """After a run could not begin: finds out which methods cannot be set up, so that they are
        no part of the next attempt, nor of the other runs.

        Returns:
            Whether that may help.
        """
        if (todo.folder / "run.json").exists():
            return False
        found = cluster.unready(todo.config, use_ray=use_ray)
        self.unready |= found
        for reason in found.values():
            self.notes.append(f"left out: {reason}")
            say(self.notes[-1])
        return bool(found)

    def _write(self) -> None:
        about = {
            "schema": SCHEMA_VERSION,
            "settings": self.config.to_dict(),
            "batches": list(self.batches),
            "unready": self.unready,
            "notes": self.notes,
        }
        write_atomically(self.folder / "sweep.json", json.dumps(about, indent=1) + "\n")

    def _clear(self) -> None:
        """A sweep that did not begin leaves nothing behind."""
        if not any(self.folder.glob("batch-*/run.json")):
            (self.folder / "sweep.json").unlink(missing_ok=True)
            with contextlib.suppress(OSError):
                self.folder.rmdir()


def run_folder(folder: Path, batch: int) -> Path:
    """Where the run of a batch size lies."""
    return folder / f"batch-{batch}"


def new(config: SweepConfig, folder: Path) -> Sweep:
    """A new sweep.

    Raises:
        ValueError: the folder holds one already, or no workload has prompts enough for a batch.
    """
    if (folder / "sweep.json").exists():
        raise ValueError(
            f"{folder} already holds a sweep; go on with `specbench sweep --resume {folder}` or "
            "choose another --out"
        )
    workloads = load_workloads(config.workloads, config.num_prompts)
    fewest = min(workloads, key=lambda workload: workload.num_prompts)
    num = fewest.num_prompts
    batches = tuple(batch for batch in config.batches if batch <= num)
    if not batches:
        raise ValueError(
            f"--batches {', '.join(map(str, config.batches))}: {fewest.name} has "
            f"{counted(num, 'prompt')} here; valid: 1..{num}"
        )
    notes = [f"left out: {reason}" for reason in config.left_out().values()]
    notes += [
        f"left out: batch size {batch}, {fewest.name} has {counted(num, 'prompt')} here"
        for batch in config.batches
        if batch not in batches
    ]
    shortages = [
        f"batch size {batch}: {counted(num, 'prompt')} of {fewest.name} make "
        f"{counted(num // batch, 'batch')}, a verdict takes {MIN_CLUSTERS} "
        f"(--prompts {MIN_CLUSTERS * batch})"
        for batch in batches
        if num < MIN_CLUSTERS * batch
    ]
    return Sweep(folder, config, batches, notes=notes, shortages=shortages)


def resume(folder: Path, num_workers: int | None = None) -> Sweep:
    """A sweep that goes on.

    Raises:
        ValueError: the folder holds none that can be read.
    """
    about = read_about(folder)
    config = SweepConfig.from_dict(about["settings"])
    if num_workers is not None:
        config = dataclasses.replace(config, workers=num_workers)
    return Sweep(folder, config, tuple(about["batches"]), about["unready"], about["notes"])


def read_about(folder: Path) -> dict[str, Any]:
    """What ``sweep.json`` holds.

    Raises:
        ValueError: there is none that can be read.
    """
    try:
        about: dict[str, Any] = json.loads((folder / "sweep.json").read_text(encoding="utf-8"))
        found = {key: about[key] for key in ("schema", *_KEPT)}
    except FileNotFoundError:
        raise ValueError(
            f"{folder} holds no sweep: there is no sweep.json in it{what_else(folder)}"
        ) from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{folder} holds no readable sweep: {in_one_line(error)}") from error
    if found["schema"] != SCHEMA_VERSION:
        raise ValueError(
            f"{folder}/sweep.json has schema version {found['schema']}; this version of specbench "
            f"reads {SCHEMA_VERSION}"
        )
    for key, kind in _KEPT.items():
        try:
            TypeAdapter(kind).validate_python(found[key], strict=True)
        except ValidationError:
            raise ValueError(
                f"{folder} holds no readable sweep: {key} of sweep.json is {found[key]!r}"
            ) from None
    return found


def read_runs(folder: Path) -> dict[int, Run]:
    """The runs of a sweep as far as they are there, by batch size.

    Raises:
        ValueError: the folder holds no sweep, nothing of it was measured, or a run cannot be read.
    """
    read_about(folder)
    found = {
        int(match[1]): path
        for path in folder.iterdir()
        if (match := _FOLDER.fullmatch(path.name)) and (path / "run.json").is_file()
    }
    if not found:
        raise ValueError(f"{folder} holds a sweep of which nothing was measured yet")
    runs = {batch: read_run(found[batch]) for batch in sorted(found)}
    for batch, run in runs.items():
        if (size := run.info["settings"]["batch_size"]) != batch:
            raise ValueError(f"{run.folder} is a run of batch size {size}; valid: its own name")
    return runs
