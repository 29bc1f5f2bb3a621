"""What is read out of a profile, against a machine that was made up."""

import pytest

from specbench.profile import PassTimes
from specbench.profile_page import page
from specbench.roofline import analyse, breadths, drafting, knees, machine
from specbench.tables import markdown
from tests.made_profiles import MACHINE, SMALL, made_passes, made_profile, made_steps


def test_the_machine_that_made_the_times_is_found_again() -> None:
    found = machine(made_profile())
    assert (found.bandwidth, found.rate) == (MACHINE.bandwidth, MACHINE.rate)
    assert found.overhead_s == pytest.approx(MACHINE.overhead_s)
    assert found.name == "Made-up CPU, as profiled" and found.memory_bytes == 2**30


def test_times_below_the_roofline_leave_no_overhead() -> None:
    fast = made_profile(passes=made_passes(seconds=lambda *place: 1e-9))
    assert machine(fast).overhead_s == 0


def test_every_forward_is_held_against_the_roofline() -> None:
    found = analyse(made_profile(passes=made_passes(tokens=(1, 8, 64))))
    for one in found:
        assert one.ratio == pytest.approx(1)
        assert one.is_compute_bound == (one.cost.intensity > MACHINE.rate / MACHINE.bandwidth)
    assert {one.is_compute_bound for one in found} == {False, True}


def test_the_knee_of_a_known_roofline_is_found() -> None:
    """One token waits for memory alone; n of them for arithmetic, once that takes longer."""
    profile = made_profile(
        shape=SMALL, passes=made_passes(rows=(1, 2), tokens=range(1, 33), contexts=(16,))
    )
    one, two = knees(profile)
    assert (one.rows, two.rows) == (1, 2)
    for found in (one, two):
        assert found.measured == found.modelled and found.measured is not None
    # In float32 a weight is 4 bytes and, for each token, 2 FLOPs: 16 FLOPs a byte are 32 tokens,
    # and attention's arithmetic and the overhead shift that a little.
    assert one.measured is not None and two.measured is not None
    assert 24 <= one.measured <= 32
    assert two.measured == pytest.approx(one.measured / 2, abs=2)


def test_the_knee_lies_between_the_widths_that_were_measured() -> None:
    def seconds(rows: int, tokens: int, context: int) -> float:
        return 1 + 0.025 * (tokens - 1) * rows

    profile = made_profile(passes=made_passes(seconds=seconds))
    found = {(one.context, one.rows): one for one in knees(profile)}
    assert found[16, 1].measured == 5 and found[16, 2].measured == 3 and found[64, 4].measured == 2
    flat = made_profile(passes=made_passes(seconds=lambda *place: 1.0))
    assert {one.measured for one in knees(flat)} == {None}


def test_breadth_is_held_against_depth_round_by_round() -> None:
    passes = [
        PassTimes(rows=1, tokens=1, context=16, seconds=[1, 1, 1]),
        PassTimes(rows=1, tokens=4, context=16, seconds=[2, 4, 8]),
        PassTimes(rows=4, tokens=1, context=16, seconds=[3, 6, 12]),
        PassTimes(rows=2, tokens=1, context=16, seconds=[1, 1, 1]),
    ]
    (found,) = breadths(made_profile(passes=passes))
    assert found.tokens == 4 and found.ratio == (1.5, 1.5, 1.5)
    assert 0 < found.extra_bytes < 0.2


def test_drafting_is_a_share_of_a_step_without_a_draft() -> None:
    found = {(one.steps.rows, one.steps.depth): one for one in drafting(made_steps())}
    assert sorted(found) == [(1, 1), (1, 3), (2, 1), (2, 3), (4, 1), (4, 3)]
    assert found[1, 3].level == 0.5 and found[2, 3].level == 0.25
    assert found[1, 1].step.median == pytest.approx((0.5 + 2 + 0.25) / (1 + 0.25))
    assert found[4, 3].nodes == 3
    assert drafting(made_steps(depths=(0,))) == []


def test_a_page_shows_all_of_it() -> None:
    shown = markdown(page(made_profile(notes=["left out: 32 tokens"])))
    for text in (
        "Profile of tiny on Made-up CPU",
        "1.0 GB/s, 16 GFLOP/s, 10 us for each layer",
        "left out: 32 tokens",
        "forwards behind a context of 64",
        "the knee",
        "breadth against depth",
        "| echo | 2 | 3 | 3.0 | 1500.00 | 5000.00 | 250.00 | 25.0 % |",
    ):
        assert text in shown
    alone = made_profile(passes=made_passes(rows=(1,)), steps={"vanilla": made_steps(depths=(0,))})
    shown = markdown(page(alone))
    assert "no batch was measured" in shown and "steps of the drafters" not in shown
