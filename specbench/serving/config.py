"""The settings of a serving run: a frozen dataclass that is checked at once."""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

from pydantic import ConfigDict

from specbench import registry
from specbench.config import DEFAULT_WORKLOADS, RunConfig
from specbench.depth import Choice
from specbench.messages import check_least
from specbench.records import BASELINE
from specbench.sampling import RULES
from specbench.target.loading import DEFAULT_TARGET

DEFAULT_LOADS = (0.5, 0.8, 1.2)


class Entry(NamedTuple):
    """What requests are served with."""

    method: str
    controller: str


@dataclass(frozen=True, kw_only=True)
class ServeConfig:
    """What to serve, with what, and how fast it comes.

    Args:
        target: as in a run.
        methods: to compare; the baseline is always among them. Empty: all that can draft for the
            target.
        controllers: each method is served under each of them; empty: under what its own knob says.
        workloads: where the prompts come from; of each prompt the first turn.
        loads: arrival rates as shares of the baseline's capacity at the largest batch, which is
            measured first: a rate in requests per second means nothing on another machine.
        rates: arrival rates in requests per second, in place of loads.
        swing: how many times as fast requests come in every other spell, the rate being the mean.
        requests: how many arrive at each rate.
        rounds: passes at each rate, each with arrival times of its own.
        max_batch: the most that are decoded together.
        max_new_tokens: token budget per request.
        temperature: of all requests: those of one batch are sampled alike.
        sampling: the rule for drafts that are drawn from a distribution.
        dtype: None for what the device computes in natively.
        seed: of arrivals, of which prompts come, and of the random numbers.
        knobs: by method, the text of its knobs.

    Raises:
        ValueError: anything unknown or out of range; the message lists what is valid.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    target: str = DEFAULT_TARGET
    methods: tuple[str, ...] = ()
    controllers: tuple[str, ...] = ()
    workloads: tuple[str, ...] = DEFAULT_WORKLOADS
    loads: tuple[float, ...] = ()
    rates: tuple[float, ...] = ()
    swing: float = 1.0
    requests: int = 32
    rounds: int = 3
    max_batch: int = 8
    max_new_tokens: int = 64
    temperature: float = 0.0
    sampling: str = RULES[0]
    dtype: str | None = None
    seed: int = 0
    knobs: Mapping[str, Mapping[str, str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("requests", "rounds", "max_batch"):
            check_least(name, getattr(self, name), 1)
        check_least("seed", self.seed, 0)
        if not (self.swing >= 1 and math.isfinite(self.swing)):
            raise ValueError(f"--swing {self.swing:g} is out of range; valid: 1 or more")
        if self.loads and self.rates:
            raise ValueError("the arrival rates are given twice; valid: --loads or --rates")
        for name in ("loads", "rates"):
            self._sort(name)
        if not self.rates and not self.loads:
            object.__setattr__(self, "loads", DEFAULT_LOADS)
        if self.loads and self.requests < self.max_batch:
            raise ValueError(
                f"--requests {self.requests} never fill a batch of {self.max_batch}, so its "
                f"capacity cannot be measured; valid: {self.max_batch} or more, a smaller "
                "--max-batch, or --rates"
            )
        object.__setattr__(self, "controllers", tuple(dict.fromkeys(self.controllers)))
        for controller in self.controllers:
            Choice.read(controller)
        for method, knobs in self.knobs.items():
            if self.controllers and "controller" in knobs:
                raise ValueError(
                    f"the controllers are given twice; valid: --controllers or --set "
                    f"{method}.controller"
                )
        run = self.run_config()
        object.__setattr__(self, "methods", run.methods)
        object.__setattr__(self, "workloads", run.workloads)

    def _sort(self, name: str) -> None:
        values = getattr(self, name)
        for value in values:
            if not (value > 0 and math.isfinite(value)):
                raise ValueError(f"--{name} {value} is out of range; valid: above 0")
        object.__setattr__(self, name, tuple(sorted(set(values))))

    def run_config(self) -> RunConfig:
        """What of it a worker needs to know."""
        return RunConfig(
            target=self.target,
            methods=self.methods,
            workloads=self.workloads,
            prompts=None,
            max_new_tokens=self.max_new_tokens,
            temperature=self.temperature,
            top_k=0,
            top_p=1.0,
            sampling=self.sampling,
            batch_size=self.max_batch,
            workers=1,
            dtype=self.dtype,
            seed=self.seed,
            knobs=self.knobs,
        )

    def entries(self) -> list[Entry]:
        """Every method with every controller; the baseline, which has nothing to control, once and
        first."""
        run = self.run_config()
        own = {
            name: run.method_config(name, registry.load_method(name)).controller
            for name in self.methods
        }
        return [
            Entry(name, controller)
            for name in self.methods
            for controller in (
                self.controllers if self.controllers and name != BASELINE else (own[name],)
            )
        ]

    def to_dict(self) -> dict[str, Any]:
        """As plain values, to file."""
        return dataclasses.asdict(self)
