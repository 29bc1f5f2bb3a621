"""Runs shards: in this process, or on Ray with one actor per device; retries, resumes, and files
what is finished."""

import contextlib
import logging
import os
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch

from specbench import provenance
from specbench.bench import Shard, Worker, plan_shards
from specbench.config import RunConfig
from specbench.progress import Progress
from specbench.records import (
    FailureRecord,
    Record,
    read_info,
    read_shard,
    shard_path,
    write_run,
    write_shard,
)
from specbench.target.loading import refuse_unsupported, resolve
from specbench.workloads import Workload, load_workload

MAX_ATTEMPTS = 3
"""Times that a shard is started before its prompts are recorded as failed."""


@dataclass(frozen=True)
class Outcome:
    """What a run came to."""

    folder: Path
    num_shards: int
    num_failures: int


@dataclass
class _Plan:
    """The shards of a run that are left to do, and how often each was tried."""

    folder: Path
    pending: deque[Shard]
    workloads: dict[str, Workload]
    num_done: int
    attempts: dict[str, int] = field(default_factory=dict)

    def finish(self, shard: Shard, records: list[Record]) -> None:
        """Files a shard's records."""
        write_shard(self.folder, shard.id, records)
        self.num_done += 1

    def retry(self, shard: Shard, reason: str) -> bool:
        """Puts a shard back, or records its prompts as failed after the last attempt.

        Returns:
            Whether it is tried again.
        """
        self.attempts[shard.id] = self.attempts.get(shard.id, 0) + 1
        if self.attempts[shard.id] < MAX_ATTEMPTS:
            self.pending.append(shard)
            return True
        prompts = self.workloads[shard.workload].prompts[shard.first : shard.last]
        self.finish(
            shard,
            [
                FailureRecord(
                    workload=self.workloads[shard.workload].name,
                    request=prompt.id,
                    method=None,
                    reason=f"given up after {MAX_ATTEMPTS} attempts: {reason}",
                )
                for prompt in prompts
            ],
        )
        return False


def run(config: RunConfig, folder: Path, *, resume: bool = False, use_ray: bool = True) -> Outcome:
    """Measures what a config says and files it in a folder; with ``resume`` only what is still
    missing there.

    Raises:
        ValueError: bad settings or input, found before anything is measured; or a folder that
        cannot be used.
    """
    refuse_unsupported(resolve(config.target), config.target)
    workloads = {name: load_workload(name, config.prompts) for name in config.workloads}
    shards = [
        shard
        for name, workload in workloads.items()
        for shard in plan_shards(name, len(workload.prompts), config.batch_size)
    ]
    if not resume and (folder / "run.json").exists():
        raise ValueError(
            f"{folder} already holds a run; go on with `specbench run --resume {folder}` "
            "or choose another --out"
        )
    open_shards = [shard for shard in shards if not _is_done(folder, shard)]
    plan = _Plan(folder, deque(open_shards), workloads, len(shards) - len(open_shards))
    if plan.pending:
        execute = _run_on_ray if use_ray else _run_here
        execute(config, plan, len(shards))
    failures = 0
    for shard in shards:
        records = read_shard(shard_path(folder, shard.id))
        failures += sum(isinstance(record, FailureRecord) for record in records)
    return Outcome(folder, len(shards), failures)


def load_config(folder: Path, workers: int | None = None) -> RunConfig:
    """The settings of a run that is to go on.

    Raises:
        ValueError: the folder holds no run.
    """
    settings = read_info(folder)["settings"]
    return RunConfig.from_dict(settings | ({"workers": workers} if workers else {}))


def _is_done(folder: Path, shard: Shard) -> bool:
    path = shard_path(folder, shard.id)
    if not path.is_file():
        return False
    read_shard(path)
    return True


def _file_info(config: RunConfig, plan: _Plan, described: dict[str, Any], workers: int) -> None:
    """Files the run's settings and provenance, or holds them against those of the run that goes
    on."""
    if (plan.folder / "run.json").is_file():
        before = read_info(plan.folder)
        for key in ("target", "methods"):
            if before[key] != described[key]:
                raise ValueError(
                    f"{plan.folder} cannot go on: its {key} differ from what is loaded now; "
                    "start a new run"
                )
        return
    shards = [
        shard.id
        for name, workload in plan.workloads.items()
        for shard in plan_shards(name, len(workload.prompts), config.batch_size)
    ]
    write_run(
        plan.folder,
        {
            "settings": config.to_dict(),
            "provenance": provenance.collect()
            | {
                "device": described["device"],
                "dtype": described["target"]["dtype"],
                "threads_per_worker": described["threads_per_worker"],
                "workers": workers,
                "weights_sha256": described["target"]["weights_sha256"],
                "template_sha256": described["template_sha256"],
            },
            "target": described["target"],
            "methods": described["methods"],
            "workloads": {
                workload.name: provenance.describe_workload(workload)
                for workload in plan.workloads.values()
            },
            "shards": shards,
        },
    )


def _run_here(config: RunConfig, plan: _Plan, num_shards: int) -> None:
    """All shards, one after the other, in this process."""
    with Progress(num_shards, plan.num_done) as progress:
        progress.say("loading the target and the methods")
        worker = Worker(config, psutil.cpu_count(logical=False) or 1)
        _file_info(config, plan, worker.describe(), 1)
        while plan.pending:
            shard = plan.pending.popleft()
            progress.start(shard.id)
            try:
                records = worker.run(shard)
            except Exception as error:
                if plan.retry(shard, f"{type(error).__name__}: {error}"):
                    continue
            else:
                plan.finish(shard, records)
            progress.finish(shard.id)


def num_workers(config: RunConfig, num_cores: int, num_gpus: int) -> int:
    """How many workers a run gets: one per group of GPUs, or up to two on a CPU.

    Raises:
        ValueError: fewer GPUs than one worker needs, or more workers than the GPUs can serve.
    """
    if num_gpus == 0:
        return config.workers or min(2, num_cores)
    groups = num_gpus // config.gpus_per_worker
    if groups == 0:
        raise ValueError(
            f"--gpus-per-worker {config.gpus_per_worker} is out of range; valid: 1..{num_gpus}"
        )
    if config.workers is not None and config.workers > groups:
        raise ValueError(
            f"--workers {config.workers} with {config.gpus_per_worker} GPUs each need more than "
            f"the {num_gpus} GPUs there are; valid: 1..{groups}"
        )
    return config.workers or groups


def _run_on_ray(config: RunConfig, plan: _Plan, num_shards: int) -> None:
    """Shards on one Ray actor per device; an actor that dies is replaced and its shard tried
    again."""
    with _ray() as ray:
        resources = ray.cluster_resources()
        cores, gpus = int(resources["CPU"]), int(resources.get("GPU", 0))
        count = num_workers(config, cores, gpus)
        count = min(count, len(plan.pending))
        threads = max(1, cores // count)
        pool = _Pool(ray, config, threads, gpus > 0)
        with Progress(num_shards, plan.num_done) as progress:
            progress.say(f"starting {count} workers of {threads} threads")
            for _ in range(count):
                pool.start()
            described = pool.describe()
            _file_info(config, plan, described, count)
            pool.run(plan, progress)


@dataclass
class _Pool:
    """The actors of a run and the shard that each is at."""

    ray: Any
    config: RunConfig
    num_threads: int
    on_gpu: bool
    actors: list[Any] = field(default_factory=list)
    busy: dict[Any, tuple[Any, Shard]] = field(default_factory=dict)

    def start(self) -> None:
        """Starts an actor."""
        options: dict[str, Any] = {
            "num_cpus": self.num_threads,
            "max_restarts": 0,
            "runtime_env": {"env_vars": {"OMP_NUM_THREADS": str(self.num_threads)}},
        }
        if self.on_gpu:
            options["num_gpus"] = self.config.gpus_per_worker
        actor = self.ray.remote(_Actor).options(**options).remote()
        self.actors.append(actor)

    def describe(self) -> dict[str, Any]:
        """Loads everything on all actors.

        Raises:
            ValueError: what a worker found wrong with the settings.
        """
        loaded = self.ray.get(
            [actor.load.remote(self.config, self.num_threads) for actor in self.actors]
        )
        for described in loaded:
            if "error" in described:
                raise ValueError(described["error"])
        first: dict[str, Any] = loaded[0]
        return first

    def run(self, plan: _Plan, progress: Progress) -> None:
        """Hands out shards until none is left."""
        idle = list(self.actors)
        while plan.pending or self.busy:
            while idle and plan.pending:
                self._hand_out(idle.pop(), plan.pending.popleft(), progress)
            ready, _ = self.ray.wait(list(self.busy), num_returns=1)
            for reference in ready:
                actor, shard = self.busy.pop(reference)
                idle.append(self._collect(reference, actor, shard, plan, progress))

    def _hand_out(self, actor: Any, shard: Shard, progress: Progress) -> None:
        progress.start(shard.id)
        self.busy[actor.run.remote(self.config, self.num_threads, shard)] = (actor, shard)

    def _collect(
        self, reference: Any, actor: Any, shard: Shard, plan: _Plan, progress: Progress
    ) -> Any:
        """Files what an actor made of a shard.

        Returns:
            The actor that is idle now: the same, or one that takes a dead one's place.
        """
        try:
            plan.finish(shard, self.ray.get(reference))
        except self.ray.exceptions.RayActorError:
            progress.say(f"a worker died at {shard.id}; another takes its place")
            again = plan.retry(shard, "the worker died")
            self.actors.remove(actor)
            self.start()
            actor = self.actors[-1]
        except self.ray.exceptions.RayTaskError as error:
            again = plan.retry(shard, str(error.cause))
        else:
            again = False
        if not again:
            progress.finish(shard.id)
        return actor


class _Actor:
    """A worker in a process of its own. It loads when told to, so that bad settings come back as
    words."""

    def __init__(self) -> None:
        self.worker: Worker | None = None

    def load(self, config: RunConfig, num_threads: int) -> dict[str, Any]:
        try:
            return self._loaded(config, num_threads).describe()
        except ValueError as error:
            return {"error": str(error)}

    def _loaded(self, config: RunConfig, num_threads: int) -> Worker:
        if self.worker is None:
            self.worker = Worker(config, num_threads)
        return self.worker

    def run(self, config: RunConfig, num_threads: int, shard: Shard) -> list[Record]:
        return self._loaded(config, num_threads).run(shard)


@contextlib.contextmanager
def _ray() -> Iterator[Any]:
    """Ray, started if it is not running, and then stopped again."""
    # Ray would start workers at nice 15, and its logs would drown the tables.
    os.environ.setdefault("RAY_worker_niceness", "0")
    os.environ.setdefault("RAY_DEDUP_LOGS", "1")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    import ray

    own = not ray.is_initialized()
    if own:
        ray.init(
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
            num_cpus=psutil.cpu_count() if "RAY_ADDRESS" not in os.environ else None,
            num_gpus=torch.cuda.device_count() if "RAY_ADDRESS" not in os.environ else None,
        )
    try:
        yield ray
    finally:
        if own:
            ray.shutdown()
