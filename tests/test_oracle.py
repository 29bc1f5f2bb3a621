"""An oracle with a chosen acceptance law: what is measured is what was chosen."""

import math
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest
import scipy.stats

from specbench.conformance.decoding import make_request
from specbench.conformance.drafters import Oracle, Scripted
from specbench.conformance.models import looping_target
from specbench.method import Budget, Request, Row
from specbench.metrics import measure_acceptance
from specbench.records import Run
from specbench.target import Target
from tests.drafters import as_record, decode

LEVEL = 1e-3


@cache
def target() -> Target:
    """A target whose config names no end-of-sequence token."""
    return looping_target(eos_token_id=None)


@pytest.mark.parametrize(
    "law", [(0.0, 0.0, 0.0), (1.0, 1.0, 1.0), (0.9, 0.5, 0.2), (0.3, 0.6, 0.9), (0.7, 1.0, 0.0)]
)
def test_measured_acceptance_is_the_law_that_was_chosen(law: tuple[float, ...]) -> None:
    requests = [make_request((3 + i % 90, 3 + i // 90), 24, name=str(i)) for i in range(64)]
    script = {row.request.id: row.output for row in _vanilla_rows(tuple(requests))}
    rows = decode(
        target(), Oracle(target(), script, law), requests, max_rows=64, budget=Budget(3, 3)
    )
    assert {row.request.id: row.output for row in rows} == script
    measured = measure_acceptance(_run(rows), "any", "any")
    assert measured is not None
    for chance, position in zip(law, measured.positions, strict=True):
        if position.reached:
            assert _fits(position.accepted, position.reached, chance)
    steps = [step for row in rows for step in row.steps]
    mean = sum(sum(_survival(law)[: step.depth]) + 1 for step in steps) / len(steps)
    spread = math.sqrt(sum(_variance(law[: step.depth]) for step in steps)) / len(steps)
    assert abs(measured.tau - mean) <= scipy.stats.norm.isf(LEVEL / 2) * spread
    assert measured.num_offered == sum(step.depth for step in steps)


@cache
def _vanilla_rows(requests: tuple[Request, ...]) -> list[Row]:
    return decode(target(), Scripted(target(), {r.id: [] for r in requests}), requests, max_rows=64)


def _run(rows: Sequence[Row]) -> Run:
    """A run that holds these rows."""
    return Run(Path(), {}, requests=[as_record(row) for row in rows])


def _fits(accepted: int, reached: int, chance: float) -> bool:
    if chance in (0, 1):
        return accepted == chance * reached
    return float(scipy.stats.binomtest(accepted, reached, chance).pvalue) > LEVEL


def _survival(law: Sequence[float]) -> list[float]:
    """By depth, the chance that the token there is accepted."""
    return [math.prod(law[: depth + 1]) for depth in range(len(law))]


def _variance(law: Sequence[float]) -> float:
    """Of the accepted tokens of a step."""
    survival = [1.0, *_survival(law), 0.0]
    chances = [survival[n] - survival[n + 1] for n in range(len(law) + 1)]
    mean = sum(n * chance for n, chance in enumerate(chances))
    return sum((n - mean) ** 2 * chance for n, chance in enumerate(chances))
