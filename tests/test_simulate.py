"""The cost model against what can be worked out by hand, and the command."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specbench.acceptance import Given, Replayed
from specbench.cli import main
from specbench.costs import Shape, forward_cost
from specbench.drafter_costs import Draft
from specbench.machines import Machine, device_names, load_machine, load_shape, shape_names
from specbench.recorded_drafter import recorded_drafter
from specbench.records import Record
from specbench.scenario import (
    Model,
    Relative,
    Scenario,
    crossovers,
    make_drafter,
)
from specbench.simulate import SimulateConfig
from specbench.theory import speed_up_iid, tokens_iid
from tests.made_runs import filed_run, output, reference

SMALL = Shape(
    hidden=64, num_layers=4, num_heads=4, num_kv_heads=2, head_dim=16, vocab=512, inner=128
)
IDLE = Machine(name="idle", bandwidth=1e9, rate=1e18, overhead_s=0)
"""Arithmetic costs nothing there."""
BUSY = Machine(name="busy", bandwidth=1e18, rate=1e9, overhead_s=0)
"""Memory costs nothing there."""


def scenario(machine: Machine, drafter: str = "0", **acceptance: float) -> Scenario:
    given = Given((acceptance.get("alpha", 0.8),) * 4)
    return Scenario(
        machine=machine,
        target=SMALL,
        drafter=make_drafter(drafter, SMALL, 2, 4),
        acceptance=given,
        context=1,
    )


def test_a_pass_takes_the_longer_of_traffic_and_arithmetic_and_its_overhead() -> None:
    machine = Machine(name="m", bandwidth=100, rate=1000, overhead_s=2)
    cost = forward_cost(SMALL, 1)
    slow = machine.seconds(cost, 3)
    assert slow == max(cost.num_bytes / 100, cost.flops / 1000) + 6
    assert machine.is_compute_bound(cost) == (cost.flops / 1000 > cost.num_bytes / 100)
    assert machine.times(2).seconds(cost, 3) == pytest.approx((slow - 6) / 2 + 6)


def test_where_arithmetic_is_idle_the_gain_is_that_of_theory() -> None:
    for share in (0.0, 0.1):
        point = scenario(IDLE, str(share)).at(1)
        for depth, gain in enumerate(point.speed_ups, start=1):
            # Its keys and values are all that a wider pass reads more.
            assert gain == pytest.approx(speed_up_iid(0.8, depth, share), rel=0.03)
        assert point.vanilla_bound == point.verify_bound == "memory"
    assert scenario(IDLE).at(1).best.depth == 4


def test_where_memory_is_free_speculation_loses_at_every_batch() -> None:
    points = [scenario(BUSY).at(batch) for batch in (1, 8)]
    for point in points:
        assert point.best == (0, 1)
        for depth, gain in enumerate(point.speed_ups, start=1):
            assert gain == pytest.approx(tokens_iid(0.8, depth) / (depth + 1), rel=0.03)
        assert point.vanilla_bound == "compute"
    assert crossovers(points) == [1, 1, 1, 1]


def test_the_crossover_lies_where_passes_become_compute_bound() -> None:
    balance = 32  # FLOPs a byte: a pass of so many tokens is as long in both
    machine = Machine(name="m", bandwidth=1e9, rate=balance * 1e9, overhead_s=0)
    points = [scenario(machine).at(batch) for batch in (1, 4, 8, 16, 32, 64, 128)]
    gains = [point.best.speed_up for point in points]
    assert gains == sorted(gains, reverse=True)
    deepest = crossovers(points)[-1]
    assert deepest is not None and balance / 2 <= deepest <= 2 * balance


def test_of_deeper_drafts_than_acceptance_is_given_for_nothing_is_said() -> None:
    given = Given((0.9, 0.5))
    assert given.tokens(1) == 1.9 and given.tokens(2) == pytest.approx(1 + 0.9 + 0.45)
    assert given.deepest == 2
    with pytest.raises(AssertionError, match="nothing is said"):
        given.tokens(3)
    with pytest.raises(ValueError, match="out of range"):
        Given((1.2,))


def test_recorded_outputs_are_replayed_at_another_depth() -> None:
    # Right at positions 0 1 2 4 5, wrong at 3; nothing was offered at 6.
    record = output("echo", "a", (4, 4, 3, 4), (2, 2, 2, 3))
    replayed = Replayed([record])
    assert replayed.deepest == 4
    assert replayed.tokens(4) == 7 / 2
    assert replayed.nodes(4) == (4 + 2) / 2
    assert replayed.tokens(1) == 7 / 4
    assert replayed.tokens(2) == 7 / 3


def test_static_batches_empty_towards_their_end() -> None:
    """Of 4 and 2 tokens, and of 3: vanilla has two rows for two steps; of depth 3 the first takes
    one step and the second two. A batch that is not full does not count."""
    records = [
        output("echo", "a", (3, 3, 3, 4)),
        output("echo", "b", (3, 3, 0, 1), (0, 0, 0, 1)),
        output("echo", "c", (2, 2, 2, 3)),
    ]
    static = Replayed(records, static=True)
    assert static.largest == 3
    assert static.steps(2, 0) == {2: 2, 1: 2}
    assert static.steps(2, 3) == {2: 1, 1: 1}
    assert static.steps(1, 0) == {1: 9} and static.steps(3, 0) == {3: 2, 2: 1, 1: 1}
    assert Replayed(records).steps(2, 3) == {2: pytest.approx(4 / 9)}
    here = replace(scenario(IDLE), acceptance=static)
    vanilla_s = 2 * here.step(2, 0).total_s + 2 * here.step(1, 0).total_s
    own_s = here.step(2, 3).total_s + here.step(1, 3).total_s
    assert here.speed_up(2, 3) == pytest.approx(vanilla_s / own_s)


def test_static_batches_are_of_one_workload() -> None:
    records = [
        output("echo", f"{workload}{i}", (1, 1, 1, 2), (0, 0, 0, 1), workload=workload)
        for i in range(3)
        for workload in ("code", "prose")[: 1 + (i < 2)]
    ]
    static = Replayed(records, static=True)
    assert static.largest == 2
    assert static.steps(2, 0) == {2: 3 * 2}


def test_drafters_cost_what_they_run() -> None:
    draft = Draft(rows=2, levels=[1, 1, 1], context=10)
    step = IDLE.seconds(forward_cost(SMALL, 2, 1, 10), 4)
    assert Relative(0.25, SMALL).seconds(IDLE, draft) == pytest.approx(0.75 * step)
    own = Model(SMALL).seconds(IDLE, draft)
    assert own == pytest.approx(3 * step, rel=0.05)
    heads, features = (make_drafter(name, SMALL, 2, 4) for name in ("heads", "features"))
    assert 0 < heads.seconds(IDLE, draft) < own
    assert 0 < features.seconds(IDLE, draft) < own
    none = Draft(rows=2, levels=[], context=10)
    for drafter in (Model(SMALL), heads, features, Relative(0.25, SMALL)):
        assert drafter.seconds(IDLE, none) == 0
    with pytest.raises(ValueError, match="out of range"):
        make_drafter("-1", SMALL, 2, 4)


@pytest.mark.parametrize(
    ("drafter", "weights"),
    [
        ("0", 0.0),
        ("0.25", 0.25 * SMALL.num_weights),
        ("heads", 4 * SMALL.hidden**2),
        ("smollm2-135m", load_shape("smollm2-135m").num_weights),
    ],
)
def test_the_memory_of_drafters_is_counted(drafter: str, weights: float) -> None:
    assert make_drafter(drafter, SMALL, 2, 4).weight_bytes == pytest.approx(2 * weights)


@pytest.mark.parametrize(
    ("name", "billions", "active"),
    [
        ("llama-3.1-70b", 70.6, 69.5),
        ("qwen3-30b-a3b", 30.5, 3.0),
        ("qwen3.5-27b-class", 24.3, 23.0),
        ("llama-3.2-1b", 1.24, 1.24),
        ("smollm2-135m", 0.1345, 0.1345),
    ],
)
def test_named_shapes_have_their_weights(name: str, billions: float, active: float) -> None:
    shape = load_shape(name)
    assert shape.num_weights == pytest.approx(billions * 1e9, rel=0.01)
    assert shape.num_active_weights == pytest.approx(active * 1e9, rel=0.02)
    assert name in shape_names()


def test_the_table_has_the_devices_that_were_asked_for() -> None:
    assert device_names() == ["A100", "H100", "H200", "L40S", "RTX4090"]
    assert load_machine("h100", "bfloat16").rate == 989e12
    with pytest.raises(ValueError, match="did you mean 'H100'"):
        load_machine("H101", "bfloat16")


def test_a_shape_comes_from_a_folder(tmp_path: Path) -> None:
    config = {
        "hidden_size": 8,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 16,
        "vocab_size": 32,
    }
    (tmp_path / "config.json").write_text(json.dumps({"text_config": config}))
    assert load_shape(str(tmp_path)).inner == load_shape(str(tmp_path / "config.json")).inner == 16


def test_the_command_states_its_assumptions(capsys: pytest.CaptureFixture[str]) -> None:
    words = "simulate --acceptance 0.8,0.7,0.7 --batches 1,64,4096 --drafter 0.05 --devices 16"
    assert main([*words.split(), "--format", "md"]) == 0
    shown = capsys.readouterr().out
    assert "Predicted, not measured: llama-3.1-70b on 16 x H200" in shown
    assert "max(bytes / bandwidth, FLOPs / rate)" in shown
    assert "| 3 | 2.75 |" in shown
    assert "switch speculation off" in shown
    assert main(words.split()) == 0
    assert "Predicted, not measured" in capsys.readouterr().out


def test_recorded_steps_are_replayed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    records: list[Record] = [
        reference("a"),
        output("vanilla", "a", *[(0, 0, 0, 1)] * 4),
        output("echo", "a", (3, 3, 2, 3), (1, 1, 0, 1)),
    ]
    filed_run(tmp_path / "run", records)
    assert main(["simulate", str(tmp_path / "run"), "--drafter", "0", "--format", "md"]) == 0
    shown = capsys.readouterr().out
    assert "| 1 | 1.33 |" in shown and "| 3 | 2.00 |" in shown and shown.count("\n| 4 |") == 1
    assert "batches are always full" in shown
    static = ["simulate", str(tmp_path / "run"), "--drafter", "0", "--static", "--format", "md"]
    assert main(static) == 0
    shown = capsys.readouterr().out
    assert "static batching" in shown and "\n| 2 |" in shown and shown.count("B=") == 1
    assert main([*static, "--batches", "1,2"]) == 2
    assert "--batches 2 is out of range; valid: 1..1" in capsys.readouterr().err
    assert main(["simulate", str(tmp_path / "run"), "--method", "vanilla"]) == 2
    assert "valid: --method echo" in capsys.readouterr().err


def test_what_nobody_said_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "--acceptance", "0.8", "--format", "md"]) == 0
    shown = capsys.readouterr().out
    assert "drafter: 0 (assumed: a free look-up, as no --drafter was named)" in shown
    assert "by default: model llama-3.1-70b and device H200" in shown
    words = "simulate --acceptance 0.8 --model llama-3.2-1b --device H100 --drafter heads"
    assert main([*words.split(), "--format", "md"]) == 0
    shown = capsys.readouterr().out
    assert "by default" not in shown and "drafter: heads (as named)" in shown


def test_depths_end_where_acceptance_does(capsys: pytest.CaptureFixture[str]) -> None:
    words = "simulate --acceptance 0.8,0.7,0.6 --batches 1 --format md"
    ends = "depths end at 3: no acceptance is given beyond that"
    for depth, last, is_said in [("", 3, True), ("--depth 8", 3, True), ("--depth 2", 2, False)]:
        assert main([*words.split(), *depth.split()]) == 0
        shown = capsys.readouterr().out
        assert f"\n| {last} |" in shown and f"\n| {last + 1} |" not in shown
        assert (ends in shown) == is_said


def test_batches_that_do_not_fit_do_not_count(capsys: pytest.CaptureFixture[str]) -> None:
    words = "simulate --acceptance 0.8 --format md --batches"
    assert main([*words.split(), "1,16,256"]) == 0
    shown = capsys.readouterr().out
    assert "pays up to the largest batch here that fits, 16. Batches that do not" in shown
    assert "left out: 256" in shown and "B=16" in shown and "B=256" not in shown
    assert main([*words.split(), "256"]) == 0
    assert "No batch here fits into the memory (256)" in capsys.readouterr().out


TARGET = {"name": "tiny", "dtype": "float32", "num_parameters": 1000}


@pytest.mark.parametrize(
    ("about", "drafter", "why"),
    [
        ({"extra_bytes": 0}, "0", "has no weights"),
        ({"extra_bytes": 9, "num_heads": 4}, "heads", "4 heads"),
        ({"taps": [1], "num_parameters": 50}, "features", "hidden states"),
        ({"num_parameters": 250}, "0.25", "0.25 of its target's"),
        ({"extra_bytes": 0, "exit_layer": 6, "layers_passed_by": [6, 7, 8]}, "layers:3", "6 of 9"),
        ({"extra_bytes": 9, "exit_layer": 0, "layers_passed_by": [1, 2, 3]}, "exit:1", "1 of 4"),
    ],
)
def test_the_drafter_is_the_recorded_one(about: dict[str, Any], drafter: str, why: str) -> None:
    assumed = recorded_drafter({"methods": {"m": about}, "target": TARGET}, "m", SMALL)
    assert assumed.drafter == drafter and why in assumed.why
    assert make_drafter(drafter, SMALL, 2, 4).weight_bytes >= 0


@pytest.mark.parametrize(
    ("about", "why"),
    [
        (None, "does not say what it is"),
        ({"extra_bytes": 9}, "does not say what it is"),
        ({"num_parameters": 1000}, "not known to be smaller"),
        ({"extra_bytes": 0, "exit_layer": 0, "layers_passed_by": [2]}, "of how many"),
    ],
)
def test_a_drafter_that_cannot_be_known_is_asked_for(
    about: dict[str, Any] | None, why: str
) -> None:
    info = {"methods": {} if about is None else {"m": about}, "target": TARGET}
    with pytest.raises(ValueError, match=f"{why}.*; valid: --drafter a share .*llama-3.2"):
        recorded_drafter(info, "m", SMALL)


def test_layers_that_drafted_are_not_verified_again() -> None:
    whole, stack, trained = (scenario(IDLE, name) for name in ("0", "layers:2", "exit:2"))
    assert 0 < stack.step(1, 2).forward_s < whole.step(1, 2).forward_s
    assert stack.step(1, 0) == whole.step(1, 0)
    assert 0 < stack.step(1, 2).draft_s < trained.step(1, 2).draft_s
    for name in ("layers:0", "layers:4", "exit:x"):
        with pytest.raises(ValueError, match="out of range; valid"):
            make_drafter(name, SMALL, 2, 4)


def test_of_several_methods_one_is_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    records: list[Record] = [reference("a")]
    records += [output(name, "a", (3, 3, 2, 3), (1, 1, 0, 1)) for name in ("echo", "other")]
    filed_run(tmp_path / "run", records)
    assert main(["simulate", str(tmp_path / "run")]) == 2
    assert "of 2 methods; say which: --method echo or other" in capsys.readouterr().err
    assert main(["simulate", str(tmp_path / "run"), "--method", "echo"]) == 2
    assert "which drafter echo is on another machine" in capsys.readouterr().err


def test_a_replay_says_what_was_never_tested_and_what_trees_cost(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    filed_run(tmp_path / "run", [reference("a"), output("echo", "a", (6, 3, 3, 4))])
    assert main(["simulate", str(tmp_path / "run"), "--drafter", "0", "--format", "md"]) == 0
    shown = capsys.readouterr().out
    assert "as often as the tested ones of all outputs, on the average" in shown
    assert "recorded drafts are trees, of which the path that was taken is replayed" in shown
    assert "this promises too much" in shown


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("", "valid: --acceptance or a run"),
        ("--acceptance 0.5 --device T1000", "unknown device 'T1000'"),
        ("--acceptance 0.5 --dtype int3", "unknown dtype 'int3'"),
        ("--acceptance 0.5 --tflops 3", "--bandwidth-gb-s"),
        ("--acceptance 0.5 --depth 0", "--depth 0 is out of range"),
        ("--acceptance 0.5 --batches 0", "--batches 0 is out of range"),
        ("--acceptance 1.5", "chance 1.5 is out of range"),
        ("--acceptance x", "argument --acceptance"),
        ("--acceptance 0.5 --method ngram", "name a run"),
        ("--acceptance 0.5 --static", "recorded outputs; name a run"),
        ("--acceptance 0.5 --drafter=", "--drafter is empty"),
        ("--acceptance 0.5 --model=", "--model is empty"),
        (
            "--acceptance 0.5 --device H100 --tflops 1 --bandwidth-gb-s 1 --overhead-us 1",
            "the device is given twice; valid: --device or --bandwidth-gb-s",
        ),
        (
            "--acceptance 0.5 --tflops 1 --bandwidth-gb-s nan --overhead-us 1",
            "custom device: bandwidth, FLOP/s or overhead is out of range",
        ),
        ("--acceptance 0.5 --tflops inf --bandwidth-gb-s 1 --overhead-us 1", "is out of range"),
        ("gone", "gone holds no run"),
    ],
)
def test_bad_input_is_one_line(
    words: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", *words.split()]) == 2
    shown = capsys.readouterr()
    (line,) = shown.err.splitlines()
    assert message in line and shown.out == ""


def test_another_device_is_described() -> None:
    config = SimulateConfig(acceptance=(0.5,), bandwidth_gb_s=100, tflops=1, overhead_us=5)
    machine = config.setup().scenario.machine
    assert (machine.bandwidth, machine.rate, machine.overhead_s) == pytest.approx(
        (1e11, 1e12, 5e-6)
    )
    assert config.setup().scenario.at(1).fits is None
