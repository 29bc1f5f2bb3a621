"""Measures how long forwards and steps take, and how fast a device reads and computes.

What is compared is measured in turns: a round visits the whole grid, so a machine that slows down
slows all of it. A place's first call is discarded, and the first step of every visit.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import fmean

import psutil
import torch

from specbench.decode import Decoder
from specbench.depth import Fixed, Recorder
from specbench.depth.calibration import Sample
from specbench.method import Method, Request
from specbench.profile import Pass, PassTimes, StepSamples
from specbench.sampling import Sampling, request_key
from specbench.stopwatch import Stopwatch
from specbench.target import KVCache, Target, ending
from specbench.tree import Tree

_BUFFER_BYTES = {"cpu": 2**29, "cuda": 2**32}
"""Far more than the caches hold."""
_MATRIX_WIDTH = {"cpu": 1024, "cuda": 8192}
_CALLS = 10
_MOST_PROMPT_TOKENS = 48
_TEXTS = (
    "The lighthouse keeper counted the ships each evening and wrote their names in a long book.",
    "To bake bread you need flour, water, salt and yeast. First, mix the flour and the salt.",
    "def mean(values):\n    total = 0\n    for value in values:\n        total = total + value\n",
    "The river rises in the hills, runs south through three small towns, and ends in the sea.",
    "Question: which of the planets is the largest? Answer: the largest of the planets is",
    "Dear colleagues, the meeting on Monday begins at nine. Please bring the figures of the year.",
    "One, two, three, four, five, six, seven, eight, nine, ten, eleven, twelve, thirteen,",
    "The committee met twice. It met first to choose a chair, and then to choose another chair.",
)


def measure_forwards(target: Target, passes: Sequence[Pass], repeats: int) -> list[PassTimes]:
    """Times forwards of the target, every row a chain behind a full cache.

    Args:
        target: the target.
        passes: the grid; each must fit into the target's context.
        repeats: rounds.

    Raises:
        ValueError: one of them does not fit.
    """
    for one in passes:
        if one.context + one.tokens > target.max_context:
            raise ValueError(
                f"a forward of {one.tokens} tokens behind {one.context} does not fit; the target's "
                f"context is {target.max_context}"
            )
    if not passes:
        return []
    cache = _full_cache(target, passes)
    seconds: dict[Pass, list[float]] = {one: [] for one in passes}
    for _ in range(1 + repeats):
        for one, found in seconds.items():
            found.append(_forward_s(target, cache, one))
    return [PassTimes(**one._asdict(), seconds=found[1:]) for one, found in seconds.items()]


def _full_cache(target: Target, passes: Sequence[Pass]) -> KVCache:
    """A cache with as many rows and tokens as any of them needs."""
    longest = max(one.context for one in passes)
    num_rows = max(one.rows for one in passes)
    cache = target.new_cache(num_rows, max(one.context + one.tokens for one in passes))
    cache.add_row()
    target.prefill(_tokens(target, 1, longest)[0].tolist(), cache, 0)
    for row in range(1, num_rows):
        cache.add_row()
        if longest:
            cache.copy(0, row, longest)
    return cache


def _tokens(target: Target, rows: int, tokens: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(target.vocab_size, (rows, tokens), generator=generator)


def _forward_s(target: Target, cache: KVCache, one: Pass) -> float:
    cache.lengths = [one.context] * one.rows
    tokens_BN = _tokens(target, one.rows, one.tokens)
    trees = [Tree.chain(one.tokens - 1)] * one.rows
    watch = Stopwatch(target.device)
    target.forward(tokens_BN, trees, cache)
    watch.lap("forward")
    return watch.seconds()["forward"]


@dataclass
class _Samples:
    """Of one place of the grid, so far."""

    contexts: list[float] = field(default_factory=list)
    nodes: list[float] = field(default_factory=list)
    seconds: list[dict[str, float]] = field(default_factory=list)

    def of(self, phase: str) -> list[float]:
        """Seconds of a phase."""
        return [one.get(phase, 0.0) for one in self.seconds]


def measure_steps(
    target: Target,
    method: Method,
    rows: Sequence[int],
    depths: Sequence[int],
    *,
    repeats: int = 5,
    seed: int = 0,
    sampling: Sampling = Sampling(),  # noqa: B008 - frozen
) -> list[StepSamples]:
    """Times whole steps of a method as it decodes a few texts, whose rows do not end.

    Args:
        target, method: who decodes.
        rows: decoded together; each in turn.
        depths: that are drafted; 0 is always among them.
        repeats: rounds; in each a place of the grid is visited once.
        seed: of the random numbers, and which texts come first.
        sampling: how tokens are chosen.

    Raises:
        ValueError: the target has no tokenizer, or its context is too short for this.
    """
    grid = {(b, d): _Samples() for b in dict.fromkeys(rows) for d in dict.fromkeys((0, *depths))}
    budget = _tokens_needed(list({depth for _, depth in grid}))
    with ending(target):
        for round_ in range(repeats):
            for num in dict.fromkeys(rows):
                requests = _requests(target, num, budget, seed + round_)
                _visit(target, method, requests, grid, sampling, turn=round_)
    method.reset()
    return [
        StepSamples(
            rows=num,
            depth=depth,
            context=fmean(found.contexts),
            nodes=found.nodes,
            draft_s=found.of("draft"),
            forward_s=found.of("forward"),
            bookkeeping_s=found.of("bookkeeping"),
        )
        for (num, depth), found in grid.items()
    ]


def record_samples(
    target: Target, method: Method, *, tokens: int = 48, seed: int = 0
) -> list[list[Sample]]:
    """How sure the drafter was of its chains, and how many of its tokens were taken, as it decodes
    a few texts greedily to its full depth: the samples of each text, to calibrate on and to check
    with. None for a drafter without chances, or of trees.

    Raises:
        ValueError: the target has no tokenizer.
    """
    found = []
    with ending(target):
        for request in _requests(target, len(_TEXTS), tokens, seed):
            recorder = Recorder(method.config.depth, method.config.max_nodes)
            Decoder(target, method, recorder, Sampling()).run([request])
            found.append(recorder.samples)
    method.reset()
    return found


def _tokens_needed(depths: Sequence[int]) -> int:
    """The token budget in which two steps of each depth find room, whatever is accepted."""
    return sum(2 * (1 + depth) for depth in depths) + max(depths) + 1


def _visit(
    target: Target,
    method: Method,
    requests: Sequence[Request],
    grid: dict[tuple[int, int], _Samples],
    sampling: Sampling,
    turn: int,
) -> None:
    """Two steps at each depth with these rows, the second of them timed; the first lets the drafter
    catch up with steps at which it drafted otherwise."""
    depths = [depth for num, depth in grid if num == len(requests)]
    turn %= len(depths)
    decoder = Decoder(target, method, Fixed(0, 1), sampling, max_rows=len(requests))
    decoder.join(requests)
    for depth in depths[turn:] + depths[:turn]:
        decoder.controller = Fixed(depth, method.config.max_nodes)
        decoder.step()
        watch = Stopwatch(target.device)
        decoder.lap = watch.lap
        decoder.step()
        found = grid[len(requests), depth]
        found.seconds.append(watch.seconds())
        found.nodes.append(fmean(row.steps[-1].nodes for row in decoder.rows))
        found.contexts.append(fmean(map(len, (row.tokens for row in decoder.rows))))
        decoder.lap = _ignore


def _ignore(phase: str) -> None:
    """No time is taken."""


def _requests(target: Target, num: int, budget: int, seed: int) -> list[Request]:
    if target.tokenizer is None:
        raise ValueError(f"target {target.name!r} has no tokenizer; steps are timed on text")
    texts = [_TEXTS[(seed + row) % len(_TEXTS)] for row in range(num)]
    # Begun again, so that drafters that copy have something to copy.
    texts = [f"{text}\n{text[: len(text) // 2]}" for text in texts]
    most = min(_MOST_PROMPT_TOKENS, max(1, target.max_context - budget))
    return [
        Request(
            id=f"profile-{row}",
            prompt=tuple(target.tokenizer.encode(text)[-most:]),
            max_new_tokens=budget,
            key=request_key(seed, f"profile-{row}"),
        )
        for row, text in enumerate(texts)
    ]


@torch.inference_mode()
def measure_bandwidth(device: torch.device) -> float:
    """Bytes a second that the device reads, with as many threads as torch has: the best of several
    sums over a buffer much larger than its caches."""
    block = torch.ones(_BUFFER_BYTES[device.type] // 4, device=device)
    return 4 * len(block) / min(_times(lambda: block.sum(), device))


@torch.inference_mode()
def measure_rate(device: torch.device, dtype: torch.dtype) -> float:
    """FLOPs a second in a large matrix product: the best of several."""
    width = _MATRIX_WIDTH[device.type]
    left, right = (torch.ones(width, width, dtype=dtype, device=device) for _ in range(2))
    return 2 * width**3 / min(_times(lambda: left @ right, device))


def _times(call: Callable[[], object], device: torch.device) -> Iterator[float]:
    call()
    for _ in range(_CALLS):
        watch = Stopwatch(device)
        call()
        watch.lap("call")
        yield watch.seconds()["call"]


def memory_bytes(device: torch.device) -> float:
    """That the device has."""
    if device.type == "cuda":
        return float(torch.cuda.get_device_properties(device).total_memory)
    return float(psutil.virtual_memory().total)
