"""Tests of which runs share a table, and of their union."""

from typing import Any

import pytest

from specbench.merge import differences, sections, unite
from specbench.metrics import pair_times
from specbench.records import Run
from specbench.stats import speed_up
from tests.made_runs import INFO, made_run, paired, reference, timing


def changed(part: str, **values: Any) -> dict[str, Any]:
    """A part of the usual info with some values changed."""
    return {part: {**INFO[part], **values}}


@pytest.mark.parametrize(
    "info",
    [
        changed("target", dtype="bfloat16"),
        changed("provenance", weights_sha256="cd" * 32),
        changed("provenance", cpu="Another CPU"),
        changed("provenance", commit="fedcba"),
        changed("provenance", packages={"torch": "9.9.9", "transformers": "5.24.0"}),
        changed("settings", seed=1),
        changed("settings", max_new_tokens=65),
        changed("settings", a_setting_of_a_later_version=1),
        changed("methods", echo={"label": "copies", "extra_bytes": 3 * 2**20, "depth": 9}),
        changed("workloads", code={"kind": "code", "decoding": {"temperature": 1.0}}),
    ],
)
def test_runs_that_were_measured_otherwise_are_kept_apart(info: dict[str, Any]) -> None:
    runs = [made_run(*paired("echo", 2)), made_run(*paired("other", 2), **info)]
    first, second = sections(runs)
    assert (first.runs, first.differs) == ([runs[0]], [])
    assert second.runs == [runs[1]]
    assert len(second.differs) == 1


@pytest.mark.parametrize(
    "info",
    [
        changed("provenance", started="later", load_average=9.0, argv=["specbench", "other"]),
        changed("settings", methods=["vanilla", "other"], rounds=7, workers=1),
        changed("methods", vanilla={"depth": 9}),
        changed("methods", other={"label": "new"}),
        changed("workloads", code={"kind": "code", "num_prompts": 3}),
    ],
)
def test_runs_of_other_methods_measured_likewise_share_a_section(info: dict[str, Any]) -> None:
    runs = [made_run(*paired("echo", 2)), made_run(*paired("other", 4), **info)]
    (section,) = sections(runs)
    assert section.runs == runs


def test_what_differs_is_said_with_both_values() -> None:
    other = made_run(target={"name": "tiny", "dtype": "bfloat16"})
    assert differences(made_run(), other) == [
        "target.dtype is bfloat16 instead of float32",
        "target.num_parameters is not known instead of 1500000",
    ]


def test_runs_apart_do_not_keep_later_runs_from_sharing() -> None:
    half = changed("target", dtype="bfloat16")
    runs = [
        made_run(*paired(name, 2), **info) for name, info in [("a", {}), ("b", half), ("c", {})]
    ]
    assert [section.runs for section in sections(runs)] == [[runs[0], runs[2]], [runs[1]]]


def test_a_method_is_paired_with_the_baseline_of_its_own_run() -> None:
    slow_machine = made_run(*paired("echo", 2))
    fast = [timing("vanilla", ["code-0"], 1), timing("other", ["code-0"], 1)]
    quick_machine = made_run(reference("code-0"), *fast)
    union = unite([slow_machine, quick_machine])
    assert speed_up(pair_times(union, "code", "echo")).value == pytest.approx(2)
    assert speed_up(pair_times(union, "code", "other")).value == pytest.approx(1)


def test_the_union_holds_each_output_of_the_baseline_once() -> None:
    union = unite([made_run(*paired("echo", 2)), made_run(*paired("other", 2))])
    assert len(union.references) == 6
    assert sorted({record.method for record in union.requests}) == ["echo", "other", "vanilla"]
    assert len(union.requests) == 3 * 6
    assert len(union.timings) == 4 * 6


def test_the_same_method_on_the_same_prompt_in_two_runs_is_an_error() -> None:
    runs = [made_run(*paired("echo", 2), folder=name) for name in ("one", "two")]
    with pytest.raises(
        ValueError, match="one and two both hold the echo output of code, prompt code-0"
    ):
        sections(runs)


def test_the_same_output_twice_in_a_run_is_an_error() -> None:
    with pytest.raises(ValueError, match="made holds the reference output of code, prompt a twice"):
        unite([made_run(reference("a"), reference("a"))])


def test_baselines_that_say_different_things_are_an_error() -> None:
    runs: list[Run] = [made_run(reference("a", num_tokens=n), folder=f"of-{n}") for n in (3, 4)]
    with pytest.raises(ValueError, match="of-3 and of-4 differ in the reference output"):
        unite(runs)
