"""Made-up profiles of a machine whose roofline is known, with numbers that can be worked out by
hand."""

from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

from specbench.costs import Shape, forward_cost
from specbench.depth.calibration import Sample
from specbench.machines import Machine
from specbench.profile import PassTimes, Profile, StepSamples

SMALL = Shape(
    hidden=64, num_layers=4, num_heads=4, num_kv_heads=2, head_dim=16, vocab=512, inner=128
)
BALANCE = 16
"""FLOPs a byte."""
MACHINE = Machine(name="made", bandwidth=1e9, rate=BALANCE * 1e9, overhead_s=1e-5)
ROUNDS = 3


def roofline_s(rows: int, tokens: int, context: int) -> float:
    """Of a forward in float32 on the machine."""
    return MACHINE.seconds(forward_cost(SMALL, rows, tokens, context, width=4), SMALL.num_layers)


def made_passes(
    rows: Sequence[int] = (1, 2, 4),
    tokens: Sequence[int] = (1, 2, 4, 8),
    contexts: Sequence[int] = (16, 64),
    seconds: Callable[[int, int, int], float] = roofline_s,
) -> list[PassTimes]:
    """A full grid."""
    return [
        PassTimes(rows=b, tokens=n, context=s, seconds=[seconds(b, n, s)] * ROUNDS)
        for b, n, s in product(rows, tokens, contexts)
    ]


def made_steps(
    rows: Sequence[int] = (1, 2, 4),
    depths: Sequence[int] = (0, 1, 3),
    *,
    level_s: float = 0.5,
    node_s: float = 1.0,
    row_s: float = 1.0,
    nodes: int = 1,
    context: float = 16,
) -> list[StepSamples]:
    """Steps whose forward takes a second, and ``row_s`` for each row but the first and ``node_s``
    for each drafted node of a row; drafting takes ``level_s`` a level, bookkeeping a quarter."""
    return [
        StepSamples(
            rows=b,
            depth=d,
            context=context,
            nodes=[float(nodes * d)] * ROUNDS,
            draft_s=[level_s * d] * ROUNDS,
            forward_s=[linear_s(b, 1 + nodes * d, node_s=node_s, row_s=row_s)] * ROUNDS,
            bookkeeping_s=[0.25] * ROUNDS,
        )
        for b, d in product(rows, depths)
    ]


def linear_s(
    rows: int, tokens: int, context: int = 0, *, node_s: float = 1.0, row_s: float = 1.0
) -> float:
    """Of such a forward."""
    return 1 + row_s * (rows - 1) + node_s * (tokens - 1)


def made_profile(**parts: Any) -> Profile:
    """A profile of the machine; its parts may be given."""
    return Profile(
        **{
            "provenance": {"device": "cpu", "cpu": "Made-up CPU", "threads": 1},
            "target": {"name": "tiny", "dtype": "float32", "weights_sha256": "ab" * 32},
            "methods": {"vanilla": {}, "echo": {}},
            "shape": SMALL,
            "passes": made_passes(),
            "steps": {"vanilla": made_steps(depths=(0,)), "echo": made_steps()},
            "samples": {"echo": [[Sample((0.9, 0.9), taken % 3)] for taken in range(8)]},
            "bandwidth": MACHINE.bandwidth,
            "rate": MACHINE.rate,
            "memory_bytes": 2.0**30,
            "notes": [],
            **parts,
        }
    )
