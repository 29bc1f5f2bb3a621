"""`specbench serve` as a whole: its settings, what it files, and what it shows again."""

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from specbench.cli import main
from specbench.commands.serve import controllers
from specbench.conformance.models import save_tiny_model
from specbench.filing import shard_path
from specbench.serving.arrivals import Arrival, poisson_times
from specbench.serving.config import DEFAULT_LOADS, Entry, ServeConfig
from specbench.serving.records import ServingRun, read_serving
from specbench.serving.run import choose_prompts
from specbench.serving.server import Server, Visit
from specbench.shards import load_workloads
from tests.tiny_runs import chat_prompts, installed_methods, write_prompts

Serve = Callable[..., int]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A tiny model and prompts, one of which is too long, with the methods that break installed."""
    folder = tmp_path_factory.mktemp("serving")
    save_tiny_model(folder / "target", max_position_embeddings=128)
    write_prompts(folder / "chat.jsonl", chat_prompts(8))
    write_prompts(folder / "some_long.jsonl", [{"prompt": "x" * 200}, {"prompt": "short"}])
    (folder / "methods").mkdir()
    with installed_methods(folder / "methods"):
        yield folder


@pytest.fixture
def serve(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Serve:
    """Calls the command beside the model and the prompts."""
    monkeypatch.chdir(folder)
    small = "--target target --dtype float32 --max-new-tokens 6 --requests 8 --max-batch 3"
    defaults = ["serve", *small.split(), "--workloads", "chat.jsonl", "--methods", "ngram"]
    return lambda *words: main([*defaults, *map(str, words)])


def config(**settings: Any) -> ServeConfig:
    return ServeConfig(**({"methods": ("ngram",)} | settings))


# Settings.


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"loads": (0.5,), "rates": (1.0,)}, "given twice; valid: --loads or --rates"),
        ({"rates": (0.0,)}, r"--rates 0\.0 is out of range; valid: above 0"),
        ({"loads": (float("inf"),)}, "--loads inf is out of range"),
        ({"swing": 0.5}, r"--swing 0\.5 is out of range; valid: 1 or more"),
        ({"swing": float("nan")}, "--swing nan is out of range"),
        ({"requests": 0}, "--requests 0 is out of range"),
        ({"max_batch": 0}, "--max-batch 0"),
        ({"rounds": 0}, "--rounds 0"),
        ({"requests": 7}, "--requests 7 never fill a batch of 8, .*valid: 8 or more"),
        ({"seed": -1}, "--seed -1"),
        ({"temperature": -1.0}, "temperature"),
        ({"controllers": ("fixd",)}, "unknown controller 'fixd' .*did you mean 'fixed'"),
        ({"methods": ("ngrm",)}, "unknown method 'ngrm'"),
        (
            {"controllers": ("fixed",), "knobs": {"ngram": {"controller": "ema"}}},
            "valid: --controllers or --set ngram.controller",
        ),
    ],
)
def test_bad_settings_are_refused_before_anything_is_loaded(
    settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        config(**settings)


def test_every_method_is_served_under_every_controller_and_vanilla_once() -> None:
    made = config(methods=("ngram", "ngram@b"), controllers=("fixed", "ema", "fixed"))
    assert made.entries() == [
        Entry("vanilla", "fixed"),
        Entry("ngram", "fixed"),
        Entry("ngram", "ema"),
        Entry("ngram@b", "fixed"),
        Entry("ngram@b", "ema"),
    ]
    own = config(knobs={"ngram": {"controller": "heuristic"}})
    assert own.entries() == [Entry("vanilla", "fixed"), Entry("ngram", "heuristic")]


def test_without_rates_the_loads_are_the_default() -> None:
    assert (config().loads, config().rates) == (DEFAULT_LOADS, ())
    assert (config(rates=(2.0, 1.0, 2.0)).loads, config(rates=(2.0, 1.0)).rates) == ((), (1.0, 2.0))


def test_controllers_with_several_knobs_are_told_apart() -> None:
    text = "fixed,off_above_batch:off_at=4,sticky=true,by_batch:depths=4:2/16:0,ema"
    assert controllers(text) == (
        "fixed",
        "off_above_batch:off_at=4,sticky=true",
        "by_batch:depths=4:2/16:0",
        "ema",
    )


def test_prompts_are_chosen_by_the_seed_each_once_and_without_later_turns(folder: Path) -> None:
    workloads = load_workloads([str(folder / "chat.jsonl"), str(folder / "some_long.jsonl")], None)

    def chosen(seed: int) -> list[str]:
        found = [p for w in choose_prompts(workloads, 6, seed) for p in w.prompts]
        assert all(len(prompt.turns) == 1 for prompt in found)
        return [prompt.id for prompt in found]

    assert chosen(0) == chosen(0) and len({*chosen(0)}) == 6
    assert len({tuple(chosen(seed)) for seed in range(4)}) > 1
    with pytest.raises(ValueError, match=r"--requests 11 .*valid: 1\.\.10"):
        choose_prompts(workloads, 11, 0)


# A run.


def served(run: ServingRun, method: str) -> dict[tuple[int, float | None], dict[str, float]]:
    """By round and rate: when each request arrived."""
    return {
        (one.about.round, one.about.rate): {r.request: r.arrival_s for r in one.served}
        for one in run.passes
        if one.about.method == method and one.about.rate is not None
    }


def test_a_run_is_served_filed_and_shown_again(
    serve: Serve, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    words = ("--controllers", "fixed,off_above_batch:off_at=2", "--loads", "0.7,1.5")
    assert serve(*words, "--methods", "ngram,draft_model", "--out", out) == 0
    shown = capsys.readouterr()
    assert "Where it hurts" in shown.out and "draft_model, off_above_batch" in shown.out
    assert "the baseline's capacity" in shown.err
    run = read_serving(out)
    assert not run.missing and not run.failures and len(run.references) == 8
    assert len(run.passes) == 1 + 3 * 2 * 5
    for one in run.passes:
        assert len(one.served) == 8 and not one.failures
        assert {record.lossless for record in one.served} == {"exact"}
        assert max(size for record in one.served for size in record.batches) <= 3
        assert one.about.rate is None or one.about.load in (0.7, 1.5)
    # The same requests at the same times, whatever serves them.
    assert served(run, "vanilla") == served(run, "ngram") == served(run, "draft_model")
    assert len({tuple(times.items()) for times in served(run, "vanilla").values()}) == 6
    first = Counter(one.about.method for one in run.passes if one.about.order == 0)
    assert len(first) > 1
    assert main(["serve", "--report", str(out)]) == 0
    assert "of vanilla's" in capsys.readouterr().out
    assert main(["serve", "--report", str(out), "--format", "md"]) == 0
    assert "| draft_model | off_above_batch: off_at=2 |" in capsys.readouterr().out


def test_rates_are_taken_as_they_are_given(
    serve: Serve, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--rates", "200,50", "--rounds", "1", "--temperature", "0.8", "--seed", "3")
    swing = ("--sampling", "coupled", "--swing", "3")
    assert serve(*words, *swing, "--out", tmp_path / "run") == 0
    run = read_serving(tmp_path / "run")
    found = [(o.about.rate, o.about.load, o.about.method, o.about.order) for o in run.passes]
    assert found == [
        (50.0, None, "vanilla", 0),
        (50.0, None, "ngram", 1),
        (200.0, None, "ngram", 0),
        (200.0, None, "vanilla", 1),
    ]
    assert {r.lossless for one in run.passes for r in one.served} == {"exact"}
    assert run.info["settings"]["temperature"] == 0.8
    shown = " ".join(capsys.readouterr().out.split())
    assert "T=0.8, rule coupled" in shown
    assert "4 spells, every other one 3 times as fast, at 0.67 and 2 times the mean" in shown
    times = sorted(served(run, "vanilla")[0, 50.0].values())
    assert times == poisson_times(50.0, 8, (3, 0), swing=3)
    assert "too few rounds for a verdict at 50 requests/s and 200 requests/s" in shown
    assert "give --rounds 2 or more" in shown and "proven to" not in shown
    assert main(["serve", "--report", str(tmp_path / "run"), "--format", "md"]) == 0
    shown = capsys.readouterr().out
    assert shown.count("inconclusive, too few rounds |") == 2 and "up to 10 blocks" in shown


def test_a_prompt_that_does_not_fit_is_a_failure_and_the_others_go_on(
    serve: Serve, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--workloads", "some_long.jsonl", "--requests", "2", "--rates", "50")
    assert serve(*words, "--rounds", "1", "--out", tmp_path / "run") == 1
    assert "the target's context is 128" in " ".join(capsys.readouterr().out.split())
    run = read_serving(tmp_path / "run")
    assert len(run.failures) == 1 and [len(one.served) for one in run.passes] == [1, 1]


def test_a_method_that_breaks_on_one_request_fails_there_alone(
    serve: Serve, tmp_path: Path
) -> None:
    words = ("--methods", "breaks", "--rates", "500", "--rounds", "1")
    assert serve(*words, "--out", tmp_path / "run") == 1
    passes = {one.about.method: one for one in read_serving(tmp_path / "run").passes}
    assert [failure.request for failure in passes["breaks"].failures] == ["p5"]
    assert len(passes["breaks"].served) == 7 and len(passes["vanilla"].served) == 8


def test_what_is_missing_or_edited_is_said(
    serve: Serve, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    assert serve("--rates", "500", "--rounds", "1", "--out", out) == 0
    assert serve("--rates", "500", "--out", out) == 2
    again = f"go on with `specbench serve --resume {out}` or choose another --out"
    assert f"is not empty; {again}" in capsys.readouterr().err
    vanilla, ngram = (shard_path(out, shard) for shard in shard_names(out)[1:])
    ngram.unlink()
    assert main(["serve", "--report", str(out)]) == 0
    assert "the run did not end: 1 of 3 parts is missing" in capsys.readouterr().out
    vanilla.write_text(vanilla.read_text().replace('"finish": "length"', '"finish": "eos"'))
    assert main(["serve", "--report", str(out)]) == 2
    assert "has been edited" in capsys.readouterr().err


def test_what_is_finished_before_an_interruption_is_kept(
    serve: Serve,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    serve_all, calls = Server.serve, []

    def interrupted(server: Server, arrivals: Sequence[Arrival]) -> list[Visit]:
        calls.append(len(arrivals))
        if len(calls) == 3:
            raise KeyboardInterrupt
        return serve_all(server, arrivals)

    monkeypatch.setattr(Server, "serve", interrupted)
    assert serve("--loads", "0.8", "--rounds", "1", "--out", tmp_path / "run") == 130
    assert f"`specbench serve --report {tmp_path}/run` shows" in capsys.readouterr().err
    run = read_serving(tmp_path / "run")
    assert [one.about.method for one in run.passes] == ["vanilla"] * 2 and len(run.missing) == 1
    assert main(["serve", "--report", str(tmp_path / "run")]) == 0
    assert "1 of 4 parts is missing" in capsys.readouterr().out


def test_an_interrupted_run_goes_on(
    serve: Serve,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "run"
    assert serve("--loads", "0.8", "--rounds", "2", "--out", out) == 0
    names, whole = shard_names(out), read_serving(out)
    lost, damaged = (shard_path(out, shard) for shard in (names[-1], names[-2]))
    kept = {name: shard_path(out, name).read_text() for name in names[:-2]}
    lost.unlink()
    damaged.write_text(damaged.read_text()[:-100])
    capsys.readouterr()
    assert main(["serve", "--resume", str(out)]) == 0
    said = " ".join(capsys.readouterr().err.split())
    assert f"served again: {damaged} is not" in said and "6/6 shards" in said
    run = read_serving(out)
    assert not run.missing and len(run.info["provenance"]["resumed"]) == 1
    # What was there is as it was, and what is new came at the same rates and times.
    assert kept == {name: shard_path(out, name).read_text() for name in kept}
    assert [one.about for one in run.passes] == [one.about for one in whole.passes]
    assert served(run, "ngram") == served(whole, "ngram")
    # There is nothing left to do.
    monkeypatch.setattr(Server, "serve", None)
    assert main(["serve", "--resume", str(out)]) == 0
    assert main(["serve", "--resume", str(out), "--rounds", "3"]) == 2
    assert "--resume takes the run's own settings; remove --rounds" in capsys.readouterr().err


def test_a_run_does_not_go_on_with_another_target(
    serve: Serve, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    save_tiny_model(folder / "changing", max_position_embeddings=128)
    words = ("--target", "changing", "--rates", "500", "--rounds", "1")
    assert serve(*words, "--out", out) == 0
    last = shard_path(out, shard_names(out)[-1])
    last.write_text("damaged")
    save_tiny_model(folder / "changing", max_position_embeddings=128, seed=5)
    assert main(["serve", "--resume", str(out)]) == 2
    assert "cannot go on, it would mix results" in capsys.readouterr().err
    assert last.read_text() == "damaged"


def shard_names(out: Path) -> list[str]:
    shards: list[str] = json.loads((out / "serving.json").read_text())["shards"]
    return shards


def test_runs_of_the_two_kinds_are_not_mixed_up(
    serve: Serve, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert serve("--rates", "500", "--rounds", "1", "--out", tmp_path / "run") == 0
    capsys.readouterr()
    assert main(["report", str(tmp_path / "run")]) == 2
    error = capsys.readouterr().err
    assert "there is no run.json in it; it is a serving run" in error
    assert f"`specbench serve --report {tmp_path}/run` shows" in error
    assert main(["serve", "--report", str(tmp_path)]) == 2
    assert "there is no serving.json in it" in capsys.readouterr().err
    assert main(["serve", "--report", str(tmp_path / "run"), "--requests", "3"]) == 2
    assert "remove --requests; valid beside it: --format" in capsys.readouterr().err
