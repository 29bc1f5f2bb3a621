"""Speed-ups from a profile, against those worked out by hand."""

from dataclasses import replace
from pathlib import Path

import pytest

from specbench.acceptance import Given, Replayed
from specbench.cli import main
from specbench.prediction import Forwards, Steps, on_profile, predict
from specbench.profile import Profile, write_profile
from specbench.records import Record
from specbench.simulate import SimulateConfig
from tests.made_profiles import linear_s, made_passes, made_profile, made_steps
from tests.made_runs import filed_run, output, reference


def linear_profile(**parts: object) -> Profile:
    """Of a machine where all costs are linear and contexts do not matter."""
    return made_profile(**({"passes": made_passes(seconds=linear_s)} | parts))


def test_forwards_are_interpolated_in_all_directions() -> None:
    def seconds(rows: int, tokens: int, context: int) -> float:
        return rows + 10 * tokens + 100 * context

    forwards = Forwards(made_profile(passes=made_passes(seconds=seconds)))
    for place in [(1, 1, 16), (3, 1, 16), (1, 6.5, 16), (4, 3, 40)]:
        rows, tokens, context = place
        assert forwards.seconds(int(rows), tokens, context) == pytest.approx(
            rows + 10 * tokens + 100 * context
        )
    assert forwards.seconds(1, 1, 1000) == forwards.seconds(1, 1, 64)
    with pytest.raises(ValueError, match=r"batch 5 is beyond the profile; valid: 1\.\.4"):
        forwards.seconds(5, 1, 16)
    with pytest.raises(ValueError, match=r"tokens 9 is beyond the profile; valid: 1\.\.8"):
        forwards.seconds(1, 9, 16)


def test_a_context_with_a_gap_is_not_interpolated_on() -> None:
    passes = [one for one in made_passes() if one.context == 16 or one.tokens < 8]
    assert Forwards(made_profile(passes=passes)).contexts == [16]
    with pytest.raises(ValueError, match=r"--context 64 is beyond the profile; valid: 16\.\.16"):
        Steps(made_profile(passes=passes), "echo", 64)
    with pytest.raises(ValueError, match="no forwards but of 1 token a row"):
        Forwards(made_profile(passes=made_passes(tokens=(1,))))
    with pytest.raises(ValueError, match="no context of the profile has all"):
        Forwards(made_profile(passes=[p for p in passes if p.place != (1, 8, 16)]))


def test_steps_of_a_profiled_method_are_its_own() -> None:
    steps = Steps(linear_profile(), "echo", 16)
    assert steps.deepest == 3
    assert steps.cost(2, 3, 3.0) == (1.5, 5.0, 0.25)
    assert steps.cost(1, 0, 0.0) == (0.0, 1.0, 0.25)
    # Fewer nodes than where it was profiled: the forward is as much shorter.
    assert steps.cost(1, 3, 1.0) == pytest.approx((1.5, 2.0, 0.25))
    # Between depths and batches.
    assert steps.cost(3, 2, 2.0) == pytest.approx((1.0, 5.0, 0.25))
    with pytest.raises(ValueError, match=r"--depth 4 is beyond the profile; valid: 0\.\.3"):
        steps.cost(1, 4, 4.0)


def test_vanilla_is_not_the_method_without_drafts() -> None:
    slow = [replace(one, bookkeeping_s=[2.0] * 3) if not one.depth else one for one in made_steps()]
    profile = linear_profile(steps={"vanilla": made_steps(depths=(0,)), "echo": slow})
    assert Steps(profile, "echo", 16).cost(2, 0, 0.0) == pytest.approx((0.0, 2.0, 0.25))
    alone = linear_profile(steps={"echo": slow})
    assert Steps(alone, "echo", 16).cost(2, 0, 0.0) == pytest.approx((0.0, 2.0, 2.0))


def test_what_its_forwards_take_less_than_the_grid_stays_less() -> None:
    """As of a drafter that has run the first layers already."""
    steps = {"vanilla": made_steps(depths=(0,)), "echo": made_steps(node_s=0.5)}
    cost = Steps(linear_profile(steps=steps), "echo", 16).cost(1, 3, 1.0)
    assert cost.forward_s == pytest.approx((1 + 0.5 * 3) * 2 / 4)


def test_steps_of_few_and_of_many_nodes_are_each_held_against_the_grid() -> None:
    """Most of the profiled steps drafted much, some nothing: their median says nothing of the
    mean number of nodes."""
    passes = made_passes(seconds=linear_s)
    nodes = [0.0, 3.0, 3.0]
    steps = [
        replace(one, nodes=nodes, forward_s=[linear_s(one.rows, 1 + round(n)) for n in nodes])
        if one.depth == 3
        else one
        for one in made_steps()
    ]
    profile = made_profile(passes=passes, steps={"vanilla": made_steps(depths=(0,)), "echo": steps})
    cost = Steps(profile, "echo", 16).cost(2, 3, 2.0)
    assert cost.forward_s == pytest.approx(linear_s(2, 3))


def test_forwards_are_scaled_to_the_context() -> None:
    def seconds(rows: int, tokens: int, context: int) -> float:
        return linear_s(rows, tokens) * (2 if context == 64 else 1)

    profile = made_profile(passes=made_passes(seconds=seconds))
    assert Steps(profile, "echo", 64).cost(2, 1, 1.0) == pytest.approx((0.5, 6.0, 0.25))


def test_trees_have_the_nodes_that_were_profiled() -> None:
    steps = {"echo": made_steps(nodes=2)}
    own = Steps(linear_profile(steps=steps), "echo", 16)
    assert own.cost(1, 3, 3.0).forward_s == pytest.approx(7.0)
    replayed = Replayed(RECORDS)
    assert on_profile(own, replayed, 3).nodes(1, 3) == 6.0
    chains = Steps(linear_profile(), "echo", 16)
    assert on_profile(chains, replayed, 3).nodes(1, 3) == replayed.nodes(3)


def test_an_unknown_method_takes_vanillas_steps_and_the_grid() -> None:
    steps = Steps(linear_profile(), "other", 16)
    assert not steps.knows_drafts and steps.deepest == 7
    assert steps.cost(2, 3, 3.0) == pytest.approx((0.0, 5.0, 0.25))
    bare = Steps(linear_profile(steps={}), "other", 16)
    assert bare.cost(2, 3, 3.0) == pytest.approx((0.0, 5.0, 0.0))


RECORDS = [output("echo", "a", (3, 3, 3, 4), (0, 0, 0, 1)), output("echo", "b", (3, 3, 3, 4))]
"""Of five and of four tokens; drafts of three are right, and of the last token none is left."""


def test_a_speed_up_is_predicted_from_recorded_outputs() -> None:
    """Nine steps of vanilla against three: 3 drafted of a, nothing left to draft of its last token
    but the time that drafting takes, 3 drafted of b."""
    own_s = (1.5 + 4 + 0.25) + (1.5 + 1 + 0.25) + (1.5 + 4 + 0.25)
    found = predict(linear_profile(), "echo", RECORDS, 1, 3)
    assert found == pytest.approx(9 * 1.25 / own_s)


def test_rows_that_ended_have_left_the_batch() -> None:
    vanilla_s = 4 * (2 + 0.25) + 1.25
    own_s = (1.5 + 5 + 0.25) + (1.5 + 1 + 0.25)
    found = predict(linear_profile(), "echo", RECORDS, 2, 3)
    assert found == pytest.approx(vanilla_s / own_s)
    # A batch that is never full is as large as what there is.
    assert predict(linear_profile(), "echo", RECORDS, 4, 3) == found


def test_recorded_trees_have_their_own_nodes() -> None:
    """Two of them at depth 1, where the profile's have four."""
    profile = linear_profile(steps={"echo": made_steps(nodes=4, depths=(0, 1))})
    records = [output("echo", "a", (2, 1, 1, 2), (2, 1, 1, 2))]
    found = predict(profile, "echo", records, 1, 1)
    assert found == pytest.approx(4 * 1.25 / (2 * (0.5 + (1 + 2) + 0.25)))


def test_steps_wider_than_the_grid_are_not_predicted() -> None:
    profile = linear_profile(steps={"echo": made_steps(nodes=4)})
    with pytest.raises(ValueError, match=r"tokens 13 is beyond the profile; valid: 1\.\.8"):
        predict(profile, "echo", RECORDS, 1, 1)


def test_a_depth_of_zero_gains_nothing() -> None:
    records = [output("echo", name, *[(0, 0, 0, 1)] * 4) for name in "ab"]
    assert predict(linear_profile(), "echo", records, 2, 0) == 1


def test_what_cannot_be_predicted_is_refused() -> None:
    for method in ("ech", "vanilla"):
        with pytest.raises(ValueError, match=f"no drafts of method '{method}'.*; valid: echo"):
            predict(linear_profile(), method, RECORDS, 1, 1)
    with pytest.raises(ValueError, match="no recorded output"):
        predict(linear_profile(), "echo", [], 1, 1)
    with pytest.raises(ValueError, match="--context 99 is beyond"):
        predict(linear_profile(), "echo", RECORDS, 1, 1, context=99)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A filed profile."""
    write_profile(tmp_path / "profile.json", linear_profile())
    return tmp_path / "profile.json"


def test_a_scenario_on_a_profile_takes_its_steps(path: Path) -> None:
    setup = SimulateConfig(acceptance=(0.5,) * 9, profile=path, method="echo").setup()
    assert setup.batches == (1, 2, 4) and setup.scenario.context == 16
    assert isinstance(setup.scenario.acceptance, Given) and setup.scenario.deepest == 3
    point = setup.scenario.at(1)
    assert point.vanilla_s == 1.25
    assert point.speed_ups == pytest.approx(
        [1.5 * 1.25 / 2.75, 1.75 * 1.25 / 4.25, 1.875 * 1.25 / 5.75]
    )


def test_a_named_drafter_counts_in_place_of_the_profiled(path: Path) -> None:
    setup = SimulateConfig(acceptance=(0.5,), profile=path, method="echo", drafter="0").setup()
    assert setup.scenario.at(1).speed_ups[0] == pytest.approx(1.5 * 1.25 / 2.25)


def test_the_command_says_that_steps_are_interpolated(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    records: list[Record] = [reference("a"), output("echo", "a", (3, 3, 2, 3), (1, 1, 0, 1))]
    filed_run(tmp_path / "run", records)
    assert main(["simulate", str(tmp_path / "run"), "--profile", str(path), "--format", "md"]) == 0
    shown = capsys.readouterr().out
    assert "Predicted, not measured: tiny on Made-up CPU, as profiled" in shown
    assert "interpolated from the profile, not modelled" in shown
    assert "vendor's peaks" not in shown
    assert "drafter: echo (as profiled)" in shown and "| 3 | 2.00 |" in shown
    assert "the run's target has other weights" in shown and "other settings" not in shown


def test_a_variant_takes_the_steps_of_what_it_is_a_variant_of(path: Path, tmp_path: Path) -> None:
    records: list[Record] = [reference("a"), output("echo@d2", "a", (2, 2, 2, 3), (1, 1, 0, 1))]
    filed_run(tmp_path / "run", records)
    setup = SimulateConfig(run=tmp_path / "run", profile=path, method="echo@d2").setup()
    assert setup.drafter == "echo" and setup.scenario.at(1).best.depth >= 0
    assert "those of echo, of which it is a variant, are taken" in setup.doubts[-1]


def test_what_does_not_belong_together_is_said(path: Path, tmp_path: Path) -> None:
    records: list[Record] = [reference("a"), output("echo", "a", (3, 3, 2, 3), (1, 1, 0, 1))]
    target = {"name": "tiny", "dtype": "float32", "weights_sha256": "ab" * 32}
    settings = {"depth": 7, "match": 2}
    for name, match in [("same", 2), ("other", 5)]:
        write_profile(path, linear_profile(methods={"echo": {"depth": 4, "match": match}}))
        run = tmp_path / name
        filed_run(run, records, target=target, methods={"echo": settings})
        doubts = SimulateConfig(run=run, profile=path).setup().doubts
        assert doubts == (
            ("echo ran and was profiled in other settings: match 2 and 5",) if match == 5 else ()
        )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--acceptance 0.5 --device H100", "--device: the profile says that"),
        ("--acceptance 0.5 --dtype float32 --devices 2", "--devices, --dtype: the profile"),
        ("--acceptance 0.5 --tflops 3", "--tflops: the profile says that"),
        ("--acceptance 0.5 --batches 8", "batch 8 is beyond the profile; valid: 1..4"),
        ("--acceptance 0.5 --context 9", "--context 9 is beyond the profile; valid: 16..64"),
        ("--acceptance 0.5,0.5,0.5,0.5 --method echo --depth 4", "--depth 4 is beyond the profile"),
        ("--acceptance 0.5 --method eco", "(did you mean 'echo'?); valid: echo, or a --drafter"),
        ("--acceptance 0.5 --profile gone.json", "no profile gone.json"),
    ],
)
def test_bad_input_is_one_line(
    words: str, message: str, path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", "--profile", str(path), *words.split()]) == 2
    shown = capsys.readouterr()
    (line,) = shown.err.splitlines()
    assert message in line and shown.out == ""
