"""`specbench profile`: its settings, and the profile that is measured."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product

from specbench import provenance
from specbench.config import RunConfig
from specbench.messages import check_least
from specbench.profile import Pass, Profile
from specbench.profiling import (
    measure_bandwidth,
    measure_forwards,
    measure_rate,
    measure_steps,
    memory_bytes,
    record_samples,
)
from specbench.records import BASELINE
from specbench.target.loading import DEFAULT_TARGET
from specbench.worker import Worker


@dataclass(frozen=True, kw_only=True)
class ProfileConfig:
    """What to profile.

    Args:
        target: as `RunConfig` takes it.
        dtype: None for what the device computes in natively.
        methods: whose steps; the baseline is always among them. Empty: all that can draft for the
            target.
        knobs: by method, the text of its knobs.
        batches: rows.
        tokens: of each row, in a forward; 1 is always among them.
        contexts: tokens of each row in the cache.
        depths: of the steps; 0 is always among them.
        repeats: rounds.
        seed: of the random numbers.

    Raises:
        ValueError: anything unknown or out of range; the message lists what is valid.
    """

    target: str = DEFAULT_TARGET
    dtype: str | None = None
    methods: tuple[str, ...] = ()
    knobs: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    batches: tuple[int, ...] = (1, 2, 4, 8)
    tokens: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
    contexts: tuple[int, ...] = (128, 512)
    depths: tuple[int, ...] = (0, 1, 2, 4)
    repeats: int = 7
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in {"batches": 1, "tokens": 1, "contexts": 0, "depths": 0}.items():
            for value in getattr(self, name):
                check_least(name, value, least)
        check_least("repeats", self.repeats, 1)
        for name, always in {"batches": (), "tokens": (1,), "contexts": (), "depths": (0,)}.items():
            whole = tuple(sorted({*always, *getattr(self, name)}))
            object.__setattr__(self, name, whole)
            if not whole:
                raise ValueError(f"--{name} is empty; valid: numbers with commas")

    def run_config(self) -> RunConfig:
        """The settings of a worker that loads the target and the methods."""
        return RunConfig(
            target=self.target,
            dtype=self.dtype,
            methods=self.methods,
            knobs=self.knobs,
            batch_size=max(self.batches),
            max_new_tokens=1,
            seed=self.seed,
        )

    def grid(self, max_context: int) -> "Grid":
        """The forwards to measure.

        Raises:
            ValueError: the target's context has room for none of one token.
        """
        passes = [Pass(*one) for one in product(self.batches, self.tokens, self.contexts)]
        kept = [one for one in passes if one.context + one.tokens <= max_context]
        if not any(one.tokens == 1 for one in kept):
            raise ValueError(
                f"--contexts {','.join(map(str, self.contexts))} do not fit; the target's context "
                f"is {max_context}"
            )
        return Grid(kept, [one for one in passes if one not in kept])


@dataclass(frozen=True)
class Grid:
    """Forwards that a target's context has room for, and those that it has not."""

    passes: Sequence[Pass]
    left_out: Sequence[Pass]


def measure(config: ProfileConfig, say: Callable[[str], None] = lambda text: None) -> Profile:
    """Loads the target and the methods, and measures.

    Args:
        config: what.
        say: told what is being measured.

    Raises:
        ValueError: something cannot be loaded, or is of a kind whose costs are not counted.
    """
    started = provenance.collect()
    run_config = config.run_config()
    say("loading the target and the methods")
    worker = Worker(run_config)
    target, methods = worker.target, worker.methods
    shape, described = target.shape, worker.describe()
    grid = config.grid(target.max_context)
    say("measuring the machine")
    bandwidth = measure_bandwidth(target.device)
    rate = measure_rate(target.device, target.dtype)
    say(f"measuring {len(grid.passes)} forwards, {config.repeats} times each")
    passes = measure_forwards(target, grid.passes, config.repeats)
    steps, samples = {}, {}
    for name, method in methods.items():
        say(f"measuring steps of {name}")
        depths = (0,) if name == BASELINE else config.depths
        steps[name] = measure_steps(
            target, method, config.batches, depths, repeats=config.repeats, seed=config.seed
        )
        if name != BASELINE and any(texts := record_samples(target, method, seed=config.seed)):
            samples[name] = texts
    return Profile(
        provenance={
            **started,
            **described["machine"],
            "device": described["device"],
            "dtype": described["target"]["dtype"],
            "threads": described["num_threads"],
            "weights_sha256": described["target"]["weights_sha256"],
            "template_sha256": described["template_sha256"],
        },
        target=described["target"],
        methods=described["methods"],
        shape=shape,
        passes=passes,
        steps=steps,
        samples=samples,
        bandwidth=bandwidth,
        rate=rate,
        memory_bytes=memory_bytes(target.device),
        notes=_notes(grid, target.max_context),
    )


def _notes(grid: Grid, max_context: int) -> list[str]:
    """What was left out."""
    widths: dict[int, set[int]] = {}
    for one in grid.left_out:
        widths.setdefault(one.context, set()).add(one.tokens)
    return [
        f"left out: {', '.join(map(str, sorted(tokens)))} tokens behind a context of {context}, "
        f"beyond the target's {max_context}"
        for context, tokens in widths.items()
    ]
