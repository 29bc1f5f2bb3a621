"""Tests of intervals and verdicts."""

import numpy as np
import pytest

from specbench.stats import Estimate, Floats, bootstrap, speed_up


def paired_times(generator: np.random.Generator, num_prompts: int, ratio: float) -> Floats:
    """Times of prompts of unequal lengths, with a speed-up that varies by prompt, and noise."""
    tokens = generator.lognormal(4.5, 0.5, num_prompts).round() + 1
    noise = generator.normal(0, 0.05, (2, num_prompts))
    own_ratio = np.exp(generator.normal(np.log(ratio), 0.15, num_prompts))
    baseline_s = 0.03 * tokens * np.exp(noise[0])
    method_s = 0.03 * tokens / own_ratio * np.exp(noise[1])
    return np.stack([baseline_s, tokens, method_s, tokens], axis=1)


def test_the_speed_up_is_a_ratio_of_sums() -> None:
    # 30 s / 12 tokens against 9 s / 9 tokens.
    pairs = np.array([[10.0, 4.0, 5.0, 6.0], [20.0, 8.0, 4.0, 3.0]])
    assert speed_up(pairs).value == pytest.approx(2.5)


def test_two_clusters_span_the_whole_interval() -> None:
    pairs = np.array([[1.0, 1.0, 1.0, 1.0], [3.0, 1.0, 1.0, 1.0]])
    estimate = speed_up(pairs)
    assert (estimate.low, estimate.value, estimate.high) == pytest.approx((1.0, 2.0, 3.0))


def test_equal_clusters_leave_no_doubt() -> None:
    estimate = speed_up(np.array([[3.0, 2.0, 2.0, 2.0]] * 6))
    assert (estimate.low, estimate.value, estimate.high) == pytest.approx((1.5, 1.5, 1.5))
    assert estimate.verdict == "faster"


def test_one_cluster_has_no_interval_and_none_no_estimate() -> None:
    assert speed_up(np.array([[3.0, 2.0, 2.0, 2.0]])) == Estimate(1.5, None, None, 1)
    with pytest.raises(ValueError, match="one cluster at least"):
        speed_up(np.empty((0, 4)))


@pytest.mark.parametrize(
    ("low", "high", "num_clusters", "verdict"),
    [
        (1.01, 1.2, 5, "faster"),
        (0.8, 0.99, 5, "slower"),
        (0.9, 1.1, 500, "inconclusive"),
        (1.0, 1.1, 500, "inconclusive"),
        (1.5, 1.6, 4, "inconclusive"),
        (None, None, 1, "inconclusive"),
    ],
)
def test_the_verdict_is_the_intervals(
    low: float | None, high: float | None, num_clusters: int, verdict: str
) -> None:
    estimate = Estimate(1.05, low, high, num_clusters)
    assert estimate.verdict == verdict
    assert estimate.too_few == (num_clusters < 5)


def test_the_same_seed_gives_the_same_interval_and_another_nearly_so() -> None:
    pairs = paired_times(np.random.default_rng(1), 20, 1.3)
    ratio = _baseline_per_method
    once, again = bootstrap(pairs, ratio, seed=3), bootstrap(pairs, ratio, seed=3)
    other = bootstrap(pairs, ratio, seed=4)
    assert once == again
    assert once.low != other.low
    assert once.low == pytest.approx(other.low, rel=0.01)


def test_fewer_clusters_give_a_wider_interval_than_their_spread_alone() -> None:
    pairs = np.array([[1.0, 1.0, 1.0, 1.0], [2.0, 1.0, 1.0, 1.0]] * 3)
    few, many = speed_up(pairs), speed_up(np.tile(pairs, (16, 1)))
    assert few.low is not None and few.high is not None
    assert many.low is not None and many.high is not None
    # The spread of a mean falls with the square root of 16; the expansion comes on top.
    assert few.high - few.low > 1.1 * 4 * (many.high - many.low)


def test_the_interval_holds_the_truth_about_as_often_as_it_says() -> None:
    generator = np.random.default_rng(0)
    large = paired_times(generator, 400_000, 1.3)
    truth = float(_baseline_per_method(large.sum(0)))
    held = 0
    for _ in range(400):
        estimate = speed_up(paired_times(generator, 15, 1.3))
        assert estimate.low is not None and estimate.high is not None
        held += estimate.low <= truth <= estimate.high
    # 95 % nominal; 3 points for 15 clusters of unequal size, 3 for the simulation itself.
    assert 0.89 <= held / 400 <= 0.98


def test_a_method_against_itself_is_rarely_called_faster_or_slower() -> None:
    generator = np.random.default_rng(2)
    verdicts = [
        speed_up(_against_itself(paired_times(generator, 15, 1.0), generator)).verdict
        for _ in range(400)
    ]
    assert sum(verdict != "inconclusive" for verdict in verdicts) / 400 <= 0.1


def test_a_real_difference_is_found() -> None:
    generator = np.random.default_rng(5)
    assert speed_up(paired_times(generator, 15, 1.3)).verdict == "faster"
    assert speed_up(paired_times(generator, 15, 0.7)).verdict == "slower"


def _baseline_per_method(sums: Floats) -> Floats:
    ratio: Floats = sums[..., 0] / sums[..., 2]
    return ratio


def _against_itself(pairs: Floats, generator: np.random.Generator) -> Floats:
    """The baseline timed twice, with 5 % noise."""
    again = pairs[:, 0] * np.exp(generator.normal(0, 0.05, len(pairs)))
    return np.stack([pairs[:, 0], pairs[:, 1], again, pairs[:, 1]], axis=1)
