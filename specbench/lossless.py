"""Losslessness of one output: does it equal the reference, and if not, was it a numerical tie?

A forward over eight tokens is not bit-identical to eight forwards, so in half precision an output
may leave the reference where two tokens are as good as equal. The target's logit gap between the
two tokens decides.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from specbench.method import Request, Row
from specbench.records import Divergence, Surprise
from specbench.sampling import Sampling, gumbel, position_key, warp
from specbench.target import Target
from specbench.tree import Tree

TOLERANCE = {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 2.5e-2}
"""Logit gap up to which two tokens count as tied, by dtype, as a share of the size of the likeliest
tokens' logits: rounding is relative. Measured on the default target, at 1900 positions, between
forwards of 1 and of 4, 8 and 64 tokens over the same text: the gap between the two likeliest tokens
differed by 0.003 in the median and 0.022 at most in bfloat16 (of 20 tokens the two that differed
most: 0.03), by 3e-7 and 2e-6 in float32. The outputs of 50 code and 50 creative prompts that left
the reference in bfloat16 did so at gaps of up to 0.015."""

_CHUNK = 64
_LIKELIEST = 20
_LEAST_LOG = -1e3
"""Stands for minus infinity where it is multiplied by 0."""


@dataclass(frozen=True)
class Comparison:
    """``exact``, ``tie`` or ``broken``, and where an output first differs."""

    verdict: str
    divergence: Divergence | None


@dataclass(frozen=True)
class Judgement:
    """What of the target's an output is: one of `specbench.records.LOSSLESS`, and what it rests
    on."""

    verdict: str
    divergence: Divergence | None = None
    surprise: Surprise | None = None


def judge(
    target: Target, sampling: Sampling, reference: Sequence[int], row: Row, *, typical: bool
) -> Judgement:
    """Holds an output to the target.

    Args:
        reference: the target's own output for that request.
        row: the request that was decoded.
        typical: whether drafts were taken by typical acceptance, which is lossy at T>0.
    """
    if typical and not sampling.greedy:
        return Judgement("lossy")
    if row.drawn:
        found = surprise(target, row.request, sampling, row.output)
        return Judgement("law" if found else "broken", surprise=found)
    comparison = compare(target, row.request, sampling, reference, row.output)
    return Judgement(comparison.verdict, comparison.divergence)


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
            tolerance=None,
        )
        return Comparison("broken", ended)
    logits_V = score(target, request.prompt, reference[: position + 1])[-1]
    key = position_key(request.key, len(request.prompt) + position, "target")
    tolerance = TOLERANCE[target.dtype] * _size(logits_V)
    gap = choice_gap(logits_V, sampling, key, reference[position], found[position], tolerance)
    divergence = Divergence(
        position=position,
        expected=reference[position],
        found=found[position],
        gap=_finite(gap),
        tolerance=tolerance,
        expected_logit=_finite(float(logits_V[reference[position]])),
        found_logit=_finite(float(logits_V[found[position]])),
    )
    return Comparison("tie" if gap <= tolerance else "broken", divergence)


def surprise(
    target: Target, request: Request, sampling: Sampling, output: Sequence[int]
) -> Surprise | None:
    """How surprising an output that was sampled is to the target; None if the target would never
    have chosen one of its tokens."""
    logits_TV = score(target, request.prompt, output)
    logp_TV = warp(logits_TV, sampling).double()
    found_T = logp_TV.gather(1, torch.tensor(output, device=logp_TV.device)[:, None])[:, 0]
    kept_T = found_T > -math.inf
    for position in (~kept_T).nonzero()[:, 0].tolist():
        # Rounding may have kept a token at the edge; it says nothing of the distribution.
        logits_V = logits_TV[position]
        tolerance = TOLERANCE[target.dtype] * _size(logits_V)
        if not _may_be_chosen(logits_V, sampling, output[position], tolerance):
            return None
    p_TV, logp_TV = logp_TV.exp(), logp_TV.clamp(min=_LEAST_LOG)
    entropy_T = -(p_TV * logp_TV).sum(-1)
    variance_T = (p_TV * logp_TV**2).sum(-1) - entropy_T**2
    return Surprise(
        nats=round(float(-found_T[kept_T].sum()), 4),
        expected_nats=round(float(entropy_T[kept_T].sum()), 4),
        variance=round(max(0.0, float(variance_T[kept_T].sum())), 4),
    )


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _size(logits_V: torch.Tensor) -> float:
    """The largest size of the likeliest tokens' logits; some models set those of others to -inf."""
    return float(logits_V.topk(min(_LIKELIEST, len(logits_V))).values.abs().max())


def choice_gap(
    logits_V: torch.Tensor,
    sampling: Sampling,
    key: int,
    expected: int,
    found: int,
    tolerance: float,
) -> float:
    """By how much the expected token beat the found one, in logits; the noise of the position
    counts at T>0.

    There top-k and top-p decide first who may be chosen at all. The gap is infinite if one of the
    two tokens would be cut even with a logit ``tolerance`` higher, and 0 if the one that scores
    better would be cut with one ``tolerance`` lower: then the other was rightly chosen.
    """
    pair = torch.tensor([expected, found], device=logits_V.device)
    scores = logits_V[pair].double()
    if sampling.greedy:
        return abs(float(scores[0] - scores[1]))
    if not all(_may_be_chosen(logits_V, sampling, token, tolerance) for token in (expected, found)):
        return math.inf
    scores = scores + sampling.temperature * gumbel([key], pair)[0]
    better = expected if scores[0] > scores[1] else found
    if not _may_be_chosen(logits_V, sampling, better, -tolerance):
        return 0.0
    return abs(float(scores[0] - scores[1]))


def _may_be_chosen(logits_V: torch.Tensor, sampling: Sampling, token: int, shift: float) -> bool:
    """Whether top-k and top-p keep a token with its logit so shifted."""
    shifted_V = logits_V.clone()
    shifted_V[token] += shift
    return bool(warp(shifted_V[None], sampling)[0, token] > -math.inf)
