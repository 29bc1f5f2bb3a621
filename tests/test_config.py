"""The settings of a run are checked before anything is loaded."""

import json
from typing import Any

import pytest

from specbench.config import RunConfig
from specbench.workloads import Decoding


def test_the_baseline_is_always_among_the_methods_and_first() -> None:
    """Every speed-up needs it; nothing is measured twice."""
    assert RunConfig(methods=("ngram", "ngram")).methods == ("vanilla", "ngram")
    assert RunConfig(methods=("ngram", "vanilla")).methods == ("vanilla", "ngram")
    assert RunConfig().methods[0] == "vanilla"


def test_a_workload_given_twice_is_measured_once() -> None:
    """Its records would be there twice."""
    assert RunConfig(workloads=("math", "chat", "math")).workloads == ("math", "chat")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"prompts": 0}, "--prompts 0 .* valid: 1 or more"),
        ({"max_new_tokens": 0}, "--max-new-tokens 0 .* valid: 1 or more"),
        ({"batch_size": 0}, "--batch-size 0 .* valid: 1 or more"),
        ({"rounds": 0}, "--rounds 0 .* valid: 1 or more"),
        ({"workers": 0}, "--workers 0 .* valid: 1 or more"),
        ({"gpus_per_worker": 0}, "--gpus-per-worker 0 .* valid: 1 or more"),
        ({"depth": -1}, "--depth -1 .* valid: 0 or more"),
        ({"temperature": -0.1}, "temperature -0.1 .* valid: 0 or above"),
        ({"temperature": float("nan")}, "temperature nan .* valid: 0 or above"),
        ({"top_k": -1}, r"top-k -1 .* valid: 0 \(off\) or above"),
        ({"top_p": 0.0}, "top-p 0.0 .* valid: above 0, at most 1"),
        ({"sampling": "greedy"}, "unknown sampling rule 'greedy'; valid: rejection, coupled"),
        ({"dtype": "int8"}, "unknown dtype 'int8'; valid: float32, bfloat16, float16"),
        ({"workloads": ()}, "no workload is given"),
        (
            {"methods": ("ngrams",)},
            r"unknown method 'ngrams' \(did you mean 'ngram'\?\); valid: .*",
        ),
        ({"knobs": {"ngram": {"x": "1"}}}, "has no knob 'x'.*; valid: depth, .*min_match"),
        ({"knobs": {"ngram": {"depth": "two"}}}, "ngram.depth: 'two' .* valid: a whole number"),
        (
            {"methods": ("ngram",), "knobs": {"early_exit": {"depth": "2"}}},
            "--set early_exit.depth: .* not in this run; valid: vanilla, ngram",
        ),
    ],
)
def test_what_is_unknown_or_out_of_range_is_refused_with_what_is_valid(
    settings: dict[str, Any], message: str
) -> None:
    """In one line."""
    with pytest.raises(ValueError, match=message) as caught:
        RunConfig(**settings)
    assert "\n" not in str(caught.value)


def test_the_runs_depth_is_each_methods_unless_its_own_knob_says_otherwise() -> None:
    """A method without either keeps its default."""
    from specbench.registry import load_method

    config = RunConfig(methods=("ngram", "early_exit"), depth=3, knobs={"ngram": {"depth": "5"}})
    assert config.method_config("ngram", load_method("ngram")).depth == 5
    assert config.method_config("early_exit", load_method("early_exit")).depth == 3
    plain = RunConfig(methods=("ngram",))
    assert plain.method_config("ngram", load_method("ngram")) == load_method("ngram").Config()


def test_a_run_decodes_as_it_says_or_else_as_the_workload_does() -> None:
    """Each of temperature, top-k and top-p by itself."""
    card = Decoding(temperature=0.8, top_k=50, top_p=0.9)
    own = RunConfig(methods=("ngram",), sampling="coupled").sampling_for(card)
    assert (own.temperature, own.top_k, own.top_p, own.rule) == (0.8, 50, 0.9, "coupled")
    cold = RunConfig(methods=("ngram",), temperature=0.0, top_k=0).sampling_for(card)
    assert (cold.temperature, cold.top_k, cold.top_p) == (0.0, 0, 0.9)


def test_settings_survive_their_file() -> None:
    """A run that goes on has the settings that it began with."""
    config = RunConfig(
        methods=("ngram",), workloads=("math",), depth=2, top_p=0.9, knobs={"ngram": {"depth": "3"}}
    )
    assert RunConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_a_setting_of_another_version_is_refused() -> None:
    """It would be ignored silently."""
    with pytest.raises(ValueError, match=r"settings: colour: Unexpected keyword argument"):
        RunConfig.from_dict({"colour": "red"})
