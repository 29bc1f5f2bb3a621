"""Numbers of a serving run, from made-up records that can be worked out by hand."""

import math
from collections.abc import Sequence
from itertools import groupby

import numpy as np
import pytest

from specbench.records import FailureRecord, Surprise
from specbench.serving.metrics import (
    Percentiles,
    busy_s,
    capacity,
    first_token_s,
    latency_s,
    measure,
    percentiles,
    queueing_s,
    token_s,
)
from specbench.serving.page import verdicts
from specbench.serving.ratios import Result, compare, drift, hurts_from, summarise
from specbench.serving.records import Pass, PassRecord, ServedRecord


def record(
    request: str,
    arrival_s: float,
    start_s: float,
    step_ends_s: Sequence[float],
    committed: Sequence[int] = (),
    batches: Sequence[int] = (),
    lossless: str = "exact",
    surprise: Surprise | None = None,
) -> ServedRecord:
    """What a request saw; by default each step commits one token, alone."""
    counts = list(committed) or [1] * len(step_ends_s)
    return ServedRecord(
        workload="w",
        request=request,
        arrival_s=arrival_s,
        start_s=start_s,
        step_ends_s=list(step_ends_s),
        batches=list(batches) or [1] * len(step_ends_s),
        steps=[[count - 1, count - 1, count - 1, count, count - 1] for count in counts],
        tokens=list(range(sum(counts))),
        finish="length",
        lossless=lossless,
        surprise=surprise,
    )


def made_pass(
    served: Sequence[ServedRecord],
    method: str = "vanilla",
    *,
    load: float | None = 1.0,
    rate: float | None = 2.0,
    round: int = 0,
    num_failed: int = 0,
) -> Pass:
    about = PassRecord(
        method=method, controller="fixed", load=load, rate=rate, round=round, order=0
    )
    failures = [
        FailureRecord(workload="w", request=f"f{i}", method=method, reason="why")
        for i in range(num_failed)
    ]
    return Pass(about, served, failures)


ONE = record("a", 1.0, 1.5, [3.0, 4.0, 6.0], [2, 1, 2], [1, 2, 2])
TWO = record("b", 2.5, 3.0, [4.0, 6.0], [1, 1], [2, 2])
FAR = record("c", 10.0, 10.0, [11.0])


def test_latency_is_from_arrival_to_end_and_holds_the_wait() -> None:
    assert (latency_s(ONE), first_token_s(ONE), queueing_s(ONE)) == (5.0, 2.0, 0.5)
    assert token_s(ONE) == pytest.approx(3.0 / 4)
    assert token_s(FAR) is None


def test_percentiles_are_interpolated() -> None:
    found = percentiles(float(i) for i in range(101))
    assert found == Percentiles(50.0, 90.0, 99.0)
    assert percentiles([]) is None


def test_seconds_without_any_request_are_not_busy() -> None:
    assert busy_s([ONE, TWO, FAR]) == 5.0 + 1.0
    assert busy_s([FAR, TWO, ONE]) == 6.0


def test_a_pass_is_measured_over_all_its_requests() -> None:
    found = measure([made_pass([ONE, TWO, FAR])])
    assert found is not None
    assert found.tokens_per_s == pytest.approx(8 / 6)
    # Steps: one of one row, two of two, one of one.
    assert found.mean_batch == pytest.approx((1 + 2 + 2 + 1) / 4)
    assert found.tau == pytest.approx(8 / 6)
    assert found.latency.p50 == 3.5
    assert found.lossless == {"exact": 3}
    assert found.law_p is None


def test_rounds_are_pooled_but_their_clocks_are_their_own() -> None:
    found = measure([made_pass([ONE]), made_pass([ONE], round=1)])
    assert found is not None and found.tokens_per_s == pytest.approx(10 / 10)


def test_nothing_served_is_no_number() -> None:
    assert measure([made_pass([], num_failed=2)]) is None


def test_outputs_that_are_too_surprising_are_told() -> None:
    usual = Surprise(nats=10.0, expected_nats=10.0, variance=1.0)
    odd = Surprise(nats=20.0, expected_nats=10.0, variance=1.0)
    p_values = []
    for surprise in (usual, odd):
        served = [record("a", 0, 0, [1.0], lossless="law", surprise=surprise)]
        found = measure([made_pass(served)])
        assert found is not None and found.law_p is not None
        p_values.append(found.law_p)
    assert p_values[0] == pytest.approx(1.0) and p_values[1] < 1e-6


def test_capacity_counts_only_while_the_batch_is_as_large_as_it_gets() -> None:
    # Two rows for ten steps of a second, behind a prefill of two; then a tail of one row.
    both = [float(3 + i) for i in range(10)]
    first = record("a", 0, 0, both, batches=[2] * 10)
    second = record("b", 0, 0, [*both, 30.0, 50.0], batches=[2] * 10 + [1, 1])
    assert capacity([first, second]) == pytest.approx(20 / 12 / 11)


def at_ratio(ratio: float, count: int = 20, tremor: float = 0.01) -> list[ServedRecord]:
    """Requests whose latency is so many seconds, and a little more or less."""
    return [
        record(f"r{i}", i, i, [i + ratio * (1 + tremor * (-1) ** (i // 2 % 2))])
        for i in range(count)
    ]


def test_a_method_is_compared_on_the_requests_that_both_served() -> None:
    slow = [r for r in at_ratio(2.0) if r.request != "r3"]
    found = compare([made_pass(at_ratio(1.0))], [made_pass(slow, "m")])
    assert found is not None and found.value == pytest.approx(0.5)
    assert found.num_clusters == 10
    assert compare([made_pass([ONE])], [made_pass([TWO], "m")]) is None
    # Nor of another round.
    assert compare([made_pass([ONE])], [made_pass([ONE], "m", round=1)]) is None


def test_a_request_counts_once_however_many_rounds_there_are() -> None:
    base = [made_pass(at_ratio(1.0), round=i) for i in range(2)]
    own = [made_pass(at_ratio(1.1, tremor=0.2), "m", round=i) for i in range(2)]
    both, one = compare(base, own), compare(base[:1], own[:1])
    assert both is not None and one is not None
    assert both.spread == pytest.approx(one.spread)


def run_of(ratios: Sequence[float], tremor: float = 0.01, num_rounds: int = 2) -> list[Pass]:
    """Vanilla and a method at rates 1, 2, ... with such latency ratios."""
    found = []
    for rate, ratio in enumerate(ratios, start=1):
        for i in range(num_rounds):
            own = at_ratio(ratio, tremor=tremor)
            found.append(made_pass(own, "m", load=rate / 2, rate=rate, round=i))
            found.append(made_pass(at_ratio(1.0), load=rate / 2, rate=rate, round=i))
    return found


def rounds_of(*methods: Sequence[float]) -> list[Pass]:
    """Vanilla and methods m0, m1, ... at one rate, with such ratios by round."""
    base = [made_pass(at_ratio(1.0), round=i) for i in range(len(methods[0]))]
    return base + [
        made_pass(at_ratio(ratio), f"m{number}", round=i)
        for number, ratios in enumerate(methods)
        for i, ratio in enumerate(ratios)
    ]


def results_of(*methods: Sequence[float]) -> list[Result]:
    return [result for result in summarise(rounds_of(*methods)) if result.method != "vanilla"]


def told(results: Sequence[Result]) -> list[tuple[str, str]]:
    """Verdicts and the reasons beside them."""
    found = [result.latency_ratio for result in results]
    return [(ratio.verdict, ratio.reason) for ratio in found if ratio]


@pytest.mark.parametrize(
    ("ratios", "rate", "words"),
    [
        (
            (0.7, 0.9, 1.4),
            3,
            "proven to hurt at load 1.5 (measured 1.40x of vanilla's latency); "
            "proven to help at load 0.5 and load 1 (measured 0.70x, 0.90x of vanilla's latency)",
        ),
        ((0.7, 1.2, 1.4), 2, "proven to hurt from load 1 on (measured 1.20x, 1.40x"),
        ((1.1, 1.2, 1.4), 1, "proven to hurt at every rate here (measured 1.10x, 1.20x, 1.40x"),
        ((0.5, 0.6, 0.9), None, "proven to help at every rate here"),
        ((1.2, 0.6, 0.9), None, "proven to hurt at load 0.5 (measured 1.20x"),
        ((1.2, 0.6, 1.9, 1.8), 3, "proven to hurt at load 0.5 and from load 1.5 on"),
    ],
)
def test_the_rate_from_which_it_hurts_is_said(
    ratios: Sequence[float], rate: int | None, words: str
) -> None:
    results = summarise(run_of(ratios))
    found = hurts_from([result for result in results if result.method == "m"])
    assert (found and found.rate) == rate
    (said,) = verdicts(results)
    assert said.startswith("m, fixed: ") and words in " ".join(said.split())


def test_what_is_measured_but_not_proven_is_said_so() -> None:
    results = summarise(run_of([1.02], tremor=0.3))
    assert hurts_from([result for result in results if result.method == "m"]) is None
    (said,) = verdicts(results)
    words = "not proven either way at load 0.5 (measured 1.02x of vanilla's latency)"
    assert said == f"m, fixed: {words}"


def test_one_round_proves_nothing() -> None:
    """Nothing is drafted: only whole passes are slower, each by its own drift."""
    found = results_of([1.09], [0.94], [1.3])
    assert told(found) == [("inconclusive", "too few rounds")] * 3
    assert all(r.latency_ratio and r.latency_ratio.interval is None for r in found)
    assert all("not proven either way at load 1" in said for said in verdicts(found))


def test_what_drifts_between_rounds_is_in_the_interval() -> None:
    (alone,) = results_of([1.2, 1.35])
    assert told([alone]) == [("inconclusive", "")], "two passes of one method prove little"
    several = results_of([1.2, 1.35], [1.02, 1.1], [0.99, 1.08], [1.6, 1.75])
    assert [verdict for verdict, _ in told(several)] == ["slower", *["inconclusive"] * 2, "slower"]


def test_rounds_that_lie_on_both_sides_of_1_give_no_verdict() -> None:
    """Though the interval of a method that drifts more than the others may not hold 1."""
    steady = [[0.5] * 6] * 8
    found = results_of([1.05, 1.06, 1.05, 1.06, 0.995, 1.06], *steady)
    assert told(found)[0] == ("inconclusive", "rounds disagree")
    assert told(found)[1] == ("faster", "")


def test_the_drift_of_one_method_is_that_of_the_paired_t_test() -> None:
    ratios = np.array([[1.1], [1.3], [1.2]])
    found = drift(ratios)
    assert found is not None and found.freedom == 2
    assert found.spread == pytest.approx(np.log(ratios).std(ddof=1) / math.sqrt(3))
    assert drift(ratios[:1]) is None


@pytest.mark.parametrize(("num_rounds", "num_methods"), [(2, 3), (3, 1), (4, 2)])
def test_methods_that_draft_nothing_are_seldom_called_anything(
    num_rounds: int, num_methods: int
) -> None:
    """Passes drift by 5 %, requests vary little: 5 of 100 runs may err, 8 of 100 do by chance in
    one of 50 tests."""
    generator = np.random.default_rng(num_rounds)
    num_wrong = 0
    for _ in range(200):
        drifts = np.exp(0.05 * generator.standard_normal((num_methods + 1, num_rounds)))
        own = [list(drifts[number + 1] / drifts[0]) for number in range(num_methods)]
        num_wrong += any(verdict != "inconclusive" for verdict, _ in told(results_of(*own)))
    assert num_wrong <= 16


def test_a_round_that_not_all_have_tells_nothing_of_drift() -> None:
    cut = [one for one in rounds_of([1.2, 1.2], [1.3, 1.3]) if one.about.method != "m1"]
    cut += [one for one in rounds_of([1.2], [1.3]) if one.about.method == "m1"]
    assert {reason for _, reason in told(summarise(cut))} == {"too few rounds"}


def test_results_come_by_rate_with_verdicts_that_are_judged_together() -> None:
    results = summarise([*run_of([0.5, 2.0]), made_pass([ONE], load=None, rate=None)])
    for rate, group in groupby(results, lambda r: r.rate):
        assert [result.method for result in group] == ["m", "vanilla"], rate
    of_method = [result.latency_ratio for result in results if result.method == "m"]
    assert [ratio and ratio.verdict for ratio in of_method] == ["faster", "slower"]
    for ratio in of_method:
        assert ratio is not None and ratio.interval is not None
        assert ratio.interval.low < ratio.value < ratio.interval.high


def test_without_a_baseline_nothing_is_said_of_a_ratio() -> None:
    results = summarise([made_pass(at_ratio(1.0), "m")])
    assert results[0].latency_ratio is None and results[0].ratio_by_round == []
    assert "not known" in verdicts(results)[0]


def test_rounds_that_differ_by_more_than_the_interval_are_noisy() -> None:
    base = [made_pass(at_ratio(1.0), round=i) for i in range(2)]
    for second, noisy in [(1.2, False), (1.9, True)]:
        ratios = (1.2, second)
        own = [made_pass(at_ratio(r), "m", round=i) for i, r in enumerate(ratios)]
        found = [result for result in summarise([*base, *own]) if result.method == "m"]
        assert found[0].is_noisy == noisy


@pytest.mark.parametrize(
    "times", [(2.0, 1.0, [3.0]), (1.0, 2.0, [1.5]), (1.0, 1.0, [3.0, 2.0]), (-1.0, 0.0, [1.0])]
)
def test_times_out_of_order_are_no_record(times: tuple[float, float, list[float]]) -> None:
    with pytest.raises(AssertionError, match="times are in order"):
        record("a", *times)
