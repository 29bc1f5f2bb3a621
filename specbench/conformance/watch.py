"""A method under watch: what it proposes, what it says of it, and what a step counts."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from specbench.conformance.faults import BUDGET, COUNTING, METADATA, Fault
from specbench.method import (
    Batch,
    Budget,
    Drawer,
    Draws,
    Method,
    Proposal,
    Request,
    Row,
    Typical,
    Verdict,
)
from specbench.sampling import Sampling
from specbench.tree import Tree


class Drafted(NamedTuple):
    """What was drafted for a row, and when."""

    request: Request
    tokens: tuple[int, ...]
    """The row's tokens then."""
    budget: Budget
    tree: Tree
    drafts: tuple[int, ...]
    logq: Mapping[int, torch.Tensor]


@dataclass(frozen=True)
class _Recorder(Drawer):
    """Remembers what was drawn from what."""

    given: dict[tuple[int, ...], list[torch.Tensor]] = field(
        default_factory=lambda: defaultdict(list)
    )

    def draw(self, logits_V: torch.Tensor, row: Row, position: int, num_children: int = 1) -> Draws:
        draws = super().draw(logits_V, row, position, num_children)
        if draws.logq_V is not None:
            self.given[tuple(draws.tokens)].append(draws.logq_V.clone())
        return draws


class Watched(Method):
    """Passes everything on to a method, and holds it and the loop to the contract at each step."""

    def __init__(self, inner: Method) -> None:
        super().__init__(inner.target, inner.config)
        self.inner, self.taps = inner, inner.taps
        self.log: list[Drafted] = []
        self.recorder = _Recorder(Sampling())

    @property
    def typical(self) -> Typical | None:  # type: ignore[override]
        """The method's own."""
        return self.inner.typical

    @property
    def drawer(self) -> Drawer:
        """The one that the loop gave, which now remembers."""
        return self.recorder

    @drawer.setter
    def drawer(self, drawer: Drawer) -> None:
        self.inner.drawer = self.recorder = _Recorder(drawer.sampling)

    def start(self, rows: Sequence[Row], taps: Sequence[Mapping[int, torch.Tensor]]) -> None:
        """Passed on."""
        self.inner.start(rows, taps)

    def propose(self, batch: Batch, budgets: Sequence[Budget]) -> Proposal:
        """Passed on, and what comes back is checked."""
        self.recorder.given.clear()
        proposal = self.inner.propose(batch, budgets)
        logq = proposal.logq or [{}] * len(batch.rows)
        if not len(proposal.trees) == len(proposal.tokens_BN) == len(logq) == len(batch.rows):
            raise Fault(
                METADATA,
                f"a proposal for {len(batch.rows)} rows has {len(proposal.trees)} trees, "
                f"{len(proposal.tokens_BN)} rows of tokens and {len(logq)} of distributions",
            )
        for row, budget, tree, tokens, row_logq in zip(
            batch.rows, budgets, proposal.trees, proposal.tokens_BN.tolist(), logq, strict=True
        ):
            drafted = Drafted(
                row.request, tuple(row.tokens), budget, tree, tuple(tokens[1 : len(tree)]), row_logq
            )
            _check_shape(drafted, tokens, self.target.vocab_size)
            if not proposal.replacement:
                self._check_draws(drafted)
            self.log.append(drafted)
        return proposal

    def _check_draws(self, drafted: Drafted) -> None:
        """A distribution must be the very one that its children were drawn from."""
        for node, logq_V in drafted.logq.items():
            children = tuple(drafted.drafts[child - 1] for child in drafted.tree.children[node])
            known = self.recorder.given.get(children, [])
            if children and not any(torch.equal(logq_V, one) for one in known):
                raise Fault(
                    METADATA,
                    f"request {drafted.request.id!r}: the distribution given for the tokens "
                    f"{list(children)} is not one that the drawer drew them from",
                )

    def update(self, verdict: Verdict) -> None:
        """Passed on, after a look at what the step counted."""
        for row, tree, committed in zip(
            verdict.rows, verdict.proposal.trees, verdict.committed, strict=True
        ):
            step, num_committed = row.steps[-1], len(committed)
            if (step.nodes, step.depth) != (tree.num_drafted, tree.depth):
                raise Fault(COUNTING, f"{step} counts a tree of {tree.num_drafted} drafted nodes")
            is_cut = step.matched + 1 > num_committed
            accepted = num_committed if is_cut else num_committed - 1
            if (step.committed, step.accepted) != (num_committed, accepted):
                raise Fault(
                    COUNTING,
                    f"request {row.request.id!r}: {step}, but {num_committed} tokens were "
                    f"committed, {accepted} of them drafts",
                )
        self.inner.update(verdict)

    def keep(self, rows: Sequence[int]) -> None:
        """Passed on."""
        self.inner.keep(rows)

    def reset(self) -> None:
        """Passed on."""
        self.inner.reset()


def _check_shape(drafted: Drafted, tokens: Sequence[int], vocab_size: int) -> None:
    name, tree, budget = f"request {drafted.request.id!r}", drafted.tree, drafted.budget
    if tree.depth > budget.depth or tree.num_drafted > budget.nodes:
        raise Fault(
            BUDGET,
            f"{name}: a draft of depth {tree.depth} with {tree.num_drafted} nodes; allowed: depth "
            f"{budget.depth}, {budget.nodes} nodes",
        )
    if len(tokens) < len(tree):
        raise Fault(METADATA, f"{name}: {len(tokens)} tokens for a tree of {len(tree)} nodes")
    if tokens[0] != drafted.tokens[-1]:
        raise Fault(
            METADATA, f"{name}: a draft has root {tokens[0]}; the row ends in {drafted.tokens[-1]}"
        )
    if outside := [token for token in tokens if not 0 <= token < vocab_size]:
        raise Fault(METADATA, f"{name}: a draft holds token {outside[0]}, of {vocab_size}")
    for parent, children in enumerate(tree.children):
        siblings = [tokens[child] for child in children]
        if len(set(siblings)) < len(siblings) and parent not in drafted.logq:
            raise Fault(METADATA, f"{name}: siblings are drafted twice: {siblings}")
