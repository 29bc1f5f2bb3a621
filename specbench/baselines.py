"""Baselines: runs that are filed under a name, for later runs to be held against."""

import re
import shutil
import tempfile
from pathlib import Path

from specbench.filing import is_edited, shard_path
from specbench.messages import are, counted
from specbench.metrics import count_lossless
from specbench.records import Run

FOLDER = Path("results") / "baselines"


def file_baseline(run: Run, name: str, folder: Path = FOLDER) -> Path:
    """Files a run as it is, with its provenance.

    Raises:
        ValueError: a name that is taken or no name, or a run that nothing should be held against.
    """
    if not re.fullmatch(r"\w[\w.-]*", name):
        raise ValueError(f"--name {name!r} is no name; valid: letters, digits, '.', '-' and '_'")
    if (folder / name).exists():
        raise ValueError(f"{folder / name} is there already; choose another --name or remove it")
    if reasons := list(_faults(run)):
        raise ValueError(f"{run.folder} is no baseline: {'; '.join(reasons)}")
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{name}-", dir=folder) as part:
        copy = Path(part) / name
        (copy / "shards").mkdir(parents=True)
        for path in (Path("run.json"), *(shard_path(Path(), s) for s in run.info["shards"])):
            shutil.copyfile(run.folder / path, copy / path)
        return copy.rename(folder / name)


def find_baseline(name: str) -> Path:
    """The folder of a baseline, named by its folder or by its name.

    Raises:
        ValueError: there is none.
    """
    for folder in (Path(name), FOLDER / name):
        if (folder / "run.json").is_file():
            return folder
    filed = sorted(path.parent.name for path in FOLDER.glob("*/run.json"))
    raise ValueError(
        f"no baseline {name!r}; valid: the folder of a run, or a name below {FOLDER}: "
        f"{', '.join(filed) or 'there is none yet'}"
    )


def doubts(run: Run) -> list[str]:
    """What does not keep a run from being a baseline, but should be known."""
    lines = []
    if run.info["provenance"].get("dirty"):
        lines.append("the code had changes that its commit does not hold")
    if run.failures:
        failed = counted(len(run.failures), "request")
        lines.append(f"{failed} failed; only those that do not are compared")
    return lines


def _faults(run: Run) -> list[str]:
    faults = []
    if run.missing_shards:
        missing, shards = len(run.missing_shards), counted(len(run.info["shards"]), "shard")
        faults.append(f"{missing} of {shards} {are(missing)} missing")
    if is_edited(run.info):
        faults.append("run.json has been edited")
    for workload in run.info["workloads"]:
        for method in run.info["methods"]:
            if broken := count_lossless(run, workload, method).get("broken"):
                outputs = counted(broken, "output")
                faults.append(f"{outputs} of {method} on {workload} {are(broken)} BROKEN")
    return faults
