"""A profile's predictions held against a sweep, with numbers that can be worked out by hand."""

from dataclasses import replace
from pathlib import Path

import pytest

from specbench.cli import main
from specbench.sweep.points import measure
from specbench.sweep.validation import page, predictions
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
        for one in predictions(PROFILE, RUNS, measure(RUNS))["code"]
        if one.point.setting
    }
    assert set(found) == {(batch, depth) for batch in GAINS for depth in (1, 2, 3)}
    first = found[1, 1]
    assert first.predicted == pytest.approx(4 * step_s(1, 0) / (2 * step_s(1, 1)))
    assert first.error == pytest.approx(first.predicted / 1.2 - 1)
    assert found[4, 1].predicted == pytest.approx(4 * step_s(4, 0) / (2 * step_s(4, 1)))
    assert not found[8, 3].is_inside


def test_batches_that_are_not_full_do_not_count() -> None:
    """They do not in what was measured."""
    run = RUNS[4]
    short = [
        replace(t, requests=t.requests[:2]) for t in run.timings if t.requests[0] == "code-5-0"
    ]
    rest = [t for t in run.timings if t.requests[0] != "code-5-0"]
    cut = {**RUNS, 4: replace(run, timings=[*rest, *short])}
    found = predictions(PROFILE, cut, measure(cut))["code"]
    assert [one.predicted for one in found] == [
        one.predicted for one in predictions(PROFILE, RUNS, measure(RUNS))["code"]
    ]


def test_what_lies_beyond_the_profile_is_left_out() -> None:
    steps = {"vanilla": made_steps(rows=(1, 2), depths=(0,)), "echo": made_steps(rows=(1, 2))}
    passes = made_passes(rows=(1, 2), seconds=lambda rows, tokens, _: linear_s(rows, tokens))
    small = made_profile(passes=passes, steps=steps)
    found = predictions(small, RUNS, measure(RUNS))["code"]
    assert {one.point.batch for one in found} == {1, 2}


def test_the_page_sums_the_errors_up() -> None:
    found = predictions(PROFILE, RUNS, measure(RUNS))
    errors = sorted(abs(one.error or 0.0) for one in found["code"])
    text, middle = markdown(page(found)), 100 * (errors[5] + errors[6]) / 2
    assert f"over 12 points the prediction is off by {middle:.1f} % in the median" in text
    assert f"{100 * errors[-1]:.1f} % at most" in text


def test_too_few_batches_leave_no_interval_to_lie_in() -> None:
    runs = {batch: batch_run(batch, here, num_batches=4) for batch, here in GAINS.items()}
    found = predictions(PROFILE, runs, measure(runs))
    assert {one.is_inside for one in found["code"]} == {None}
    text = markdown(page(found))
    assert "no point has a measured interval to lie in" in text and " of 0" not in text


def test_a_profile_that_lacks_a_method_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="the profile has no drafts of method 'echo'"):
        predictions(made_profile(steps={}), RUNS, measure(RUNS))


def test_a_profile_is_read_before_anything_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["sweep", "--out", str(tmp_path / "sweep"), "--profile", str(tmp_path / "none.json")]
    assert main(words) == 2
    assert "no profile" in capsys.readouterr().err and not (tmp_path / "sweep").exists()
