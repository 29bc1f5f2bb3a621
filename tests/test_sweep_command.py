"""`specbench sweep` on a tiny target, from the command line."""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from specbench import cluster
from specbench.cli import main
from specbench.conformance.models import save_tiny_model
from specbench.plan import Plan
from specbench.records import Run as Records
from specbench.records import read_run, shard_path
from specbench.sweep.running import SCHEMA_VERSION
from tests.tiny_runs import inodes, installed_methods, write_prompts

Run = Callable[..., int]
SETTINGS = (
    "--target target --workloads ten.jsonl --prompts 10 --batches 1,2 --depths 1,3 "
    "--max-new-tokens 6 --rounds 1 --dtype float32 --no-ray"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A tiny model and ten prompts, with the methods that break installed."""
    folder = tmp_path_factory.mktemp("sweep")
    save_tiny_model(folder / "target", max_position_embeddings=128)
    prompts = [{"id": f"p{i}", "prompt": f"say {i}{i}, then say {i}{i}"} for i in range(10)]
    write_prompts(folder / "ten.jsonl", prompts)
    (folder / "methods").mkdir()
    with installed_methods(folder / "methods"):
        yield folder


@pytest.fixture
def specbench(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Calls the command line beside the model and the prompts."""
    monkeypatch.chdir(folder)
    return lambda *words: main([str(word) for word in words])


def test_a_sweep_is_a_folder_of_runs_that_goes_on_where_it_was_cut(
    specbench: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And is shown again from there."""
    out = tmp_path / "sweep"
    words = ["sweep", *SETTINGS.split(), "--methods", "ngram", "--format", "md"]
    assert specbench(*words, "--out", out) == 0
    shown = capsys.readouterr()
    for word in ("# Sweep: target", "ngram: speed-up by depth and batch size", "| 2 |", "theory"):
        assert word in shown.out
    runs = {batch: read_run(out / f"batch-{batch}") for batch in (1, 2)}
    for batch, run in runs.items():
        assert run.info["settings"]["batch_size"] == batch
        assert set(run.info["methods"]) == {"vanilla", "ngram@d1", "ngram@d3"}
        assert run.info["methods"]["ngram@d3"]["depth"] == 3
        assert {record.lossless for record in run.requests} == {"exact"}
    assert specbench("report", out / "batch-1", out / "batch-2") == 0

    kept = inodes(out / "batch-1", runs[1].info["shards"])
    shard_path(out / "batch-1", runs[1].info["shards"][0]).unlink()
    shutil.rmtree(out / "batch-2")
    capsys.readouterr()
    assert specbench("sweep", "--resume", out, "--no-ray") == 0
    again = {batch: read_run(out / f"batch-{batch}") for batch in (1, 2)}
    assert [run.missing_shards for run in again.values()] == [[], []]
    found = inodes(out / "batch-1", runs[1].info["shards"])
    assert list(kept.items())[1:] == list(found.items())[1:]

    def steps(run: Records) -> list[tuple[str, str, list[list[int]]]]:
        return sorted((r.method, r.request, r.steps) for r in run.requests)

    assert [steps(run) for run in again.values()] == [steps(run) for run in runs.values()]
    assert steps(again[1]) == steps(again[2])
    capsys.readouterr()
    assert specbench("sweep", "--report", out, "--format", "md") == 0
    assert "# Sweep: target" in capsys.readouterr().out
    for other in (("report", out), ("baseline", out, "--name", "b"), ("run", "--resume", out)):
        assert specbench(*other) == 2
    error = capsys.readouterr().err
    shows = f"it is a sweep, which `specbench sweep --report {out}` shows; the batch-* in it"
    assert error.count(shows) == 3
    assert specbench("sweep", "--report", out / "batch-1") == 2
    shows = f"it is a run, which `specbench report {out}/batch-1` shows"
    assert shows in capsys.readouterr().err
    assert specbench(*words, "--out", out) == 2
    assert f"go on with `specbench sweep --resume {out}`" in capsys.readouterr().err


def test_a_method_that_cannot_be_set_up_is_left_out(
    specbench: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The sweep is not, nor is the word on it."""
    out = tmp_path / "sweep"
    words = ["sweep", *SETTINGS.split(), "--methods", "unready,ngram"]
    assert specbench(*words, "--out", out) == 0
    assert "left out: unready@d1" in capsys.readouterr().err
    for batch in (1, 2):
        methods = read_run(out / f"batch-{batch}").info["methods"]
        assert set(methods) == {"vanilla", "ngram@d1", "ngram@d3"}
    assert specbench("sweep", "--report", out, "--format", "md") == 0
    assert "left out: unready@d3" in capsys.readouterr().out


def test_a_method_that_breaks_in_batches_fails_there_only(
    specbench: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "sweep"
    words = ["sweep", *SETTINGS.split(), "--methods", "crowded", "--depths", "1", "--format", "md"]
    assert specbench(*words, "--out", out) == 1
    shown = capsys.readouterr().out
    assert "batch-2: failed: crowded@d1" in shown and "batch-1: failed" not in shown


def test_a_sweep_that_did_not_begin_leaves_nothing_behind(
    specbench: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "sweep"
    words = ["sweep", *SETTINGS.split(), "--out", out]
    assert specbench(*words, "--methods", "unready") == 2
    assert "unready@d1" in capsys.readouterr().err
    assert specbench(*words, "--methods", "ngram", "--max-new-tokens", "128") == 2
    assert not out.exists()


def test_a_sweep_that_is_interrupted_says_how_it_goes_on(
    specbench: Run,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    out = tmp_path / "sweep"

    def interrupt(plan: Plan, *, use_ray: bool) -> Records:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(cluster, "run", interrupt)
        assert specbench("sweep", *SETTINGS.split(), "--methods", "ngram", "--out", out) == 130
    assert f"go on with `specbench sweep --resume {out}`" in capsys.readouterr().err
    assert specbench("sweep", "--resume", out, "--no-ray") == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--report gone", "gone holds no sweep: there is no sweep.json in it"),
        ("--resume target", "target holds no sweep"),
        ("--report gone --depths 2", "--report takes the sweep's own settings; remove --depths"),
        ("--resume gone --set ngram.branches=2", "remove --set; valid beside it: --workers, "),
        ("--batches two", "argument --batches"),
        ("--methods ngram --batches 0", "--batches 0 is out of range"),
        ("--methods ngram --set ngram.depth=2", "--set ngram.depth: --depths sets it"),
    ],
)
def test_bad_usage_is_one_line_and_exit_code_2(
    specbench: Run, words: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert specbench("sweep", *words.split()) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("specbench: ") and message in line


def test_settings_of_another_schema_are_refused(specbench: Run, tmp_path: Path) -> None:
    about = {"schema": 99, "settings": {}, "batches": [], "unready": {}, "notes": []}
    (tmp_path / "sweep.json").write_text(json.dumps(about))
    assert specbench("sweep", "--report", tmp_path) == 2


@pytest.mark.parametrize(
    ("key", "value"),
    [("batches", "x"), ("unready", 3), ("notes", None), ("settings", [])],
)
def test_a_sweep_file_that_was_edited_is_refused_by_name(
    specbench: Run, key: str, value: object, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    about = {"schema": SCHEMA_VERSION, "settings": {}, "batches": [], "unready": {}, "notes": []}
    (tmp_path / "sweep.json").write_text(json.dumps(about | {key: value}))
    for how in ("--report", "--resume"):
        assert specbench("sweep", how, tmp_path) == 2
        assert f"holds no readable sweep: {key} of sweep.json is" in capsys.readouterr().err


def test_a_run_in_the_folder_of_another_batch_size_is_refused(
    specbench: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*SETTINGS.split(), "--methods", "ngram", "--no-ray"]
    assert specbench("sweep", *words, "--out", tmp_path / "sweep") == 0
    shutil.copytree(tmp_path / "sweep" / "batch-1", tmp_path / "sweep" / "batch-3")
    assert specbench("sweep", "--report", tmp_path / "sweep") == 2
    assert "batch-3 is a run of batch size 1" in capsys.readouterr().err
