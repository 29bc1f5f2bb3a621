"""A machine's profile: how long a target's forwards and methods' steps take on it, and how fast it
reads and computes. Its file.

Every sample is kept, in the order of the rounds, so what was measured in one round can be paired.
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from pydantic import TypeAdapter

from specbench.costs import Shape
from specbench.depth import StepTable
from specbench.depth.calibration import Sample
from specbench.files import write_atomically
from specbench.messages import in_one_line, suggest
from specbench.records import Strict

SCHEMA_VERSION = 1
_KIND = "profile"


class Pass(NamedTuple):
    """A forward: so many rows, nodes of each row, and tokens of each row in the cache."""

    rows: int
    tokens: int
    context: int


@dataclass(frozen=True, kw_only=True)
class PassTimes(Strict):
    """How long a forward of the target takes, each row a chain.

    Args:
        rows, tokens, context: see `Pass`.
        seconds: of each round.
    """

    rows: int
    tokens: int
    context: int
    seconds: list[float]

    def __post_init__(self) -> None:
        assert self.seconds and min(self.seconds) > 0, "a forward takes time"
        assert min(self.rows, self.tokens) >= 1 and self.context >= 0, "a forward has a node"

    @property
    def place(self) -> Pass:
        """In the grid."""
        return Pass(self.rows, self.tokens, self.context)


@dataclass(frozen=True, kw_only=True)
class StepSamples(Strict):
    """How long a method's whole steps take at one budget.

    Args:
        rows: decoded together.
        depth: that each may draft.
        context: mean tokens of a row.
        nodes: mean drafted nodes of a row, of each round.
        draft_s, forward_s, bookkeeping_s: likewise.
    """

    rows: int
    depth: int
    context: float
    nodes: list[float]
    draft_s: list[float]
    forward_s: list[float]
    bookkeeping_s: list[float]

    def __post_init__(self) -> None:
        parts = (self.draft_s, self.forward_s, self.bookkeeping_s)
        assert {len(self.nodes)} == {len(part) for part in parts} and self.nodes, (
            "each round of steps has nodes, and seconds of each phase"
        )
        assert self.rows >= 1 and self.depth >= 0, "a step has a row"
        assert min(map(min, parts)) >= 0 and min(self.forward_s) > 0, "a step takes time"

    @property
    def total_s(self) -> list[float]:
        """Seconds of the steps, of each round."""
        phases = zip(self.draft_s, self.forward_s, self.bookkeeping_s, strict=True)
        return [sum(step) for step in phases]


@dataclass(frozen=True, kw_only=True)
class Profile(Strict):
    """What was measured of a target and methods on a machine.

    Args:
        provenance: code, machine, device, dtype, threads, as in ``run.json``.
        target: what it is, its weights' fingerprint among it.
        methods: by name, their effective settings.
        shape: of the target.
        passes: the grid of forwards; one token a row among them.
        steps: by method; a full grid of rows and depths, 0 among them.
        samples: by method whose drafts are chains with chances, of each of a few texts.
        bandwidth: bytes a second, read.
        rate: FLOPs a second in the target's dtype.
        memory_bytes: that the device has.
        notes: what was left out.
    """

    provenance: dict[str, Any]
    target: dict[str, Any]
    methods: dict[str, dict[str, Any]]
    shape: Shape
    passes: list[PassTimes]
    steps: dict[str, list[StepSamples]]
    samples: dict[str, list[list[Sample]]]
    bandwidth: float
    rate: float
    memory_bytes: float
    notes: list[str]

    def __post_init__(self) -> None:
        assert min(self.bandwidth, self.rate) > 0, "a machine reads and computes"
        assert any(one.tokens == 1 for one in self.passes), "a profile has forwards of one token"
        assert len({one.place for one in self.passes}) == len(self.passes), "no forward comes twice"
        assert len({len(one.seconds) for one in self.passes}) == 1, "forwards have the same rounds"
        for name, steps in self.steps.items():
            grid = {(one.rows, one.depth) for one in steps}
            full = {(rows, depth) for rows, _ in grid for depth in {0, *(d for _, d in grid)}}
            assert grid and grid == full and len(steps) == len(grid), (
                f"the steps of {name} are a full grid, with depth 0"
            )
            assert len({len(one.nodes) for one in steps}) == 1, "steps have the same rounds"
        for part, key in ((self.target, "name"), (self.target, "weights_sha256")):
            assert isinstance(part.get(key), str), f"a target has a {key}"
        assert isinstance(self.target.get("dtype"), str), "a target has a dtype"

    @property
    def dtype(self) -> str:
        """The target's."""
        return str(self.target["dtype"])

    @property
    def device(self) -> str:
        """What it was measured on."""
        name = str(self.provenance.get("device", "unknown device"))
        return str(self.provenance.get("cpu", name)) if name == "cpu" else name

    @property
    def rows(self) -> list[int]:
        """Of the grid of forwards."""
        return sorted({one.rows for one in self.passes})

    @property
    def contexts(self) -> list[int]:
        """Of the grid of forwards."""
        return sorted({one.context for one in self.passes})


_ADAPTER = TypeAdapter(Profile)


def write_profile(path: Path, profile: Profile) -> None:
    """Files a profile, whole or not at all."""
    body = asdict(profile)
    header = {"kind": _KIND, "schema": SCHEMA_VERSION, "sha256": _sha256(body)}
    write_atomically(path, json.dumps(header | body, indent=1) + "\n")


def load_profile(path: Path) -> Profile:
    """A profile from its file.

    Raises:
        ValueError: there is no such file, or it is damaged, edited, no profile, or of another
        schema; says which.
    """
    try:
        whole = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"no profile {path}; `specbench profile --out {path}` makes one") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not a readable profile: {in_one_line(error)}") from error
    if not isinstance(whole, dict) or whole.get("kind") != _KIND:
        raise ValueError(f"{path} is no profile; valid: a file of `specbench profile --out`")
    if whole.get("schema") != SCHEMA_VERSION:
        raise ValueError(
            f"{path} has schema version {whole.get('schema')}; this version of specbench reads "
            f"{SCHEMA_VERSION}"
        )
    body = {key: value for key, value in whole.items() if key not in ("kind", "schema", "sha256")}
    if whole.get("sha256") != _sha256(body):
        raise ValueError(f"{path} has been edited: its sha256 is not that of what it holds")
    try:
        profile: Profile = _ADAPTER.validate_json(json.dumps(body))
    except ValueError as error:
        raise ValueError(f"{path} is a damaged profile: {in_one_line(error)}") from error
    return profile


def _sha256(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def drafts_trees(steps: Sequence[StepSamples]) -> bool:
    """Whether more nodes than levels were drafted in them."""
    return any(max(one.nodes) > one.depth for one in steps)


def profiled_name(profile: Profile, method: str) -> str | None:
    """The method of a profile whose steps a method takes: itself, else the one that it is a variant
    of, ``eagle`` of ``eagle@d2``; None where the profile has drafts of neither."""
    drafting = _drafting(profile)
    return next((name for name in (method, method.partition("@")[0]) if name in drafting), None)


def unknown_drafts(profile: Profile, method: str) -> str:
    """Says that a profile lacks a method's drafts."""
    drafting = _drafting(profile)
    return (
        f"the profile has no drafts of method {method!r}{suggest(method, drafting)}; valid: "
        f"{', '.join(drafting) or '(nothing was drafted)'}"
    )


def _drafting(profile: Profile) -> list[str]:
    return [name for name, steps in profile.steps.items() if any(one.depth for one in steps)]


def variant_note(method: str, profiled: str) -> str:
    """Says whose step times a variant takes."""
    return (
        f"the profile has no steps of {method}; those of {profiled}, of which it is a variant, are "
        "taken"
    )


def step_table(
    steps: Sequence[StepSamples],
    seconds: Callable[[StepSamples], Sequence[float]] = lambda one: one.total_s,
) -> StepTable:
    """Medians by rows and depth, as controllers go by them: a row that drafts so many nodes counts
    as one that drafts so deep.

    Args:
        steps: a full grid, depth 0 among them.
        seconds: which of a step's; by default of all of it.
    """
    return StepTable({(one.rows, one.depth): median(seconds(one)) for one in steps})
