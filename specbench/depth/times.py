"""What steps cost, as controllers are told: seconds of a step by the nodes that each row drafts."""

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np


class StepTimes(Protocol):
    """Tells how long a step takes."""

    def step_s(self, nodes: Sequence[int]) -> float:
        """Seconds of a step, drafting included, in which each row drafts so many nodes."""
        ...


class StepTable:
    """Step times from a profile; between its entries they are interpolated, beyond them the nearest
    counts.

    Args:
        seconds: by rows and nodes of each row, 0 nodes among them; every combination. A step of
            ragged rows takes what one of as many nodes in even rows does.

    Raises:
        ValueError: a combination is missing.
    """

    def __init__(self, seconds: Mapping[tuple[int, int], float]) -> None:
        self.rows = sorted({rows for rows, _ in seconds})
        self.nodes = sorted({nodes for _, nodes in seconds})
        missing = [(r, n) for r in self.rows for n in self.nodes if (r, n) not in seconds]
        if missing or 0 not in self.nodes:
            raise ValueError(
                f"step times lack {missing[0] if missing else '0 nodes'} (rows, nodes); valid: "
                "every combination, with 0 nodes"
            )
        self.seconds = [[seconds[r, n] for n in self.nodes] for r in self.rows]

    def step_s(self, nodes: Sequence[float]) -> float:
        """As the table has it."""
        width = sum(nodes) / len(nodes)
        by_rows = [np.interp(width, self.nodes, row) for row in self.seconds]
        return float(np.interp(len(nodes), self.rows, by_rows))
