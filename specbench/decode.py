"""The loop: budget -> propose -> verify -> commit, for ragged rows that may join and leave between
steps.

Vanilla is this loop with an empty proposal. Every step takes exactly one target forward; the first
output token comes from the first step, so a prompt's last token is the first root and prefill
commits nothing.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from specbench.depth import Admission, DepthController
from specbench.method import Batch, Budget, Drawer, Method, Proposal, Request, Row, Step, Verdict
from specbench.sampling import Sampling
from specbench.target import Target
from specbench.tree import Tree
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
        share_prefixes: a prompt's first tokens are copied from a row that begins alike, where the
            method reads no hidden states; for throughput, not for what is measured.
    """

    def __init__(
        self,
        target: Target,
        method: Method,
        controller: DepthController,
        sampling: Sampling,
        max_rows: int = 1,
        lap: Callable[[str], None] = lambda phase: None,
        share_prefixes: bool = False,
    ) -> None:
        self.target, self.method, self.controller = target, method, controller
        self.share_prefixes = share_prefixes and not method.taps
        self.sampling, self.max_rows, self.lap = sampling, max_rows, lap
        self.cache = target.new_cache(max_rows)
        self.rows: list[Row] = []
        method.drawer = Drawer(sampling, rates=controller.reads_drafts)
        method.reset()
        controller.reset()

    @property
    def num_free(self) -> int:
        """Rows that may still join."""
        return self.max_rows - len(self.rows)

    def join(self, requests: Sequence[Request]) -> list[Row]:
        """Takes in requests: fills the caches with all but the last token of their prompts.

        Raises:
            ValueError: a request that this target cannot do; none of them is then taken in.
        """
        for request in requests:
            check_request(request, self.target)
        assert len(requests) <= self.num_free, "more requests than free rows"
        rows = [Row(request, list(request.prompt)) for request in requests]
        taps = []
        for row in rows:
            index, tokens = self.cache.add_row(), row.tokens[:-1]
            known = self._copy_prefix(tokens, index) if self.share_prefixes else 0
            taps.append(self.target.prefill(tokens[known:], self.cache, index, self.method.taps))
            self.rows.append(row)
        self.method.start(rows, taps)
        self.lap("prefill")
        return rows

    def _copy_prefix(self, tokens: Sequence[int], index: int) -> int:
        """Copies to a new row of the cache what the row most like it has of the same first tokens,
        and returns how many they are."""
        shared = [_num_shared(tokens, row.request.prompt[:-1]) for row in self.rows]
        longest = max(shared, default=0)
        if longest:
            self.cache.copy(shared.index(longest), index, longest)
        return longest

    def step(self) -> list[Row]:
        """One round for all rows.

        Returns:
            The rows that ended; they have left.
        """
        budgets = self._budgets()
        self.lap("bookkeeping")
        proposal = self.method.propose(Batch(self.rows, self.cache), budgets)
        self.lap("draft")
        check_proposal(proposal, self.rows, budgets, self.target.vocab_size)
        if self.controller.reads_drafts:
            admission = Admission(proposal)
            self.controller.admit(admission)
            proposal = proposal.cut(admission.num_nodes)
        self.lap("bookkeeping")
        forward = self.target.forward(
            proposal.tokens_BN,
            proposal.trees,
            self.cache,
            taps=self.method.taps,
            resume=proposal.resume,
        )
        self.lap("forward")
        walks = self._walk(proposal, forward.logits_BMV)
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
        """The controller's budgets, cut so that drafts and bonus stay within the token budget; that
        lies within the context."""
        budgets = []
        for row, budget in zip(self.rows, self.controller.choose(self.rows), strict=True):
            depth = min(budget.depth, row.num_left - 1)
            budgets.append(Budget(depth, budget.nodes if depth else 0))
        return budgets

    def _walk(self, proposal: Proposal, logits_BNV: torch.Tensor) -> list[Walk]:
        return verify(logits_BNV, proposal, self.rows, self.sampling, self.method.typical)

    def _commit(
        self, proposal: Proposal, walks: Sequence[Walk], taps: Mapping[int, torch.Tensor]
    ) -> Verdict:
        """Adds each walk's tokens to its row, up to where the row ends, and its nodes to the
        cache."""
        paths, committed = [], []
        for b, (row, walk) in enumerate(zip(self.rows, walks, strict=True)):
            tokens = [*proposal.tokens_BN[b, walk.path[1:]].tolist(), walk.bonus]
            ending = cut(row, tokens, self.target)
            row.steps.append(_count(proposal.trees[b], walk, ending))
            row.finish = ending.finish
            row.drawn |= bool(proposal.logq and proposal.logq[b])
            committed.append(tokens[: ending.num_kept])
            row.tokens += committed[-1]
            paths.append(walk.path[: ending.num_kept])
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


def _num_shared(one: Sequence[int], other: Sequence[int]) -> int:
    differing = (i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    return next(differing, min(len(one), len(other)))


def _count(tree: Tree, walk: Walk, ending: Cut) -> Step:
    matched = len(walk.path) - 1
    return Step(
        nodes=tree.num_drafted,
        depth=tree.depth,
        accepted=min(matched, ending.num_kept),
        committed=ending.num_kept,
        matched=matched,
    )


def check_request(request: Request, target: Target) -> None:
    """Holds a request to what the target can do.

    Raises:
        ValueError: it does not fit into the context with its token budget, holds a token that the
        target does not have, or needs a tokenizer that is not there.
    """
    name, num_tokens = f"prompt {request.id!r}", len(request.prompt)
    if num_tokens + request.max_new_tokens > target.max_context:
        raise ValueError(
            f"{name} has {num_tokens} tokens and asks for {request.max_new_tokens} more; "
            f"the target's context is {target.max_context}"
        )
    for token in (min(request.prompt), max(request.prompt)):
        if not 0 <= token < target.vocab_size:
            raise ValueError(
                f"{name} holds token {token}; the target's are 0..{target.vocab_size - 1}"
            )
    if request.stop and target.tokenizer is None:
        raise ValueError(f"{name} has stop strings, but target {target.name!r} has no tokenizer")


def check_proposal(
    proposal: Proposal, rows: Sequence[Row], budgets: Sequence[Budget], vocab_size: int
) -> None:
    """Holds a method to its contract.

    Raises:
        ValueError: a tree beyond its budget or without its tokens, a root that is not the row's
        last token, or a token outside the target's vocabulary.
    """
    trees, tokens_BN = proposal.trees, proposal.tokens_BN
    num_logq = len(rows) if proposal.logq is None else len(proposal.logq)
    if not len(trees) == len(tokens_BN) == num_logq == len(rows):
        raise ValueError(
            f"a proposal has {len(trees)} trees, {len(tokens_BN)} rows of tokens and {num_logq} of "
            f"draft distributions for {len(rows)} rows"
        )
    if proposal.chances and [*map(len, proposal.chances)] != [t.num_drafted for t in trees]:
        raise ValueError("a proposal with chances has not one for each drafted node")
    for tree, budget in zip(trees, budgets, strict=True):
        if tree.depth > budget.depth or tree.num_drafted > budget.nodes:
            raise ValueError(
                f"a proposal of depth {tree.depth} with {tree.num_drafted} nodes exceeds its "
                f"budget: depth {budget.depth}, {budget.nodes} nodes"
            )
        if len(tree) > tokens_BN.shape[1]:
            raise ValueError(
                f"a proposal has {tokens_BN.shape[1]} tokens for a tree of {len(tree)} nodes"
            )
    # Reading tokens on an accelerator would wait for them.
    if tokens_BN.device.type == "cpu":
        _check_tokens(tokens_BN, rows, vocab_size)


def _check_tokens(tokens_BN: torch.Tensor, rows: Sequence[Row], vocab_size: int) -> None:
    for token in (int(tokens_BN.min()), int(tokens_BN.max())):
        if not 0 <= token < vocab_size:
            raise ValueError(
                f"a proposal holds token {token}; the target's are 0..{vocab_size - 1}"
            )
    for root, row in zip(tokens_BN[:, 0].tolist(), rows, strict=True):
        if root != row.tokens[-1]:
            raise ValueError(
                f"a proposal has root {root}; the last token of its row is {row.tokens[-1]}"
            )
