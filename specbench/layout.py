"""How a run uses machines: how many workers, and how many threads and GPUs each has."""

import os
from collections.abc import Sequence
from dataclasses import dataclass

_CPU_WORKERS = 2
"""Workers of a node without GPUs, if the run does not say."""


@dataclass(frozen=True)
class Node:
    """A machine of the cluster."""

    num_cores: int
    num_gpus: int


@dataclass(frozen=True)
class Layout:
    """How a run uses the cluster."""

    num_workers: int
    num_threads: int
    """Of each worker."""
    num_gpus: int
    """Of each worker."""


def plan_layout(
    nodes: Sequence[Node], num_workers: int | None, gpus_per_worker: int, most_threads: int | None
) -> Layout:
    """One worker per group of GPUs; without GPUs up to two on each node, if the run does not say.
    Each has its share of the cores.

    Args:
        nodes: the machines; each worker runs on one of them.
        num_workers: what the run says, or None.
        gpus_per_worker: GPUs of each worker, if there are any.
        most_threads: threads that no worker exceeds, or None.

    Raises:
        ValueError: the workers do not fit.
    """
    if any(node.num_gpus for node in nodes):
        return _gpu_layout(nodes, num_workers, gpus_per_worker, most_threads)
    if gpus_per_worker > 1:
        raise ValueError(too_many_gpus(gpus_per_worker, 0))
    most = sum(node.num_cores for node in nodes)
    count = num_workers or sum(min(_CPU_WORKERS, node.num_cores) for node in nodes)
    if count > most:
        raise ValueError(f"--workers {count} is out of range; valid: 1..{most}, one per core")
    # Workers of one size, of which each node holds so many as fit.
    threads = max(
        size
        for size in range(1, most + 1)
        if sum(node.num_cores // size for node in nodes) >= count
    )
    return Layout(count, min(threads, most_threads or threads), 0)


def _gpu_layout(
    nodes: Sequence[Node], num_workers: int | None, gpus_per_worker: int, most_threads: int | None
) -> Layout:
    groups = [node.num_gpus // gpus_per_worker for node in nodes]
    if sum(groups) == 0:
        raise ValueError(too_many_gpus(gpus_per_worker, max(node.num_gpus for node in nodes)))
    count = num_workers or sum(groups)
    if count > sum(groups):
        raise ValueError(
            f"--workers {count} with --gpus-per-worker {gpus_per_worker} is out of range; "
            f"valid: 1..{sum(groups)}"
        )
    threads = min(node.num_cores // n for node, n in zip(nodes, groups, strict=True) if n)
    return Layout(count, max(1, min(threads, most_threads or threads)), gpus_per_worker)


def too_many_gpus(gpus_per_worker: int, num_gpus: int) -> str:
    """What to say to who asks for more GPUs than one machine has."""
    there = f"1..{num_gpus}" if num_gpus else "1, as there are no GPUs"
    return f"--gpus-per-worker {gpus_per_worker} is out of range; valid: {there}"


def most_threads() -> int | None:
    """What OMP_NUM_THREADS allows; None if it says nothing."""
    first = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    return int(first) if first.isdecimal() and int(first) > 0 else None
