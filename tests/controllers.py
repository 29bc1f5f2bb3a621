"""Every depth controller in settings that make it act on tiny models, and one that is broken."""

from collections.abc import Sequence

from specbench.depth import (
    CONTROLLERS,
    Admission,
    Calibration,
    DepthController,
    StepTable,
    Survival,
    make_controller,
)
from specbench.method import Budget, Row

DEEPEST = 4


class Rates:
    """Step times from steps per second, by the nodes that all rows together draft; beyond the last
    that one counts."""

    def __init__(self, *steps_per_s: float) -> None:
        self.steps_per_s = steps_per_s

    def step_s(self, nodes: Sequence[int]) -> float:
        """Seconds of a step."""
        return 1 / self.steps_per_s[min(sum(nodes), len(self.steps_per_s) - 1)]


TIMES = StepTable(
    {(rows, n): 1 + 0.01 * rows + (0.1 + 0.01 * rows) * n for rows in (1, 80) for n in (0, 4)}
)
"""A draft of one node pays where it is likely, above all in small batches."""

_KNOBS: dict[str, list[dict[str, object]]] = {
    "off_above_batch": [{"off_at": 60}, {"off_at": 60, "sticky": True}],
    "by_batch": [{"depths": {1: 3, 50: 2, 90: 0}}],
    "heuristic": [{"first": 2}],
    "confidence": [{"threshold": 0.3}, {"threshold": 0.5, "adaptive": True}],
    "ema": [{"tiers": (1, 2, 4), "warm_up": 2, "interval": 1}],
    "goodput": [{"times": TIMES, "probe": 1}],
    "survival": [{"times": TIMES}, {"times": TIMES, "calibration": Calibration((2.0, 0.5))}],
}

SETTINGS = [(name, knobs) for name in CONTROLLERS for knobs in _KNOBS.get(name, [{}])]


def names() -> list[str]:
    """What the settings are called."""
    return [
        " ".join([name, *(_called(*knob) for knob in knobs.items())]) for name, knobs in SETTINGS
    ]


def _called(knob: str, value: object) -> str:
    return knob if isinstance(value, StepTable) else f"{knob}={value}"


def made(name: str, knobs: dict[str, object]) -> DepthController:
    """A controller, new."""
    return make_controller(name, DEEPEST, 12, **knobs)


class GlobalSearch(Survival):
    """Broken: admits what raises throughput most of all, after a look at every chance. A node's
    token decides over the chances behind it, and with them over itself."""

    def choose(self, rows: Sequence[Row]) -> list[Budget]:
        """The most, as in the paper."""
        return [self.budget] * len(rows)

    def admit(self, admission: Admission) -> None:
        """The best prefix of the order by survival."""
        if admission._chances is None:
            return
        nodes = [
            (survival, row)
            for row, chances in enumerate(admission._chances)
            for survival in _survivals(chances)
        ]
        nodes.sort(reverse=True)
        counts, tokens = [0] * len(admission._chances), float(len(admission._chances))
        best, admitted = tokens / self.times.step_s(counts), list(counts)
        for survival, row in nodes:
            counts[row] += 1
            tokens += survival
            rate = tokens / self.times.step_s(counts)
            if rate > best:
                best, admitted = rate, list(counts)
        admission.num_nodes = admitted


def _survivals(chances: Sequence[float]) -> list[float]:
    survivals, product = [], 1.0
    for chance in chances:
        product *= chance
        survivals.append(product)
    return survivals
