"""What a sweep measures: its settings, and the run of each batch size that follows from them.

A method stands several times in each run, under a name for each depth and tree size: ``eagle@d3``,
``eagle@d3n12``; ``eagle@chain-d3`` where it has a label of its own.
"""

import dataclasses
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

from pydantic import ConfigDict

from specbench import registry
from specbench.config import DEFAULT_WORKLOADS, RunConfig, settings_from
from specbench.messages import check_least, suggest
from specbench.records import BASELINE
from specbench.stats import MIN_CLUSTERS
from specbench.target.loading import DEFAULT_TARGET

_NAME = re.compile(r"(?P<method>.+)[@-]d(?P<depth>\d+)(n(?P<nodes>\d+))?")
_VARIED = {"depth": "--depths", "max_nodes": "--nodes"}


class Setting(NamedTuple):
    """A method at a depth, and with a tree of a size where that is varied."""

    method: str
    depth: int
    nodes: int | None = None

    @property
    def name(self) -> str:
        """What it is called in a run."""
        size = "" if self.nodes is None else f"n{self.nodes}"
        return f"{self.method}{'-' if '@' in self.method else '@'}d{self.depth}{size}"

    @staticmethod
    def read(name: str) -> "Setting | None":
        """From what it is called; None for what is no part of a sweep, as the baseline is not."""
        match = _NAME.fullmatch(name)
        if match is None:
            return None
        nodes = match["nodes"]
        return Setting(match["method"], int(match["depth"]), int(nodes) if nodes else None)


@dataclass(frozen=True, kw_only=True)
class SweepConfig:
    """What to measure.

    Args:
        target: the target's name, Hub name, folder or GGUF file.
        methods: methods to compare with the baseline; empty: all that can draft for the target.
        workloads: names of workloads, data sets or files.
        batches: batch sizes.
        depths: draft depths; 0 is the baseline, which is always measured.
        nodes: sizes of the trees of methods that draft trees; empty for each method's own.
        prompts: prompts per workload; None for `MIN_CLUSTERS` batches of the largest size.
        max_new_tokens: token budget per request.
        rounds: timed passes per batch and method.
        temperature: None for each workload's own.
        dtype: None for what the device computes in natively.
        workers: processes that share the work; None as for a run.
        knobs: by method, the text of its knobs.

    Raises:
        ValueError: anything unknown or out of range; the message lists what is valid.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    target: str = DEFAULT_TARGET
    methods: tuple[str, ...] = ()
    workloads: tuple[str, ...] = DEFAULT_WORKLOADS
    batches: tuple[int, ...] = (1, 2, 4, 8)
    depths: tuple[int, ...] = (1, 2, 3, 5)
    nodes: tuple[int, ...] = ()
    prompts: int | None = None
    max_new_tokens: int = 64
    rounds: int = 2
    temperature: float | None = None
    dtype: str | None = None
    workers: int | None = None
    knobs: Mapping[str, Mapping[str, str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, least in {"batches": 1, "depths": 0, "nodes": 1}.items():
            for value in getattr(self, name):
                check_least(name, value, least)
            object.__setattr__(self, name, tuple(sorted(set(getattr(self, name)))))
        object.__setattr__(self, "depths", tuple(depth for depth in self.depths if depth))
        if not self.batches or not self.depths:
            raise ValueError("a sweep needs a batch size and a depth of 1 or more at least")
        names = self.methods or registry.usable(self.target, self.knobs)[0]
        object.__setattr__(self, "methods", tuple(n for n in dict.fromkeys(names) if n != BASELINE))
        self._check_knobs()
        self.run_config(self.batches[0])

    def _check_knobs(self) -> None:
        for method, knobs in self.knobs.items():
            if method not in self.methods:
                raise ValueError(
                    f"--set {method}.{next(iter(knobs), '')}: method {method!r} is not in this "
                    f"sweep{suggest(method, self.methods)}; valid: {', '.join(self.methods)}"
                )
            for knob, option in _VARIED.items():
                if knob in knobs and (knob == "depth" or self.nodes):
                    raise ValueError(f"--set {method}.{knob}: {option} sets it in a sweep")

    @property
    def num_prompts(self) -> int:
        """Prompts of each workload."""
        return MIN_CLUSTERS * max(self.batches) if self.prompts is None else self.prompts

    def run_config(self, batch: int, left_out: Mapping[str, str] | None = None) -> RunConfig:
        """The run of a batch size.

        Args:
            left_out: names that cannot be set up, beside those of `left_out`.

        Raises:
            ValueError: a setting is not valid, or nothing is left to measure.
        """
        out = self.left_out() | dict(left_out or {})
        kept = [setting for setting in self._settings() if setting.name not in out]
        if not kept:
            raise ValueError(next(iter(out.values()), "no method is left to sweep"))
        return RunConfig(
            target=self.target,
            methods=tuple(setting.name for setting in kept),
            workloads=self.workloads,
            prompts=self.num_prompts,
            max_new_tokens=self.max_new_tokens,
            temperature=self.temperature,
            batch_size=batch,
            rounds=self.rounds,
            workers=self.workers,
            dtype=self.dtype,
            knobs={setting.name: self._knobs(setting) for setting in kept},
        )

    def left_out(self) -> dict[str, str]:
        """By name, why a method cannot be put to a depth or a tree size."""
        found = {}
        for setting in self._settings():
            cls = registry.load_method(setting.method)
            try:
                config = registry.make_config(setting.name, cls, self._knobs(setting))
            except ValueError as error:
                found[setting.name] = str(error)
                continue
            if config.max_nodes < config.depth:
                found[setting.name] = (
                    f"{setting.name}: {config.max_nodes} nodes reach no depth of {config.depth}; "
                    f"valid: --nodes, or --set {setting.method}.max_nodes, of that or more"
                )
        return found

    def _settings(self) -> Iterator[Setting]:
        for method in self.methods:
            for depth in self.depths:
                for nodes in self.nodes if self._draws_trees(method) else (None,):
                    yield Setting(method, depth, nodes)

    def _draws_trees(self, method: str) -> bool:
        cls = registry.load_method(method)
        config = registry.make_config(method, cls, self.knobs.get(method, {}))
        return bool(self.nodes) and config.drafts_trees

    def _knobs(self, setting: Setting) -> dict[str, str]:
        size = {} if setting.nodes is None else {"max_nodes": str(setting.nodes)}
        return {**self.knobs.get(setting.method, {}), "depth": str(setting.depth), **size}

    def to_dict(self) -> dict[str, Any]:
        """As plain values, to file."""
        return dataclasses.asdict(self)

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> "SweepConfig":
        """From what `to_dict` gave, lists for tuples.

        Raises:
            ValueError: a setting that this version does not know, of another type or out of range.
        """
        return settings_from(SweepConfig, values)
