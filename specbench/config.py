"""The settings of a run: a frozen dataclass that is checked at once, before any device is busy."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

from pydantic import ConfigDict, TypeAdapter, ValidationError

from specbench import registry
from specbench.messages import check_least, in_one_line, suggest
from specbench.method import Method, MethodConfig
from specbench.records import BASELINE
from specbench.sampling import RULES, Sampling
from specbench.target.loading import DEFAULT_TARGET, DTYPES
from specbench.workloads import Decoding

Settings = TypeVar("Settings")

DEFAULT_WORKLOADS = ("humaneval", "creative")


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """What to measure.

    Args:
        target: the target's name, Hub name, folder or GGUF file.
        methods: methods to compare; the baseline is always among them. Empty: all that can
            draft for the target.
        workloads: names of workloads, data sets or files.
        prompts: prompts per workload; None for all.
        max_new_tokens: token budget per request.
        temperature, top_k, top_p: None for each workload's own.
        sampling: the rule for drafts that are drawn from a distribution.
        batch_size: requests decoded together.
        depth: draft depth of every method; None for each method's own.
        rounds: timed passes per request and method.
        workers: processes that share the work; None for one per GPU group, or two on a CPU.
        gpus_per_worker: GPUs that one worker spreads the target over.
        dtype: None for what the device computes in natively.
        seed: of the random numbers.
        knobs: by method, the text of its knobs.

    Raises:
        ValueError: anything unknown or out of range; the message lists what is valid.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    target: str = DEFAULT_TARGET
    methods: tuple[str, ...] = ()
    workloads: tuple[str, ...] = DEFAULT_WORKLOADS
    prompts: int | None = 12
    max_new_tokens: int = 64
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    sampling: str = RULES[0]
    batch_size: int = 1
    depth: int | None = None
    rounds: int = 2
    workers: int | None = None
    gpus_per_worker: int = 1
    dtype: str | None = None
    seed: int = 0
    knobs: Mapping[str, Mapping[str, str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, least in {
            "prompts": 1,
            "max_new_tokens": 1,
            "batch_size": 1,
            "depth": 0,
            "rounds": 1,
            "workers": 1,
            "gpus_per_worker": 1,
        }.items():
            if getattr(self, name) is not None:
                check_least(name, getattr(self, name), least)
        if self.dtype is not None and self.dtype not in DTYPES:
            raise ValueError(f"unknown dtype {self.dtype!r}; valid: {', '.join(DTYPES)}")
        if not self.workloads:
            raise ValueError("no workload is given; `specbench workloads` lists them")
        object.__setattr__(self, "workloads", tuple(dict.fromkeys(self.workloads)))
        self.sampling_for(Decoding())
        names = self.methods or registry.usable(self.target, self.knobs)[0]
        object.__setattr__(self, "methods", tuple(dict.fromkeys((BASELINE, *names))))
        for method, knobs in self.knobs.items():
            if method not in self.methods:
                raise ValueError(
                    f"--set {method}.{next(iter(knobs), '')}: method {method!r} is not "
                    f"in this run{suggest(method, self.methods)}; "
                    f"valid: {', '.join(self.methods)}"
                )
        for name in self.methods:
            cls = registry.load_method(name)
            if problem := cls.lacks(self.method_config(name, cls), self.target):
                raise ValueError(problem)

    def method_config(self, name: str, method: type[Method]) -> MethodConfig:
        """A method's settings in this run."""
        knobs = dict(self.knobs.get(name, {}))
        if self.depth is not None:
            knobs.setdefault("depth", str(self.depth))
        return registry.make_config(name, method, knobs)

    def sampling_for(self, decoding: Decoding) -> Sampling:
        """How a workload's tokens are chosen: as the run says, else as its card says."""
        own = decoding.override(temperature=self.temperature, top_k=self.top_k, top_p=self.top_p)
        return Sampling(
            temperature=own.temperature, top_k=own.top_k, top_p=own.top_p, rule=self.sampling
        )

    def to_dict(self) -> dict[str, Any]:
        """As plain values, to file."""
        return dataclasses.asdict(self)

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> "RunConfig":
        """From what `to_dict` gave, lists for tuples.

        Raises:
            ValueError: a setting that this version does not know, of another type or out of range.
        """
        return settings_from(RunConfig, values)


def settings_from(kind: type[Settings], values: Mapping[str, Any]) -> Settings:
    """Settings of a kind from plain values, lists for tuples.

    Raises:
        ValueError: a setting that this version does not know, of another type or out of range.
    """
    try:
        settings: Settings = TypeAdapter(kind).validate_python(values)
    except ValidationError as error:
        raise ValueError(f"settings: {in_one_line(error)}") from error
    return settings
