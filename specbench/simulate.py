"""`specbench simulate`: its settings, and the scenario that they come to. Nothing is measured
here."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from specbench.acceptance import Acceptance, Given, Replayed
from specbench.costs import Shape
from specbench.machines import WIDTHS, Machine, load_machine, load_shape
from specbench.messages import check_least, option
from specbench.recorded_drafter import LOOK_UP, Assumed, recorded_drafter
from specbench.records import RequestRecord, read_info, read_run
from specbench.scenario import (
    ASSUMPTIONS,
    Scenario,
    make_drafter,
)
from specbench.trace import are_trees, assumptions, check_replayable

if TYPE_CHECKING:
    from specbench.profile import Profile

_DEEPEST = 32
_MODEL, _DEVICE = "llama-3.1-70b", "H200"
_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_STATIC = (
    "batches are made of the recorded outputs in their order, and run until the last row of each "
    "has ended, none taking the place of another (static batching, as a run or a sweep decodes); "
    "what is shown of vanilla and of memory is that of a full batch"
)
_CONTINUOUS = (
    "batches are always full: as a row ends another takes its place (continuous batching); those "
    "of a run or a sweep empty, as --static has it"
)
_CUSTOM = ("bandwidth_gb_s", "tflops", "overhead_us")
_MAY_DIFFER = ("depth", "source_sha256")
"""Settings of a method that need not be alike in a run and a profile: depth is what is varied."""
_AS_CHAIN = "is taken for a chain, which costs less than the tree did: this promises too much"
_NOT_NAMED = Assumed(LOOK_UP, "assumed: a free look-up, as no --drafter was named")
_OF_PROFILE = ("model", "device", "devices", "dtype", *_CUSTOM)


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What is simulated, with everything filled in that was not said.

    Args:
        scenario: what is predicted from.
        model, dtype, drafter: how they are called.
        why: this drafter.
        batches: rows.
        assumptions: that the prediction makes.
        doubts: where what is combined does not belong together, or was not said.
    """

    scenario: Scenario
    model: str
    dtype: str
    drafter: str
    why: str
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
        drafter: see `specbench.scenario.make_drafter`; by default the one recorded, what the
            profile has of the method, or without either what is looked up.
        acceptance: the chance at each position.
        run: a folder with recorded steps, in place of ``acceptance``.
        method, workload: whose; by default all workloads, and the one method that drafts.
        static: batches empty towards their end; see `specbench.scenario.Replayed`.
        batches: rows; by default those of the profile, or up to 256.
        context: tokens of each row; by default the shortest of the profile, or 1024.
        depth: the deepest draft; by default as deep as the acceptance goes, and the profile.
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
    static: bool = False
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
        if self.run is None and self.static:
            raise ValueError("--static makes batches of recorded outputs; name a run")
        if self.profile and (said := [name for name in _OF_PROFILE if getattr(self, name)]):
            raise ValueError(
                f"{', '.join(map(option, said))}: the profile says that; leave it out, or --profile"
            )
        for name in ("model", "device", "drafter", "method", "workload"):
            if getattr(self, name) == "":
                raise ValueError(f"{option(name)} is empty; valid: a name, or leave it out")
        given = [name for name in _CUSTOM if getattr(self, name) is not None]
        if given and self.device:
            raise ValueError(
                f"the device is given twice; valid: --device or {', '.join(map(option, given))}"
            )
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
        model, dtype = self.model or _MODEL, self.dtype or "bfloat16"
        target, width, recorded = load_shape(model), WIDTHS[dtype], self._recorded()
        assumed = self._drafter(recorded, target)
        acceptance = self._acceptance(recorded)
        depth = min(acceptance.deepest, self.depth or acceptance.deepest, _DEEPEST)
        scenario = Scenario(
            machine=self._machine(dtype).times(self.devices or 1),
            target=target,
            drafter=make_drafter(assumed.drafter, target, width, depth),
            acceptance=acceptance,
            deepest=depth,
            context=self.context or 1024,
            width=width,
        )
        return Setup(
            scenario=scenario,
            model=model,
            dtype=dtype,
            drafter=assumed.drafter,
            why=assumed.why,
            batches=self._batches(_BATCHES, acceptance),
            assumptions=(*ASSUMPTIONS, self._batching, *_replayed(recorded, _AS_CHAIN)),
            doubts=tuple(self._unsaid(model)),
        )

    def _unsaid(self, model: str) -> list[str]:
        """What is assumed without a word from the user."""
        defaults = {
            "model": None if self.model else _MODEL,
            "device": None if self.device or self.tflops else _DEVICE,
        }
        taken = {name: value for name, value in defaults.items() if value}
        lines = []
        if taken:
            named = " and ".join(f"{name} {value}" for name, value in taken.items())
            others = " and ".join(map(option, taken))
            lines.append(f"not said, and so by default: {named} ({others} to name others)")
        if self.run is not None:
            name = read_info(self.run)["target"].get("name", "another target")
            lines.append(
                f"acceptance was recorded for {name}; it is taken to be the same for {model}"
            )
        return lines

    def _drafter(self, recorded: Sequence[RequestRecord], target: Shape) -> Assumed:
        """The one named, else the one recorded."""
        if self.drafter:
            return Assumed(self.drafter, "as named")
        if self.run is not None:
            found = recorded_drafter(read_info(self.run), recorded[0].method, target)
            return found._replace(why=f"assumed: {found.why}")
        return _NOT_NAMED

    def _profiled(self, path: Path) -> Setup:
        # torch comes with these.
        from specbench import prediction
        from specbench.profile import (
            drafts_trees,
            load_profile,
            profiled_name,
            unknown_drafts,
            variant_note,
        )

        profile = load_profile(path)
        recorded = self._recorded()
        method = recorded[0].method if recorded else self.method
        profiled = method and profiled_name(profile, method)
        context = self.context or prediction.Forwards(profile).contexts[0]
        # A drafter that is named counts, whatever was measured.
        steps = prediction.Steps(profile, "" if self.drafter else profiled or "", context)
        if method and not (self.drafter or profiled):
            raise ValueError(f"{unknown_drafts(profile, method)}, or a --drafter")
        acceptance = self._acceptance(recorded)
        depth = min(acceptance.deepest, self.depth or steps.deepest)
        prediction.check_within("--depth", depth, [1, steps.deepest])
        assumed = _NOT_NAMED
        if self.drafter:
            assumed = Assumed(self.drafter, "as named")
        elif profiled:
            assumed = Assumed(LOOK_UP, "")
        draws_trees = steps.knows_drafts and drafts_trees(profile.steps[steps.method])
        trees = "takes as many nodes as the profile's trees" if draws_trees else _AS_CHAIN
        doubts = _doubts(self.run, method or "", profile) if self.run else []
        if method and steps.knows_drafts and profiled != method:
            doubts.append(variant_note(method, steps.method))
        return Setup(
            scenario=prediction.on_profile(steps, acceptance, depth, assumed.drafter),
            model=str(profile.target["name"]),
            dtype=profile.dtype,
            drafter=steps.method if steps.knows_drafts else assumed.drafter,
            why="as profiled" if steps.knows_drafts else assumed.why,
            batches=self._batches(profile.rows, acceptance),
            assumptions=(
                *prediction.ASSUMPTIONS,
                self._batching,
                *_replayed(recorded, trees),
            ),
            doubts=tuple(doubts),
        )

    def _machine(self, dtype: str) -> Machine:
        if self.bandwidth_gb_s is None or self.tflops is None or self.overhead_us is None:
            return load_machine(self.device or _DEVICE, dtype)
        return Machine(
            name="custom device",
            bandwidth=self.bandwidth_gb_s * 1e9,
            rate=self.tflops * 1e12,
            overhead_s=self.overhead_us * 1e-6,
        )

    def _acceptance(self, recorded: Sequence[RequestRecord]) -> Acceptance:
        if recorded:
            return Replayed(recorded, static=self.static)
        return Given(self.acceptance)

    @property
    def _batching(self) -> str:
        return _STATIC if self.static else _CONTINUOUS

    def _batches(self, known: Sequence[int], acceptance: Acceptance) -> tuple[int, ...]:
        """Those asked for, else what is known as far as outputs fill it."""
        largest = acceptance.largest
        if largest and self.batches and max(self.batches) > largest:
            raise ValueError(
                f"--batches {max(self.batches)} is out of range; valid: 1..{largest}, of so many "
                "outputs as were recorded of each workload, or without --static"
            )
        return self.batches or tuple(num for num in known if num <= (largest or num))

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
        on = f" on workload {self.workload!r}" if self.workload else ""
        if self.method is None and len(drafting) > 1:
            raise ValueError(
                f"{self.run} has drafts of {len(drafting)} methods{on}; say which: --method "
                f"{' or '.join(drafting)}"
            )
        method = "".join(drafting) if self.method is None else self.method
        if method not in drafting:
            of = f" of method {method!r}" if self.method is not None else ""
            raise ValueError(
                f"{self.run} has no drafts{of}{on}; valid: --method "
                f"{', '.join(drafting) or '(nothing was drafted)'}"
            )
        check_replayable(read_info(self.run), method)
        return [record for record in requests if record.method == method]


def _replayed(recorded: Sequence[RequestRecord], trees: str) -> list[str]:
    """What the replay of records assumes, and what a step of trees costs."""
    if not recorded:
        return []
    own = [f"a step whose recorded draft was a tree {trees}"] if are_trees(recorded) else []
    return [*assumptions(recorded), *own]


def _doubts(run: Path, method: str, profile: "Profile") -> list[str]:
    """In what a run is not of what was profiled."""
    from specbench.profile import profiled_name

    info, doubts = read_info(run), []
    if info["target"].get("weights_sha256") != profile.target["weights_sha256"]:
        doubts.append("the run's target has other weights, or another dtype, than the profile's")
    name = profiled_name(profile, method) or method
    ran, profiled = info["methods"].get(method, {}), profile.methods.get(name, {})
    differing = [
        f"{key} {ran[key]} and {profiled[key]}"
        for key in ran
        if key in profiled and key not in _MAY_DIFFER and ran[key] != profiled[key]
    ]
    if differing:
        doubts.append(f"{method} ran and was profiled in other settings: {'; '.join(differing)}")
    return doubts
