"""Controllers compared on made-up outputs at made-up step times."""

from pathlib import Path

import pytest

from specbench.cli import main
from specbench.comparison import SPELL_STEPS, Costs, compare, spells, tide
from specbench.depth import StepTable
from specbench.profile import write_profile
from specbench.records import Record
from specbench.trace import RIGHT, WRONG, Trace
from tests.made_profiles import made_profile, made_steps
from tests.made_runs import filed_run, output, paired, reference
from tests.test_trace import TIMES

GRID = [(rows, n) for rows in (1, 64) for n in (0, 8)]
COSTS = Costs(
    drafting=StepTable({(rows, n): 0.05 * n for rows, n in GRID}),
    rest=StepTable({(rows, n): 1 + 0.02 * rows * (n + 1) for rows, n in GRID}),
)
"""Of the steps of `TIMES`, in parts."""
ALWAYS: list[Trace] = [[RIGHT] * 60] * 8
NEVER: list[Trace] = [[WRONG] * 60] * 8


def regrets(traces: list[Trace], batch: int) -> dict[str, float]:
    return {one.name: one.regret for one in compare(traces, COSTS, [batch], depth=4)}


def test_where_all_is_right_the_deepest_draft_misses_next_to_nothing() -> None:
    found = regrets(ALWAYS, 1)
    assert min(found, key=found.__getitem__) in ("fixed at 4", "goodput", "survival")
    assert found["fixed at 4"] < 0.01 < found["fixed at 1"] < found["fixed at 0"]


def test_where_nothing_is_right_drafting_is_what_is_missed() -> None:
    found = regrets(NEVER, 8)
    assert found["fixed at 0"] == pytest.approx(0, abs=1e-9)
    assert found["goodput"] < found["fixed at 1"] < found["fixed at 4"]


def test_a_load_that_changes_goes_up_and_down() -> None:
    room = spells(tide([8, 1, 4]), 2.0)
    assert [room(second) for second in (0, 1.9, 2, 4, 6, 8, 9, 10)] == [1, 1, 4, 8, 4, 1, 1, 4]


def test_under_a_load_that_changes_those_that_know_the_load_miss_least() -> None:
    """Half of the drafts are right: worth it for one row at these times, and not for many."""
    traces: list[Trace] = [[RIGHT, WRONG, WRONG] * 20] * 8
    found = [one for one in compare(traces, COSTS, [1, 8, 64], depth=4) if one.batch is None]
    regret = {one.name: one.regret for one in found}
    fixed = min(missed for name, missed in regret.items() if name.startswith("fixed"))
    assert max(regret["goodput"], regret["survival"]) < fixed
    # All have the same time, whatever they make of it; their last step may end after it.
    end_s = 4 * SPELL_STEPS * TIMES.step_s([0])
    for one in found:
        assert end_s <= one.made.seconds < end_s + TIMES.step_s([4] * 64)
        assert one.made.num_tokens == pytest.approx(one.made.tokens_per_s * one.made.seconds)


def test_drafts_that_are_not_verified_have_been_drafted() -> None:
    """At these times half of the drafts pay for one row, if they are all verified."""
    traces: list[Trace] = [[RIGHT, WRONG, WRONG] * 20] * 8
    free = COSTS._replace(drafting=StepTable({place: 0.0 for place in GRID}))
    for batch in (1, 8):
        dear_s, free_s = (
            {one.name: one.made.seconds for one in compare(traces, costs, [batch], depth=4)}
            for costs in (COSTS, free)
        )
        assert dear_s["fixed at 0"] == free_s["fixed at 0"]
        assert dear_s["fixed at 2"] > free_s["fixed at 2"]
        assert dear_s["survival"] > free_s["survival"]


def test_batches_are_compared_once_each() -> None:
    found = compare(ALWAYS, COSTS, [4, 4], ["ema"], depth=4)
    assert [one.batch for one in found] == [4] * len(found)


def test_a_depth_beyond_the_step_times_is_refused() -> None:
    with pytest.raises(ValueError, match=r"--depth 9 is out of range; valid: 1\.\.8"):
        compare(ALWAYS, COSTS, [1], depth=9)


@pytest.fixture
def at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to work in, with a run and a profile in it."""
    monkeypatch.chdir(tmp_path)
    filed_run(tmp_path / "run", paired("echo", 2, num_prompts=8), workloads={"code": {}})
    write_profile(tmp_path / "here.json", made_profile(steps={"echo": made_steps(level_s=0.01)}))
    return tmp_path


def test_the_command_shows_each_controller_at_each_batch(
    at: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = "compare run --profile here.json --method echo --format md"
    asked = ["--controllers", "ema:tiers=1/3,warm_up=2,goodput", "--batches", "1,4"]
    assert main([*words.split(), *asked]) == 0
    shown = capsys.readouterr().out
    names = [line.split("|")[1].strip() for line in shown.splitlines() if line.startswith("|")]
    fixed = [f"fixed at {depth}" for depth in range(4)]
    assert names[2:] == [*fixed, "ema:tiers=1/3,warm_up=2", "goodput"]
    assert all(f"{load} tokens/s" in shown for load in ("B=1", "B=4", "changing"))


def test_controllers_that_go_by_chances_alone_are_not_compared_unless_asked_for(
    at: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = "compare run --profile here.json --method echo --batches 1 --format md"
    assert main(words.split()) == 0
    assert "confidence" not in capsys.readouterr().out
    assert main([*words.split(), "--controllers", "confidence:threshold=0.3,ema"]) == 0
    shown = capsys.readouterr().out
    assert "confidence:threshold=0.3 goes by the drafter's chances alone" in shown
    assert "ema goes by" not in shown and "recorded drafts are chains" in shown


def test_of_trees_it_is_said_what_is_replayed(at: Path, capsys: pytest.CaptureFixture[str]) -> None:
    filed_run(at / "trees", [reference("a"), output("echo", "a", (6, 3, 2, 3), (2, 1, 0, 1))])
    words = "compare trees --profile here.json --method echo --batches 1 --format md"
    for steps, cost in [
        (made_steps(nodes=2), "the profile's trees of its depth cost"),
        (made_steps(), "the profile's chains, though trees were recorded,"),
    ]:
        write_profile(at / "here.json", made_profile(steps={"echo": steps}))
        assert main(words.split()) == 0
        shown = capsys.readouterr().out
        assert "are trees, of which the path that was taken is replayed" in shown
        assert cost in shown and "drafts are chains" not in shown
        assert "left out: survival: admits the nodes of a tree" in shown
        assert "| survival |" not in shown and "| goodput |" in shown
    assert main([*words.split(), "--controllers", "ema,survival"]) == 2
    error = capsys.readouterr().err
    assert "survival: admits the nodes" in error and "valid: other controllers" in error


def test_short_drafts_of_a_controller_are_not_replayed(
    at: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    methods = {"echo": {"controller": "by_batch:depths=4:0"}, "other": {"controller": "fixed"}}
    records: list[Record] = [
        reference("a"),
        output("echo", "a", (3, 3, 2, 3), (1, 1, 0, 1)),
        output("other", "a", *[(0, 0, 0, 1)] * 4),
    ]
    filed_run(at / "short", records, methods=methods)
    for words in (
        "compare short --profile here.json --method echo",
        "simulate short --profile here.json --method echo",
        "simulate short --drafter 0",
    ):
        assert main(words.split()) == 2
        error = capsys.readouterr().err
        assert "echo ran under the controller by_batch:depths=4:0" in error
        assert "valid: outputs at a fixed depth" in error
    write_profile(at / "here.json", made_profile(steps={"other": made_steps()}))
    assert main(["compare", "short", "--profile", "here.json", "--method", "other"]) == 2
    assert "other drafted nothing here" in capsys.readouterr().err


def test_a_variant_takes_the_steps_of_what_it_is_a_variant_of(
    at: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    filed_run(at / "sweep", paired("echo@d2", 2, num_prompts=8), workloads={"code": {}})
    words = "compare sweep --profile here.json --method echo@d2 --batches 1 --format md"
    note = "no steps of echo@d2; those of echo, of which it is a variant, are taken"
    assert main(words.split()) == 0
    assert note in capsys.readouterr().out
    own = {"echo": made_steps(), "echo@d2": made_steps()}
    write_profile(at / "here.json", made_profile(steps=own))
    assert main(words.split()) == 0
    assert note not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--method eco", "no outputs of method 'eco'"),
        ("--method echo --workload prose", "no outputs of method 'echo' on prose"),
        ("--method vanilla", "the profile has no drafts of method 'vanilla'"),
        ("--method echo --batches 9", "--batches 9 is beyond the profile; valid: 1..4"),
        ("--method echo --controllers fixt", "unknown controller 'fixt' (did you mean 'fixed'?)"),
        ("--method echo --controllers by_batch", "for example by_batch:depths=4:2/16:0"),
        ("--method echo --batches 1 --controllers ema:tiers=x", "whole numbers, as 1/3/7"),
    ],
)
def test_bad_usage_is_one_line(
    at: Path, words: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compare", "run", "--profile", "here.json", *words.split()]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
