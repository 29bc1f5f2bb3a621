"""Warpers against transformers', keyed noise against its laws, draws against their probabilities.

The statistical tests use fixed keys, so they give the same result each time; each was set up once
with a chance of LEVEL to fail.
"""

import itertools
import math
import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import scipy.stats
import torch
from transformers import (
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from specbench import sampling
from specbench.sampling import (
    Sampling,
    choose,
    draw,
    gumbel,
    likeliest_token,
    position_key,
    request_key,
    uniform,
    warp,
)

LEVEL = 1e-3
MASK = (1 << 64) - 1
REQUEST = request_key(0, "tests")


def keys_of(num_keys: int, purpose: str = "target") -> list[int]:
    return [position_key(REQUEST, position, purpose) for position in range(num_keys)]


def random_logits(vocab_size: int, scale: float, seed: int = 0, num_rows: int = 4) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_rows, vocab_size, generator=generator) * scale


def transformers_logp(logits_MV: torch.Tensor, settings: Sampling) -> torch.Tensor:
    warpers = LogitsProcessorList([TemperatureLogitsWarper(settings.temperature)])
    if settings.top_k:
        warpers.append(TopKLogitsWarper(settings.top_k))
    if settings.top_p < 1:
        warpers.append(TopPLogitsWarper(settings.top_p))
    no_ids: Any = None
    warped_MV: torch.Tensor = warpers(no_ids, logits_MV)
    return warped_MV.log_softmax(-1)


def near_the_edge(logits_V: torch.Tensor, settings: Sampling) -> torch.Tensor:
    """Which tokens begin or end within rounding of top-p in the cumulated mass: bool [V]."""
    without_top_p = Sampling(temperature=settings.temperature, top_k=settings.top_k)
    probs_V = warp(logits_V[None].double(), without_top_p)[0].exp()
    sorted_V, order_V = probs_V.sort(descending=True)
    mass_V = sorted_V.cumsum(0)
    is_near_V = ((mass_V - settings.top_p).abs() < 3e-6) | (
        (mass_V - sorted_V - settings.top_p).abs() < 3e-6
    )
    return torch.zeros_like(is_near_V).scatter(0, order_V, is_near_V)


@pytest.mark.parametrize("vocab_size", [50, 49152])
@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.7])
@pytest.mark.parametrize("top_k", [0, 1, 20, 5000])
@pytest.mark.parametrize("top_p", [0.2, 0.9, 0.95, 1.0])
def test_warping_equals_transformers(
    vocab_size: int, temperature: float, top_k: int, top_p: float
) -> None:
    settings = Sampling(temperature=temperature, top_k=top_k, top_p=top_p)
    logits_MV = random_logits(vocab_size, scale=3.0, seed=top_k)
    ours_MV, theirs_MV = warp(logits_MV, settings), transformers_logp(logits_MV, settings)
    for logits_V, ours_V, theirs_V in zip(logits_MV, ours_MV, theirs_MV, strict=True):
        unclear_V = near_the_edge(logits_V, settings) if top_p < 1 else torch.tensor(False)
        differs_V = (ours_V > -math.inf) != (theirs_V > -math.inf)
        assert not (differs_V & ~unclear_V).any()
        assert differs_V.sum() <= 4
        both_V = (ours_V > -math.inf) & (theirs_V > -math.inf)
        torch.testing.assert_close(ours_V[both_V], theirs_V[both_V], rtol=0, atol=3e-5)


def test_warping_returns_normalised_float32_or_float64() -> None:
    settings = Sampling(temperature=0.8, top_k=30, top_p=0.9)
    logits_MV = random_logits(100, 2.0)
    assert warp(logits_MV.bfloat16(), settings).dtype == torch.float32
    assert warp(logits_MV.double(), settings).dtype == torch.float64
    torch.testing.assert_close(warp(logits_MV, settings).exp().sum(-1), torch.ones(4))


@pytest.mark.parametrize("settings", [{"top_k": 2}, {"top_p": 0.5}])
def test_tokens_equal_to_the_last_one_kept_all_stay(settings: dict[str, float]) -> None:
    logits_1V = torch.tensor([[1.0, 3.0, 2.0, 0.0, 2.0, 2.0]])
    logp_V = warp(logits_1V, Sampling(temperature=1.0, **settings))[0]  # type: ignore[arg-type]
    assert (logp_V > -math.inf).tolist() == [False, True, True, False, True, True]


@pytest.mark.parametrize("top_p", [1e-6, 0.3, 0.95, 0.999999])
@pytest.mark.parametrize(
    "logits_MV",
    [
        pytest.param(random_logits(49152, 0.0), id="all equal"),
        pytest.param(random_logits(49152, 1.0), id="flat"),
        pytest.param(random_logits(49152, 3.0), id="peaked"),
        pytest.param(random_logits(49152, 3.0).bfloat16().float(), id="with ties"),
        pytest.param(random_logits(49152, 30.0), id="one token"),
    ],
)
def test_the_nucleus_among_likely_tokens_is_that_of_the_full_sort(
    logits_MV: torch.Tensor, top_p: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = Sampling(temperature=1.0, top_p=top_p)
    found_MV = warp(logits_MV, settings)
    monkeypatch.setattr(sampling, "_FLOORS", (-math.inf,))
    assert torch.equal(found_MV, warp(logits_MV, settings))
    monkeypatch.setattr(sampling, "_on_cpu", lambda values: False)
    torch.testing.assert_close(found_MV, warp(logits_MV, settings), rtol=0, atol=1e-5)


def test_uniform_numbers_are_uniform() -> None:
    numbers = uniform(keys_of(200), torch.arange(2000)).numpy()
    assert scipy.stats.kstest(numbers.ravel(), "uniform").pvalue > LEVEL
    num_sigmas = scipy.stats.norm.isf(LEVEL / 2)
    assert abs(numbers.mean() - 1 / 2) < num_sigmas * math.sqrt(1 / 12 / numbers.size)
    assert abs(numbers.var() - 1 / 12) < num_sigmas * math.sqrt(1 / 180 / numbers.size)
    means_of_ids = (numbers.mean(0) - 1 / 2) * math.sqrt(12 * len(numbers))
    assert scipy.stats.kstest(means_of_ids, "norm").pvalue > LEVEL


@pytest.mark.parametrize("axis", ["keys", "ids", "consecutive key values"])
def test_neighbouring_numbers_are_independent(axis: str) -> None:
    keys = [REQUEST + i for i in range(300)] if axis == "consecutive key values" else keys_of(300)
    numbers = uniform(keys, torch.arange(1000)).numpy()
    numbers = numbers.T if axis == "ids" else numbers
    left, right = numbers[:-1].ravel(), numbers[1:].ravel()
    num_sigmas = scipy.stats.norm.isf(LEVEL / 2)
    assert abs(np.corrcoef(left, right)[0, 1]) < num_sigmas / math.sqrt(left.size)
    table, *_ = np.histogram2d(left[::2], right[::2], bins=16, range=[[0, 1], [0, 1]])
    assert scipy.stats.chi2_contingency(table).pvalue > LEVEL


def unshift(value: int, bits: int) -> int:
    """Inverse of x -> x ^ (x >> bits)."""
    found = value
    for _ in range(64 // bits):
        found = value ^ (found >> bits)
    return found


def key_with_hash(wanted: int) -> int:
    """The key for which the hash of id 0 is ``wanted``."""
    z = unshift(wanted, 31) * pow(0x94D049BB133111EB, -1, 1 << 64) & MASK
    z = unshift(z, 27) * pow(0xBF58476D1CE4E5B9, -1, 1 << 64) & MASK
    return (unshift(z, 30) - 0x9E3779B97F4A7C15) & MASK


def test_the_most_extreme_hashes_give_numbers_between_0_and_1_and_finite_noise() -> None:
    keys = [key_with_hash(0), key_with_hash(MASK), key_with_hash(1 << 63)]
    low, high, middle = uniform(keys, torch.tensor([0]))[:, 0].tolist()
    assert 0 < low < 1e-15
    assert 1 - 1e-15 < high < 1
    assert middle == pytest.approx(0.5)
    assert gumbel(keys, torch.tensor([0])).isfinite().all()


def test_numbers_depend_on_key_and_id_alone() -> None:
    keys = keys_of(5)
    numbers = uniform(keys, torch.arange(1000))
    ids = torch.tensor([999, 0, 17, 512])
    assert torch.equal(uniform(keys, ids), numbers[:, ids])
    assert torch.equal(uniform(keys[3:4], ids)[0], numbers[3, ids])


def test_an_accelerator_gets_the_same_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    keys, ids = [*keys_of(5), 0, MASK], torch.arange(1000)
    numbers, noise = uniform(keys, ids), gumbel(keys, ids)
    monkeypatch.setattr(sampling, "_on_cpu", lambda values: False)
    assert torch.equal(uniform(keys, ids), numbers)
    torch.testing.assert_close(gumbel(keys, ids), noise, rtol=1e-13, atol=1e-13)


def test_numbers_are_the_same_in_another_process() -> None:
    program = (
        "import torch; from specbench.sampling import position_key, request_key, uniform;"
        "key = position_key(request_key(3, 'code/7'), 41, 'draft');"
        "print([x.hex() for x in uniform([key], torch.arange(50))[0].tolist()])"
    )
    environment = os.environ | {"PYTHONHASHSEED": "12345"}
    run = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
    )
    key = position_key(request_key(3, "code/7"), 41, "draft")
    here = [number.hex() for number in uniform([key], torch.arange(50))[0].tolist()]
    assert run.stdout.strip() == str(here)


def test_gumbel_noise_has_its_law() -> None:
    noise = gumbel(keys_of(100), torch.arange(1000)).numpy().ravel()
    assert scipy.stats.kstest(noise, "gumbel_r").pvalue > LEVEL


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_of_equal_values_the_first_is_the_likeliest(dtype: torch.dtype) -> None:
    values = torch.randn(40, 1000).to(dtype)
    values[:, 300] = values[:, 700] = 9.0
    assert likeliest_token(values).tolist() == [300] * 40
    values[:, 800] = 10.0
    assert likeliest_token(values).tolist() == [800] * 40
    if dtype == torch.float64:
        values[:, 100] = 10.0 + 1e-12
        assert likeliest_token(values).tolist() == [100] * 40


def test_draws_have_the_given_probabilities() -> None:
    probs = np.array([0.4, 0.3, 0.15, 0.1, 0.04, 0.01])
    logp_V = torch.from_numpy(probs).log()
    num_draws = 5000
    drawn = [int(draw(logp_V, key)) for key in keys_of(num_draws)]
    counts = np.bincount(drawn, minlength=len(probs))
    assert scipy.stats.chisquare(counts, probs * num_draws).pvalue > LEVEL


def test_draws_without_replacement_follow_plackett_and_luce() -> None:
    probs = np.array([0.45, 0.25, 0.15, 0.1, 0.05])
    logp_V = torch.from_numpy(probs).log()
    num_draws = 6000
    pairs = [tuple(draw(logp_V, key, num_draws=2).tolist()) for key in keys_of(num_draws)]
    ordered = list(itertools.permutations(range(len(probs)), 2))
    expected = [num_draws * probs[i] * probs[j] / (1 - probs[i]) for i, j in ordered]
    counts = [pairs.count(pair) for pair in ordered]
    assert sum(counts) == num_draws
    assert scipy.stats.chisquare(counts, expected).pvalue > LEVEL


def test_the_first_of_several_draws_is_the_single_draw() -> None:
    logp_V = random_logits(1000, 2.0)[0].log_softmax(-1)
    for key in keys_of(50):
        several = draw(logp_V, key, num_draws=4).tolist()
        assert len(set(several)) == 4
        assert draw(logp_V, key).tolist() == several[:1]


def test_tokens_without_mass_are_never_drawn() -> None:
    logp_V = torch.tensor([-math.inf, -0.5, -200.0, -1.0, -math.inf])
    assert all(set(draw(logp_V, key, num_draws=4).tolist()) == {1, 3} for key in keys_of(20))
    stand_in_V = torch.tensor([0.0, 1.0]).clamp_min(sampling.NO_MASS).log()
    assert draw(stand_in_V, 5, num_draws=2).tolist() == [1]


def test_choosing_for_many_rows_equals_single_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Sampling(temperature=1.0, top_p=0.9)
    logp_MV = torch.cat([warp(random_logits(300, 2.0), settings), random_logits(300, 1.0)])
    keys = keys_of(len(logp_MV))
    singles = [int(draw(logp_V, key)) for logp_V, key in zip(logp_MV, keys, strict=True)]
    assert choose(logp_MV, keys).tolist() == singles
    monkeypatch.setattr(sampling, "_on_cpu", lambda values: False)
    assert choose(logp_MV, keys).tolist() == singles
    assert draw(logp_MV[0], keys[0], num_draws=5).tolist()[0] == singles[0]


def test_seeds_requests_positions_and_purposes_have_keys_of_their_own() -> None:
    requests = [
        request_key(seed, name) for seed in range(3) for name in ("code/1", "code/11", "1", "")
    ]
    keys = {
        position_key(request, position, purpose)
        for request in requests
        for position in range(300)
        for purpose in ("target", "draft", "accept")
    }
    assert len(keys) == len(requests) * 300 * 3
    assert all(0 <= key <= MASK for key in [*requests, *keys])


@pytest.mark.parametrize(
    ("settings", "valid"),
    [
        ({"temperature": -0.1}, "0 or above"),
        ({"temperature": math.inf}, "0 or above"),
        ({"temperature": math.nan}, "0 or above"),
        ({"top_k": -1}, "0 (off) or above"),
        ({"top_p": 0.0}, "above 0, at most 1"),
        ({"top_p": 1.01}, "above 0, at most 1"),
        ({"rule": "typical"}, "rejection, coupled"),
    ],
)
def test_bad_settings_are_refused_with_the_valid_ones(
    settings: dict[str, object], valid: str
) -> None:
    with pytest.raises(ValueError, match="valid: ") as error:
        Sampling(**settings)  # type: ignore[arg-type]
    assert str(error.value).endswith(valid)
    assert str(next(iter(settings.values()))) in str(error.value)


def test_only_temperature_0_is_greedy() -> None:
    assert Sampling().greedy
    assert not Sampling(temperature=0.01).greedy


def test_a_tiny_temperature_is_the_argmax_and_not_an_overflow() -> None:
    logits_MV = torch.tensor([[1.0, 30.0, 2.0], [5.0, -7.0, 4.9]])
    logp_MV = warp(logits_MV, Sampling(temperature=1e-40))
    assert logp_MV.argmax(-1).tolist() == [1, 0]
    assert torch.equal(logp_MV.amax(-1), torch.zeros(2))
