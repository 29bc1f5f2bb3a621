"""Runs shards: in this process, or on Ray with one actor per device; replaces actors that die.

Records come back to the driver, which files them, so nodes need no common file system. Only what is
named by a path must lie at that path on every node: a local target, a drafter's folder, trained
weights. Prompts travel with their shards.
"""

import contextlib
import io
import logging
import os
import signal
import socket
import textwrap
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import psutil
import torch

from specbench.config import RunConfig
from specbench.layout import Layout, Node, most_threads, plan_layout
from specbench.messages import in_one_line
from specbench.plan import MAX_ATTEMPTS, Plan
from specbench.progress import Progress
from specbench.records import Record, Run, read_run
from specbench.shards import Shard
from specbench.worker import Worker, find_unready

_PATIENCE_S = 60.0
"""How long to wait for a worker without a word."""
_KNOCK_S = 10.0
_OBJECT_STORE_BYTES = 128 * 2**20
"""Only prompts and records go through it; Ray's default is a third of the memory."""


def run(plan: Plan, *, use_ray: bool = True) -> Run:
    """Measures what is left of a run.

    Returns:
        The run as filed.

    Raises:
        ValueError: what the workers found wrong with the settings, or a folder that cannot be
        written.
    """
    if plan.pending:
        with plan.alone():
            _run_pending(plan, use_ray)
    return read_run(plan.folder)


def _run_pending(plan: Plan, use_ray: bool) -> None:
    if plan.pending:
        with Progress(len(plan.shards), plan.num_done) as progress:
            (_run_on_ray if use_ray else _run_here)(plan, progress)


def unready(config: RunConfig, *, use_ray: bool = True) -> dict[str, str]:
    """By name, why each method of a run that cannot be set up for its target cannot; tried where
    the run's workers would be.

    Raises:
        ValueError: the target cannot be loaded, or Ray cannot start.
    """
    if not use_ray:
        return find_unready(config)
    with contextlib.redirect_stdout(io.StringIO()), session() as ray:
        layout = _layout(ray, config)
        cores = 0 if layout.num_gpus else layout.num_threads
        options = {"num_cpus": cores, "num_gpus": layout.num_gpus}
        actor = ray.remote(Actor).options(**options).remote(os.getcwd())
        try:
            found: dict[str, str] = ray.get(actor.unready.remote(config))
        except ray.exceptions.RayError as error:
            raise ValueError(f"no worker can load: {in_one_line(error)}") from error
    return found


def _run_here(plan: Plan, progress: Progress) -> None:
    """All shards, one after the other, in this process."""
    config = plan.config
    node = Node(os.cpu_count() or 1, torch.cuda.device_count())
    # As many threads as a worker of Ray's has here, so that either may go on with the other's run.
    layout = plan_layout([node], config.workers, config.gpus_per_worker, most_threads())
    progress.say("loading the target and the methods")
    worker = Worker(config, layout.num_threads)
    for note in plan.begin([worker.describe()]):
        progress.say(note)
    while plan.pending:
        shard = plan.pending.popleft()
        progress.start(shard.id)
        _file(plan, shard, _try(worker, shard), progress)


def _try(worker: Worker, shard: Shard) -> list[Record] | str:
    """A shard's records, or why there are none."""
    try:
        return worker.run(shard)
    except Exception as error:
        return f"{type(error).__name__}: {in_one_line(error)}"


def _file(plan: Plan, shard: Shard, outcome: list[Record] | str, progress: Progress) -> None:
    """Files a shard's records, or sees to it that it is tried again."""
    if isinstance(outcome, str):
        if plan.fail(shard, outcome):
            progress.say(f"{shard.id} is tried again: {outcome}")
            return
        progress.say(f"{shard.id} is given up: {outcome}")
    else:
        plan.finish(shard, outcome)
    progress.finish(shard.id)


def _run_on_ray(plan: Plan, progress: Progress) -> None:
    """Shards on actors, one per device."""
    # Ray tells of dead workers on standard output, which is for the tables.
    with contextlib.redirect_stdout(io.StringIO()), session() as ray:
        config = plan.config
        layout = _layout(ray, config)
        # More workers than shards have nothing to do; threads stay, so that a resumed run is alike.
        count = min(layout.num_workers, len(plan.pending))
        progress.say(f"loading; workers: {count}, threads of each: {layout.num_threads}")
        with contextlib.closing(Pool(ray, config, layout)) as pool:
            for note in plan.begin(pool.load(count, progress)):
                progress.say(note)
            pool.run(plan, progress)


def _layout(ray: Any, config: RunConfig) -> Layout:
    nodes = [
        Node(int(node["Resources"].get("CPU", 0)), int(node["Resources"].get("GPU", 0)))
        for node in ray.nodes()
        if node["Alive"]
    ]
    return plan_layout(nodes, config.workers, config.gpus_per_worker, most_threads())


class _Lost(Exception):
    """A worker is gone; says why."""


@dataclass
class Pool:
    """The actors of a run: those that load, those at a shard, and those that have nothing to do."""

    ray: Any
    config: RunConfig
    layout: Layout
    loading: dict[Any, Any] = field(default_factory=dict)
    busy: dict[Any, tuple[Any, Shard]] = field(default_factory=dict)
    idle: list[Any] = field(default_factory=list)
    losses: int = 0
    """Workers that were lost one after the other, before any could load."""

    def load(self, count: int, progress: Progress) -> list[dict[str, Any]]:
        """Starts actors and waits until they have loaded everything.

        Returns:
            What each says of itself.

        Raises:
            ValueError: what a worker found wrong with the settings, or none can be kept alive.
        """
        for _ in range(count):
            self._start()
        described = []
        while self.loading:
            for reference in self._wait(progress):
                described += self._welcome(reference, progress)
        return described

    def run(self, plan: Plan, progress: Progress) -> None:
        """Hands out shards until none is left.

        Raises:
            ValueError: no worker can be kept alive.
        """
        while plan.pending or self.busy:
            while plan.pending and self.idle:
                self._hand_out(self.idle.pop(), plan.pending.popleft(), progress)
            for reference in self._wait(progress):
                if reference in self.loading:
                    self._welcome(reference, progress)
                else:
                    self._collect(reference, plan, progress)

    def close(self) -> None:
        """Ends all actors."""
        busy = (actor for actor, _ in self.busy.values())
        for actor in [*self.loading.values(), *busy, *self.idle]:
            self.ray.kill(actor)

    def _start(self) -> None:
        options: dict[str, Any] = {
            "max_restarts": 0,
            # Where GPUs say how many workers fit, cores need not.
            "num_cpus": 0 if self.layout.num_gpus else self.layout.num_threads,
            "num_gpus": self.layout.num_gpus,
            "runtime_env": {
                "env_vars": {
                    "OMP_NUM_THREADS": str(self.layout.num_threads),
                    "TOKENIZERS_PARALLELISM": "false",
                }
            },
        }
        actor = self.ray.remote(Actor).options(**options).remote(os.getcwd())
        self.loading[actor.load.remote(self.config, self.layout.num_threads)] = actor

    def _wait(self, progress: Progress) -> list[Any]:
        """What is done, one at least; says so if nothing is for long and no shard is in work."""
        references = [*self.loading, *self.busy]
        ready: list[Any] = []
        while not ready:
            ready, _ = self.ray.wait(references, num_returns=1, timeout=_PATIENCE_S)
            if not ready and not self.busy:
                progress.say(f"waiting for {len(self.loading)} workers to be placed and to load")
        return ready

    def _get(self, reference: Any) -> Any:
        try:
            return self.ray.get(reference)
        except self.ray.exceptions.RayError as error:
            raise _Lost(_why_lost(error)) from error

    def _welcome(self, reference: Any, progress: Progress) -> list[dict[str, Any]]:
        """An actor has loaded, or not."""
        actor = self.loading.pop(reference)
        try:
            described = self._get(reference)
        except _Lost as loss:
            self.losses += 1
            if self.losses < MAX_ATTEMPTS:
                progress.say(f"a worker was lost while it loaded, another is started: {loss}")
                self._replace(actor)
            elif not (self.idle or self.loading or self.busy):
                raise ValueError(
                    f"workers die while they load: {loss}; give them more memory, fewer --workers "
                    "or a smaller target"
                ) from loss
            return []
        if isinstance(described, str):
            raise ValueError(described)
        self.losses = 0
        self.idle.append(actor)
        return [described]

    def _replace(self, actor: Any) -> None:
        # It may be out of reach only, and would keep its place.
        self.ray.kill(actor)
        self._start()

    def _hand_out(self, actor: Any, shard: Shard, progress: Progress) -> None:
        progress.start(shard.id)
        self.busy[actor.run.remote(shard)] = (actor, shard)

    def _collect(self, reference: Any, plan: Plan, progress: Progress) -> None:
        """Files what an actor made of a shard. One that failed may have lost its device: it is
        replaced, and the shard goes to whoever is free."""
        actor, shard = self.busy.pop(reference)
        try:
            outcome = self._get(reference)
        except _Lost as loss:
            outcome = str(loss)
        if isinstance(outcome, str):
            self._replace(actor)
        else:
            self.idle.append(actor)
        _file(plan, shard, outcome, progress)


class Actor:
    """A worker in a process of its own. What goes wrong comes back as words."""

    def __init__(self, folder: str) -> None:
        # Relative paths mean what they mean to the driver, where its folder exists.
        with contextlib.suppress(OSError):
            os.chdir(folder)
        self.worker: Worker | None = None

    def load(self, config: RunConfig, num_threads: int) -> dict[str, Any] | str:
        """Loads everything and describes it."""
        import ray

        # torch computes on cores, Ray counts hardware threads.
        cores, threads = psutil.cpu_count(logical=False) or 1, psutil.cpu_count() or 1
        try:
            self.worker = Worker(config, max(1, num_threads * min(cores, threads) // threads))
        except Exception as error:
            name = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
            return name + in_one_line(error)
        gpus = ray.get_runtime_context().get_accelerator_ids().get("GPU", [])
        return self.worker.describe() | {"gpus": gpus}

    def unready(self, config: RunConfig) -> dict[str, str]:
        """Which methods cannot be set up, and why."""
        return find_unready(config)

    def run(self, shard: Shard) -> list[Record] | str:
        """A shard's records."""
        assert self.worker is not None, "a worker loads before it runs"
        return _try(self.worker, shard)


def _why_lost(error: Exception) -> str:
    """Ray's story of a lost worker in one line."""
    story, _, detail = str(error).partition("Worker exit detail:")
    return f"the worker died: {textwrap.shorten(detail or story, 120, placeholder=' ...')}"


@contextlib.contextmanager
def session(**options: Any) -> Iterator[Any]:
    """Ray: the session there is, the cluster at RAY_ADDRESS, or one of this machine's that is
    stopped afterwards.

    Args:
        options: for ``ray.init``, over our own.

    Raises:
        ValueError: the cluster cannot be reached, or Ray cannot start.
    """
    # Ray would start its workers at nice 15, and say that it hides GPUs from those without any.
    os.environ.setdefault("RAY_worker_niceness", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    import ray

    if ray.is_initialized():
        yield ray
        return
    try:
        with _undisturbed():
            _start_ray(ray, os.environ.get("RAY_ADDRESS") or "local", options)
        yield ray
    finally:
        with _undisturbed():
            ray.shutdown()


def _start_ray(ray: Any, address: str, options: dict[str, Any]) -> None:
    settings: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    if address == "local":
        settings |= {
            "num_cpus": _num_own_cores(),
            "num_gpus": torch.cuda.device_count(),
            "object_store_memory": _OBJECT_STORE_BYTES,
            "include_dashboard": False,
        }
    try:
        _reach(address)
        ray.init(address, **(settings | options))
    except (OSError, RuntimeError, ValueError) as error:
        where = "Ray cannot start" if address == "local" else f"no Ray cluster at {address}"
        raise ValueError(f"{where}: {in_one_line(error)}; --no-ray does without") from error
    except SystemExit as end:
        # Ray takes SIGTERM over while it starts.
        raise KeyboardInterrupt from end


def _reach(address: str) -> None:
    """Knocks at a cluster's door: Ray itself would try for a quarter of an hour.

    Raises:
        OSError: nobody answers.
    """
    host, colon, port = address.rpartition("://")[2].rpartition(":")
    if colon and port.isdecimal():
        socket.create_connection((host, int(port)), timeout=_KNOCK_S).close()


def _num_own_cores() -> int | None:
    """Cores that this process may use, where they are fewer than the machine's; None lets Ray
    count."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None
    return allowed if allowed != os.cpu_count() else None


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Ctrl-C waits until Ray's processes are up or down: half of them would stay behind."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    arrived: list[int] = []
    signals = (signal.SIGINT, signal.SIGTERM)
    handlers = {one: signal.getsignal(one) for one in signals}
    for one in signals:
        signal.signal(one, lambda number, frame: arrived.append(number))
    try:
        yield
    finally:
        for one, handler in handlers.items():
            signal.signal(one, handler)
    if arrived:
        raise KeyboardInterrupt
