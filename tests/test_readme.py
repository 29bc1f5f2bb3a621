"""Runs what the README tells a newcomer to type, on a tiny target."""

import multiprocessing
import re
import shlex
import subprocess
from pathlib import Path

import pytest

import specbench_methods
from specbench import cli
from specbench.conformance import show
from specbench.conformance.models import save_tiny_model

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    """The README's fenced blocks in a language."""
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


def small(command: list[str], target: Path) -> list[str]:
    """The command on a tiny target, with tiny sizes; of an option given twice the last counts."""
    if command[0] == "train":
        sizes = ("--tokens", "50", "--minutes", "0.01", "--max-new-tokens", "4", "--vocab", "60")
        return [*command, "--target", str(target), *sizes]
    if command[0] == "check":
        # Two prompts leave its soft part open.
        return [*command, "--hard"]
    if command[0] == "serve" and "--report" not in command:
        sizes = ("--requests", "3", "--max-batch", "2", "--max-new-tokens", "3", "--rounds", "1")
        return [*command, "--target", str(target), *sizes]
    if command[0] not in ("run", "sweep") or {"--resume", "--report"} & {*command}:
        return command
    few = ["--prompts", "2", "--max-new-tokens", "4", "--rounds", "1", "--no-ray"]
    few += ["--batches", "1,2", "--depths", "1"] if command[0] == "sweep" else []
    return [*command, "--target", str(target), *few]


def test_its_commands_run_as_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The example of a method is in its place, and is checked and measured like the others."""
    target = save_tiny_model(tmp_path / "tiny", max_position_embeddings=4096)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SPECBENCH_CACHE", str(tmp_path / "cache"))
    (code,) = blocks("python")
    (tmp_path / "methods").mkdir()
    (tmp_path / "methods" / "copycat.py").write_text(code)
    monkeypatch.setattr(
        specbench_methods, "__path__", [*specbench_methods.__path__, str(tmp_path / "methods")]
    )
    # A process of a new interpreter would not look there.
    monkeypatch.setattr(show, "get_context", lambda _: multiprocessing.get_context("fork"))
    commands = [shlex.split(line) for block in blocks("sh") for line in block.splitlines()]
    assert len(commands) >= 7
    for program, *command in commands:
        assert program == "specbench"
        assert cli.main(small(command, target)) == cli.EXIT_DONE, command
    assert "| ngram |" in capsys.readouterr().out


def test_its_make_targets_exist() -> None:
    named = set(re.findall(r"(?:^    |`)make (\w+)", README, flags=re.MULTILINE))
    assert {"bench", "test"} <= named
    for name in named:
        done = subprocess.run(
            ["make", "--dry-run", name], cwd=ROOT, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr


def test_it_never_tells_to_install_the_unrelated_package_of_that_name() -> None:
    assert "pip install specbench" not in README


def test_its_file_tree_names_every_module() -> None:
    modules = {path.stem for path in (ROOT / "specbench").glob("*.py")} - {"__init__"}
    assert {name for name in modules if f"{name}.py" not in README} == set()
