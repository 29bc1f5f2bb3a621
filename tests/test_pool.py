"""What becomes of workers that are lost, on a Ray that does as it is told."""

from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from specbench import plan
from specbench.cluster import Pool
from specbench.config import RunConfig
from specbench.conformance.models import save_tiny_model
from specbench.filing import shard_path
from specbench.layout import Layout
from specbench.progress import Progress
from specbench.records import FailureRecord, Record, read_shard
from specbench.shards import Shard
from tests.tiny_runs import chat_prompts, tiny_config, write_prompts


class Lost(Exception):
    """What Ray raises for a lost worker."""


class ScriptedRay:
    """Stands for Ray: actors answer at once, the i-th one as the i-th script says.

    Args:
        loads: for each actor that is started, what it answers when it loads.
        run: what an actor answers to a shard, by the number of the actor.
    """

    exceptions = SimpleNamespace(RayError=Lost)

    def __init__(self, loads: Sequence[Any], run: Callable[[int, Shard], Any]) -> None:
        self.loads, self.answer = list(loads), run
        self.alive: set[int] = set()
        self.num_started = 0

    def remote(self, cls: type) -> "ScriptedRay":
        """The class, as a remote one."""
        return self

    def options(self, **options: Any) -> SimpleNamespace:
        """The class, with options; its ``remote`` starts an actor."""
        return SimpleNamespace(remote=self._start)

    def _start(self, folder: str) -> SimpleNamespace:
        number = self.num_started
        self.num_started += 1
        self.alive.add(number)
        loads = self.loads[number]
        return SimpleNamespace(
            number=number,
            load=SimpleNamespace(remote=lambda *_: Reference(lambda: loads)),
            run=SimpleNamespace(remote=lambda shard: Reference(lambda: self.answer(number, shard))),
        )

    def wait(self, references: list[Any], num_returns: int, timeout: float) -> Any:
        """The first of them is done."""
        return references[:num_returns], references[num_returns:]

    def get(self, reference: "Reference") -> Any:
        """An answer, or the loss of the actor."""
        answer = reference.answer()
        if isinstance(answer, Exception):
            raise answer
        return answer

    def kill(self, actor: Any) -> None:
        """Ends an actor."""
        self.alive.discard(actor.number)


class Reference:
    """What will be answered."""

    def __init__(self, answer: Callable[[], Any]) -> None:
        self.answer = answer


READY: dict[str, Any] = {"gpus": []}
LOST = Lost("The actor died.\n\tWorker exit detail: Worker exits with code 7")


def records(_: int, shard: Shard) -> list[Record]:
    """Some records for each shard."""
    return [
        FailureRecord(workload="w", request=prompt.id, method=None, reason="said so")
        for prompt in shard.workload.prompts
    ]


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    """Three shards."""
    folder = tmp_path_factory.mktemp("pool")
    target = save_tiny_model(folder / "target")
    return tiny_config(target, write_prompts(folder / "chat.jsonl", chat_prompts(12)))


def pool(config: RunConfig, ray: ScriptedRay) -> Pool:
    """Workers of one thread."""
    return Pool(ray, config, Layout(2, 1, 0))


def test_a_worker_lost_while_it_loads_is_replaced(config: RunConfig) -> None:
    """The run begins with as many as it asked for."""
    ray = ScriptedRay([READY, LOST, LOST, READY], records)
    assert pool(config, ray).load(2, Progress(3, 0)) == [READY, READY]
    assert ray.alive == {0, 3}


def test_workers_that_never_load_end_the_run_with_the_reason(config: RunConfig) -> None:
    """After a few attempts, not for ever."""
    ray = ScriptedRay([LOST] * 9, records)
    with pytest.raises(ValueError, match=r"workers die while they load: .* exits with code 7"):
        pool(config, ray).load(2, Progress(3, 0))
    assert ray.num_started <= 4


def test_a_run_goes_on_with_the_workers_that_load(config: RunConfig, tmp_path: Path) -> None:
    """One does the work of two."""
    ray = ScriptedRay([READY, LOST, LOST, LOST], records)
    workers = pool(config, ray)
    assert workers.load(2, Progress(3, 0)) == [READY]
    todo = plan.new(config, tmp_path / "run")
    workers.run(todo, Progress(3, 0))
    for shard in todo.shards:
        assert len(read_shard(shard_path(todo.folder, shard.id))) == 4


def test_what_a_worker_finds_wrong_ends_the_run(config: RunConfig) -> None:
    """In its words."""
    ray = ScriptedRay([READY, "no such head"], records)
    with pytest.raises(ValueError, match=r"^no such head$"):
        pool(config, ray).load(2, Progress(3, 0))


def test_a_worker_that_fails_at_a_shard_is_replaced(config: RunConfig, tmp_path: Path) -> None:
    """Its device may be lost, though it still answers."""
    todo = plan.new(config, tmp_path / "run")
    ray = ScriptedRay(
        [READY] * 2, lambda number, shard: "device lost" if number == 0 else records(number, shard)
    )
    workers = pool(config, ray)
    workers.load(1, Progress(3, 0))
    workers.run(todo, Progress(3, 0))
    assert ray.alive == {1}
    for shard in todo.shards:
        assert len(read_shard(shard_path(todo.folder, shard.id))) == 4
    workers.close()
    assert ray.alive == set()


def test_a_shard_that_fails_everywhere_is_given_up_and_the_run_ends(
    config: RunConfig, tmp_path: Path
) -> None:
    """After three workers; the others are done."""
    todo = plan.new(config, tmp_path / "run")
    bad = todo.shards[1].id
    ray = ScriptedRay(
        [READY] * 5, lambda number, shard: LOST if shard.id == bad else records(number, shard)
    )
    workers = pool(config, ray)
    workers.load(2, Progress(3, 0))
    workers.run(todo, Progress(3, 0))
    reasons = {
        record.reason
        for record in read_shard(shard_path(todo.folder, bad))
        if isinstance(record, FailureRecord)
    }
    assert reasons == {"given up after 3 attempts: the worker died: Worker exits with code 7"}
    assert not todo.pending
