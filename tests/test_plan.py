"""What of a run is left to do, and what its folder holds."""

import json
import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from specbench import plan
from specbench.cluster import run
from specbench.conformance.models import save_tiny_model
from specbench.filing import SCHEMA_VERSION, shard_path
from specbench.records import read_info, read_run
from tests.tiny_runs import chat_prompts, inodes, outputs, tiny_config, write_prompts


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model in a folder."""
    return save_tiny_model(tmp_path_factory.mktemp("target"))


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    """Three shards of prompts."""
    return write_prompts(tmp_path / "chat.jsonl", chat_prompts(10))


@pytest.fixture(scope="module")
def whole(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a whole run, to be copied."""
    folder = tmp_path_factory.mktemp("whole")
    return finished(target, write_prompts(folder / "chat.jsonl", chat_prompts(10)), folder / "run")


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    return Path(shutil.copytree(whole, tmp_path / "run"))


def finished(target: Path, prompts: Path, folder: Path, **settings: Any) -> Path:
    """A folder with a whole run."""
    run(plan.new(tiny_config(target, prompts, "ngram", **settings), folder), use_ray=False)
    return folder


def test_a_resumed_run_does_what_is_missing_and_nothing_else(whole: Path, folder: Path) -> None:
    """With the records of a run that was never interrupted."""
    shards: Sequence[str] = read_info(folder)["shards"]
    shard_path(folder, shards[1]).unlink()
    kept = inodes(folder, shards)
    assert len(kept) == 2
    todo = plan.resume(folder)
    assert [shard.id for shard in todo.pending] == [shards[1]] and todo.num_done == 2
    resumed = run(todo, use_ray=False)
    assert outputs(resumed) == outputs(read_run(whole))
    assert kept.items() <= inodes(folder, shards).items()


def test_a_damaged_shard_is_measured_again_and_named(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is finished beside it is kept, and the damaged file stays until it is replaced."""
    before = outputs(read_run(folder))
    shards: Sequence[str] = read_info(folder)["shards"]
    path = shard_path(folder, shards[0])
    path.write_text(path.read_text()[:-40])
    todo = plan.resume(folder)
    assert [shard.id for shard in todo.pending] == [shards[0]]
    assert path.exists()
    assert outputs(run(todo, use_ray=False)) == before
    assert f"measured again: {path}" in capsys.readouterr().err


def _edit(path: Path) -> None:
    path.write_text(path.read_text().replace('"finish": "length"', '"finish": "eos"', 1))


def _age(path: Path) -> None:
    path.write_text(path.read_text().replace(f'"schema": {SCHEMA_VERSION}', '"schema": 2', 1))


def _take_from_another_run(path: Path) -> None:
    header, body = path.read_text().split("\n", 1)
    path.write_text(json.dumps(json.loads(header) | {"run": "another"}) + "\n" + body)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (_edit, "has been edited"),
        (_age, "has schema version 2"),
        (_take_from_another_run, "belongs to another run"),
    ],
)
def test_whatever_is_wrong_with_a_shard_it_alone_is_measured_again(
    folder: Path, damage: Any, reason: str
) -> None:
    shards: Sequence[str] = read_info(folder)["shards"]
    damage(shard_path(folder, shards[1]))
    with pytest.raises(ValueError, match=reason):
        read_run(folder)
    todo = plan.resume(folder)
    assert [shard.id for shard in todo.pending] == [shards[1]]
    (note,) = todo.notes
    assert note.startswith("measured again: ") and reason in note


def test_what_a_killed_write_left_is_removed_when_the_run_goes_on(folder: Path) -> None:
    part = folder / "shards" / ".chat.jsonl-00000.jsonl.unfinished-abc"
    part.write_text("half")
    with plan.resume(folder).alone():
        assert not part.exists()


def test_a_complete_run_is_resumed_without_its_target(
    target: Path, prompts: Path, tmp_path: Path
) -> None:
    """There is nothing to measure: it is only read."""
    folder = finished(target, prompts, tmp_path / "run")
    info = json.loads((folder / "run.json").read_text())
    info["settings"]["target"] = str(tmp_path / "gone")
    (folder / "run.json").write_text(json.dumps(info))
    prompts.unlink()
    assert outputs(run(plan.resume(folder))) == outputs(read_run(folder))


def test_how_a_run_went_on_is_filed_beside_how_it_began(folder: Path) -> None:
    """The first start stays."""
    before = read_info(folder)["provenance"]
    for shard in read_info(folder)["shards"][:2]:
        shard_path(folder, shard).unlink()
        run(plan.resume(folder), use_ray=False)
    after = read_info(folder)["provenance"]
    assert [sorted(one) for one in after.pop("resumed")] == 2 * [
        ["argv", "load_average", "started", "threads_per_worker", "workers"]
    ]
    assert after == before


def _other_weights(info: dict[str, Any]) -> None:
    info["target"]["weights_sha256"] = "0" * 64


def _other_commit(info: dict[str, Any]) -> None:
    info["provenance"]["commit"] = "0" * 40


def _other_torch(info: dict[str, Any]) -> None:
    info["provenance"]["packages"]["torch"] = "1.0"


def _other_knob(info: dict[str, Any]) -> None:
    info["methods"]["ngram"]["max_match"] = 99


def _other_source(info: dict[str, Any]) -> None:
    info["methods"]["ngram"]["source_sha256"] = "0" * 64


def _other_prompts(info: dict[str, Any]) -> None:
    info["workloads"]["chat.jsonl"]["sha256"] = "0" * 64


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (_other_weights, "weights_sha256 was 0000"),
        (_other_commit, "provenance.commit was 0000"),
        (_other_torch, "packages.torch was 1.0"),
        (_other_knob, "methods.ngram.max_match was 99, is"),
        (_other_source, "methods.ngram.source_sha256 was 0000"),
        (_other_prompts, "workloads.chat.jsonl.sha256 was 0000"),
    ],
)
def test_a_run_on_something_else_is_not_gone_on_with(folder: Path, change: Any, named: str) -> None:
    """It says what changed, and leaves the folder as it was."""
    info = json.loads((folder / "run.json").read_text())
    change(info)
    text = json.dumps(info)
    (folder / "run.json").write_text(text)
    shard_path(folder, info["shards"][0]).unlink()
    with pytest.raises(ValueError, match=f"cannot go on, it would mix results: .*{named}"):
        run(plan.resume(folder), use_ray=False)
    assert (folder / "run.json").read_text() == text
    assert len(inodes(folder, info["shards"])) == 2


def test_a_run_whose_description_was_edited_is_not_gone_on_with(folder: Path) -> None:
    """Though what was edited does not bear on the numbers."""
    path = folder / "run.json"
    shard_path(folder, read_info(folder)["shards"][0]).unlink()
    path.write_text(path.read_text().replace('"load_average": ', '"load_average": 1'))
    with pytest.raises(ValueError, match=r"run\.json has been edited; start a new run"):
        run(plan.resume(folder), use_ray=False)


def test_without_ray_a_run_has_the_threads_of_one_of_rays_workers(
    target: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that either may go on with the other's run."""
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    before = torch.get_num_threads()
    try:
        folder = finished(target, prompts, tmp_path / "run", workers=4)
    finally:
        torch.set_num_threads(before)
    assert read_info(folder)["provenance"]["threads_per_worker"] == 2


def test_a_run_whose_prompts_are_cut_otherwise_is_not_gone_on_with(
    target: Path, prompts: Path, tmp_path: Path
) -> None:
    """Its finished shards would hold other prompts."""
    folder = finished(target, prompts, tmp_path / "run")
    shard_path(folder, read_info(folder)["shards"][0]).unlink()
    write_prompts(prompts, chat_prompts(4))
    with pytest.raises(ValueError, match="cut into other shards"):
        plan.resume(folder)


def test_a_shard_is_tried_three_times_and_then_recorded_as_failed(
    target: Path, prompts: Path, tmp_path: Path
) -> None:
    """Every turn of its prompts, with the last reason."""
    todo = plan.new(tiny_config(target, prompts), tmp_path / "run")
    first = todo.pending.popleft()
    assert todo.fail(first, "one") and todo.pending.pop() is first
    assert todo.fail(first, "two") and todo.pending.pop() is first
    assert not todo.fail(first, "three")
    assert first not in todo.pending
    text = shard_path(todo.folder, first.id).read_text().splitlines()[1:]
    found = {line["request"]: line["reason"] for line in map(json.loads, text)}
    assert set(found) == {"p0", "p0/2", "p1", "p2", "p3", "p3/2"}
    assert set(found.values()) == {"given up after 3 attempts: three"}


def test_workers_that_would_measure_different_things_are_refused(
    target: Path, prompts: Path, tmp_path: Path
) -> None:
    """As on machines of two kinds that choose different dtypes."""
    from specbench.worker import Worker

    config = tiny_config(target, prompts)
    todo = plan.new(config, tmp_path / "run")
    one = Worker(config).describe()
    other = one | {"target": one["target"] | {"dtype": "bfloat16"}}
    with pytest.raises(ValueError, match="the workers differ in their target"):
        todo.begin([one, other])
    assert not (tmp_path / "run").exists()
    slower = one | {"machine": one["machine"] | {"cpu": "a slower one"}}
    assert any(re.search("different CPUs: .*a slower one", n) for n in todo.begin([one, slower]))


@pytest.mark.parametrize("held", ["run.json", "shards"])
def test_a_folder_that_holds_a_run_is_not_written_to(
    target: Path, prompts: Path, tmp_path: Path, held: str
) -> None:
    """Also where only its shards are left."""
    folder = tmp_path / "a run"
    folder.mkdir()
    (folder / held).mkdir()
    with pytest.raises(ValueError, match=r"already holds a run .*--resume '.*a run'` or .*--out"):
        plan.new(tiny_config(target, prompts), folder)


def test_a_folder_of_someone_else_is_no_obstacle(
    target: Path, prompts: Path, tmp_path: Path
) -> None:
    """What is in it stays."""
    (tmp_path / "notes.txt").write_text("mine")
    finished(target, prompts, tmp_path)
    assert (tmp_path / "notes.txt").read_text() == "mine"
    assert len(read_run(tmp_path).references) == 14


def test_a_folder_that_cannot_be_made_is_refused_before_anything_is_loaded(
    target: Path, prompts: Path, tmp_path: Path
) -> None:
    """And nothing is made on the way."""
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"cannot write to .*file/deep/run: .*; valid: a folder"):
        plan.new(tiny_config(target, prompts), tmp_path / "file" / "deep" / "run")
    assert not plan.new(tiny_config(target, prompts), tmp_path / "new").folder.exists()


def test_a_disk_that_fills_up_stops_the_run_in_one_line(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is finished is kept, and it says how to go on."""
    shards: Sequence[str] = read_info(folder)["shards"]
    shard_path(folder, shards[2]).unlink()
    todo = plan.resume(folder)

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(plan, "write_shard", full)
    with pytest.raises(ValueError, match=r"cannot write .* No space left .* go on with `specbench"):
        run(todo, use_ray=False)
    assert len(inodes(folder, shards)) == 2


def test_a_folder_without_a_run_cannot_be_resumed(tmp_path: Path) -> None:
    """It says that there is none."""
    with pytest.raises(ValueError, match=r"holds no run: there is no run\.json in it"):
        plan.resume(tmp_path)
    (tmp_path / "run.json").write_text(json.dumps({"schema": SCHEMA_VERSION, "shards": []}))
    with pytest.raises(ValueError, match="has no settings"):
        plan.resume(tmp_path)


def test_two_runs_do_not_write_to_one_folder(target: Path, prompts: Path, tmp_path: Path) -> None:
    """Planned at the same time: the second one starts while the first one measures, or after it."""
    config = tiny_config(target, prompts, "ngram")
    first, second, late = (plan.new(config, tmp_path / "run") for _ in range(3))
    with first.alone(), pytest.raises(ValueError, match="another run is writing to"):
        run(second, use_ray=False)
    finished = run(first, use_ray=False)
    with pytest.raises(ValueError, match="already holds a run"):
        run(late, use_ray=False)
    assert outputs(read_run(tmp_path / "run")) == outputs(finished)


def test_of_two_runs_that_go_on_the_second_does_what_the_first_left(
    whole: Path, folder: Path
) -> None:
    shards: Sequence[str] = read_info(folder)["shards"]
    shard_path(folder, shards[1]).unlink()
    first, second = plan.resume(folder), plan.resume(folder)
    run(first, use_ray=False)
    finished = inodes(folder, shards)
    assert outputs(run(second, use_ray=False)) == outputs(read_run(whole))
    assert inodes(folder, shards) == finished
    assert len(read_info(folder)["provenance"]["resumed"]) == 1


def test_a_run_that_does_not_begin_leaves_the_folder_as_it_was(
    target: Path, prompts: Path, tmp_path: Path
) -> None:
    (tmp_path / "own").mkdir()
    for name, kept in (("own", True), ("new", False)):
        todo = plan.new(tiny_config(target, prompts, "ngram"), tmp_path / name)
        with pytest.raises(RuntimeError), todo.alone():
            raise RuntimeError
        assert (tmp_path / name).exists() == kept


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"knobs": {"nobody": {}}}, "method 'nobody' is not in this run"),
        ({"prompts": "many"}, "prompts: Input should be a valid integer"),
        ({"methods": 3}, "methods: Input should be a valid tuple"),
        ({"colour": "red"}, "colour: Unexpected keyword argument"),
        ({"rounds": 0}, "--rounds 0 is out of range"),
    ],
)
def test_edited_settings_are_refused(folder: Path, settings: dict[str, Any], message: str) -> None:
    info = read_info(folder)
    info["settings"] |= settings
    (folder / "run.json").write_text(json.dumps(info))
    with pytest.raises(ValueError, match=message):
        plan.resume(folder)
