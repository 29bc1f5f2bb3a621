"""Exact, tie or broken: how an output is compared with the reference."""

import math
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

from specbench.conformance.decoding import GREEDY, make_request, reference
from specbench.conformance.models import ASCII_VOCAB, looping_model, looping_target
from specbench.lossless import Comparison, choice_gap, compare, mean_entropy, score, surprise
from specbench.records import Divergence
from specbench.sampling import Sampling, gumbel, position_key, warp
from specbench.target import Target

REQUEST = make_request((5, 40, 12, 77), 10)
SAMPLED = Sampling(temperature=0.8, top_p=0.9)


@cache
def target() -> Target:
    return looping_target(eos_token_id=None)


def own_logits(model: Target, prompt: tuple[int, ...], output: list[int]) -> torch.Tensor:
    """The logits for each token of an output, from one plain forward of the model."""
    with torch.inference_mode():
        text = torch.tensor([[*prompt, *output]])
        logits_TV: torch.Tensor = model.model(input_ids=text, use_cache=False).logits[0]
    return logits_TV[len(prompt) - 1 : -1].float()


def replaced(output: list[int], position: int, token: int) -> list[int]:
    return [*output[:position], token, *output[position + 1 :]]


# Scores.


@pytest.mark.parametrize("prompt", [(5, 40, 12, 77), (7,)])
@pytest.mark.parametrize("num_tokens", [1, 64, 150])
def test_scores_are_the_logits_that_each_token_was_chosen_from(
    prompt: tuple[int, ...], num_tokens: int
) -> None:
    output = reference(target(), make_request(prompt, num_tokens))
    logits_TV = score(target(), prompt, output)
    assert logits_TV.shape == (num_tokens, ASCII_VOCAB)
    assert logits_TV.argmax(-1).tolist() == output
    torch.testing.assert_close(
        logits_TV, own_logits(target(), prompt, output), rtol=1e-5, atol=1e-4
    )


def test_entropy_is_in_nats_and_the_mean_over_tokens() -> None:
    logits_TV = torch.zeros(2, 8)
    assert mean_entropy(logits_TV) == pytest.approx(math.log(8))
    logits_TV[1, 3] = 100
    assert mean_entropy(logits_TV) == pytest.approx(math.log(8) / 2)


# Greedy comparisons.


def test_an_equal_output_is_exact() -> None:
    output = reference(target(), REQUEST)
    assert compare(target(), REQUEST, GREEDY, output, list(output)) == Comparison("exact", None)


@pytest.mark.parametrize("position", [0, 4, 9])
def test_another_token_is_broken_with_the_gap_that_the_reference_had(position: int) -> None:
    output = reference(target(), REQUEST)
    logits_V = own_logits(target(), REQUEST.prompt, output)[position]
    token = int(logits_V.topk(2).indices[1])
    found = compare(target(), REQUEST, GREEDY, output, replaced(output, position, token))
    gap = float(logits_V[output[position]] - logits_V[token])
    assert gap > 0.01
    assert found.verdict == "broken" and found.divergence is not None
    assert found.divergence.gap == pytest.approx(gap, abs=1e-4)
    logits = (found.divergence.expected_logit, found.divergence.found_logit)
    both_V = logits_V[[output[position], token]]
    assert logits == pytest.approx(both_V.tolist(), abs=1e-4)
    assert (found.divergence.position, found.divergence.found) == (position, token)
    assert found.divergence.expected == output[position]


@pytest.mark.parametrize("num_tokens", [0, 6, 9])
def test_an_output_that_ends_too_early_is_broken(num_tokens: int) -> None:
    output = reference(target(), REQUEST)
    found = compare(target(), REQUEST, GREEDY, output, output[:num_tokens])
    ended = Divergence(
        position=num_tokens, expected=output[num_tokens], found=None, gap=None, tolerance=None
    )
    assert found == Comparison("broken", ended)


def test_an_output_that_goes_on_is_broken() -> None:
    output = reference(target(), REQUEST)
    found = compare(target(), REQUEST, GREEDY, output, [*output, 7, 8])
    assert found == Comparison(
        "broken", Divergence(position=10, expected=None, found=7, gap=None, tolerance=None)
    )


# Ties.


def twin_target(dtype: torch.dtype, shade: float) -> Target:
    """A target in which every other token's logit is a shade below its twin's."""
    model = looping_model(eos_token_id=None)
    head = model.get_output_embeddings().weight
    with torch.no_grad():
        head[1::2] = head[:-1:2] * (1 - shade)
    nn.Module.to(model, dtype)
    return Target(model)


def test_the_tolerance_grows_with_the_likeliest_tokens_logits_and_no_others() -> None:
    output = reference(target(), REQUEST)
    for scale in (1.0, 10.0):
        model = looping_model(eos_token_id=None)
        with torch.no_grad():
            model.get_output_embeddings().weight.mul_(scale)
        other = Target(model)
        forward = other.forward

        def masked(*args: Any, forward: Any = forward, **kwargs: Any) -> Any:
            """As some models do for tokens that they must not say."""
            out = forward(*args, **kwargs)
            logits_BMV = out.logits_BMV.clone()
            logits_BMV[..., 3] = torch.finfo(torch.float32).min
            return replace(out, logits_BMV=logits_BMV)

        other.forward = masked  # type: ignore[method-assign]
        logits_V = scale * own_logits(target(), REQUEST.prompt, output)[4]
        token = int(logits_V.topk(2).indices[1])
        found = compare(other, REQUEST, GREEDY, output, replaced(output, 4, token))
        assert found.verdict == "broken" and found.divergence is not None
        largest = float(logits_V.topk(20).values.abs().max())
        assert found.divergence.tolerance == pytest.approx(1e-5 * largest, rel=1e-3)


@pytest.mark.parametrize(
    ("dtype", "shade", "verdict"),
    [
        (torch.float32, 1e-6, "tie"),
        (torch.float32, 1e-2, "broken"),
        (torch.bfloat16, 1e-2, "tie"),
        (torch.bfloat16, 0.5, "broken"),
        (torch.float16, 1e-3, "tie"),
        (torch.float16, 0.5, "broken"),
    ],
    ids=str,
)
def test_twins_tie_within_what_the_dtype_can_tell_apart(
    dtype: torch.dtype, shade: float, verdict: str
) -> None:
    model = twin_target(dtype, shade)
    output = reference(model, REQUEST)
    position = next(i for i, token in enumerate(output) if i and token % 2 == 0)
    twin = output[position] + 1
    logits_V = own_logits(model, REQUEST.prompt, output)[position]
    found = compare(model, REQUEST, GREEDY, output, replaced(output, position, twin))
    assert found.verdict == verdict
    assert found.divergence is not None and found.divergence.gap is not None
    expected = abs(float(logits_V[twin] - logits_V[output[position]]))
    assert found.divergence.gap == pytest.approx(expected, abs=0.1)


# Above temperature 0.


@pytest.mark.parametrize("position", [0, 5])
def test_above_temperature_0_the_noise_of_the_position_counts(position: int) -> None:
    output = reference(target(), REQUEST, SAMPLED)
    logits_V = own_logits(target(), REQUEST.prompt, output)[position]
    key = position_key(REQUEST.key, len(REQUEST.prompt) + position, "target")
    logp_V = warp(logits_V[None], SAMPLED)[0]
    noise_V = gumbel([key], torch.arange(ASCII_VOCAB))[0]
    best, second = (logp_V + noise_V).topk(2).indices.tolist()
    assert best == output[position] and logp_V[second] > -math.inf
    gap = float(logits_V[best] - logits_V[second]) + 0.8 * float(noise_V[best] - noise_V[second])
    found = compare(target(), REQUEST, SAMPLED, output, replaced(output, position, second))
    assert found.divergence is not None
    assert (found.verdict, found.divergence.found) == ("broken", second)
    assert found.divergence.gap == pytest.approx(gap, abs=1e-4)


def test_near_ties_of_the_noisy_scores_are_ties() -> None:
    logits_V = torch.tensor([1.0, 0.0, -1.0])
    noise_V = gumbel([7], torch.arange(3))[0]
    logits_V[1] = float(logits_V[0] + 0.5 * (noise_V[0] - noise_V[1])) - 1e-4
    sampling = Sampling(temperature=0.5)
    assert choice_gap(logits_V, sampling, 7, 0, 1, 0.01) == pytest.approx(1e-4, abs=1e-6)
    assert choice_gap(logits_V, sampling, 8, 0, 1, 0.01) > 0.01


CUTS = (Sampling(temperature=1.0, top_p=0.9), Sampling(temperature=1.0, top_k=2))
MASSES = torch.tensor([0.53, 0.385, 0.055, 0.03])
"""Each of the cuts keeps the first two, the third by little not."""


def key_at_which(better: int, worse: int) -> int:
    """The key of a noise that makes one token's score beat the other's by far."""
    pair = torch.tensor([better, worse])
    return next(
        key for key in range(99999) if (MASSES.log()[pair] + gumbel([key], pair)[0]).diff() < -2
    )


@pytest.mark.parametrize("sampling", CUTS, ids=str)
def test_a_token_that_is_cut_by_more_than_the_tolerance_has_no_chance(sampling: Sampling) -> None:
    logits_V = MASSES.log()
    assert (warp(logits_V[None], sampling)[0] > -math.inf).tolist() == [True, True, False, False]
    for token, tolerance, finite in (
        (1, 0.1, True),
        (2, 2.0, True),
        (2, 0.1, False),
        (3, 0.5, False),
    ):
        gap = choice_gap(logits_V, sampling, 3, 0, token, tolerance)
        assert math.isfinite(gap) == finite, (token, tolerance)


@pytest.mark.parametrize("sampling", CUTS, ids=str)
def test_a_better_token_at_the_edge_of_the_cut_may_have_been_cut(sampling: Sampling) -> None:
    """Kept in one forward and cut in the other, it and the token chosen in its place are far apart
    in score; whichever of them the reference has."""
    logits_V, tolerance = MASSES.log(), 2.0
    key = key_at_which(better=2, worse=1)
    assert choice_gap(logits_V, sampling, key, 1, 2, tolerance) == 0
    assert choice_gap(logits_V, sampling, key, 2, 1, tolerance) == 0
    far_from_the_edge = key_at_which(better=0, worse=1)
    assert choice_gap(logits_V, sampling, far_from_the_edge, 0, 1, 0.1) > 2


def test_a_token_outside_the_nucleus_is_broken_without_a_gap() -> None:
    sampling = Sampling(temperature=0.8, top_k=3)
    output = reference(target(), REQUEST, sampling)
    least = int(own_logits(target(), REQUEST.prompt, output)[2].argmin())
    found = compare(target(), REQUEST, sampling, output, replaced(output, 2, least))
    assert found.verdict == "broken" and found.divergence is not None
    assert (found.divergence.position, found.divergence.found) == (2, least)
    assert found.divergence.gap is None and found.divergence.tolerance is not None


# The law.


def excess(sampling: Sampling, judged: Sampling) -> float:
    """How many standard deviations outputs that were sampled are more surprising than they should
    be."""
    total = [0.0, 0.0]
    for i in range(12):
        request = make_request((5, 40, 12, 77), 20, name=str(i))
        found = surprise(target(), request, judged, reference(target(), request, sampling))
        if found is None:
            return math.inf
        total = [total[0] + found.nats - found.expected_nats, total[1] + found.variance]
    return total[0] / math.sqrt(total[1])


@pytest.mark.parametrize("sampling", [SAMPLED, Sampling(temperature=1.5)], ids=str)
def test_outputs_of_the_target_are_as_surprising_as_it_expects(sampling: Sampling) -> None:
    assert abs(excess(sampling, sampling)) < 3


def test_outputs_of_another_temperature_are_not() -> None:
    warm, hot = Sampling(temperature=1.0), Sampling(temperature=2.0)
    assert excess(hot, warm) > 4
    assert excess(warm, hot) < -4


def test_a_token_that_the_target_would_never_choose_has_no_surprise() -> None:
    assert excess(Sampling(temperature=1.5), SAMPLED) == math.inf
