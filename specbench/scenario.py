"""Speculation on another machine: what recorded or given acceptance is worth under a cost model.
Pure functions; nothing is measured here."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

from specbench.acceptance import Acceptance
from specbench.costs import Cost, Memory, Shape, forward_cost, memory
from specbench.drafter_costs import (
    Draft,
    features_cost,
    heads_cost,
    model_cost,
    short_stack_cost,
)
from specbench.machines import Machine, load_shape, shape_names
from specbench.theory import (
    Choice,
    StepCost,
    best_depth_of,
    crossover,
)

ASSUMPTIONS = (
    "a pass takes max(bytes / bandwidth, FLOPs / rate) + overhead; both are the vendor's peaks, "
    "which real kernels stay below",
    "weights are read once a pass, keys and values once for each row; activations stay on the chip",
    "all rows have the same context; attention computes what it masks",
    "a batch of rows verifies exactly its nodes: no padding to the widest row",
    "sampling, scheduling and prefill take no time; several devices are as fast as one of their "
    "summed bandwidth and rate",
    "of a mixture, tokens choose experts uniformly and independently",
)


class Drafter(Protocol):
    """What drafting costs."""

    @property
    def weight_bytes(self) -> float:
        """Beside the target's."""
        ...

    @property
    def resumed_layers(self) -> int:
        """The target's first layers that verification need not run again."""
        ...

    def seconds(self, machine: Machine, draft: Draft) -> float:
        """Of one draft."""
        ...


class Relative(NamedTuple):
    """A share of the target's step of one token, for each level, and of its weights; 0 for drafts
    that are looked up."""

    share: float
    target: Shape
    weight_bytes: float = 0.0
    resumed_layers: int = 0

    def seconds(self, machine: Machine, draft: Draft) -> float:
        """In proportion."""
        step = forward_cost(self.target, draft.rows, 1, draft.context, width=draft.width)
        return self.share * len(draft.levels) * machine.seconds(step, self.target.num_layers)


class Heads(NamedTuple):
    """Medusa's heads of one block each, on the target's head."""

    target: Shape
    weight_bytes: float = 0.0
    resumed_layers: int = 0

    def seconds(self, machine: Machine, draft: Draft) -> float:
        """All heads at once."""
        cost = heads_cost(self.target.hidden, 1, self.target.vocab, draft)
        return machine.seconds(cost, int(bool(draft.levels)))


class Features(NamedTuple):
    """EAGLE-3's head: one dense layer as wide as the target's, with a draft vocabulary."""

    layer: Shape
    weight_bytes: float = 0.0
    resumed_layers: int = 0

    def seconds(self, machine: Machine, draft: Draft) -> float:
        """Level by level."""
        cost = features_cost(self.layer, draft, fused_width=3 * self.layer.hidden)
        return machine.seconds(cost, len(draft.levels))


class Layers(NamedTuple):
    """The target's first layers, and behind them its own head, or a trained exit: a dense layer as
    wide, with a draft vocabulary."""

    target: Shape
    num_layers: int
    exit: Shape | None = None
    weight_bytes: float = 0.0

    @property
    def resumed_layers(self) -> int:
        """Those that draft."""
        return self.num_layers

    def seconds(self, machine: Machine, draft: Draft) -> float:
        """Level by level; the last level's nodes run through the layers too."""
        cost = short_stack_cost(
            self.target,
            draft,
            num_layers=self.num_layers,
            resumed=self.num_layers,
            adapter=self.exit,
        )
        levels, own = len(draft.levels), int(self.exit is not None)
        passes = (levels + 1) * self.num_layers + levels * own if levels else 0
        return machine.seconds(cost, passes)


class Model(NamedTuple):
    """A draft model."""

    shape: Shape
    weight_bytes: float = 0.0
    resumed_layers: int = 0

    def seconds(self, machine: Machine, draft: Draft) -> float:
        """Level by level."""
        return machine.seconds(
            model_cost(self.shape, draft), len(draft.levels) * self.shape.num_layers
        )


_DRAFT_VOCAB = 32_000
DRAFTERS = (
    "a share of the target's step (0 for look-up), heads, features, layers:N (the target's first "
    f"N), exit:N (a trained exit behind these), or a model ({', '.join(shape_names())}, a folder, "
    "or a name on the Hub)"
)


def make_drafter(name: str, target: Shape, width: int, depth: int) -> Drafter:
    """A drafter by what it is.

    Args:
        name: one of `DRAFTERS`.
        target: what it drafts for.
        width: bytes of a number.
        depth: of its deepest draft.

    Raises:
        ValueError: it is none of these.
    """
    try:
        share = float(name)
    except ValueError:
        pass
    else:
        if not 0 <= share < float("inf"):
            raise ValueError(f"drafter {name} is out of range; valid: {DRAFTERS}")
        return Relative(share, target, share * width * target.num_weights)
    if name == "heads":
        return Heads(target, depth * width * target.hidden**2)
    if name == "features":
        layer = replace(_dense_layer(target), width_in=2 * target.hidden)
        fused = 3 * target.hidden**2
        return Features(layer, width * (layer.layer_weights(0) + layer.head_weights + fused))
    kind, _, number = name.partition(":")
    if kind in ("layers", "exit"):
        most = target.num_layers - 1
        if not number.isdecimal() or not 1 <= int(number) <= most:
            raise ValueError(f"drafter {name} is out of range; valid: {kind}:1..{kind}:{most}")
        if kind == "layers":
            return Layers(target, int(number))
        layer = _dense_layer(target)
        own = width * (layer.layer_weights(0) + layer.head_weights)
        return Layers(target, int(number), layer, own)
    shape = load_shape(name)
    return Model(shape, width * shape.num_weights)


def _dense_layer(target: Shape) -> Shape:
    """One layer as wide as the target's, without experts or a window, and a draft vocabulary."""
    inner = target.inner or target.num_active * target.expert_inner
    dense = replace(target.part(1), inner=inner, num_experts=0, num_windowed=0)
    return replace(dense, vocab=min(_DRAFT_VOCAB, target.vocab))


@dataclass(frozen=True, kw_only=True)
class Point:
    """What is predicted of one batch size.

    Args:
        batch: rows.
        vanilla_s: of a step of one token a row.
        speed_ups: by depth, from 1.
        best: the depth that promises most, 0 among them.
        vanilla_bound, verify_bound: ``memory`` or ``compute``: what a pass waits for, without
            drafts and at the largest depth.
        memory: weights, the drafter's among them, and keys and values.
        fits: whether the machine holds it; None where its memory is not known.
    """

    batch: int
    vanilla_s: float
    speed_ups: tuple[float, ...]
    best: Choice
    vanilla_bound: str
    verify_bound: str
    memory: Memory
    fits: bool | None


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """What is simulated.

    Args:
        machine, target, drafter, acceptance: as they say.
        deepest: the deepest draft, no deeper than the acceptance; None for that.
        context: tokens of each row.
        width: bytes of a number.
    """

    machine: Machine
    target: Shape
    drafter: Drafter
    acceptance: Acceptance
    deepest: int | None = None
    context: int = 1024
    width: int = 2

    def step(self, batch: int, depth: int) -> StepCost:
        """What a step costs."""
        num_layers = self._verifying(depth).num_layers
        forward_s = self.machine.seconds(self.verify(batch, depth), num_layers)
        return StepCost(self.draft_s(batch, depth), forward_s)

    def _verifying(self, depth: int) -> Shape:
        """What of the target is left to run where the drafter ran the first layers already."""
        resumed = self.drafter.resumed_layers if depth else 0
        return self.target.part(self.target.num_layers - resumed) if resumed else self.target

    def draft_s(self, batch: int, depth: int) -> float:
        """Seconds of drafting."""
        if not depth:
            return 0.0
        unseen = round(self.acceptance.tokens(depth))
        draft = Draft(
            rows=batch,
            levels=[1] * depth,
            context=self.context,
            unseen=min(unseen, self.context),
            width=self.width,
        )
        return self.drafter.seconds(self.machine, draft)

    def nodes(self, batch: int, depth: int) -> float:
        """What a row verifies beyond one token."""
        return self.acceptance.nodes(depth)

    def verify(self, batch: int, depth: int) -> Cost:
        """Of the target's pass; between whole numbers of nodes it is interpolated."""
        nodes = self.nodes(batch, depth)
        low = int(nodes)
        below, above = (
            forward_cost(self._verifying(depth), batch, 1 + n, self.context, width=self.width)
            for n in (low, low + 1)
        )
        return below.times(1 - (nodes - low)).plus(above.times(nodes - low))

    def at(self, batch: int) -> Point:
        """What is predicted of a batch size."""
        deepest = self.acceptance.deepest if self.deepest is None else self.deepest
        seconds = [self._seconds(batch, depth) for depth in range(1 + deepest)]
        gains = [seconds[0] / own for own in seconds]
        held = memory(self.target, batch, self.context, self.width)
        held = held._replace(weights=held.weights + round(self.drafter.weight_bytes))
        room = self.machine.memory_bytes
        return Point(
            batch=batch,
            vanilla_s=self.step(batch, 0).total_s,
            speed_ups=tuple(gains[1:]),
            best=best_depth_of(gains),
            vanilla_bound=self._bound(self.verify(batch, 0)),
            verify_bound=self._bound(self.verify(batch, deepest)),
            memory=held,
            fits=held.total <= room if room else None,
        )

    def speed_up(self, batch: int, depth: int) -> float:
        """Over vanilla in batches of the same size."""
        return self._seconds(batch, 0) / self._seconds(batch, depth)

    def _seconds(self, batch: int, depth: int) -> float:
        """Of the work that is the same at any depth."""
        taken = self.acceptance.steps(batch, depth)
        return sum(number * self.step(rows, depth).total_s for rows, number in taken.items())

    def _bound(self, cost: Cost) -> str:
        return "compute" if self.machine.is_compute_bound(cost) else "memory"


def crossovers(points: Sequence[Point]) -> list[int | None]:
    """By depth, from 1: the batch from which on it does not pay; None if it pays at the largest."""
    depths = range(len(points[0].speed_ups))
    return [crossover({p.batch: p.speed_ups[depth] for p in points}) for depth in depths]
