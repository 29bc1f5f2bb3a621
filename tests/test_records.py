"""Tests of what a run writes and reads back."""

import dataclasses
import json
import math
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from specbench.files import remove_unfinished, write_atomically
from specbench.filing import shard_path
from specbench.records import (
    Divergence,
    Record,
    read_info,
    read_run,
    read_shard,
    write_run,
    write_shard,
)
from tests.made_runs import INFO, failure, output, reference, resource, timing

DIVERGENCE = Divergence(position=1, expected=7, found=None, gap=None, tolerance=None)
RECORDS: list[Record] = [
    reference("a", num_tokens=3),
    output("echo", "a", (2, 2, 1, 2), (0, 0, 0, 1), lossless="broken", divergence=DIVERGENCE),
    timing("echo", ["a"], 1.5, num_tokens=3),
    failure(None, "b", "the prompt is too long — by «7»"),
    resource(123.5),
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run of two shards, of which one is finished."""
    write_run(tmp_path, INFO | {"shards": ["code-0", "code-1"]})
    write_shard(tmp_path, "code-0", RECORDS)
    return tmp_path


def edit(path: Path, change: Callable[[list[dict[str, Any]]], None]) -> None:
    """Edits the lines of a shard behind the program's back."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    change(lines)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_what_is_written_is_read_back(folder: Path) -> None:
    assert read_shard(shard_path(folder, "code-0")) == RECORDS


def test_a_run_sorts_its_records_and_lists_the_missing_shards(folder: Path) -> None:
    run = read_run(folder)
    found = [*run.references, *run.requests, *run.timings, *run.failures, *run.resources]
    assert found == RECORDS
    assert run.missing_shards == ["code-1"]


def test_a_write_that_fails_in_the_middle_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(UnicodeEncodeError):
        write_atomically(tmp_path / "new.json", "begun, then \ud800")
    assert list(tmp_path.iterdir()) == []


def test_a_write_that_fails_leaves_the_old_file_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "old.json"
    write_atomically(path, "old")
    with pytest.raises(UnicodeEncodeError):
        write_atomically(path, "\ud800")
    assert [path.read_text()] == [file.read_text() for file in tmp_path.iterdir()] == ["old"]


def test_results_may_be_read_by_everyone(tmp_path: Path) -> None:
    write_atomically(tmp_path / "open.json", "")
    assert (tmp_path / "open.json").stat().st_mode & 0o777 == 0o644


def test_a_file_that_ends_within_a_record_is_refused(folder: Path) -> None:
    path = shard_path(folder, "code-0")
    path.write_text(path.read_text()[:-9])
    with pytest.raises(ValueError, match=r"code-0\.jsonl is not a readable result file"):
        read_run(folder)


def test_a_file_that_ends_between_records_is_refused(folder: Path) -> None:
    edit(shard_path(folder, "code-0"), lambda lines: lines.__delitem__(-1))
    with pytest.raises(ValueError, match="holds 4 records, its header says 5"):
        read_run(folder)


def test_a_file_of_endless_brackets_is_refused(folder: Path) -> None:
    for path in (shard_path(folder, "code-0"), folder / "run.json"):
        path.write_text("[" * 100_000)
        with pytest.raises(ValueError, match="readable"):
            read_run(folder)


def test_an_empty_file_is_refused(folder: Path) -> None:
    shard_path(folder, "code-0").write_text("")
    with pytest.raises(ValueError, match="is not a readable result file: it has no header"):
        read_run(folder)
    (folder / "run.json").write_text("[]")
    with pytest.raises(ValueError, match=r"holds no readable run: run\.json is no JSON object"):
        read_run(folder)


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ({"num_records": 4}, "holds 5 records, its header says 4"),
        ({"shard": "math-0"}, "holds shard 'math-0'"),
        ({"schema": 99}, "has schema version 99; this version of specbench reads 3"),
    ],
)
def test_an_edited_header_is_refused(folder: Path, header: dict[str, Any], message: str) -> None:
    edit(shard_path(folder, "code-0"), lambda lines: lines[0].update(header))
    with pytest.raises(ValueError, match=message):
        read_run(folder)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kind": "guess"}, "no such key: 'guess'"),
        ({"colour": "red"}, "colour"),
        ({"steps": [[2, 2, 3, 3, 3]]}, "accepted tokens lie within the offered depth"),
        ({"steps": [[2, 2, 1]]}, "unpack"),
        ({"tokens": "0, 1, 2"}, "tokens: Input should be a valid array"),
        ({"tokens": [0, 1, 2.5]}, r"tokens\.2: Input should be a valid integer"),
        ({"request": "z"}, "request 'z' of workload 'code' has no reference"),
        ({"workload": "math"}, "request 'a' of workload 'math' has no reference"),
        ({"lossless": "exact", "divergence": None, "tokens": [9, 9, 9]}, "called exact, but"),
        ({"lossless": "perhaps"}, "losslessness is one of exact, tie"),
        ({"divergence": {"position": 1}}, "divergence.expected: Field required"),
        (
            {"divergence": {"position": 1, "expected": 7, "found": 8, "gap": 1, "tolerance": None}},
            "divergence: Assertion failed, a gap has a tolerance",
        ),
    ],
)
def test_a_broken_record_is_refused_with_its_line(
    folder: Path, fields: dict[str, Any], message: str
) -> None:
    edit(shard_path(folder, "code-0"), lambda lines: lines[2].update(fields))
    with pytest.raises(
        ValueError, match=f"code-0.jsonl holds a broken record in line 3: .*{message}"
    ):
        read_run(folder)


def test_a_number_that_was_edited_by_hand_is_noticed(folder: Path) -> None:
    """Though it could be true."""
    edit(shard_path(folder, "code-0"), lambda lines: lines[3].update(decode_s=0.75))
    with pytest.raises(ValueError, match=r"code-0\.jsonl has been edited: its sha256 is not"):
        read_run(folder)


def test_a_record_that_was_written_twice_is_noticed(folder: Path) -> None:
    for record in RECORDS[:3]:
        write_shard(folder, "code-0", [*RECORDS, record])
        with pytest.raises(ValueError, match="record of code, a twice"):
            read_run(folder)


def test_a_file_that_was_copied_under_another_name_is_refused(folder: Path) -> None:
    shutil.copy(shard_path(folder, "code-0"), shard_path(folder, "code-1"))
    with pytest.raises(ValueError, match=r"code-1\.jsonl holds shard 'code-0'; a shard's"):
        read_run(folder)


def test_a_shard_that_holds_what_another_one_holds_is_refused(folder: Path) -> None:
    write_shard(folder, "code-1", RECORDS)
    with pytest.raises(ValueError, match="holds the target's reference record of code, a twice"):
        read_run(folder)


def test_a_file_of_another_run_is_refused(folder: Path, tmp_path_factory: Any) -> None:
    other = tmp_path_factory.mktemp("other")
    write_run(other, INFO | {"shards": ["code-0", "code-1"]})
    write_shard(other, "code-0", RECORDS)
    shutil.copy(shard_path(other, "code-0"), shard_path(folder, "code-0"))
    with pytest.raises(ValueError, match=r"code-0\.jsonl belongs to another run"):
        read_run(folder)


def test_a_file_that_the_run_does_not_list_is_left_out_and_named(folder: Path) -> None:
    shutil.copy(shard_path(folder, "code-0"), folder / "shards" / "code-0 (copy).jsonl")
    write_shard(folder, "code-2", RECORDS)
    run = read_run(folder)
    assert run.stray_files == ["code-0 (copy).jsonl", "code-2.jsonl"]
    assert len(run.references) == 1


def test_a_write_that_is_killed_leaves_the_old_file_and_a_part_to_be_removed(
    folder: Path,
) -> None:
    path = shard_path(folder, "code-0")
    script = (
        "import os, signal, sys; from pathlib import Path; from specbench import files\n"
        "os.fsync = lambda _: os.kill(os.getpid(), signal.SIGKILL)\n"
        "files.write_atomically(Path(sys.argv[1]), 'half')"
    )
    killed = subprocess.run([sys.executable, "-c", script, str(path)], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert read_shard(path) == RECORDS
    assert read_run(folder).stray_files == []
    assert len(list(path.parent.iterdir())) == 2
    remove_unfinished(path.parent)
    assert list(path.parent.iterdir()) == [path]


def test_a_disk_that_is_full_in_the_middle_of_a_write_leaves_the_old_file(folder: Path) -> None:
    """As a limit on the size of files makes it."""
    path = shard_path(folder, "code-0")
    script = (
        "import resource, signal, sys; from pathlib import Path; from specbench import files\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))\n"
        "try: files.write_atomically(Path(sys.argv[1]), 'x' * 9999)\n"
        "except OSError as error: print(error.strerror)"
    )
    full = subprocess.run(
        [sys.executable, "-c", script, str(path)], capture_output=True, text=True, check=True
    )
    assert full.stdout == "File too large\n"
    assert read_shard(path) == RECORDS
    assert list(path.parent.iterdir()) == [path]


def test_a_record_without_a_field_is_refused(folder: Path) -> None:
    edit(shard_path(folder, "code-0"), lambda lines: lines[1].pop("entropy_nats"))
    with pytest.raises(ValueError, match=r"broken record in line 2: .*entropy_nats"):
        read_run(folder)


@pytest.mark.parametrize("seconds", [math.nan, math.inf, -1.0])
def test_a_time_that_cannot_be_is_refused(folder: Path, seconds: float) -> None:
    edit(shard_path(folder, "code-0"), lambda lines: lines[3].update(decode_s=seconds))
    with pytest.raises(ValueError, match="broken record in line 4"):
        read_run(folder)


@pytest.mark.parametrize("part", ["settings", "provenance", "target", "methods", "workloads"])
def test_a_run_without_one_of_its_parts_is_refused(folder: Path, part: str) -> None:
    info = json.loads((folder / "run.json").read_text())
    something_else: tuple[Any, ...] = (None, [], "text")
    if part in ("methods", "workloads"):
        something_else = (*something_else, {"name": 3})
    for broken in something_else:
        (folder / "run.json").write_text(json.dumps(info | {part: broken}))
        with pytest.raises(ValueError, match=f"holds no readable run: run.json has no {part}"):
            read_run(folder)


@pytest.mark.parametrize(
    "step",
    [
        (2, 2, 3, 3),  # more accepted than offered
        (1, 2, 0, 1),  # deeper than there are nodes
        (2, 2, 1, 3),  # more than one bonus
        (2, 2, 0, 0),  # nothing committed
    ],
)
def test_steps_that_cannot_be_are_not_recorded(step: tuple[int, int, int, int]) -> None:
    with pytest.raises(AssertionError):
        output("echo", "a", step)


def test_steps_must_account_for_every_token() -> None:
    good = output("echo", "a", (2, 2, 1, 2))
    with pytest.raises(AssertionError, match="steps account for every token"):
        dataclasses.replace(good, tokens=[*good.tokens, 5])


def test_a_time_is_not_negative_and_made_a_token() -> None:
    with pytest.raises(AssertionError, match="not negative"):
        timing("echo", ["a"], -1.0)
    with pytest.raises(AssertionError, match="made a token"):
        timing("echo", ["a", "b"], 1.0, num_tokens=1)


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"holds no run: there is no run\.json"):
        read_run(tmp_path)


def test_a_run_of_another_schema_is_refused(tmp_path: Path) -> None:
    write_run(tmp_path, {"schema": 0, "shards": []})
    with pytest.raises(ValueError, match="has schema version 0"):
        read_info(tmp_path)


def test_a_run_that_lists_a_shard_twice_or_has_no_id_is_refused(folder: Path) -> None:
    info = json.loads((folder / "run.json").read_text())
    for change, message in (
        ({"shards": ["code-0"] * 2}, "lists a shard twice"),
        ({"id": 0}, "no id"),
    ):
        (folder / "run.json").write_text(json.dumps(info | change))
        with pytest.raises(ValueError, match=message):
            read_info(folder)


def test_a_run_that_lists_no_shards_is_refused(tmp_path: Path) -> None:
    write_run(tmp_path, {"settings": {}})
    with pytest.raises(ValueError, match="lists no shards"):
        read_info(tmp_path)
