"""The loop: budget -> propose -> verify -> commit, for ragged rows that may join and leave between
steps.

Vanilla is this loop with an empty proposal. Every step takes exactly one target forward; the first
output token comes from the first step, so a prompt's last token is the first root and prefill
commits nothing.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from specbench.depth import DepthController
from specbench.method import Batch, Budget, Drawer, Method, Proposal, Request, Row, Step, Verdict
from specbench.sampling import Sampling
from specbench.target import Target
from specbench.verify import Walk, verify


@dataclass(frozen=True)
class Cut:
    """How many of a step's tokens are kept, and why the row ends there, if it does."""

    num_kept: int
    finish: str | None


def cut(row: Row, tokens: Sequence[int], target: Target) -> Cut:
    """Cuts a step's tokens, one by one, at the first end-of-sequence token, stop string or end of
    the budget."""
    for i, token in enumerate(tokens, start=1):
        if token in target.eos_ids:
            return Cut(i, "eos")
        if row.request.stop and _stops(row, tokens[:i], target):
            return Cut(i, "stop")
        if i == row.num_left:
            return Cut(i, "length")
    return Cut(len(tokens), None)


def _stops(row: Row, tokens: Sequence[int], target: Target) -> bool:
    """Whether the text ends in or just after a stop string; a token is at least one byte, which
    bounds the look back."""
    assert target.tokenizer is not None, "stop strings need a tokenizer"
    output = [*row.output, *tokens]
    reach = max(len(stop.encode()) for stop in row.request.stop) + 4
    text = target.tokenizer.decode(output[-reach:])
    return any(stop in text for stop in row.request.stop)


class Decoder:
    """Decodes rows of one batch with one method.

    Args:
        target: the model whose output is wanted.
        method: drafts.
        controller: says how deep.
        sampling: how the target's tokens are chosen.
        max_rows: rows that can be decoded together.
        lap: called at the end of each phase with its name: ``prefill``, ``draft``, ``forward``,
        ``bookkeeping``.
    """

    def __init__(
        self,
        target: Target,
        method: Method,
        controller: DepthController,
        sampling: Sampling,
        max_rows: int = 1,
        lap: Callable[[str], None] = lambda phase: None,
    ) -> None:
        self.target, self.method, self.controller, self.sampling = (
            target,
            method,
            controller,
            sampling,
        )
        self.max_rows, self.lap = max_rows, lap
        self.cache = target.new_cache(max_rows)
        self.rows: list[Row] = []
        method.drawer = Drawer(sampling)
        method.reset()
        controller.reset()

    @property
    def num_free(self) -> int:
        """Rows that may still join."""
        return self.max_rows - len(self.rows)

    def join(self, requests: Sequence[Request]) -> list[Row]:
        """Takes in requests: fills the caches with all but the last token of their prompts.

        Raises:
            ValueError: a prompt does not fit into the target's context with its token budget.
        """
        for request in requests:
            needed = len(request.prompt) + request.max_new_tokens
            if needed > self.target.max_context:
                raise ValueError(
                    f"prompt {request.id!r} has {len(request.prompt)} tokens and asks for "
                    f"{request.max_new_tokens} more; "
                    f"the target's context is {self.target.max_context}"
                )
        assert len(requests) <= self.num_free, "more requests than free rows"
        rows = [Row(request, list(request.prompt)) for request in requests]
        taps = []
        for row in rows:
            index = self.cache.add_row()
            taps.append(self.target.prefill(row.tokens[:-1], self.cache, index, self.method.taps))
        self.rows += rows
        self.method.start(rows, taps)
        self.lap("prefill")
        return rows

    def step(self) -> list[Row]:
        """One round for all rows.

        Returns:
            The rows that ended; they have left.
        """
        budgets = self._budgets()
        self.lap("bookkeeping")
        proposal = self.method.propose(Batch(self.rows, self.cache), budgets)
        self.lap("draft")
        check_proposal(proposal, budgets, self.target.vocab_size)
        forward = self.target.forward(
            proposal.tokens_BN,
            proposal.trees,
            self.cache,
            taps=self.method.taps,
            resume=proposal.resume,
        )
        self.lap("forward")
        walks = verify(forward.logits_BMV, proposal, self.rows, self.sampling, self.method.typical)
        verdict = self._commit(proposal, walks, forward.taps)
        self.lap("bookkeeping")
        self.method.update(verdict)
        self.lap("draft")
        self.controller.observe(verdict)
        done = self._let_go()
        self.lap("bookkeeping")
        return done

    def run(self, requests: Sequence[Request]) -> list[Row]:
        """Decodes requests to their ends, all in one batch.

        Returns:
            Their rows, in the order of the requests.
        """
        rows = self.join(requests)
        while self.rows:
            self.step()
        return rows

    def _budgets(self) -> list[Budget]:
        """The controller's budgets, cut where the token budget or the context ends; a root needs
        no budget."""
        budgets = []
        for row, budget in zip(self.rows, self.controller.choose(self.rows), strict=True):
            room = min(row.num_left - 1, self.target.max_context - len(row.tokens))
            depth = max(0, min(budget.depth, room))
            budgets.append(Budget(depth, budget.nodes if depth else 0))
        return budgets

    def _commit(
        self, proposal: Proposal, walks: Sequence[Walk], taps: Mapping[int, torch.Tensor]
    ) -> Verdict:
        paths, committed = [], []
        for b, (row, walk) in enumerate(zip(self.rows, walks, strict=True)):
            tree = proposal.trees[b]
            tokens = [*proposal.tokens_BN[b, walk.path[1:]].tolist(), walk.bonus]
            ending = cut(row, tokens, self.target)
            matched = len(walk.path) - 1
            row.steps.append(
                Step(
                    tree.num_drafted,
                    tree.depth,
                    min(matched, ending.num_kept),
                    ending.num_kept,
                    matched,
                )
            )
            row.tokens += tokens[: ending.num_kept]
            row.finish = ending.finish
            row.drawn |= bool(proposal.logq and proposal.logq[b])
            paths.append(walk.path[: ending.num_kept])
            committed.append(tokens[: ending.num_kept])
            self.cache.commit(b, paths[-1])
        return Verdict(self.rows, proposal, paths, committed, taps)

    def _let_go(self) -> list[Row]:
        kept = [b for b, row in enumerate(self.rows) if row.finish is None]
        done = [row for row in self.rows if row.finish is not None]
        if done:
            self.rows = [self.rows[b] for b in kept]
            self.cache.keep(kept)
            self.method.keep(kept)
        return done


def check_proposal(proposal: Proposal, budgets: Sequence[Budget], vocab_size: int) -> None:
    """Holds a method to its contract.

    Raises:
        ValueError: a tree beyond its budget, or a token outside the target's vocabulary.
    """
    for tree, budget in zip(proposal.trees, budgets, strict=True):
        if tree.depth > budget.depth or tree.num_drafted > budget.nodes:
            raise ValueError(
                f"a proposal of depth {tree.depth} with {tree.num_drafted} nodes exceeds its "
                f"budget: depth {budget.depth}, {budget.nodes} nodes"
            )
    if proposal.tokens_BN.device.type == "cpu":
        low, high = int(proposal.tokens_BN.min()), int(proposal.tokens_BN.max())
        if low < 0 or high >= vocab_size:
            raise ValueError(
                f"a proposal holds token {low if low < 0 else high}; "
                f"the target's are 0..{vocab_size - 1}"
            )
