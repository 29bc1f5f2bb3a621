"""Broken on purpose: methods and loops, each with one fault that public trackers report, for the
kit to catch and to name.

No registry knows them. A method runs in the loop as it is, a loop with a drafter that is right.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import ClassVar
from unittest.mock import patch

import torch

from specbench import decode, verify
from specbench.conformance.drafters import Bigram, BigramConfig, Shadow
from specbench.conformance.faults import BUDGET, CACHE, COUNTING, METADATA, RULE, STATE
from specbench.decode import Cut, Decoder, cut
from specbench.method import (
    Batch,
    Budget,
    Drawer,
    Draws,
    Method,
    Proposal,
    Row,
    Step,
    Verdict,
)
from specbench.sampling import Sampling, choose, position_key, warp
from specbench.target import Target
from specbench.tree import Tree
from specbench.verify import Walk

_Draw = Callable[[torch.Tensor], Draws]


class _FalseDrawer(Drawer):
    """Draws as a broken method does."""

    def __init__(self, right: Drawer, misdraw: Callable[[_Draw, torch.Tensor], Draws]) -> None:
        super().__init__(right.sampling)
        self.__dict__.update(right=right, misdraw=misdraw)

    right: Drawer
    misdraw: Callable[[_Draw, torch.Tensor], Draws]

    def draw(self, logits_V: torch.Tensor, row: Row, position: int, num_children: int = 1) -> Draws:
        def draw(logits_V: torch.Tensor) -> Draws:
            return self.right.draw(logits_V, row, position, num_children)

        # Greedy and coupled drafts are point masses, of which nothing can be said.
        if draw(logits_V).logq_V is None:
            return draw(logits_V)
        return self.misdraw(draw, logits_V)


class ArgmaxSaidToBeDrawn(Bigram):
    """Drafts the likeliest tokens, and gives the softmax for what they were drawn from (jaymody's
    speculative-sampling#3, dflash#74)."""

    def propose(self, batch: Batch, budgets: Sequence[Budget]) -> Proposal:
        """Broken."""
        return self.draft(batch, budgets, _FalseDrawer(self.drawer, self._misdraw))

    def _misdraw(self, draw: _Draw, logits_V: torch.Tensor) -> Draws:
        drawn = draw(logits_V)
        return drawn._replace(tokens=logits_V.topk(len(drawn.tokens)).indices.tolist())


class TwoPrecisions(ArgmaxSaidToBeDrawn):
    """Draws from a softmax in bfloat16, and gives one in float32 (DeepSpec#31)."""

    def _misdraw(self, draw: _Draw, logits_V: torch.Tensor) -> Draws:
        drawn = draw(logits_V.bfloat16().float())
        return drawn._replace(logq_V=warp(logits_V[None], self.drawer.sampling)[0])


class DraftTemperatureIgnored(ArgmaxSaidToBeDrawn):
    """Draws at the temperature, and gives the distribution without it (vllm#10198)."""

    ignored: ClassVar[Mapping[str, float]] = {"temperature": 1.0}

    def _misdraw(self, draw: _Draw, logits_V: torch.Tensor) -> Draws:
        logq_MV = warp(logits_V[None], _without(self.drawer.sampling, self.ignored))
        return draw(logits_V)._replace(logq_V=logq_MV[0])


class DraftTopKIgnored(DraftTemperatureIgnored):
    """The same with top-k."""

    ignored: ClassVar[Mapping[str, float]] = {"top_k": 0}


class DraftTopPIgnored(DraftTemperatureIgnored):
    """The same with top-p."""

    ignored: ClassVar[Mapping[str, float]] = {"top_p": 1.0}


class DepthByTheDraftedToken(Bigram):
    """Offers a drawn token only if it was a likely one: a depth control that looks at the token
    that it admits."""

    least: ClassVar[float] = 0.3

    def __init__(self, target: Target, config: BigramConfig) -> None:
        super().__init__(target, replace(config, branching=()))

    def propose(self, batch: Batch, budgets: Sequence[Budget]) -> Proposal:
        """Broken."""
        whole = super().propose(batch, budgets)
        logq = whole.logq or [{}] * len(batch.rows)
        kept = []
        for tokens, tree, by_node in zip(whole.tokens_BN.tolist(), whole.trees, logq, strict=True):
            unlikely = (
                node
                for node, logq_V in by_node.items()
                if float(logq_V[tokens[node + 1]].exp()) < self.least
            )
            kept.append(min(unlikely, default=tree.num_drafted))
        return Proposal.from_rows(
            batch.rows,
            [Tree.chain(num) for num in kept],
            [
                tokens[1 : num + 1]
                for tokens, num in zip(whole.tokens_BN.tolist(), kept, strict=True)
            ],
            [
                {node: by_node[node] for node in by_node if node < num}
                for by_node, num in zip(logq, kept, strict=True)
            ],
        )


class DraftOvershoot(Bigram):
    """Drafts one token more than it may."""

    def propose(self, batch: Batch, budgets: Sequence[Budget]) -> Proposal:
        """Broken."""
        return super().propose(batch, [Budget(b.depth + 1, b.nodes + 1) for b in budgets])


class WrongRoot(Bigram):
    """Roots its draft in the first token of the text instead of the last."""

    def propose(self, batch: Batch, budgets: Sequence[Budget]) -> Proposal:
        """Broken."""
        proposal = super().propose(batch, budgets)
        proposal.tokens_BN[:, 0] = torch.tensor([row.tokens[0] for row in batch.rows])
        return proposal


class LastDraftNotCached(Shadow):
    """Takes its last draft token, which it never ran, for one that its cache holds."""

    def update(self, verdict: Verdict) -> None:
        """Broken."""
        for cache, path in zip(self.caches, verdict.paths, strict=True):
            cache.extend(0, len(path))


class LeakingState(Bigram):
    """Remembers which token followed which, in all prompts that it ever saw (llama.cpp#10455)."""

    def __init__(self, target: Target, config: BigramConfig) -> None:
        super().__init__(target, config)
        self.followed: dict[int, int] = {}

    def propose(self, batch: Batch, budgets: Sequence[Budget]) -> Proposal:
        """Broken."""
        for row in batch.rows:
            self.followed |= zip(row.tokens, row.tokens[1:], strict=False)
        drafts = [
            self._chain(row.tokens[-1], min(budget))
            for row, budget in zip(batch.rows, budgets, strict=True)
        ]
        return Proposal.from_rows(batch.rows, [Tree.chain(len(d)) for d in drafts], drafts)

    def _chain(self, token: int, length: int) -> list[int]:
        chain: list[int] = []
        while token in self.followed and len(chain) < length:
            token = self.followed[token]
            chain.append(token)
        return chain


# Loops: the rule.


class SoftmaxResidual(Decoder):
    """Draws the bonus from a softmax of p - q (transformers#28508)."""

    def _walk(self, proposal: Proposal, logits_BNV: torch.Tensor) -> list[Walk]:
        with patch.object(verify, "_residual", lambda p_MV, q_MV: (p_MV - q_MV).softmax(-1)):
            return super()._walk(proposal, logits_BNV)


class SiblingsNotRenormalised(Decoder):
    """Takes siblings that were drawn without replacement for draws from the same q."""

    def _walk(self, proposal: Proposal, logits_BNV: torch.Tensor) -> list[Walk]:
        return super()._walk(replace(proposal, replacement=True), logits_BNV)


class TemperatureIgnored(Decoder):
    """Scores by the target's distribution without the temperature."""

    ignored: ClassVar[Mapping[str, float]] = {"temperature": 1.0}

    def _walk(self, proposal: Proposal, logits_BNV: torch.Tensor) -> list[Walk]:
        sampling = _without(self.sampling, self.ignored)
        return verify.verify(logits_BNV, proposal, self.rows, sampling, self.method.typical)


class TopKIgnored(TemperatureIgnored):
    """The same with top-k."""

    ignored: ClassVar[Mapping[str, float]] = {"top_k": 0}


class TopPIgnored(TemperatureIgnored):
    """The same with top-p."""

    ignored: ClassVar[Mapping[str, float]] = {"top_p": 1.0}


class AlwaysGreedy(TemperatureIgnored):
    """Takes the argmax at any temperature (mistral.rs#2424)."""

    ignored: ClassVar[Mapping[str, float]] = {"temperature": 0.0}


class BonusTemperatureIgnored(Decoder):
    """Draws the bonus behind a draft that was accepted as a whole without the temperature (EAGLE's
    first release)."""

    ignored: ClassVar[Mapping[str, float]] = {"temperature": 1.0}

    def _walk(self, proposal: Proposal, logits_BNV: torch.Tensor) -> list[Walk]:
        walks = super()._walk(proposal, logits_BNV)
        return [self._with_bonus(b, walk, proposal, logits_BNV[b]) for b, walk in enumerate(walks)]

    def _with_bonus(self, b: int, walk: Walk, proposal: Proposal, logits_NV: torch.Tensor) -> Walk:
        last, row = walk.path[-1], self.rows[b]
        if self.sampling.greedy or proposal.trees[b].children[last]:
            return walk
        sampling = _without(self.sampling, self.ignored)
        position = len(row.tokens) + len(walk.path) - 1
        key = position_key(row.request.key, position, "target")
        return walk._replace(bonus=int(choose(warp(logits_NV[last][None], sampling), [key])))


class BonusTopKIgnored(BonusTemperatureIgnored):
    """The same with top-k."""

    ignored: ClassVar[Mapping[str, float]] = {"top_k": 0}


class BonusTopPIgnored(BonusTemperatureIgnored):
    """The same with top-p."""

    ignored: ClassVar[Mapping[str, float]] = {"top_p": 1.0}


class SharedSeeds(Decoder):
    """All rows of a batch draw with the first one's noise."""

    def _walk(self, proposal: Proposal, logits_BNV: torch.Tensor) -> list[Walk]:
        key = self.rows[0].request.key
        rows = [replace(row, request=replace(row.request, key=key)) for row in self.rows]
        return verify.verify(logits_BNV, proposal, rows, self.sampling, self.method.typical)


# Loops: the cache.


class CropTooShort(Decoder):
    """Gives up the last accepted token's keys and values."""

    num_off: ClassVar[int] = -1

    def step(self) -> list[Row]:
        """Broken."""
        done = super().step()
        for b, row in enumerate(self.rows):
            if row.steps[-1].accepted:
                self.cache.lengths[b] += self.num_off
        return done


class CropTooLong(CropTooShort):
    """Keeps a refused token's keys and values."""

    num_off: ClassVar[int] = 1


class PaddingOverText(Decoder):
    """Writes the padding of the rows with fewer nodes over their last token (vllm#39273)."""

    @torch.inference_mode()
    def step(self) -> list[Row]:
        """Broken."""
        done = super().step()
        if self.rows:
            longest = max(row.steps[-1].nodes for row in self.rows)
            for b, row in enumerate(self.rows):
                if row.steps[-1].nodes < longest:
                    for store in (*self.cache.keys.values(), *self.cache.values.values()):
                        store[b, :, self.cache.lengths[b] - 1] = 0
        return done


# Loops: where an output ends, and what is counted.


class CountsBehindTheEnd(Decoder):
    """Counts the tokens that were cut off at the end (vllm#56101)."""

    def step(self) -> list[Row]:
        """Broken."""

        def count(tree: Tree, walk: Walk, ending: Cut) -> Step:
            matched = len(walk.path) - 1
            return Step(tree.num_drafted, tree.depth, matched, matched + 1, matched)

        with patch.object(decode, "_count", count):
            return super().step()


class EndMissedInside(Decoder):
    """Looks for an end of sequence at the end of a block only (transformers#47912)."""

    missed: ClassVar[str] = "eos"

    def step(self) -> list[Row]:
        """Broken."""

        def late(row: Row, tokens: Sequence[int], target: Target) -> Cut:
            ending = cut(row, tokens, target)
            if ending.finish == self.missed and ending.num_kept < len(tokens):
                full = len(tokens) == row.num_left
                return Cut(len(tokens), "length" if full else None)
            return ending

        with patch.object(decode, "cut", late):
            return super().step()


class StopMissedInside(EndMissedInside):
    """The same with stop strings (sglang#31599)."""

    missed: ClassVar[str] = "stop"


class BudgetOvershoot(Decoder):
    """Looks at the token budget only behind a block (transformers#46993)."""

    def _budgets(self) -> list[Budget]:
        return self.controller.choose(self.rows)

    def step(self) -> list[Row]:
        """Broken."""

        def late(row: Row, tokens: Sequence[int], target: Target) -> Cut:
            ending = cut(row, tokens, target)
            return Cut(len(tokens), "length") if ending.finish == "length" else ending

        with patch.object(decode, "cut", late):
            return super().step()


def _without(sampling: Sampling, ignored: Mapping[str, float]) -> Sampling:
    """The sampling with some of its settings ignored; an argmax has none."""
    return sampling if sampling.greedy else replace(sampling, **ignored)  # type: ignore[arg-type]


METHODS: Mapping[type[Method], str] = {
    ArgmaxSaidToBeDrawn: METADATA,
    TwoPrecisions: METADATA,
    DraftTemperatureIgnored: METADATA,
    DraftTopKIgnored: METADATA,
    DraftTopPIgnored: METADATA,
    WrongRoot: METADATA,
    DraftOvershoot: BUDGET,
    DepthByTheDraftedToken: RULE,
    LastDraftNotCached: CACHE,
    LeakingState: STATE,
}
"""Broken methods, and the kind of each one's fault."""

LOOPS: Mapping[type[Decoder], str] = {
    SoftmaxResidual: RULE,
    SiblingsNotRenormalised: RULE,
    TemperatureIgnored: RULE,
    TopKIgnored: RULE,
    TopPIgnored: RULE,
    AlwaysGreedy: RULE,
    BonusTemperatureIgnored: RULE,
    BonusTopKIgnored: RULE,
    BonusTopPIgnored: RULE,
    SharedSeeds: STATE,
    CropTooShort: CACHE,
    CropTooLong: CACHE,
    PaddingOverText: CACHE,
    CountsBehindTheEnd: COUNTING,
    EndMissedInside: COUNTING,
    StopMissedInside: COUNTING,
    BudgetOvershoot: BUDGET,
}
"""Broken loops, and the kind of each one's fault."""
