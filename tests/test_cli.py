"""The command line: its options, its exit codes, and one line for whatever is wrong."""

import argparse
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from specbench.cli import build_parser, main
from specbench.config import RunConfig
from specbench.conformance.models import save_tiny_model
from specbench.filing import shard_path
from specbench.records import read_info, read_run
from tests.tiny_runs import (
    chat_prompts,
    inodes,
    installed_methods,
    outputs,
    wait_for_shards,
    write_prompts,
)

COMMANDS = {
    "run": {
        "--target",
        "--methods",
        "--workloads",
        "--prompts",
        "--max-new-tokens",
        "--temperature",
        "--top-k",
        "--top-p",
        "--sampling",
        "--batch-size",
        "--depth",
        "--rounds",
        "--workers",
        "--gpus-per-worker",
        "--dtype",
        "--seed",
        "--set",
        "--out",
        "--resume",
        "--no-ray",
    },
    "sweep": {
        "--target",
        "--methods",
        "--workloads",
        "--batches",
        "--depths",
        "--nodes",
        "--prompts",
        "--max-new-tokens",
        "--rounds",
        "--temperature",
        "--dtype",
        "--workers",
        "--set",
        "--out",
        "--resume",
        "--report",
        "--no-ray",
        "--format",
        "--plots",
        "--profile",
    },
    "serve": {
        "--target",
        "--methods",
        "--controllers",
        "--workloads",
        "--loads",
        "--rates",
        "--swing",
        "--requests",
        "--rounds",
        "--max-batch",
        "--max-new-tokens",
        "--temperature",
        "--sampling",
        "--dtype",
        "--seed",
        "--set",
        "--out",
        "--resume",
        "--report",
        "--format",
    },
    "report": {"folders", "--format"},
    "check": {
        "baseline",
        "run",
        "--method",
        "--margin",
        "--allow",
        "--hard",
        "--markdown",
        "--junit",
    },
    "baseline": {"run", "--name"},
    "explain": {"folder", "--prompt", "--method"},
    "train": {
        "method",
        "--target",
        "--prompts",
        "--tokens",
        "--minutes",
        "--max-new-tokens",
        "--batch-size",
        "--batch-tokens",
        "--learning-rate",
        "--vocab",
        "--unroll",
        "--layers",
        "--exit-layer",
        "--disk-gib",
        "--evaluate-minutes",
        "--dtype",
        "--seed",
        "--out",
        "--resume",
    },
    "conform": {"method", "--set"},
    "profile": {
        "--target",
        "--dtype",
        "--methods",
        "--set",
        "--batches",
        "--tokens",
        "--contexts",
        "--depths",
        "--repeats",
        "--out",
        "--format",
    },
    "compare": {
        "run",
        "--profile",
        "--method",
        "--workload",
        "--batches",
        "--controllers",
        "--depth",
        "--format",
    },
    "simulate": {
        "run",
        "--method",
        "--workload",
        "--static",
        "--acceptance",
        "--model",
        "--device",
        "--devices",
        "--bandwidth-gb-s",
        "--tflops",
        "--overhead-us",
        "--profile",
        "--dtype",
        "--drafter",
        "--batches",
        "--context",
        "--depth",
        "--format",
    },
    "methods": {"method"},
    "workloads": set(),
}

Run = Callable[..., int]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A tiny model and prompts, with the methods that break installed."""
    folder = tmp_path_factory.mktemp("cli")
    save_tiny_model(folder / "target", max_position_embeddings=128)
    write_prompts(folder / "chat.jsonl", chat_prompts(5))
    write_prompts(folder / "long.jsonl", [{"id": "long", "prompt": "x" * 200}])
    write_prompts(folder / "some_long.jsonl", [{"prompt": "x" * 200}, {"prompt": "short"}])
    (folder / "broken.jsonl").write_text('{"prompt": "one"}\n{"prom\n')
    (folder / "no_model").mkdir()
    (folder / "file").write_text("")
    (folder / "methods").mkdir()
    with installed_methods(folder / "methods"):
        yield folder


@pytest.fixture
def specbench(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Calls the command line beside the model and the prompts."""
    monkeypatch.chdir(folder)
    return lambda *words: main([str(word) for word in words])


def small_run(out: Path, *words: str, workloads: str = "chat.jsonl") -> list[str]:
    """The words of a short run in this process."""
    setting = "--target target --dtype float32 --max-new-tokens 4 --rounds 1 --methods vanilla"
    words = ("--workloads", workloads, "--out", str(out), *words)
    return ["run", *setting.split(), *words, "--no-ray"]


def test_every_option_is_listed_here() -> None:
    """So that none is added, renamed or dropped by accident."""
    parser = build_parser()
    (commands,) = (a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
    found = {
        name: {word for a in sub._actions for word in a.option_strings or [a.dest]}
        for name, sub in commands.choices.items()
    }
    help_words = {"-h", "--help"}
    assert found == {name: words | help_words for name, words in COMMANDS.items()}
    assert {word for a in parser._actions for word in a.option_strings} == help_words


def test_the_help_names_the_defaults_of_a_run(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["run", "--help"])
    shown = " ".join(capsys.readouterr().out.split())
    config = RunConfig()
    for name in [
        "prompts",
        "max_new_tokens",
        "sampling",
        "batch_size",
        "rounds",
        "gpus_per_worker",
        "seed",
    ]:
        about = shown.rpartition(f"--{name.replace('_', '-')} ")[2].partition(" --")[0]
        assert f"({getattr(config, name)})" in about, name
    assert f"({','.join(config.workloads)})" in shown


def test_a_terminal_that_knows_ascii_only_gets_a_report(folder: Path, tmp_path: Path) -> None:
    words = small_run(tmp_path / "run", "--methods", "ngram", workloads=f"{folder}/chat.jsonl")
    words[words.index("target")] = f"{folder}/target"
    done = subprocess.run(
        [sys.executable, "-m", "specbench.cli", *words],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"},
    )
    assert done.returncode == 0, done.stderr
    assert "ngram" in done.stdout and "Traceback" not in done.stderr


def test_options_have_one_spelling(capsys: pytest.CaptureFixture[str]) -> None:
    """An abbreviation would break when an option is added."""
    assert main(["run", "--temp", "1"]) == 2
    assert "unrecognized arguments: --temp" in capsys.readouterr().err


def test_a_run_is_measured_filed_and_reported(
    specbench: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And reported again from its folder, in every format."""
    assert specbench(*small_run(tmp_path / "run", "--methods", "ngram")) == 0
    shown = capsys.readouterr()
    assert "ngram" in shown.out and "chat.jsonl" in shown.out
    assert "Loading weights" not in shown.err and "arning" not in shown.err
    assert len(read_run(tmp_path / "run").references) == 7
    assert specbench("report", tmp_path / "run") == 0
    assert "ngram" in capsys.readouterr().out
    assert specbench("report", tmp_path / "run", "--format", "md") == 0
    assert "| ngram" in capsys.readouterr().out
    assert specbench("report", tmp_path / "run", "--format", "json") == 0
    assert json.loads(capsys.readouterr().out)["sections"]


def test_every_setting_reaches_the_run(specbench: Run, tmp_path: Path) -> None:
    """By the name that it has in the run's settings."""
    words = (
        "--target target --methods ngram,idle --workloads chat.jsonl --prompts 2 "
        "--max-new-tokens 3 --temperature 0.5 --top-k 7 --top-p 0.9 --sampling coupled "
        "--batch-size 2 --depth 2 --rounds 1 --workers 1 --gpus-per-worker 1 --dtype float32 "
        "--seed 5 --set ngram.max_match=3 --set ngram.branches=2 --set idle.prompt=none --no-ray"
    )
    assert specbench("run", *words.split(), "--out", tmp_path / "run") == 0
    assert read_info(tmp_path / "run")["settings"] == {
        "target": "target",
        "methods": ["vanilla", "ngram", "idle"],
        "workloads": ["chat.jsonl"],
        "prompts": 2,
        "max_new_tokens": 3,
        "temperature": 0.5,
        "top_k": 7,
        "top_p": 0.9,
        "sampling": "coupled",
        "batch_size": 2,
        "depth": 2,
        "rounds": 1,
        "workers": 1,
        "gpus_per_worker": 1,
        "dtype": "float32",
        "seed": 5,
        "knobs": {"ngram": {"max_match": "3", "branches": "2"}, "idle": {"prompt": "none"}},
    }


def test_a_run_may_hold_a_method_in_several_settings(
    specbench: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = "--methods vanilla@again,ngram,ngram@short --set ngram@short.depth=1"
    assert specbench(*small_run(tmp_path / "run", *words.split(), workloads="chat.jsonl")) == 0
    assert "ngram@short" in capsys.readouterr().out
    run = read_run(tmp_path / "run")
    names = {"vanilla", "vanilla@again", "ngram", "ngram@short"}
    assert {record.method for record in run.requests} == names
    assert run.info["methods"]["ngram@short"]["depth"] == 1 < run.info["methods"]["ngram"]["depth"]
    assert specbench(*small_run(tmp_path / "other", "--methods", "ngram@a.b")) == 2
    assert "valid: letters, digits, _ and - behind the @" in capsys.readouterr().err


def test_a_run_without_a_folder_makes_one_of_its_own(
    specbench: Run, folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Below runs/, named after the time."""
    monkeypatch.chdir(tmp_path)
    words = small_run(Path("unused"), workloads=str(folder / "chat.jsonl"))
    words = [word for word in words if word not in ("--out", "unused")]
    words[words.index("target")] = str(folder / "target")
    assert specbench(*words) == 0
    (made,) = (tmp_path / "runs").iterdir()
    assert read_run(made).missing_shards == []


def test_failed_prompts_are_reported_and_give_exit_code_1(
    specbench: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The rest is measured."""
    words = small_run(tmp_path / "run", "--methods", "breaks", "--set", "breaks.prompt=p2")
    assert specbench(*words) == 1
    shown = " ".join(capsys.readouterr().out.split())
    assert "failed: breaks on chat.jsonl, prompt p2: RuntimeError: no draft" in shown
    assert len(read_run(tmp_path / "run").references) == 7
    assert specbench(*small_run(tmp_path / "more"), "--workloads", "some_long.jsonl") == 1
    shown = " ".join(capsys.readouterr().out.split())
    assert "failed: every method on some_long.jsonl, prompt some_long-1: prompt" in shown


BAD_INPUT = {
    "unknown method": ("--methods ngrm", "unknown method 'ngrm' (did you mean 'ngram'?); valid: "),
    "no method": ("--methods ,", "argument --methods: ',' names nothing; valid: names"),
    "unknown workload": ("--workloads mth", "unknown workload 'mth' (did you mean 'math'?); valid"),
    "no such file": ("--workloads gone.jsonl", "no file 'gone.jsonl'"),
    "broken file": ("--workloads broken.jsonl", "cannot read broken.jsonl: row 2 is not JSON"),
    "unknown knob": ("--methods ngram --set ngram.max=2", "has no knob 'max'"),
    "knob of no method": ("--set nobody.depth=2", "method 'nobody' is not in this run"),
    "no knob": ("--set depth=2", "--set 'depth=2' is not valid; valid: METHOD.KNOB=VALUE"),
    "knob of wrong type": ("--methods ngram --set ngram.depth=x", "valid: a whole number"),
    "missing model": ("--target gone/away/far", "no model folder 'gone/away/far'; valid: "),
    "missing model on the Hub": ("--target nobody/nothing", "cannot load target 'nobody/nothing'"),
    "folder without a model": ("--target no_model", "'no_model' has no config.json"),
    "all prompts too long": ("--workloads long.jsonl", "no prompt could be decoded"),
    "budget beyond the context": ("--max-new-tokens 128", "valid: 1..127"),
    "batch 0": ("--batch-size 0", "--batch-size 0 is out of range; valid: 1 or more"),
    "no number": ("--batch-size two", "argument --batch-size: invalid int value: 'two'"),
    "temperature below 0": ("--temperature -1", "temperature -1.0 is out of range; valid: 0"),
    "top-p 2": ("--top-p 2", "top-p 2.0 is out of range; valid: above 0, at most 1"),
    "unknown rule": ("--sampling best", "unknown sampling rule 'best'; valid: rejection, coupled"),
    "unknown dtype": ("--dtype fp8", "unknown dtype 'fp8'; valid: float32, bfloat16, float16"),
    "GPUs that are not there": ("--gpus-per-worker 99", "--gpus-per-worker 99 is out of range"),
    "unwritable folder": ("--out file/run", "cannot write to file/run"),
    "unknown option": ("--fast", "unrecognized arguments: --fast; `specbench"),
    "resume beside settings": ("--resume file", "--resume goes on with the run's own settings"),
}


@pytest.mark.parametrize("case", BAD_INPUT)
def test_bad_input_is_one_line_and_exit_code_2(
    specbench: Run, tmp_path: Path, case: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """It says what and what is valid; there is no traceback, and no folder is left behind."""
    words, message = BAD_INPUT[case]
    assert specbench(*small_run(tmp_path / "run"), *words.split()) == 2
    shown = capsys.readouterr()
    *before, line = shown.err.splitlines()
    assert line.startswith("specbench: ") and message in line
    assert shown.out == ""
    # Some things only show once the target is loaded.
    progress = ("loading the target", "long.jsonl-00000 done")
    assert all(earlier.startswith(progress) for earlier in before)
    assert case == "all prompts too long" or not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("", "the following arguments are required: command; `specbench --help`"),
        (
            "measure",
            "invalid choice: measure (choose from run, sweep, serve, report, check, baseline, "
            "explain, profile, compare, simulate, train, conform, methods, workloads)",
        ),
        ("run --out=", "argument --out:  names no folder"),
        ("report", "the following arguments are required: DIR"),
        ("report gone", "gone holds no run: there is no run.json in it"),
        ("report file", "file holds no readable run"),
        ("report no_model --format html", "invalid choice: html (choose from rich, md, json)"),
        ("run --resume no_model", "no_model holds no run"),
        ("run --resume no_model --set ngram.depth=2", "remove --set; valid beside it: --workers"),
        ("run --resume no_model --max-new-tokens 3 --out x", "remove --max-new-tokens, --out"),
    ],
)
def test_bad_usage_is_one_line_and_exit_code_2(
    specbench: Run, words: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of every command."""
    assert specbench(*words.split()) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("specbench: ")
    # Python 3.11 quotes the choices, later ones do not.
    assert message in line.replace("'", "")


def test_a_damaged_result_file_is_named(
    specbench: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A report shows all of a run or nothing."""
    specbench(*small_run(tmp_path / "run"))
    capsys.readouterr()
    path = shard_path(tmp_path / "run", read_info(tmp_path / "run")["shards"][0])
    path.write_text(path.read_text()[:-30])
    assert specbench("report", tmp_path / "run") == 2
    error = capsys.readouterr().err
    assert error.startswith(f"specbench: {path} ")
    assert f"; `specbench run --resume {tmp_path}/run` measures it again" in error


def test_a_folder_with_a_run_is_not_run_into(
    specbench: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing in it is touched."""
    specbench(*small_run(tmp_path / "run"))
    before = (tmp_path / "run" / "run.json").read_bytes()
    capsys.readouterr()
    assert specbench(*small_run(tmp_path / "run", "--seed", "1")) == 2
    assert f"go on with `specbench run --resume {tmp_path}/run`" in capsys.readouterr().err
    assert (tmp_path / "run" / "run.json").read_bytes() == before


def test_resuming_a_complete_run_prints_its_report(
    specbench: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """At once, and with its exit code."""
    words = small_run(tmp_path / "run", "--methods", "breaks", "--set", "breaks.prompt=p2")
    assert specbench(*words) == 1
    capsys.readouterr()
    assert specbench("run", "--resume", tmp_path / "run") == 1
    shown = capsys.readouterr()
    assert "breaks" in shown.out and shown.err == "specbench: nothing is left to do\n"


def test_a_run_that_is_killed_goes_on_to_the_same_records(
    specbench: Run, folder: Path, tmp_path: Path
) -> None:
    """By SIGKILL, which leaves no time to put anything in order."""
    slow = ["--methods", "slow", "--set", "slow.seconds=0.05", "--prompts", "5"]
    with subprocess.Popen(
        [sys.executable, "-m", "specbench.cli", *small_run(tmp_path / "run", *slow)],
        cwd=folder,
        stderr=subprocess.DEVNULL,
    ) as process:
        wait_for_shards(tmp_path / "run", 1)
        process.kill()
    assert process.returncode == -signal.SIGKILL
    kept = inodes(tmp_path / "run", read_info(tmp_path / "run")["shards"])
    assert specbench("report", tmp_path / "run") == 0
    assert specbench("run", "--resume", tmp_path / "run", "--no-ray") == 0
    finished = read_run(tmp_path / "run")
    assert kept.items() <= inodes(tmp_path / "run", finished.info["shards"]).items()
    assert (len(finished.references), finished.missing_shards) == (7, [])


def test_methods_are_listed_with_their_knobs(
    specbench: Run, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of other packages with the package's name."""
    monkeypatch.setenv("COLUMNS", "200")
    assert specbench("methods") == 0
    shown = capsys.readouterr().out
    for word in ("vanilla", "ngram", "max_match=8", "breaks", "drafters-that-break", "Raises on"):
        assert word in shown


def test_workloads_are_listed_with_their_licence(
    specbench: Run, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And how they are decoded."""
    monkeypatch.setenv("COLUMNS", "200")
    assert specbench("workloads") == 0
    shown = capsys.readouterr().out
    for word in ("humaneval", "MIT", "creative", "T=0.8", "greedy"):
        assert word in shown


def test_a_run_that_is_stopped_keeps_what_is_finished(
    specbench: Run, folder: Path, tmp_path: Path
) -> None:
    """By SIGTERM as by Ctrl-C. It says how to go on, and goes on to the same records."""
    slow = ["--methods", "slow", "--set", "slow.seconds=0.05", "--prompts", "5"]
    words = small_run(tmp_path / "run", *slow)
    with subprocess.Popen(
        [sys.executable, "-m", "specbench.cli", *words],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
    ) as process:
        wait_for_shards(tmp_path / "run", 1)
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert err.splitlines()[-1] == (
        "specbench: interrupted; what is finished is kept, go on with "
        f"`specbench run --resume {tmp_path}/run`"
    )
    assert out == "" and "Traceback" not in err
    shards = read_info(tmp_path / "run")["shards"]
    kept = inodes(tmp_path / "run", shards)
    assert list(kept) == shards[:1]
    assert specbench("run", "--resume", tmp_path / "run", "--no-ray") == 0
    assert kept.items() <= inodes(tmp_path / "run", shards).items()
    assert specbench(*small_run(tmp_path / "whole", *slow)) == 0
    assert outputs(read_run(tmp_path / "run")) == outputs(read_run(tmp_path / "whole"))
