"""A profile's predictions held against a sweep, with numbers that can be worked out by hand."""

from dataclasses import replace
from pathlib import Path
from statistics import median

import pytest

from specbench.cli import main
from specbench.profile import write_profile
from specbench.sweep.points import measure
from specbench.sweep.validation import hold, page
from specbench.tables import markdown
from tests.made_profiles import linear_s, made_passes, made_profile, made_steps
from tests.made_sweeps import GAINS, batch_run

RUNS = {batch: batch_run(batch, gains) for batch, gains in GAINS.items()}
PROFILE = made_profile(
    passes=made_passes(rows=(1, 2, 4, 8), seconds=lambda rows, tokens, _: linear_s(rows, tokens)),
    steps={
        "vanilla": made_steps(rows=(1, 2, 4, 8), depths=(0,)),
        "echo": made_steps(rows=(1, 2, 4, 8)),
    },
)


def step_s(batch: int, depth: int) -> float:
    """By the profile: half a second a level, a quarter for bookkeeping."""
    return 0.5 * depth + linear_s(batch, 1 + depth) + 0.25


def test_every_point_is_predicted_from_its_own_steps() -> None:
    """A request takes 4 steps of vanilla. Drafts to depth 1 and more are right once, so it takes 2
    of any depth; the last token is left to the bonus."""
    found = {
        (one.point.batch, one.point.setting.depth): one
        for one in hold(PROFILE, RUNS, measure(RUNS)).found["code"]
        if one.point.setting
    }
    assert set(found) == {(batch, depth) for batch in GAINS for depth in (1, 2, 3)}
    first = found[1, 1]
    assert first.predicted == pytest.approx(4 * step_s(1, 0) / (2 * step_s(1, 1)))
    assert first.error == pytest.approx(first.predicted / 1.2 - 1)
    assert found[4, 1].predicted == pytest.approx(4 * step_s(4, 0) / (2 * step_s(4, 1)))
    assert not found[8, 3].is_inside


def test_points_are_simulated_from_the_deepest_of_the_smallest_batch() -> None:
    """Where that was never right, nothing is thought to be. It has 6 requests, too few for 8."""
    run = RUNS[1]
    wrong = [
        replace(r, steps=[[3, 3, 0, 1, 0]] * 4) if r.method == "echo@d3" else r
        for r in run.requests
    ]
    runs = {**RUNS, 1: replace(run, requests=wrong)}
    found = hold(PROFILE, runs, measure(RUNS)).found["code"]
    for one in found:
        batch, setting = one.point.batch, one.point.setting
        if one.simulated is None or setting is None:
            assert batch == 8 and one.simulated_error is None
            continue
        # The last token of a step is left to the bonus: there are 3, 2, 1 and 0 to draft.
        nodes = sum(min(setting.depth, left) for left in range(4)) / 4
        own_s = 0.5 * setting.depth + linear_s(batch, 1) + nodes + 0.25
        assert one.simulated == pytest.approx(step_s(batch, 0) / own_s)
        assert one.simulated_error == pytest.approx(one.simulated / one.measured - 1)
    assert sum(one.simulated is None for one in found) == 3


def test_trees_of_other_sizes_are_not_simulated() -> None:
    run = batch_run(1, {"echo@d1": 1.2, "echo@d3": 1.4, "echo@d3n6": 1.1})
    trees = [
        replace(r, steps=[[6, 3, 1, 2, 1]] * 2) if r.method == "echo@d3n6" else r
        for r in run.requests
    ]
    runs = {1: replace(run, requests=trees)}
    found = hold(PROFILE, runs, measure(runs)).found["code"]
    assert [one.simulated is None for one in found] == [False, False, True]


def test_batches_that_are_not_full_do_not_count() -> None:
    """They do not in what was measured."""
    run = RUNS[4]
    short = [
        replace(t, requests=t.requests[:2]) for t in run.timings if t.requests[0] == "code-5-0"
    ]
    rest = [t for t in run.timings if t.requests[0] != "code-5-0"]
    cut = {**RUNS, 4: replace(run, timings=[*rest, *short])}
    found = hold(PROFILE, cut, measure(cut)).found["code"]
    assert [one.predicted for one in found] == [
        one.predicted for one in hold(PROFILE, RUNS, measure(RUNS)).found["code"]
    ]


def test_what_lies_beyond_the_profile_is_left_out() -> None:
    steps = {"vanilla": made_steps(rows=(1, 2), depths=(0,)), "echo": made_steps(rows=(1, 2))}
    passes = made_passes(rows=(1, 2), seconds=lambda rows, tokens, _: linear_s(rows, tokens))
    small = made_profile(passes=passes, steps=steps)
    held = hold(small, RUNS, measure(RUNS))
    assert {one.point.batch for one in held.found["code"]} == {1, 2}
    text = markdown(page(held))
    assert (
        "not predicted: echo@d1 at batch size 4, echo@d2 at batch size 4, echo@d3 at batch size 4: "
        "batch 4 is beyond the profile; valid: 1..2, or a new `specbench profile`"
    ) in text
    large = made_profile(
        passes=made_passes(rows=(8,), seconds=lambda rows, tokens, _: linear_s(rows, tokens)),
        steps={"vanilla": made_steps(rows=(8,), depths=(0,)), "echo": made_steps(rows=(8,))},
    )
    assert "batch 1 is beyond the profile; valid: 8..8" in markdown(
        page(hold(large, RUNS, measure(RUNS)))
    )


def test_the_page_sums_the_errors_up() -> None:
    held = hold(PROFILE, RUNS, measure(RUNS))
    found, text = held.found, markdown(page(held))
    for what, errors in (
        ("predicted", [one.error for one in found["code"]]),
        ("simulated", [e for one in found["code"] if (e := one.simulated_error) is not None]),
    ):
        sizes = sorted(map(abs, errors))
        assert (
            f"code, {what}: over {len(sizes)} points it is off by {100 * median(sizes):.1f} % in "
            f"the median and {100 * sizes[-1]:.1f} % at most, by more than 10 % at "
            f"{sum(size > 0.1 for size in sizes)}"
        ) in text


def test_too_few_batches_leave_no_interval_to_lie_in() -> None:
    runs = {batch: batch_run(batch, here, num_batches=4) for batch, here in GAINS.items()}
    held = hold(PROFILE, runs, measure(runs))
    assert {one.is_inside for one in held.found["code"]} == {None}
    text = markdown(page(held))
    assert "no point has a measured interval to lie in" in text and " of 0" not in text


def test_a_method_that_the_profile_lacks_is_named() -> None:
    held = hold(made_profile(steps={}), RUNS, measure(RUNS))
    assert held.found == {"code": []}
    text = markdown(page(held))
    assert "echo@d3 at batch size 8: the profile has no drafts of method 'echo'" in text


def test_a_profile_is_read_before_anything_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["sweep", "--out", str(tmp_path / "sweep"), "--profile", str(tmp_path / "none.json")]
    assert main(words) == 2
    assert "no profile" in capsys.readouterr().err and not (tmp_path / "sweep").exists()
    narrow = made_profile(passes=made_passes(tokens=(1,)))
    write_profile(tmp_path / "none.json", narrow)
    assert main(words) == 2
    error = capsys.readouterr().err
    assert "no forwards but of 1 token a row; valid" in error and not (tmp_path / "sweep").exists()
