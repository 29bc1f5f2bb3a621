"""Tests of the metrics, on records whose numbers are worked out by hand."""

import numpy as np
import pytest

from specbench.metrics import (
    Position,
    count_failures,
    count_lossless,
    group_batches,
    measure_acceptance,
    measure_times,
    measure_workload,
    pair_times,
    peak_memory_mib,
    prompt_of,
)
from specbench.stats import speed_up
from tests.made_runs import failure, made_run, output, reference, resource, timing

CHAINS = made_run(
    reference("a"),
    reference("b"),
    # Accepts 2 of 4, all 4, and 1 of 3, where the output ends: no bonus. 9 tokens in 3 steps.
    output("echo", "a", (4, 4, 2, 3), (4, 4, 4, 5), (3, 3, 1, 1)),
    # Accepts none of 4, then drafts nothing. 2 tokens in 2 steps.
    output("echo", "b", (4, 4, 0, 1), (0, 0, 0, 1)),
    output("vanilla", "a", *[(0, 0, 0, 1)] * 9),
)


def test_tau_counts_the_bonus_and_pools_or_averages_by_prompt() -> None:
    acceptance = measure_acceptance(CHAINS, "code", "echo")
    assert acceptance is not None
    assert (acceptance.num_tokens, acceptance.num_steps) == (11, 5)
    assert acceptance.tau == pytest.approx(11 / 5)
    assert acceptance.tau_by_prompt == pytest.approx((9 / 3 + 2 / 2) / 2)


def test_acceptance_is_accepted_over_offered() -> None:
    acceptance = measure_acceptance(CHAINS, "code", "echo")
    assert acceptance is not None
    assert acceptance.rate == pytest.approx(7 / 15)
    assert acceptance.nodes_per_token == pytest.approx(15 / 11)
    assert acceptance.wasted == pytest.approx(8 / 15)


def test_acceptance_by_position_counts_the_offered_and_the_reached() -> None:
    acceptance = measure_acceptance(CHAINS, "code", "echo")
    assert acceptance is not None
    assert acceptance.positions == [
        Position(offered=4, reached=4, accepted=3),
        # The step whose output ended behind position 1 never reached position 2.
        Position(offered=4, reached=2, accepted=2),
        Position(offered=4, reached=2, accepted=1),
        Position(offered=3, reached=1, accepted=1),
    ]
    assert acceptance.positions[2].unconditional == pytest.approx(1 / 4)
    assert acceptance.positions[2].conditional == pytest.approx(1 / 2)


def test_a_position_that_was_never_reached_has_no_rate() -> None:
    assert Position(offered=3, reached=0, accepted=0).conditional is None


def test_a_tree_wastes_its_other_branches() -> None:
    run = made_run(output("echo", "a", (9, 3, 2, 3)))
    acceptance = measure_acceptance(run, "code", "echo")
    assert acceptance is not None
    assert acceptance.rate == pytest.approx(2 / 3)
    assert acceptance.wasted == pytest.approx(7 / 9)


def test_vanilla_has_a_tau_of_one_and_no_acceptance() -> None:
    acceptance = measure_acceptance(CHAINS, "code", "vanilla")
    assert acceptance is not None
    assert (acceptance.tau, acceptance.tau_by_prompt, acceptance.nodes_per_token) == (1, 1, 0)
    assert (acceptance.rate, acceptance.wasted, acceptance.positions) == (None, None, [])


def test_a_method_without_records_has_no_numbers() -> None:
    assert measure_acceptance(CHAINS, "code", "ngram") is None
    assert measure_acceptance(CHAINS, "creative", "echo") is None
    assert measure_times(CHAINS, "code", "echo") is None


def test_a_later_turn_belongs_to_its_prompt_and_a_slash_alone_makes_no_turn() -> None:
    names = {"chat", "chat/2", "chat/3", "HumanEval/2", "HumanEval/2/2"}
    assert {name: prompt_of(name, names) for name in names} == {
        "chat": "chat",
        "chat/2": "chat",
        "chat/3": "chat",
        "HumanEval/2": "HumanEval/2",
        "HumanEval/2/2": "HumanEval/2",
    }


def test_turns_make_one_prompt_of_the_mean_tau() -> None:
    run = made_run(
        reference("a"),
        reference("a/2"),
        reference("b"),
        output("echo", "a", (1, 1, 1, 2)),
        output("echo", "a/2", (1, 1, 0, 1)),
        output("echo", "b", (3, 3, 3, 4)),
    )
    acceptance = measure_acceptance(run, "code", "echo")
    assert acceptance is not None
    assert acceptance.tau_by_prompt == pytest.approx((3 / 2 + 4) / 2)


def test_a_workload_is_described_by_all_tokens_of_its_references() -> None:
    run = made_run(
        reference("a", num_tokens=10, entropy_nats=0.2),
        reference("a/2", num_tokens=30, entropy_nats=1.0, looping=True),
        reference("b", num_tokens=60, entropy_nats=0.8),
        reference("c", workload="creative", entropy_nats=9.0),
    )
    workload = measure_workload(run, "code")
    assert (workload.num_prompts, workload.num_requests, workload.num_tokens) == (2, 3, 100)
    assert workload.entropy_nats == pytest.approx((2 + 30 + 48) / 100)
    # The first is too short to tell.
    assert workload.looping == pytest.approx(1 / 2)


def test_a_workload_that_failed_throughout_has_a_kind_and_no_numbers() -> None:
    workload = measure_workload(made_run(failure(None, "a")), "code")
    assert (workload.kind, workload.num_prompts) == ("code", 0)
    assert (workload.entropy_nats, workload.looping) == (None, None)


def test_times_take_each_batchs_median_round_and_pool_the_shares() -> None:
    run = made_run(
        *(timing("echo", ["a"], s, round=i, prefill_s=s / 4) for i, s in enumerate([2, 4, 99])),
        timing(
            "echo", ["b"], 6, num_tokens=16, num_forwards=8, shares=(0.5, 0.5, 0.0), prefill_s=2
        ),
    )
    times = measure_times(run, "code", "echo")
    assert times is not None
    assert (times.num_batches, times.num_rounds) == (2, 3)
    assert times.tokens_per_s == pytest.approx((4 + 16) / (4 + 6))
    assert times.prefill_s == pytest.approx((1 + 2) / 2)
    assert times.draft_share == pytest.approx((105 * 0.25 + 6 * 0.5) / 111)
    assert times.forward_share == pytest.approx(0.5)
    assert times.bookkeeping_share == pytest.approx(105 * 0.25 / 111)
    assert times.forwards_per_token == pytest.approx((3 * 4 + 8) / (3 * 4 + 16))
    assert times.step_s == pytest.approx(111 / 20)


def test_a_forward_that_rows_share_is_counted_once_and_prefill_by_request() -> None:
    run = made_run(timing("echo", ["a", "b"], 1.0, num_tokens=8, num_forwards=2, prefill_s=3.0))
    times = measure_times(run, "code", "echo")
    assert times is not None
    assert times.forwards_per_token == pytest.approx(0.25)
    assert times.prefill_s == pytest.approx(1.5)


def test_times_are_paired_by_batch_and_round() -> None:
    run = made_run(
        timing("vanilla", ["a"], 8, round=0),
        timing("vanilla", ["a"], 10, round=1),
        timing("vanilla", ["a"], 90, round=2),  # echo has no such round
        timing("echo", ["a"], 4, round=0, num_tokens=2),
        timing("echo", ["a"], 6, round=1, num_tokens=2),
        timing("echo", ["a"], 70, round=3, num_tokens=2),  # vanilla has no such round
        timing("vanilla", ["b"], 7),  # echo failed on it
        timing("echo", ["c"], 1),  # vanilla failed on it
    )
    assert pair_times(run, "code", "echo").tolist() == [[9, 4, 5, 2]]


def test_a_hiccup_in_one_round_of_three_does_not_count() -> None:
    run = made_run(
        *(timing("vanilla", ["a"], s, round=i) for i, s in enumerate([8, 8, 8])),
        *(timing("echo", ["a"], s, round=i) for i, s in enumerate([4, 400, 4])),
    )
    assert speed_up(pair_times(run, "code", "echo")).value == pytest.approx(2)


def test_turns_of_a_prompt_are_one_cluster() -> None:
    run = made_run(
        *(reference(name) for name in ("a", "a/2", "b")),
        *(timing("vanilla", [name], 4) for name in ("a", "a/2", "b")),
        *(timing("echo", [name], 2) for name in ("a", "a/2", "b")),
    )
    pairs = pair_times(run, "code", "echo")
    assert sorted(pairs.tolist()) == [[4, 4, 2, 4], [8, 8, 4, 8]]


def test_batches_that_share_prompts_are_one_cluster_also_through_others() -> None:
    names = {"a", "a/2", "b", "b/2", "c"}
    clusters = group_batches([("a",), ("c",), ("b",), ("a/2", "b/2")], names)
    assert sorted(sorted(cluster) for cluster in clusters) == [
        [("a",), ("a/2", "b/2"), ("b",)],
        [("c",)],
    ]


def test_without_the_baseline_there_are_no_pairs() -> None:
    run = made_run(timing("echo", ["a"], 2))
    assert pair_times(run, "code", "echo").shape == (0, 4)


def test_the_speed_up_of_methods_with_other_tokens_is_per_token() -> None:
    run = made_run(
        timing("vanilla", ["a"], 8, num_tokens=4), timing("echo", ["a"], 8, num_tokens=8)
    )
    estimate = speed_up(np.tile(pair_times(run, "code", "echo"), (5, 1)))
    assert estimate.value == pytest.approx(2)


def test_losslessness_is_counted_by_verdict() -> None:
    step = (1, 1, 1, 2)
    run = made_run(
        output("echo", "a", step),
        output("echo", "b", step),
        output("echo", "c", step, lossless="tie"),
        output("vanilla", "a", (0, 0, 0, 1), lossless="broken"),
    )
    assert count_lossless(run, "code", "echo") == {"exact": 2, "tie": 1}


def test_failures_are_a_methods_own_and_those_before_its_turn_each_request_once() -> None:
    run = made_run(
        failure("echo", "a"), failure("echo", "a"), failure(None, "b"), failure("vanilla", "c")
    )
    assert count_failures(run, "code", "echo") == 2
    assert count_failures(run, "creative", "echo") == 0


def test_peak_memory_is_that_of_the_largest_worker() -> None:
    assert peak_memory_mib(made_run(resource(100), resource(300), resource(200))) == 300
    assert peak_memory_mib(made_run()) is None
