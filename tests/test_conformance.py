"""The conformance kit: it catches every broken method and loop and names the kind of fault, and
what is right passes."""

import multiprocessing
import os
import pickle
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import pytest

from specbench import registry
from specbench.cli import main
from specbench.conformance import broken
from specbench.conformance.cases import CASES
from specbench.conformance.drafters import Bigram, Shadow
from specbench.conformance.faults import COUNTING, ERROR, KINDS, METADATA, RULE, Fault, WrongToken
from specbench.conformance.kit import (
    FAIL,
    NO_MATTER,
    PASS,
    Result,
    check,
    conform,
    read_knobs,
    subjects,
)
from specbench.conformance.settings import Subject, settings
from specbench.decode import Decoder
from specbench.method import Batch, Budget, Method, MethodConfig, Proposal

BROKEN = "specbench.conformance.broken"
OF_LOOPS = (
    "prompt_1_token",
    "eos_mid_block",
    "cap_inside_block",
    "stop_string_mid_block",
    "sampled_distribution_chi2",
)
OF_METHODS = (
    "prompt_1_token",
    "state_reset_between_prompts",
    "kv_rollback_audit",
    "sampled_distribution_chi2",
)
"""Cases that tell all controls apart; the others name the same kinds, in more time."""


def faults(results: list[Result]) -> list[Fault]:
    return [result.fault for result in results if result.fault]


def in_settings(method: type[Method]) -> list[Subject]:
    return settings(method.__name__, method, {})


@pytest.mark.parametrize("method", broken.METHODS, ids=lambda method: method.__name__)
def test_a_broken_method_is_caught_and_its_kind_of_fault_named(method: type[Method]) -> None:
    found = faults(list(conform(in_settings(method), cases=OF_METHODS)))
    assert {fault.kind for fault in found} == {broken.METHODS[method]}


@pytest.mark.parametrize("loop", broken.LOOPS, ids=lambda loop: loop.__name__)
def test_a_broken_loop_is_caught_and_its_kind_of_fault_named(loop: type[Decoder]) -> None:
    found = faults(list(conform(in_settings(Bigram)[:2], loop, OF_LOOPS)))
    assert {fault.kind for fault in found} == {broken.LOOPS[loop]}


@pytest.mark.parametrize("method", [Bigram, Shadow])
def test_the_drafters_that_are_broken_there_are_right_themselves(method: type[Method]) -> None:
    assert not faults(list(conform(in_settings(method))))


def test_every_kind_of_fault_has_a_control() -> None:
    assert {*broken.METHODS.values(), *broken.LOOPS.values()} == set(KINDS) - {ERROR}


def test_no_broken_method_can_be_selected() -> None:
    origins = {source.module for source in registry.sources().values()}
    assert not any("conformance" in module for module in origins)
    for method in broken.METHODS:
        with pytest.raises(ValueError, match="unknown method"):
            registry.load_method(f"{BROKEN}:{method.__name__}")


def test_the_first_wrong_token_is_shown_with_what_stands_before_it() -> None:
    methods = in_settings(Bigram)[:1]
    result = check(CASES["prompt_1_token"], methods, broken.TemperatureIgnored)
    assert result.verdict == FAIL and result.fault and result.fault.kind == RULE
    wrong = result.fault.wrong
    assert wrong and wrong.context[0] == int(wrong.request) and wrong.found != wrong.expected
    assert len(wrong.context) == 1 + wrong.position
    assert f"{wrong.found} (" in str(result.fault) and f"instead of {wrong.expected} (" in str(
        wrong
    )
    assert "batch 1" in result.where


def test_an_output_that_goes_on_behind_its_end_is_shown_there() -> None:
    methods = in_settings(Bigram)[:1]
    found = check(CASES["eos_mid_block"], methods, broken.EndMissedInside).fault
    assert found and found.kind == COUNTING and found.wrong and found.wrong.expected is None
    assert "instead of the end" in str(found)


class Raising(Method):
    """Raises."""

    def propose(self, batch: Batch, budgets: list[Budget]) -> Proposal:  # type: ignore[override]
        raise RuntimeError("no\nidea")


def test_what_a_method_raises_is_its_fault() -> None:
    result = check(CASES["prompt_1_token"], in_settings(Raising))
    assert result.fault and result.fault.kind == ERROR
    assert isinstance(result.fault.__cause__, RuntimeError)


class Remembering(broken.LastDraftNotCached):
    """Says that its drafts depend on more than the text."""

    remembers = True


def test_drafts_that_may_depend_on_more_than_the_text_are_not_held_to_it() -> None:
    case = CASES["kv_rollback_audit"]
    assert check(case, in_settings(broken.LastDraftNotCached)).verdict == FAIL
    assert check(case, in_settings(Remembering)).verdict == PASS


class Secretive(Bigram):
    """Describes itself by something that cannot be filed."""

    def describe(self) -> dict[str, object]:
        return {"logits": self.logits_VV}


def test_a_description_must_be_one_that_can_be_filed() -> None:
    found = check(CASES["described"], in_settings(Secretive)).fault
    assert found and found.kind == METADATA and "cannot be filed" in found.message


def test_a_case_that_does_not_apply_says_why() -> None:
    result = check(CASES["tokenizer_mismatch"], in_settings(Bigram))
    assert (result.verdict, result.why) == (NO_MATTER, "it takes no model")


# Settings.


@dataclass(frozen=True, kw_only=True)
class ManyConfig(MethodConfig):
    kind: str = "plain"
    sharp: bool = False
    branching: tuple[int, ...] = ()
    width: int = 4
    share: float = 0.5

    def __post_init__(self) -> None:
        if self.kind not in ("plain", "fancy", "odd"):
            raise ValueError(f"unknown kind {self.kind!r}; valid: plain, fancy, odd")
        if self.branching and self.kind != "fancy":
            raise ValueError("branching needs a fancy kind; valid: kind=fancy")


class Many(Bigram):
    Config = ManyConfig  # type: ignore[assignment]


def test_settings_hold_every_value_of_every_knob_beside_every_other_that_is_allowed() -> None:
    found = [dict(one.knobs) for one in settings("many", Many, {})]
    assert found[0] == {}
    tried = {
        "kind": ["", "fancy", "odd"],
        "sharp": ["", "true"],
        "branching": ["", "2,2"],
        "width": ["", "2", "0"],
        "share": ["", "0.3"],
    }
    for (one, values), (other, others) in combinations(tried.items(), 2):
        for value in values:
            for beside in others:
                given = {one: value, other: beside}
                allowed = given.get("branching") != "2,2" or given.get("kind") in ("fancy", None)
                stands = any(
                    setting.get(one, "") == value and setting.get(other, "") == beside
                    for setting in found
                )
                assert stands == allowed, given
    assert len(found) < 14


def test_a_knob_that_is_set_does_not_vary() -> None:
    found = [dict(one.knobs) for one in settings("many", Many, {"kind": "odd"})]
    assert all(knobs["kind"] == "odd" and "branching" not in knobs for knobs in found)
    with pytest.raises(ValueError, match="unknown kind 'x'"):
        settings("many", Many, {"kind": "x"})


def test_knobs_are_read_with_and_without_the_methods_name() -> None:
    assert read_knobs("ngram", ["branches=2", "ngram.max_match=3"]) == {
        "branches": "2",
        "max_match": "3",
    }
    with pytest.raises(ValueError, match="valid: KNOB=VALUE"):
        read_knobs("ngram", ["eagle.depth=2"])


def test_learned_methods_get_weights_of_their_own_recipe() -> None:
    assert all(dict(one.knobs)["weights"] == "MADE" for one in subjects("medusa", {}))
    tried = {dict(one.knobs).get("weights") for one in subjects("early_exit", {})}
    assert tried == {None, "MADE"}


# The command, and the plug-in.


def test_the_command_shows_verdicts_and_exits_with_1_on_a_fault(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["conform", f"{BROKEN}:WrongRoot"]) == 1
    shown = " ".join(capsys.readouterr().out.split())
    assert "described │ pass" in shown and "prompt_1_token │ FAIL │ metadata" in shown
    assert "has root 9; the row ends in 51" in shown


def test_the_command_exits_with_0_when_all_cases_pass(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["conform", "vanilla"]) == 0
    assert "FAIL" not in capsys.readouterr().out


class Ends(broken.WrongRoot):
    """Ends the process that stands beside the command's."""

    def propose(self, batch: Batch, budgets: Sequence[Budget]) -> Proposal:
        if multiprocessing.parent_process() is not None:
            os._exit(1)
        return super().propose(batch, budgets)


def test_a_process_that_ends_fails_its_cases_and_no_other(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["conform", f"{__name__}:Ends"]) == 1
    shown = " ".join(capsys.readouterr().out.split())
    assert "error: the process ended in this case, or before it" in shown
    assert all(case in shown for case in CASES) and "has root 9; the row ends in 51" in shown


def test_a_fault_is_the_same_in_another_process() -> None:
    (fault,) = faults(list(conform(in_settings(broken.WrongRoot), cases=["prompt_1_token"])))
    wrong = WrongToken("r", 3, (1, 2), 4, None, None)
    for one in (fault, Fault(RULE, "not the target's", wrong)):
        other = pickle.loads(pickle.dumps(one))
        assert (str(other), other.kind, other.wrong) == (str(one), one.kind, one.wrong)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["ngrm"], "unknown method 'ngrm' (did you mean 'ngram'?)"),
        (["ngram", "--set", "branch=2"], "has no knob 'branch'"),
        (["ngram", "--set", "branches"], "valid: KNOB=VALUE"),
        (["no.such.module:Thing"], "cannot be loaded"),
        (["specbench.method:Nothing"], "defines 0 methods"),
        ([":Nothing"], "valid: package.module:Class"),
        (["medusa", "--set", "weights=nowhere"], "nowhere"),
    ],
)
def test_bad_usage_is_one_line(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["conform", *words]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def run_pytest(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "specbench.conformance.plugin", *words],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
    )


def test_the_plug_in_makes_a_test_of_each_case() -> None:
    done = run_pytest("--specbench-method", f"{BROKEN}:WrongRoot", "tests/__init__.py", "-q", "-rA")
    assert done.returncode == 1, done.stderr
    assert f"PASSED {BROKEN}:WrongRoot::described" in done.stdout
    assert f"FAILED {BROKEN}:WrongRoot::prompt_1_token" in done.stdout
    assert "SKIPPED" in done.stdout and "metadata: request '9'" in done.stdout
    num_reported = sum(done.stdout.count(word) for word in ("PASSED ", "FAILED "))
    assert num_reported >= len(CASES) - 4


def test_the_plug_in_refuses_what_is_no_method() -> None:
    done = run_pytest("--specbench-method", "ngrm", "tests/__init__.py")
    assert done.returncode == 4
    assert "unknown method 'ngrm'" in done.stderr + done.stdout
