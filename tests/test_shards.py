"""How workloads are cut into shards."""

from pathlib import Path
from typing import Any

import pytest

from specbench.shards import load_workloads, plan_shards, request_ids
from tests.tiny_runs import chat_prompts, write_prompts


@pytest.mark.parametrize(
    ("batch_size", "sizes"), [(1, [4, 4, 2]), (3, [6, 4]), (4, [4, 4, 2]), (5, [5, 5]), (64, [10])]
)
def test_shards_are_whole_batches_of_four_prompts_or_more(
    tmp_path: Path, batch_size: int, sizes: list[int]
) -> None:
    """In the order of the prompts, none left out."""
    path = write_prompts(tmp_path / "w.jsonl", chat_prompts(10))
    (workload,) = load_workloads([str(path)], None)
    shards = plan_shards(workload, batch_size)
    assert [len(shard.workload.prompts) for shard in shards] == sizes
    assert [p for shard in shards for p in shard.workload.prompts] == list(workload.prompts)
    assert len({shard.id for shard in shards}) == len(shards)


def test_files_of_one_name_stay_apart(tmp_path: Path) -> None:
    """Their workloads and shards have names of their own, the same ones each time."""
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
    paths = [write_prompts(tmp_path / d / "w.jsonl", chat_prompts(2)) for d in ("a", "b")]
    sources = [str(path) for path in paths]
    one, other = load_workloads(sources, None)
    assert one.name != other.name
    assert plan_shards(one, 1)[0].id != plan_shards(other, 1)[0].id
    assert [w.name for w in load_workloads(sources[::-1], None)] == [other.name, one.name]
    assert load_workloads(sources[:1], None)[0].name == "w.jsonl"


def test_a_name_too_long_for_a_shards_file_is_refused(tmp_path: Path) -> None:
    path = write_prompts(tmp_path / ("w" * 240 + ".jsonl"), chat_prompts(2))
    with pytest.raises(ValueError, match="its name is too long for a file; valid: up to 200"):
        load_workloads([str(path)], None)


def test_a_prompt_named_like_a_later_turn_is_refused(tmp_path: Path) -> None:
    """Its records could not be told from the turn's."""
    rows: list[dict[str, Any]] = [
        {"id": "p0", "turns": ["one", "two"]},
        {"id": "p0/2", "prompt": "three"},
    ]
    path = write_prompts(tmp_path / "w.jsonl", rows)
    with pytest.raises(ValueError, match="both called 'p0/2'; rename the prompt"):
        load_workloads([str(path)], None)


def test_each_turn_is_a_request(tmp_path: Path) -> None:
    """The first one bears the prompt's name."""
    path = write_prompts(tmp_path / "w.jsonl", [{"id": "x", "turns": ["a", "b", "c"]}])
    (workload,) = load_workloads([str(path)], None)
    assert list(request_ids(workload.prompts[0])) == ["x", "x/2", "x/3"]
