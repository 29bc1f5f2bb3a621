"""Cuts workloads into shards: blocks of prompts that are measured, retried and filed as one."""

import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from specbench.workloads import Prompt, Workload, load_workload

_LONGEST_NAME = 200
_LEAST_PROMPTS = 4
"""A shard costs a file and a little waiting for the last worker: more prompts than one."""


@dataclass(frozen=True)
class Shard:
    """A block of a workload's prompts. It carries them, so that a worker on another machine needs
    no file of the workload."""

    id: str
    workload: Workload
    """The workload, of its prompts only those of the block."""


def load_workloads(sources: Sequence[str], num_prompts: int | None) -> list[Workload]:
    """Loads the workloads of a run. Those of one name (files of one name in two folders) get a tag
    of their source behind it.

    Raises:
        ValueError: what `specbench.workloads.load_workload` says, or two requests of a workload
        have the same id.
    """
    workloads = [load_workload(source, num_prompts) for source in sources]
    for workload in workloads:
        if len(workload.name.encode()) > _LONGEST_NAME:
            raise ValueError(
                f"workload {workload.name[:40]}...: its name is too long for a file; valid: up to "
                f"{_LONGEST_NAME} bytes"
            )
        _check_ids(workload)
    count = Counter(workload.name for workload in workloads)
    return [
        replace(workload, name=f"{workload.name}-{_tag(source)}")
        if count[workload.name] > 1
        else workload
        for source, workload in zip(sources, workloads, strict=True)
    ]


def _check_ids(workload: Workload) -> None:
    seen: set[str] = set()
    for prompt in workload.prompts:
        for request in request_ids(prompt):
            if request in seen:
                raise ValueError(
                    f"workload {workload.name!r}: a prompt and a later turn of another are both "
                    f"called {request!r}; rename the prompt"
                )
            seen.add(request)


def _tag(source: str) -> str:
    return hashlib.sha256(source.encode()).hexdigest()[:8]


def plan_shards(workload: Workload, batch_size: int) -> list[Shard]:
    """Cuts a workload into blocks of whole batches; the same ones whatever the number of
    workers."""
    size = batch_size * -(-_LEAST_PROMPTS // batch_size)
    prompts = workload.prompts
    return [
        Shard(
            f"{workload.name}-{first:05d}",
            replace(workload, prompts=prompts[first : first + size]),
        )
        for first in range(0, len(prompts), size)
    ]


def request_ids(prompt: Prompt) -> Iterator[str]:
    """The ids of a prompt's requests, one for each turn."""
    yield prompt.id
    for turn in range(2, len(prompt.turns) + 1):
        yield f"{prompt.id}/{turn}"
