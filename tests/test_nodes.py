"""Runs on a Ray of their own and on several nodes: what is lost on the way, and how they stop."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import psutil
import pytest

from specbench import plan
from specbench.cluster import run
from specbench.config import RunConfig
from specbench.conformance.models import save_tiny_model
from specbench.records import read_info
from tests.tiny_runs import (
    chat_prompts,
    inodes,
    installed_methods,
    outputs,
    tiny_config,
    wait_for_shards,
    write_prompts,
)

pytestmark = [
    pytest.mark.slow,
    # Ray leaves sockets and processes to the collector when it stops.
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]

FAST_HEARTBEAT = {
    "health_check_initial_delay_ms": 1000,
    "health_check_period_ms": 500,
    "health_check_failure_threshold": 4,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A tiny model and two shards of prompts, with the methods that break installed."""
    folder = tmp_path_factory.mktemp("nodes")
    save_tiny_model(folder / "target")
    write_prompts(folder / "chat.jsonl", chat_prompts(8))
    (folder / "methods").mkdir()
    with installed_methods(folder / "methods"):
        yield folder


def test_a_lost_node_costs_no_record(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its shard is done on the node that is left."""
    from ray.cluster_utils import Cluster

    cluster = Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": 1, "_system_config": FAST_HEARTBEAT},
    )
    node = cluster.add_node(num_cpus=1)
    write_prompts(tmp_path / "chat.jsonl", chat_prompts(16))

    def settings(seconds: str) -> RunConfig:
        return tiny_config(
            folder / "target",
            tmp_path / "chat.jsonl",
            "slow",
            prompts=16,
            knobs={"slow": {"seconds": seconds}},
        )

    def lose_node() -> None:
        wait_for_shards(tmp_path / "run", 1)
        cluster.remove_node(node, allow_graceful=False)

    killer = threading.Thread(target=lose_node)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("RAY_ADDRESS", cluster.address)
            killer.start()
            # Slow enough for both workers to be at a shard when one is lost.
            found = run(plan.new(settings("0.1"), tmp_path / "run"))
        killer.join()
    finally:
        cluster.shutdown()  # type: ignore[no-untyped-call]
    assert found.info["provenance"]["workers"] == 2
    assert "is tried again: the worker died" in capsys.readouterr().err
    assert found.missing_shards == [] and found.failures == []
    here = run(plan.new(settings("0"), tmp_path / "here"), use_ray=False)
    assert outputs(found) == outputs(here)


def test_ctrl_c_ends_a_run_on_ray_and_its_processes(folder: Path, tmp_path: Path) -> None:
    """As a terminal sends it: to the whole group. What is finished is kept, the rest is done by a
    run that goes on; and nothing but tables goes to standard output, whatever died before."""
    words = (
        f"run --target {folder}/target --workloads {folder}/chat.jsonl --methods slow,dies_once "
        f"--set dies_once.prompt=p0 --set dies_once.mark={tmp_path}/died "
        "--set slow.seconds=0.1 --max-new-tokens 6 --rounds 1 --dtype float32 --workers 1 "
        f"--out {tmp_path}/run"
    )
    with subprocess.Popen(
        [sys.executable, "-m", "specbench.cli", *words.split()],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # These tests may themselves run in the background, where a shell ignores Ctrl-C.
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
    ) as process:
        wait_for_shards(tmp_path / "run", 1)
        started = psutil.Process(process.pid).children(recursive=True)
        os.killpg(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert err.splitlines()[-1].startswith("specbench: interrupted; what is finished is kept")
    assert "is tried again: the worker died" in err
    assert out == "" and "Traceback" not in err
    (finished,) = inodes(tmp_path / "run", read_info(tmp_path / "run")["shards"]).items()
    assert len(started) >= 3
    _, alive = psutil.wait_procs(started, timeout=20)
    assert alive == []
    resumed = run(plan.resume(tmp_path / "run"), use_ray=False)
    assert resumed.missing_shards == [] and len(resumed.references) == 11
    assert finished in inodes(tmp_path / "run", resumed.info["shards"]).items()
