"""Sweeps: what is measured, and what is made of it, on runs with known answers."""

import io
import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from specbench import registry
from specbench.conformance.models import save_tiny_model
from specbench.records import Run
from specbench.sweep import plots, running
from specbench.sweep.choices import (
    Ends,
    Span,
    best,
    best_fixed,
    by_batch,
    by_setting,
    find_ends,
    last_paying,
    recommend,
    spans,
)
from specbench.sweep.config import Setting, SweepConfig
from specbench.sweep.engines import advise
from specbench.sweep.pages import page
from specbench.sweep.points import Point, Points, find_twins, measure
from specbench.tables import Table, markdown, print_page
from tests.made_runs import failure, made_run, output, reference, timing
from tests.made_sweeps import GAINS, NUM_BATCHES, batch_run, made_sweep
from tests.tiny_runs import write_prompts


def points_of(runs: dict[int, Run]) -> list[Point]:
    """The points of the first workload."""
    return list(measure(runs).workloads[0].points)


def depths(choices: dict[int, Point | None]) -> dict[int, int]:
    return {batch: p.setting.depth if p and p.setting else 0 for batch, p in choices.items()}


@pytest.mark.parametrize(
    ("setting", "name"),
    [
        (Setting("eagle", 3), "eagle@d3"),
        (Setting("eagle", 3, 12), "eagle@d3n12"),
        (Setting("eagle@chain", 3), "eagle@chain-d3"),
        (Setting("eagle@chain", 10, 6), "eagle@chain-d10n6"),
    ],
)
def test_a_setting_is_read_from_its_name(setting: Setting, name: str) -> None:
    assert setting.name == name
    assert Setting.read(name) == setting


def test_what_is_no_setting_is_not_read_as_one() -> None:
    assert Setting.read("vanilla") is None
    assert Setting.read("eagle@chain") is None


@pytest.fixture
def tiny(tmp_path: Path) -> dict[str, str]:
    """A target and ten prompts."""
    target = save_tiny_model(tmp_path / "target", max_position_embeddings=128)
    prompts = [{"id": f"p{i}", "prompt": f"say {i}"} for i in range(10)]
    return {
        "target": str(target),
        "prompts": str(write_prompts(tmp_path / "ten.jsonl", prompts)),
    }


def config(tiny: dict[str, str], *methods: str, **settings: object) -> SweepConfig:
    values = {"target": tiny["target"], "workloads": [tiny["prompts"]], "methods": methods}
    return SweepConfig.from_dict(values | settings)


def test_every_method_stands_at_every_depth(tiny: dict[str, str]) -> None:
    """Depth 0 is the baseline, which is there once."""
    asked = config(
        tiny, "ngram", "draft_model", depths=[3, 0, 1], knobs={"ngram": {"min_match": "2"}}
    )
    run = asked.run_config(4)
    names = ["ngram@d1", "ngram@d3", "draft_model@d1", "draft_model@d3"]
    assert list(run.methods) == ["vanilla", *names]
    assert run.knobs["ngram@d3"] == {"min_match": "2", "depth": "3"}
    assert (run.batch_size, run.prompts) == (4, 40)
    assert SweepConfig.from_dict(json.loads(json.dumps(asked.to_dict()))) == asked


def test_tree_sizes_are_for_methods_that_draft_trees(tiny: dict[str, str]) -> None:
    """And no smaller than the depth."""
    asked = config(tiny, "ngram", "draft_model", depths=[1, 3], nodes=[2, 6])
    assert asked.run_config(1).methods == (
        *("vanilla", "ngram@d1", "ngram@d3"),
        *("draft_model@d1n2", "draft_model@d1n6", "draft_model@d3n6"),
    )
    (reason,) = asked.left_out().values()
    assert "draft_model@d3n2: 2 nodes reach no depth of 3" in reason


@pytest.mark.parametrize(
    ("method", "knobs", "expected"),
    [
        ("ngram", {}, False),
        ("ngram", {"branches": "2"}, True),
        ("draft_model", {"branching": ""}, False),
        ("early_exit", {"branching": "1,2"}, True),
        ("eagle", {}, True),
        ("eagle", {"tree": "chain"}, False),
        ("medusa", {}, True),
        ("vanilla", {}, False),
    ],
)
def test_a_config_knows_whether_it_drafts_trees(
    method: str, knobs: dict[str, str], expected: bool
) -> None:
    found = registry.make_config(method, registry.load_method(method), knobs)
    assert found.drafts_trees is expected


def test_a_depth_that_a_method_cannot_have_is_that_point_lost(tiny: dict[str, str]) -> None:
    asked = config(tiny, "ngram", depths=[2, 9], knobs={"ngram": {"max_nodes": "4"}})
    assert asked.run_config(1).methods == ("vanilla", "ngram@d2")
    with pytest.raises(ValueError, match="ngram@d9: 4 nodes reach no depth of 9"):
        config(tiny, "ngram", depths=[9], knobs={"ngram": {"max_nodes": "4"}})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"depths": [0]}, "a sweep needs a batch size and a depth of 1"),
        ({"batches": [0]}, "--batches 0 is out of range; valid: 1 or more"),
        ({"knobs": {"ngram": {"depth": "2"}}}, "--set ngram.depth: --depths sets it"),
        ({"knobs": {"ngram": {"max_nodes": "2"}}, "nodes": [4]}, "--nodes sets it"),
        ({"knobs": {"ngrm": {"min_match": "2"}}}, "did you mean 'ngram'"),
        ({"methods": ["ngrm"]}, "unknown method 'ngrm'"),
    ],
)
def test_bad_settings_are_refused(
    tiny: dict[str, str], settings: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        config(tiny, "ngram", **settings)


def test_a_batch_takes_as_many_prompts(tiny: dict[str, str], tmp_path: Path) -> None:
    """Larger ones are left out; where a verdict is out of reach it says so."""
    sweep = running.new(config(tiny, "ngram", batches=[1, 2, 4, 16]), tmp_path / "sweep")
    assert sweep.batches == (1, 2, 4)
    assert sweep.notes == ["left out: batch size 16, ten.jsonl has 10 prompts here"]
    assert sweep.shortages == [
        "batch size 4: 10 prompts of ten.jsonl make 2 batches, a verdict takes 5 (--prompts 20)",
    ]
    with pytest.raises(ValueError, match=r"--batches 16: ten.jsonl has 10 prompts here; valid: 1"):
        running.new(config(tiny, "ngram", batches=[16]), tmp_path / "sweep")


def test_throughput_and_latency_are_those_of_full_batches() -> None:
    """By hand: two rows of 4 tokens, in 2 and 4 steps of half a second; one prompt is left over,
    in a batch of its own."""
    steps = {"a": [(2, 2, 1, 2)] * 2, "b": [(2, 2, 0, 1)] * 4, "c": [(2, 2, 1, 2)] * 2}
    run = made_run(
        *(reference(name) for name in steps),
        *(output("vanilla", name, *[(0, 0, 0, 1)] * 4) for name in steps),
        *(output("echo@d2", name, *taken) for name, taken in steps.items()),
        timing("vanilla", ["a", "b"], 4.0, num_tokens=8, prefill_s=0.5),
        timing("echo@d2", ["a", "b"], 2.0, num_tokens=8, num_forwards=4, prefill_s=0.5),
        timing("vanilla", ["c"], 1.0),
        timing("echo@d2", ["c"], 100.0, num_forwards=2),
        methods={"vanilla": {}, "echo@d2": {}},
    )
    found = measure({2: run})
    (point,) = found.workloads[0].points
    assert point.tokens_per_s == 4.0
    assert point.mean_rows == 6 / 4 and point.mean_steps == 3
    assert point.row_s == pytest.approx(0.5 / (12 / 8))
    assert point.request_s == pytest.approx(0.5 + 3 * 0.5)
    assert point.gain == pytest.approx(2.0)
    assert found.workloads[0].baselines[2].tokens_per_s == 2.0
    assert "batch size 2: 1 smaller batch is left out of all times" in found.notes


def test_speed_ups_are_judged_together() -> None:
    """All depths, batch sizes and workloads."""
    runs = made_sweep()
    both = {
        batch: made_run(
            *run.references,
            *run.requests,
            *run.timings,
            *(other := batch_run(batch, GAINS[batch], workload="creative")).references,
            *other.requests,
            *other.timings,
            methods=run.info["methods"],
        )
        for batch, run in runs.items()
    }
    found = measure(both)
    speed_ups = [p.result.speed_up for w in found.workloads for p in w.points]
    assert len(speed_ups) == 2 * 12
    assert {s.num_judged for s in speed_ups if s} == {24}


def test_a_depth_that_changes_nothing_is_one_point() -> None:
    """Steps tell, not times."""
    run = batch_run(1, {"echo@d2": 1.5, "echo@d4": 1.4, "other@d4": 1.4})
    deeper = [r for r in run.requests if r.method == "echo@d4"]
    for record in deeper:
        record.steps[:] = [[2, 2, 1, 2, 1]] * 2
    assert find_twins([run]) == {"echo@d4": "echo@d2"}
    found = measure({1: run})
    assert [p.result.method for p in found.workloads[0].points] == ["echo@d2", "other@d4"]
    assert "echo@d4 drafted exactly as echo@d2 did: its point is left out" in found.notes
    deeper[0].steps[:] = [[4, 4, 1, 2, 1]] * 2
    assert find_twins([run]) == {}


def test_the_best_depth_and_the_recommendation_of_each_batch_size() -> None:
    points = points_of(made_sweep())
    bests = {batch: best(here) for batch, here in by_batch(points).items()}
    assert depths(bests) == {1: 2, 2: 1, 4: 1, 8: 1}
    choices = recommend(points)
    assert depths(choices) == {1: 2, 2: 1, 4: 0, 8: 0}
    assert last_paying(choices) == 2
    assert spans(choices) == [Span(1, 1, 2), Span(2, 2, 1), Span(3, 8, 0)]


def test_where_speculation_stops_to_pay_is_told_by_intervals() -> None:
    """Depth 1 at batch 4 is not proven either way."""
    points = points_of(made_sweep())
    ends = {setting.depth: find_ends(own) for setting, own in by_setting(points).items()}
    assert ends == {1: Ends(4, 8), 2: Ends(4, 4), 3: Ends(2, 2)}
    assert find_ends(points) == Ends(4, 8)
    assert find_ends(p for p in points if p.batch < 4) == Ends(None, None)


def test_nothing_is_recommended_that_is_not_proven() -> None:
    """Too few batches for a verdict, outputs that are not the target's, requests that failed."""
    gains = {"echo@d2": 3.0}
    sound = batch_run(1, gains)
    assert depths(recommend(points_of({1: sound}))) == {1: 2}
    few = batch_run(1, gains, num_batches=4)
    assert recommend(points_of({1: few})) == {} and advise(points_of({1: few})) == []
    assert any("give --prompts 5 or more" in note for note in measure({1: few}).notes)
    for kind in ("broken", "lossy"):
        assert depths(recommend(points_of({1: batch_run(1, gains, lossless=kind)}))) == {1: 0}
    sound.failures.append(failure("echo@d2", "code-more"))
    points = points_of({1: sound})
    assert depths(recommend(points)) == {1: 0} and find_ends(points) == Ends(1, None)


def test_where_nothing_can_be_told_off_is_not_recommended_either() -> None:
    """Measured far above 1, but from 4 batches and from 1."""
    runs = {batch: batch_run(batch, GAINS[1], num_batches=5 - batch) for batch in (1, 4)}
    found = measure(runs)
    points = found.workloads[0].points
    assert find_ends(points) == Ends(None, None)
    text = markdown(page(runs, found)).replace("\N{NO-BREAK SPACE}", " ")
    assert "| 1 | cannot tell: 4 batches of 5 needed | - | - | - |" in text
    assert "| 4 | cannot tell: 1 batch of 5 needed | - | - | - |" in text
    assert "| best | 2 | 2 | cannot tell | cannot tell |" in text
    assert "at batch sizes 1, 4 cannot be told" in text and "speculation off" not in text
    assert text.count("give --prompts") == 2
    assert "batch size 4: 1 batch of code was timed, a verdict takes 5: give --prompts 20" in text


def test_batch_sizes_with_a_verdict_and_those_without_are_told_apart() -> None:
    def said(gains: dict[int, dict[str, float]]) -> str:
        runs = {
            batch: batch_run(batch, here, num_batches=6 if batch < 4 else 2)
            for batch, here in gains.items()
        }
        assert all(p.batch < 4 for p in recommend(points_of(runs)).values() if p)
        return markdown(page(runs, measure(runs)))

    fast, slow = {"echo@d2": 1.5}, {"echo@d2": 0.8}
    text = said({1: fast, 2: slow, 4: fast})
    assert "above batch size 2" not in text and "above batch size 1: switch" in text
    assert "At batch size 4 it cannot be told." in text
    text = said({1: fast, 2: fast, 4: slow, 8: slow})
    assert "up to the largest batch size with a verdict, 2; beyond, nothing is known" in text
    assert "At batch sizes 4, 8 it cannot be told." in text
    assert "at batch size 1, 2: leave speculation off there" in said({1: slow, 2: slow, 4: slow})


def test_engines_are_told_what_they_can_say() -> None:
    vllm, old_vllm, sglang, transformers = advise(points_of(made_sweep()))
    flag, _, value = vllm.setting.partition(" ")
    assert flag == "--speculative-config"
    assert json.loads(value.strip("'")) == {
        "num_speculative_tokens": 2,
        "num_speculative_tokens_per_batch_size": [[1, 1, 2], [2, 2, 1], [3, 4096, 0]],
    }
    assert old_vllm.setting == "--num-speculative-tokens 2 --speculative-disable-by-batch-size 3"
    assert sglang.setting == (
        "--speculative-num-steps 2 --speculative-eagle-topk 1 --speculative-num-draft-tokens 3"
    )
    assert "--max-running-requests 2" in sglang.unsaid
    assert "num_assistant_tokens=2" in transformers.setting


def test_engines_are_told_to_stop_where_nothing_was_measured() -> None:
    points = points_of(made_sweep({1: GAINS[1], 2: GAINS[2]}))
    vllm = advise(points)[0]
    assert "[[1, 1, 2], [2, 2, 1], [3, 4096, 0]]" in vllm.setting
    fixed = best_fixed(points)
    assert fixed is not None and fixed.last == 2


def test_where_nothing_pays_no_engine_is_told_anything() -> None:
    slow = {batch: {"echo@d1": 0.9, "echo@d2": 0.8} for batch in (1, 2)}
    points = points_of(made_sweep(slow))
    assert advise(points) == [] and best_fixed(points) is None
    found = measure(made_sweep(slow))
    assert "leave speculation off" in markdown(page(made_sweep(slow), found))


def test_what_pays_at_larger_batches_only_is_no_fixed_setting() -> None:
    odd = {1: {"echo@d1": 0.9}, 2: {"echo@d1": 1.5}}
    points = points_of(made_sweep(odd))
    assert best_fixed(points) is None
    vllm, transformers = advise(points)
    assert "[[1, 1, 0], [2, 2, 1], [3, 4096, 0]]" in vllm.setting
    assert transformers.setting.startswith("no assistant_model")


def _tables(found: Points, runs: dict[int, Run]) -> dict[str, Table]:
    return {e.title: e for e in page(runs, found) if isinstance(e, Table)}


def test_the_heat_map_says_in_colour_and_in_signs_what_is_proven() -> None:
    runs = made_sweep()
    table = _tables(measure(runs), runs)["echo: speed-up by depth and batch size"]
    first, _, third, last = table.rows
    assert [cell.tone for cell in first] == ["", "warm", "hot", "", "cool", "", ""]
    assert [cell.tone for cell in third][1:5] == ["hot", "cool", "cold", "cold"]
    texts = [cell.text.replace("\N{NO-BREAK SPACE}", " ") for cell in first]
    assert texts == ["1", "1.20x +", "1.30x +", "0.98x ?", "0.90x -", "4", "8"]
    assert [cell.text for cell in last] == ["best", "2", "1", "1", "1", "4", "8"]


def test_theory_stands_beside_what_was_measured() -> None:
    """By hand, at depth 2: one of two tokens is accepted, so 1 + 1/2 + 1/4 and 1 + 1 + 0 tokens;
    6 batches of 39 seconds in all and 4 tokens each."""
    runs = made_sweep()
    table = _tables(measure(runs), runs)["echo: promised and measured"]
    row = next(r for r in table.rows if (r[0].text, r[1].text) == ("2", "1"))
    texts = [cell.text for cell in row[2:]]
    assert texts[:5] == ["1.75", "2.00", "2.00", "2.00x", "1.50x"]
    ideal, draft, verify, other, total = map(float, texts[5:])
    vanilla_ms = 1000 * 39 / 24
    assert ideal == pytest.approx(vanilla_ms / 2)
    assert total == pytest.approx(vanilla_ms / 1.5, rel=1e-4)
    assert ideal + draft + verify + other == pytest.approx(total, abs=0.05)


def test_a_page_is_shown_in_a_terminal_and_in_markdown() -> None:
    runs = made_sweep()
    elements = page(runs, measure(runs), ["left out: something"])
    console = Console(width=100, record=True, file=io.StringIO())
    print_page(elements, console)
    shown, text = console.export_text(), markdown(elements)
    for word in ("left out: something", "switch speculation off there", "1.50x", "vLLM"):
        assert word in " ".join(shown.split()) and word in text
    assert NUM_BATCHES == 6 and "6 prompts" in text


def test_plots_say_what_they_need(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ValueError, match="--plots needs matplotlib"):
        plots.require()


def test_plots_are_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    runs = made_sweep()
    files = plots.draw(measure(runs), "tiny, float32", tmp_path / "plots")
    assert [path.name for path in files] == ["code-echo.png", "code-echo.svg"]
    assert all(path.stat().st_size > 1000 for path in files)
    few = {1: replace(batch_run(1, GAINS[1], num_batches=1))}
    assert plots.draw(measure(few), "tiny", tmp_path / "few")
