"""Runs on Ray: the same records whatever the number of workers, and whatever dies on the way."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from specbench import plan
from specbench.cluster import Pool, run, session
from specbench.config import RunConfig
from specbench.conformance.models import save_tiny_model
from specbench.layout import Node, plan_layout
from specbench.progress import Progress
from specbench.records import Run, read_info
from tests.tiny_runs import (
    chat_prompts,
    installed_methods,
    outputs,
    tiny_config,
    write_prompts,
)

pytestmark = [
    pytest.mark.slow,
    # Ray leaves sockets and processes to the collector when it stops.
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A tiny model and two shards of prompts, with the methods that break installed."""
    folder = tmp_path_factory.mktemp("cluster")
    save_tiny_model(folder / "target")
    write_prompts(folder / "chat.jsonl", chat_prompts(8))
    (folder / "methods").mkdir()
    with installed_methods(folder / "methods"):
        yield folder


@pytest.fixture(scope="module")
def ray(folder: Path) -> Iterator[Any]:
    """One Ray for the tests of this file, with two GPUs that exist in name only."""
    with session(num_cpus=2, num_gpus=2) as ray:
        yield ray


def config(folder: Path, *methods: str, **settings: Any) -> RunConfig:
    """A short run of the tiny model."""
    return tiny_config(folder / "target", folder / "chat.jsonl", *methods, **settings)


def measure(settings: RunConfig, folder: Path, *, use_ray: bool = True) -> Run:
    """A new run, from beginning to end."""
    return run(plan.new(settings, folder), use_ray=use_ray)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_records_do_not_depend_on_workers_or_batches(
    ray: Any, folder: Path, tmp_path: Path, temperature: float
) -> None:
    """In this process, on one worker and on two with a GPU each; one prompt at a time and four."""
    layouts: dict[str, dict[str, Any]] = {
        "here": {"use_ray": False},
        "one": {"workers": 1, "batch_size": 4},
        "two": {"workers": 2},
    }
    found = {}
    for name, settings in layouts.items():
        use_ray = settings.pop("use_ray", True)
        chosen = config(folder, "ngram", "breaks", temperature=temperature, **settings)
        found[name] = outputs(measure(chosen, tmp_path / name, use_ray=use_ray))
    assert len(found["here"]) == 11 + 11 * 3
    assert found["one"] == found["here"]
    assert found["two"] == found["here"]
    filed = read_info(tmp_path / "two")["provenance"]
    assert filed["workers"] == 2
    assert sorted(filed["gpus"]) == [["0"], ["1"]]


@pytest.fixture(scope="module")
def with_deaths(ray: Any, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run of three shards in which ``p5`` always kills its worker, and ``p8`` the first time."""
    own = tmp_path_factory.mktemp("deaths")
    path = write_prompts(own / "chat.jsonl", chat_prompts(9))
    knobs = {"dies": {"prompt": "p5"}, "dies_once": {"prompt": "p8", "mark": str(own / "died")}}
    chosen = tiny_config(folder / "target", path, "dies", "dies_once", workers=2, knobs=knobs)
    found = measure(chosen, own / "run")
    assert (own / "died").exists()
    return found


def test_a_worker_that_dies_is_replaced_and_its_shard_done(with_deaths: Run) -> None:
    """The prompt that killed it has all its records."""
    assert with_deaths.missing_shards == []
    assert {r.method for r in with_deaths.requests if r.request == "p8"} == {
        "vanilla",
        "dies",
        "dies_once",
    }


def test_a_shard_that_always_kills_its_worker_is_given_up(with_deaths: Run) -> None:
    """After three attempts its prompts are recorded as failed; the others are not harmed."""
    assert {f.request for f in with_deaths.failures} == {"p4", "p5", "p6", "p6/2", "p7"}
    for failure in with_deaths.failures:
        assert failure.method is None
        assert failure.reason.startswith("given up after 3 attempts: the worker died")
    assert {r.request for r in with_deaths.requests} == {
        *("p0", "p0/2", "p1", "p2", "p3", "p3/2", "p8")
    }


def test_what_a_worker_finds_wrong_comes_back_in_words(
    ray: Any, folder: Path, tmp_path: Path
) -> None:
    """And nothing is filed."""
    with pytest.raises(ValueError, match="'unready' cannot be set up: TypeError: no such head"):
        measure(config(folder, "unready", workers=1), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_worker_can_have_several_gpus(ray: Any, folder: Path) -> None:
    """As many as one model is spread over."""
    layout = plan_layout([Node(2, 2)], None, 2, None)
    pool = Pool(ray, config(folder, gpus_per_worker=2), layout)
    described = pool.load(layout.num_workers, Progress(1, 0))
    pool.close()
    assert [one["gpus"] for one in described] == [["0", "1"]]


def test_workers_run_at_full_priority_with_our_methods_and_the_right_datasets(ray: Any) -> None:
    """Ray's own nice 15 would slow them, and datasets/ of the checkout is no package."""

    def look() -> tuple[int, str, bool]:
        import datasets

        import specbench_methods

        return os.nice(0), specbench_methods.__name__, hasattr(datasets, "load_dataset")

    assert ray.get(ray.remote(look).remote()) == (os.nice(0), "specbench_methods", True)
