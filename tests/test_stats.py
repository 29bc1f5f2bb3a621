"""Tests of intervals and verdicts."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import scipy.stats

from specbench.stats import LEVEL, Estimate, Floats, judge_together, speed_up
from tests.made_runs import paired_times


def test_the_speed_up_is_a_ratio_of_sums() -> None:
    # 30 s / 12 tokens against 9 s / 9 tokens.
    pairs = np.array([[10.0, 4.0, 5.0, 6.0], [20.0, 8.0, 4.0, 3.0]])
    assert speed_up(pairs).value == pytest.approx(2.5)


def test_the_interval_is_students_on_the_logarithm() -> None:
    # Left out in turn: a ratio of 1 and one of 4; the spread of two is half their distance.
    pairs = np.array([[4.0, 1.0, 1.0, 1.0], [1.0, 1.0, 1.0, 1.0]])
    estimate = speed_up(pairs)
    assert (estimate.value, estimate.spread) == pytest.approx((2.5, math.log(4) / 2))
    sizes = Estimate(2.5, math.log(4) / 2, 1.0, 5)
    interval = sizes.interval(0.5)
    assert interval == pytest.approx((1.25, 5.0))  # the t of one degree at 0.75 is 1


def test_equal_clusters_leave_no_doubt() -> None:
    estimate = speed_up(np.array([[3.0, 2.0, 2.0, 2.0]] * 6))
    assert estimate.interval() == pytest.approx((1.5, 1.5))
    assert estimate.freedom == pytest.approx(5)
    assert estimate.verdict == "faster"
    same = speed_up(np.array([[2.0, 2.0, 2.0, 2.0]] * 6))
    assert (same.verdict, same.p_value) == ("inconclusive", 1)


def test_clusters_of_unequal_size_count_as_fewer() -> None:
    pairs = np.array([[3.0, 2.0, 2.0, 2.0]] * 6)
    pairs[0] *= 10
    assert speed_up(pairs).freedom == pytest.approx(5 / 6 * 105**2 / 10_005)


def test_one_cluster_has_no_interval_and_none_no_estimate() -> None:
    alone = speed_up(np.array([[3.0, 2.0, 2.0, 2.0]]))
    assert (alone.value, alone.interval(), alone.simultaneous) == (1.5, None, None)
    assert (alone.verdict, alone.smallest_visible, alone.p_value) == ("inconclusive", None, 1)
    with pytest.raises(ValueError, match="one cluster at least"):
        speed_up(np.empty((0, 4)))


@pytest.mark.parametrize(
    ("value", "spread", "num_clusters", "verdict"),
    [
        (1.1, 0.02, 5, "faster"),
        (0.9, 0.02, 5, "slower"),
        (1.1, 0.1, 500, "inconclusive"),
        (1.5, 0.02, 4, "inconclusive"),
        (1.5, 0.0, 4, "inconclusive"),
        (1.5, None, 1, "inconclusive"),
    ],
)
def test_the_verdict_of_one_estimate_is_its_intervals(
    value: float, spread: float | None, num_clusters: int, verdict: str
) -> None:
    estimate = Estimate(value, spread, num_clusters - 1.0, num_clusters)
    assert estimate.verdict == verdict
    assert estimate.too_few == (num_clusters < 5)
    interval = estimate.interval()
    if estimate.too_few:
        assert interval is None and estimate.simultaneous is None
    if interval:
        assert (interval.low <= 1 <= interval.high) == (verdict == "inconclusive")


def test_an_interval_that_is_nearly_endless_is_made_of_numbers() -> None:
    interval = Estimate(1.0, 9.0, 0.5, 5, num_judged=100).simultaneous
    assert interval is not None and interval.low > 0 and math.isfinite(interval.high)


def test_p_values_are_corrected_by_holm() -> None:
    spreads = (0.02, 0.03, 0.04, 0.05)
    alone = [Estimate(1.1, spread, 20.0, 21) for spread in spreads]
    few = Estimate(2.0, 0.01, 2.0, 3)
    *judged, untouched = judge_together([*reversed(alone), few])
    assert untouched == few
    ordered = [e.p_value for e in alone]
    by_hand = np.maximum.accumulate([p * (4 - i) for i, p in enumerate(ordered)])
    assert [e.adjusted_p for e in reversed(judged)] == pytest.approx(list(by_hand))
    assert {e.num_judged for e in judged} == {4}


def test_a_verdict_gets_harder_with_the_number_that_is_judged() -> None:
    estimate = Estimate(1.1, 0.04, 20.0, 21)
    assert estimate.verdict == "faster"
    noise = [Estimate(1.0, 0.04, 20.0, 21)] * 9
    judged, *_ = judge_together([estimate, *noise])
    assert judged.verdict == "inconclusive"
    assert judged.p_value == estimate.p_value
    assert judged.simultaneous is not None and judged.simultaneous.low < 1
    assert judged.smallest_visible is not None and estimate.smallest_visible is not None
    assert judged.smallest_visible > estimate.smallest_visible


def test_the_p_value_agrees_with_scipys_permutations() -> None:
    """Of the baseline's and the method's seconds within each prompt."""
    generator = np.random.default_rng(11)

    def log_ratio(baseline_s: Floats, method_s: Floats, axis: int) -> Floats:
        ratio: Floats = np.log(baseline_s.sum(axis) / method_s.sum(axis))
        return ratio

    for _ in range(20):
        pairs = paired_times(generator, 14, 1.0, own=0.0)
        permuted = scipy.stats.permutation_test(
            (pairs[:, 0], pairs[:, 2]), log_ratio, permutation_type="samples", n_resamples=20_000
        )
        assert speed_up(pairs).p_value == pytest.approx(permuted.pvalue, abs=0.1)


@pytest.mark.parametrize("num_prompts", [6, 15])
def test_the_interval_holds_the_truth_about_as_often_as_it_says(num_prompts: int) -> None:
    generator = np.random.default_rng(1)
    found = [speed_up(paired_times(generator, num_prompts, 1.3)) for _ in range(1000)]
    for level, least in ((0.95, 0.93), (0.99, 0.98)):
        intervals = [estimate.interval(level) for estimate in found]
        held = sum(i is not None and i.low <= 1.3 <= i.high for i in intervals)
        assert least <= held / 1000 <= level + 0.03


def test_a_method_against_itself_is_called_otherwise_no_more_often_than_the_level_says() -> None:
    """In all of a run's verdicts together: four methods on three workloads, 200 runs."""
    assert _false_alarms(lambda g: paired_times(g, 12, 1.0, own=0.0)) <= _most_alarms(200)


def test_so_it_is_where_the_speed_up_varies_by_prompt_about_nothing() -> None:
    assert _false_alarms(lambda g: paired_times(g, 12, 1.0)) <= _most_alarms(200)


def test_the_smallest_visible_difference_is_found_as_often_as_it_says() -> None:
    generator = np.random.default_rng(5)
    same = [speed_up(paired_times(generator, 20, 1.0, own=0.0)) for _ in range(400)]
    ratio = 1 + float(np.mean([estimate.smallest_visible or 0 for estimate in same]))
    found = [speed_up(paired_times(generator, 20, ratio, own=0.0)).verdict for _ in range(400)]
    assert 0.74 <= found.count("faster") / 400 <= 0.86


def test_a_real_difference_is_found() -> None:
    generator = np.random.default_rng(5)
    assert speed_up(paired_times(generator, 15, 1.3)).verdict == "faster"
    assert speed_up(paired_times(generator, 15, 0.7)).verdict == "slower"


def _false_alarms(draw: Callable[[np.random.Generator], Floats]) -> int:
    """Of 200 runs of twelve comparisons, those with any verdict."""
    generator = np.random.default_rng(2)
    runs = [judge_together([speed_up(draw(generator)) for _ in range(12)]) for _ in range(200)]
    return sum(any(e.verdict != "inconclusive" for e in run) for run in runs)


def _most_alarms(num_runs: int) -> int:
    """What chance makes of the level: as many in 99 of 100 such tests."""
    return int(scipy.stats.binom.ppf(0.99, num_runs, 1 - LEVEL))
