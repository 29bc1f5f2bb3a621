"""`specbench simulate`: its settings, and the page that shows what is predicted. Nothing is
measured here."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from specbench.machines import WIDTHS, Machine, load_machine, load_shape
from specbench.messages import check_least, option
from specbench.records import RequestRecord, read_info, read_run
from specbench.scenario import (
    ASSUMPTIONS,
    Acceptance,
    Given,
    Point,
    Replayed,
    Scenario,
    crossovers,
    make_drafter,
)
from specbench.tables import MISSING, Cell, Column, Heading, Note, Page, Table

if TYPE_CHECKING:
    from specbench.profile import Profile

_DEEPEST, _USUAL_DEPTH = 32, 8
_CUSTOM = ("bandwidth_gb_s", "tflops", "overhead_us")
_MAY_DIFFER = ("depth", "source_sha256")
"""Settings of a method that need not be alike in a run and a profile: depth is what is varied."""
_OF_PROFILE = ("model", "device", "devices", "dtype", *_CUSTOM)


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What is simulated, with everything filled in that was not said.

    Args:
        scenario: what is predicted from.
        model, dtype, drafter: how they are called.
        batches: rows.
        assumptions: that the prediction makes.
        doubts: where what is combined does not belong together.
    """

    scenario: Scenario
    model: str
    dtype: str
    drafter: str
    batches: tuple[int, ...]
    assumptions: tuple[str, ...]
    doubts: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class SimulateConfig:
    """What to simulate.

    Args:
        model: whose shape: a name, a folder, a config file or a name on the Hub.
        device: of the table.
        bandwidth_gb_s, tflops, overhead_us: another device; all three.
        devices: how many of them hold the model.
        dtype: of weights and cache.
        profile: a file of `specbench profile`, in place of model, device and dtype.
        drafter: see `specbench.scenario.make_drafter`; by default what is looked up, or what the
            profile has of the method.
        acceptance: the chance at each position; beyond the last, the last.
        run: a folder with recorded steps, in place of ``acceptance``.
        method, workload: whose; by default all workloads, and the one method that drafts.
        batches: rows; by default those of the profile, or up to 256.
        context: tokens of each row; by default the shortest of the profile, or 1024.
        depth: the deepest draft; by default 8, or as deep as the recorded and profiled ones.
    """

    model: str | None = None
    device: str | None = None
    bandwidth_gb_s: float | None = None
    tflops: float | None = None
    overhead_us: float | None = None
    devices: int | None = None
    dtype: str | None = None
    profile: Path | None = None
    drafter: str | None = None
    acceptance: tuple[float, ...] = ()
    run: Path | None = None
    method: str | None = None
    workload: str | None = None
    batches: tuple[int, ...] = ()
    context: int | None = None
    depth: int | None = None

    def __post_init__(self) -> None:
        for name in ("devices", "context"):
            if getattr(self, name) is not None:
                check_least(name, getattr(self, name), 1)
        for batch in self.batches:
            check_least("batches", batch, 1)
        if self.depth is not None and not 1 <= self.depth <= _DEEPEST:
            raise ValueError(f"--depth {self.depth} is out of range; valid: 1..{_DEEPEST}")
        if self.dtype not in (None, *WIDTHS):
            raise ValueError(f"unknown dtype {self.dtype!r}; valid: {', '.join(WIDTHS)}")
        if (self.run is None) == (not self.acceptance):
            raise ValueError("acceptance is not given, or twice; valid: --acceptance or a run")
        if self.run is None and (self.workload or (self.method and self.profile is None)):
            raise ValueError("--method and --workload say what of a run is replayed; name a run")
        if self.profile and (said := [name for name in _OF_PROFILE if getattr(self, name)]):
            raise ValueError(
                f"{', '.join(map(option, said))}: the profile says that; leave it out, or --profile"
            )
        given = [name for name in _CUSTOM if getattr(self, name) is not None]
        if given and len(given) < len(_CUSTOM):
            raise ValueError(
                "another device takes all of --bandwidth-gb-s, --tflops and --overhead-us"
            )

    def setup(self) -> Setup:
        """All of it, loaded.

        Raises:
            ValueError: there is no such model, device, drafter, profile, run or method in it, or
            the profile has nothing so large.
        """
        return self._modelled() if self.profile is None else self._profiled(self.profile)

    def _modelled(self) -> Setup:
        model, dtype = self.model or "llama-3.1-70b", self.dtype or "bfloat16"
        target, width, drafter = load_shape(model), WIDTHS[dtype], self.drafter or "0"
        scenario = Scenario(
            machine=self._machine(dtype).times(self.devices or 1),
            target=target,
            drafter=make_drafter(drafter, target, width),
            acceptance=self._acceptance(self._recorded(), self.depth),
            context=self.context or 1024,
            width=width,
        )
        batches = self.batches or (1, 2, 4, 8, 16, 32, 64, 128, 256)
        return Setup(
            scenario=scenario,
            model=model,
            dtype=dtype,
            drafter=drafter,
            batches=batches,
            assumptions=ASSUMPTIONS,
        )

    def _profiled(self, path: Path) -> Setup:
        # torch comes with these.
        from specbench import prediction, roofline
        from specbench.profile import load_profile

        profile = load_profile(path)
        recorded = self._recorded()
        method = recorded[0].method if recorded else self.method
        context = self.context or prediction.Forwards(profile).contexts[0]
        # A drafter that is named counts, whatever was measured.
        steps = prediction.Steps(profile, "" if self.drafter else method or "", context)
        if method and not (self.drafter or steps.knows_drafts):
            raise ValueError(f"{prediction.unknown_drafts(profile, method)}, or a --drafter")
        depth = self.depth or min(_DEEPEST if recorded else _USUAL_DEPTH, steps.deepest)
        width = WIDTHS[profile.dtype]
        scenario = prediction.ProfiledScenario(
            machine=roofline.machine(profile),
            target=profile.shape,
            drafter=make_drafter(self.drafter or "0", profile.shape, width),
            acceptance=self._acceptance(recorded, depth),
            context=context,
            width=width,
            steps=steps,
        )
        measured = f"{method}, as profiled" if steps.knows_drafts else "0"
        return Setup(
            scenario=scenario,
            model=str(profile.target["name"]),
            dtype=profile.dtype,
            drafter=self.drafter or measured,
            batches=self.batches or tuple(profile.rows),
            assumptions=prediction.ASSUMPTIONS,
            doubts=tuple(_doubts(self.run, method or "", profile)) if self.run else (),
        )

    def _machine(self, dtype: str) -> Machine:
        if self.bandwidth_gb_s is None or self.tflops is None or self.overhead_us is None:
            return load_machine(self.device or "H200", dtype)
        return Machine(
            name="custom device",
            bandwidth=self.bandwidth_gb_s * 1e9,
            rate=self.tflops * 1e12,
            overhead_s=self.overhead_us * 1e-6,
        )

    def _acceptance(self, recorded: Sequence[RequestRecord], depth: int | None) -> Acceptance:
        if recorded:
            return Replayed(recorded, depth)
        return Given(self.acceptance, depth or _USUAL_DEPTH)

    def _recorded(self) -> list[RequestRecord]:
        """What one method made of the run's requests; nothing without a run."""
        if self.run is None:
            return []
        requests = [
            record
            for record in read_run(self.run).requests
            if self.workload in (None, record.workload)
        ]
        drafting = sorted({r.method for r in requests if any(step[1] for step in r.steps)})
        method = self.method or (drafting[0] if len(drafting) == 1 else None)
        if method not in drafting:
            raise ValueError(
                f"{self.run} has no drafts of method {method!r}"
                f"{f' on workload {self.workload!r}' if self.workload else ''}; valid: --method "
                f"{', '.join(drafting) or '(nothing was drafted)'}"
            )
        return [record for record in requests if record.method == method]


def _doubts(run: Path, method: str, profile: "Profile") -> list[str]:
    """In what a run is not of what was profiled."""
    info, doubts = read_info(run), []
    if info["target"].get("weights_sha256") != profile.target["weights_sha256"]:
        doubts.append("the run's target has other weights, or another dtype, than the profile's")
    ran, profiled = info["methods"].get(method, {}), profile.methods.get(method, {})
    differing = [
        f"{key} {ran[key]} and {profiled[key]}"
        for key in ran
        if key in profiled and key not in _MAY_DIFFER and ran[key] != profiled[key]
    ]
    if differing:
        doubts.append(f"{method} ran and was profiled in other settings: {'; '.join(differing)}")
    return doubts


def simulate(config: SimulateConfig) -> Page:
    """What is predicted, as a page."""
    setup = config.setup()
    scenario = setup.scenario
    points = [scenario.at(batch) for batch in sorted(set(setup.batches))]
    target, machine = scenario.target, scenario.machine
    ends = crossovers(points)
    return [
        Heading(f"Predicted, not measured: {setup.model} on {machine.name}", 1),
        Note(
            f"target: {_billions(target.num_weights)} weights, "
            f"{_billions(target.num_active_weights)} of them active, in {setup.dtype}; context "
            f"{scenario.context}"
        ),
        Note(
            f"machine: {machine.bandwidth / 1e9:.0f} GB/s, {machine.rate / 1e12:.3g} TFLOP/s, "
            f"{machine.overhead_s * 1e6:.0f} us for each layer of a pass"
        ),
        Note(f"drafter: {setup.drafter}; acceptance: {_source(config)}"),
        *(Note(doubt, "strong") for doubt in setup.doubts),
        _batches(points),
        _depths(points, scenario.acceptance, ends),
        Note(_crossover(points, ends), "strong"),
        Heading("Assumptions", 3),
        *(Note(assumption) for assumption in setup.assumptions),
    ]


def _source(config: SimulateConfig) -> str:
    if config.run is None:
        return ", ".join(f"{chance:g}" for chance in config.acceptance) + " by position"
    return " ".join(filter(None, ["recorded in", str(config.run), config.method, config.workload]))


def _billions(number: float) -> str:
    return f"{number / 1e9:.2f}B"


def _batches(points: Sequence[Point]) -> Table:
    columns = [
        Column("batch"),
        Column("vanilla ms /step"),
        Column("vanilla tokens/s"),
        Column("waits for", numbers=False),
        Column("deepest verify waits for", numbers=False),
        Column("best depth"),
        Column("speed-up"),
        Column("weights + KV GiB"),
        Column("fits", numbers=False),
    ]
    rows = [
        [
            Cell(str(point.batch)),
            Cell(f"{point.vanilla_s * 1e3:.2f}"),
            Cell(f"{point.batch / point.vanilla_s:.0f}"),
            Cell(point.vanilla_bound),
            Cell(point.verify_bound),
            Cell(str(point.best.depth)),
            _gain(point.best.speed_up),
            Cell(f"{point.memory.weights / 2**30:.1f} + {point.memory.kv / 2**30:.1f}"),
            _fits(point.fits),
        ]
        for point in points
    ]
    return Table("by batch", columns, rows)


def _depths(points: Sequence[Point], acceptance: Acceptance, ends: Sequence[int | None]) -> Table:
    columns = [Column("depth"), Column("tokens /step")]
    columns += [*(Column(f"B={point.batch}") for point in points), Column("pays below batch")]
    rows = [
        [
            Cell(str(1 + i)),
            Cell(f"{acceptance.tokens(1 + i):.2f}"),
            *(_gain(point.speed_ups[i]) for point in points),
            Cell(MISSING if end is None else str(end)),
        ]
        for i, end in enumerate(ends)
    ]
    return Table("speed-up by depth and batch", columns, rows)


def _crossover(points: Sequence[Point], ends: Sequence[int | None]) -> str:
    largest = points[-1].batch
    if None in ends:
        return f"Some depth pays up to the largest batch here, {largest}."
    last = max(end for end in ends if end is not None)
    return f"No depth pays from batch {last} on: switch speculation off there."


def _gain(gain: float) -> Cell:
    return Cell(f"{gain:.2f}x", "good" if gain > 1 else "bad" if gain < 1 else "")


def _fits(fits: bool | None) -> Cell:
    if fits is None:
        return Cell(MISSING)
    return Cell("yes") if fits else Cell("no", "bad")
