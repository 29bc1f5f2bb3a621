"""The contract between a depth controller and the loop: budgets before a step's drafts exist, then
how much of the drafts is verified.

What keeps a controller lossless: whether a token is verified must not depend on that token. Where
drafts are drawn and go through rejection, a refused token changes what comes in its place, and to
leave tokens out by what they are changes the law of the output. (Point masses and coupled drafts
are beyond this: there the output is the target's own choices whatever is drafted.) So a controller

- chooses budgets from committed tokens alone;
- is shown the chance of a node, which may depend on the tokens above it, only once all nodes before
  it are admitted;
- learns only from what was committed. A draft behind a refused one comes again at its position with
  the same random numbers: what it looked like must not be remembered.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, NamedTuple

from specbench.method import Budget, Proposal, Row, Verdict


class Candidate(NamedTuple):
    """The next node of a row that may be admitted.

    Args:
        parent: its parent, 0 for the root.
        depth: its depth.
        chance: the drafter's own estimate that it is taken if its parent is; None if it has none.
    """

    parent: int
    depth: int
    chance: float | None


class Admission:
    """A step's drafts as a controller sees them: node by node, in the order of drafting."""

    def __init__(self, proposal: Proposal) -> None:
        self._trees, self._chances = proposal.trees, proposal.chances
        self.num_nodes = [0] * len(proposal.trees)
        """By row, the drafted nodes admitted so far; they will be verified."""

    def next(self, row: int) -> Candidate | None:
        """A row's first node that is not admitted yet; None if all are."""
        node, tree = self.num_nodes[row] + 1, self._trees[row]
        if node == len(tree):
            return None
        chance = self._chances[row][node - 1] if self._chances else None
        return Candidate(tree.parents[node], tree.depths[node], chance)

    def admit(self, row: int) -> None:
        """Lets it be verified, whatever token it is."""
        assert self.num_nodes[row] < self._trees[row].num_drafted, "there is no next node"
        self.num_nodes[row] += 1


class DepthController(ABC):
    """Says how deep each row drafts, and how much of that is verified."""

    reads_drafts: ClassVar[bool] = False
    """Whether it is asked what to admit; else all is."""
    needs_chances: ClassVar[bool] = False
    """Whether the drafter's chances are all that it goes by."""

    @abstractmethod
    def choose(self, rows: Sequence[Row]) -> list[Budget]:
        """A budget for each row of the coming step."""

    def admit(self, admission: Admission) -> None:  # noqa: B027 - for those that read drafts
        """Admits what is to be verified."""

    def observe(self, verdict: Verdict) -> None:  # noqa: B027 - an optional hook
        """Takes in what became of the step."""

    def reset(self) -> None:  # noqa: B027 - an optional hook
        """Forgets what it has seen."""


class Bounded(DepthController):
    """A controller with a largest budget.

    Args:
        depth: the most levels.
        max_nodes: the most nodes.
    """

    def __init__(self, depth: int, max_nodes: int) -> None:
        if depth < 0 or max_nodes < 0:
            raise ValueError(
                f"depth {depth}, max_nodes {max_nodes} are out of range; valid: 0 or more"
            )
        self.budget = Budget(depth, max_nodes)

    def within(self, depth: int) -> Budget:
        """A budget of this depth or, if that is less, the largest."""
        return self.budget._replace(depth=min(depth, self.budget.depth))
