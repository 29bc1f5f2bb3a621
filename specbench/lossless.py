"""Losslessness of one output: does it equal the reference, and if not, was it a numerical tie?

A forward over eight tokens is not bit-identical to eight forwards, so in half precision an output
may leave the reference where two tokens are as good as equal. The reference's logit gap between
the two tokens decides.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from specbench.method import Request
from specbench.records import Divergence
from specbench.sampling import Sampling, gumbel, position_key, warp
from specbench.target import Target
from specbench.tree import Tree

TOLERANCE = {torch.float32: 1e-3, torch.float16: 0.1, torch.bfloat16: 0.5}
"""Logit gap up to which two tokens count as tied, by dtype."""

_NUCLEUS_SLACK = 0.02
_CHUNK = 64


@dataclass(frozen=True)
class Comparison:
    """``exact``, ``tie`` or ``broken``, and where an output first differs."""

    verdict: str
    divergence: Divergence | None


def score(target: Target, prompt: Sequence[int], output: Sequence[int]) -> torch.Tensor:
    """The target's float32 logits [T, V] for each token of an output, given all before it."""
    cache = target.new_cache(1, len(prompt) + len(output))
    row = cache.add_row()
    target.prefill(prompt[:-1], cache, row)
    inputs = [prompt[-1], *output[:-1]]
    logits = []
    for begin in range(0, len(inputs), _CHUNK):
        chunk = torch.tensor([inputs[begin : begin + _CHUNK]])
        logits.append(target.forward(chunk, [Tree.chain(chunk.shape[1] - 1)], cache).logits_BMV[0])
        cache.extend(row, chunk.shape[1])
    return torch.cat(logits).float()


def mean_entropy(logits_TV: torch.Tensor) -> float:
    """Mean next-token entropy in nats at T=1."""
    logp_TV = logits_TV.log_softmax(-1)
    return float(-(logp_TV.exp() * logp_TV).sum(-1).mean())


def compare(
    target: Target,
    request: Request,
    sampling: Sampling,
    reference: Sequence[int],
    found: Sequence[int],
) -> Comparison:
    """Compares an output with the reference, token by token and in length."""
    if list(reference) == list(found):
        return Comparison("exact", None)
    shared = min(len(reference), len(found))
    position = next((i for i in range(shared) if reference[i] != found[i]), shared)
    if position == shared:
        ended = Divergence(
            position=position,
            expected=reference[position] if position < len(reference) else None,
            found=found[position] if position < len(found) else None,
            gap=None,
        )
        return Comparison("broken", ended)
    logits_V = score(target, request.prompt, reference[: position + 1])[-1]
    key = position_key(request.key, len(request.prompt) + position, "target")
    gap = choice_gap(logits_V, sampling, key, reference[position], found[position])
    divergence = Divergence(
        position=position,
        expected=reference[position],
        found=found[position],
        gap=gap if math.isfinite(gap) else None,
    )
    tied = gap <= TOLERANCE[target.dtype]
    return Comparison("tie" if tied else "broken", divergence)


def choice_gap(
    logits_V: torch.Tensor, sampling: Sampling, key: int, expected: int, found: int
) -> float:
    """By how much the expected token beat the found one, in logits; the noise of the position
    counts at T>0.

    A token that top-k or top-p removes, though not by a hair, has no chance: then the gap is
    infinite.
    """
    pair = torch.tensor([expected, found], device=logits_V.device)
    scores = logits_V[pair].double()
    if not sampling.greedy:
        loose = Sampling(
            temperature=sampling.temperature,
            top_k=sampling.top_k and sampling.top_k + 1,
            top_p=min(1.0, sampling.top_p + _NUCLEUS_SLACK),
        )
        if torch.isinf(warp(logits_V[None], loose)[0][pair]).any():
            return math.inf
        scores = scores + sampling.temperature * gumbel([key], pair)[0]
    return abs(float(scores[0] - scores[1]))
