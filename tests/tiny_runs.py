"""Small runs for tests: a tiny model in a folder, prompts in a file, methods of an installed
package that break in all ways, and what two runs must have in common."""

import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from specbench.config import RunConfig
from specbench.filing import shard_path
from specbench.records import (
    FailureRecord,
    Record,
    ReferenceRecord,
    RequestRecord,
    Run,
    TimingRecord,
)

_METHODS = '''
import os
import time
from dataclasses import dataclass

import torch

from specbench.method import Method, MethodConfig, Proposal, Typical
from specbench.tree import Tree


@dataclass(frozen=True, kw_only=True)
class Knobs(MethodConfig):
    prompt: str = "p5"
    mark: str = ""
    seconds: float = 0.0


class Idle(Method):
    """Drafts nothing."""

    Config = Knobs

    def propose(self, batch, budgets):
        if any(row.request.id == self.config.prompt for row in batch.rows):
            self.strike()
        return Proposal.nothing(batch.rows)

    def strike(self):
        pass


class Breaks(Idle):
    """Raises on one prompt."""

    def strike(self):
        raise RuntimeError("no draft\\nfor this one")


class Dies(Idle):
    """Takes its process down on one prompt: always, or once where a mark is to be left."""

    def strike(self):
        if self.config.mark:
            try:
                open(self.config.mark, "x").close()
            except FileExistsError:
                return
        os._exit(7)


class Crowded(Method):
    """Raises where two rows are decoded together."""

    def propose(self, batch, budgets):
        if len(batch.rows) > 1:
            raise RuntimeError("out of memory")
        return Proposal.nothing(batch.rows)


class Slow(Idle):
    """Takes its time over every step."""

    def propose(self, batch, budgets):
        time.sleep(self.config.seconds)
        return Proposal.nothing(batch.rows)


class Listens(Method):
    """Remembers the requests that it was given."""

    def __init__(self, target, config):
        super().__init__(target, config)
        self.heard = {}

    def start(self, rows, taps):
        self.heard |= {row.request.id: row.request for row in rows}

    def propose(self, batch, budgets):
        return Proposal.nothing(batch.rows)


class Fickle(Method):
    """Drafts another token each time and has it taken."""

    typical = Typical(epsilon=0.0)
    token = 100

    def propose(self, batch, budgets):
        self.token += 1
        trees = [Tree.chain(min(1, budget.depth)) for budget in budgets]
        return Proposal.from_rows(batch.rows, trees, [[self.token] * t.depth for t in trees])


class LosesDevice(Idle):
    """Leaves the device unusable."""

    def strike(self):
        raise torch.AcceleratorError("an illegal memory access was encountered")


class Unready(Method):
    """Cannot be set up."""

    def __init__(self, target, config):
        raise TypeError("no such head")

    def propose(self, batch, budgets):
        raise AssertionError
'''
_ENTRY_POINTS = """[specbench.methods]
idle = drafters_that_break:Idle
breaks = drafters_that_break:Breaks
dies = drafters_that_break:Dies
dies_once = drafters_that_break:Dies
crowded = drafters_that_break:Crowded
slow = drafters_that_break:Slow
listens = drafters_that_break:Listens
fickle = drafters_that_break:Fickle
loses_device = drafters_that_break:LosesDevice
unready = drafters_that_break:Unready
"""

Output = ReferenceRecord | RequestRecord | FailureRecord


@contextmanager
def installed_methods(folder: Path) -> Iterator[None]:
    """With the methods above installed from a folder, also for the processes that are started."""
    (folder / "drafters_that_break.py").write_text(_METHODS)
    about = folder / "drafters_that_break-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: drafters-that-break\n")
    (about / "entry_points.txt").write_text(_ENTRY_POINTS)
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(folder), *([before] if before else [])])
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before


def write_prompts(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    """Writes a file of prompts."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def chat_prompts(count: int = 8) -> list[dict[str, Any]]:
    """Prompts ``p0``, ``p1``, ..., every third of two turns; each says something twice."""
    return [
        {
            "id": f"p{i}",
            "turns": [f"say {i}{i}, then say {i}{i}", *(["and again"] if i % 3 == 0 else [])],
        }
        for i in range(count)
    ]


def tiny_config(target: Path, source: Path, *methods: str, **settings: Any) -> RunConfig:
    """A short run in float32."""
    defaults: dict[str, Any] = {"dtype": "float32", "max_new_tokens": 6, "rounds": 1}
    return RunConfig(
        target=str(target),
        methods=methods or ("vanilla",),
        workloads=(str(source),),
        **(defaults | settings),
    )


def outputs(records: Run | Sequence[Record]) -> list[Output]:
    """All but times and resources, in an order of their own."""
    if isinstance(records, Run):
        records = [*records.references, *records.requests, *records.failures]
    found = [record for record in records if isinstance(record, Output)]
    return sorted(
        found, key=lambda r: (type(r).__name__, r.request, getattr(r, "method", "") or "")
    )


def of_method(records: Sequence[Record], method: str) -> list[Record]:
    """The records of one method."""
    own = (RequestRecord, TimingRecord, FailureRecord)
    return [r for r in records if isinstance(r, own) and r.method == method]


def inodes(folder: Path, shards: Sequence[str]) -> dict[str, int]:
    """Which file each shard's is: a shard that is written again is another one."""
    paths = {shard: shard_path(folder, shard) for shard in shards}
    return {shard: path.stat().st_ino for shard, path in paths.items() if path.exists()}


def wait_for_shards(folder: Path, count: int, timeout_s: float = 120.0) -> None:
    """Waits until so many shards are filed."""
    deadline = time.monotonic() + timeout_s
    while len(list(folder.glob("shards/*.jsonl"))) < count:
        assert time.monotonic() < deadline, "no shard was finished in time"
        time.sleep(0.05)
