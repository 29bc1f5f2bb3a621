"""Two runs held against each other: what is exact, what is left to chance, and what is refused."""

from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from specbench.baselines import file_baseline, find_baseline
from specbench.check import Check, check
from specbench.cli import main
from specbench.judge import Finding, Verdict
from specbench.records import Divergence, RequestRecord, Run, Surprise, read_run
from specbench.report import main_leaderboard
from specbench.verdicts import as_junit, as_markdown
from tests.benchmarks.power_of_the_gate import LESS_TAU, PLANTED, SAMPLED, outcomes
from tests.made_runs import INFO, failure, filed_run, made_run, noisy_run, output, paired

BEFORE = noisy_run(0, folder="before")


def questions(done: Check, verdict: Verdict) -> set[str]:
    """What was answered so."""
    return {finding.question for finding in done.findings if finding.verdict == verdict}


def finding(done: Check, question: str, workload: str = "code") -> Finding:
    """The answer to a question."""
    (found,) = (f for f in done.findings if (f.question, f.workload) == (question, workload))
    return found


def changed(run: Run, change: Any) -> Run:
    """A run with each of the method's outputs changed, the first one's index being 0."""
    records = [r for r in run.requests if r.method == "echo"]
    others = [r for r in run.requests if r.method != "echo"]
    return replace(run, requests=[*others, *(change(i, r) for i, r in enumerate(records))])


def test_a_run_against_itself_passes_everything() -> None:
    done = check(BEFORE, BEFORE)
    assert done.verdict == Verdict.PASS
    assert {f.question for f in done.findings if f.is_hard} == {
        "lossless",
        "failed requests",
        "output tokens",
        "target forwards",
        "tau",
        "acceptance",
    }
    assert finding(done, "speed-up").reason == "1.000 [1.000, 1.000] of before"


def test_an_unchanged_method_passes_in_nineteen_of_twenty_runs() -> None:
    """On 50 prompts of each of two workloads, two rounds, and 5 % of noise."""
    assert outcomes(40, PLANTED["unchanged"])[Verdict.PASS] >= 38


def test_a_method_that_is_a_tenth_slower_fails_in_nineteen_of_twenty_runs() -> None:
    assert outcomes(20, PLANTED["10 % slower"])[Verdict.FAIL] >= 19


def test_a_lower_tau_is_found_always_where_nothing_is_left_to_chance() -> None:
    assert outcomes(5, PLANTED["tau 0.1 lower, greedy"])[Verdict.FAIL] == 5


def test_a_lower_tau_rarely_passes_where_drafts_are_drawn() -> None:
    """It lies at the margin, so it is seldom sure to be beyond."""
    assert outcomes(20, PLANTED["tau 0.1 lower, T=0.8"])[Verdict.PASS] <= 1
    much = {"decoding": SAMPLED, "chance": 0.3}
    assert outcomes(5, much)[Verdict.FAIL] == 5


def test_a_drop_of_tau_is_named_with_both_numbers() -> None:
    done = check(BEFORE, noisy_run(0, chance=LESS_TAU))
    assert questions(done, Verdict.FAIL) == {"target forwards", "tau", "acceptance"}
    tau = finding(done, "tau")
    assert float(tau.before) - float(tau.now) == pytest.approx(0.1, abs=0.05)


def test_a_rise_of_tau_passes_and_asks_for_a_new_baseline() -> None:
    done = check(noisy_run(0, chance=LESS_TAU), BEFORE)
    assert finding(done, "tau").reason == "better; file a new baseline"
    assert done.verdict == Verdict.PASS


def test_fewer_guesses_for_the_same_forwards_are_no_loss_and_more_are() -> None:
    def wasteful(_: int, record: RequestRecord) -> RequestRecord:
        return replace(record, steps=[[n + 1, d + 1, a, c, m] for n, d, a, c, m in record.steps])

    more = changed(BEFORE, wasteful)
    assert questions(check(BEFORE, more), Verdict.FAIL) == {"acceptance"}
    assert questions(check(more, BEFORE), Verdict.FAIL) == set()


@pytest.mark.parametrize("dtype", [{"dtype": "float32"}, {"dtype": "bfloat16", "bitwise": True}])
def test_another_output_fails_where_the_target_is_exact(dtype: dict[str, Any]) -> None:
    def other(i: int, record: RequestRecord) -> RequestRecord:
        tokens = [99, *record.tokens[1:]] if i == 0 else record.tokens
        return replace(record, tokens=tokens)

    before, now = (replace(r, info={**r.info, "target": dtype}) for r in (BEFORE, BEFORE))
    done = check(before, changed(now, other))
    assert questions(done, Verdict.FAIL) == {"output tokens"}
    assert finding(done, "output tokens").now == "49 equal"


def test_where_rounding_may_differ_outputs_and_tau_are_left_to_chance() -> None:
    target = {"dtype": "bfloat16"}
    done = check(noisy_run(0, target=target), noisy_run(0, draft_seed=1, target=target))
    assert "output tokens" not in {f.question for f in done.findings}
    assert not finding(done, "tau").is_hard


def test_the_same_draws_pass_on_however_few_prompts() -> None:
    few = noisy_run(0, decoding=SAMPLED, num_prompts=3)
    tau = finding(check(few, few), "tau")
    assert (tau.verdict, tau.reason) == (Verdict.PASS, "the same steps")


def test_a_broken_output_fails_and_so_does_one_that_was_broken_before() -> None:
    split = Divergence(
        position=0,
        expected=1,
        found=2,
        gap=3.0,
        tolerance=0.1,
    )

    def broken(i: int, record: RequestRecord) -> RequestRecord:
        return replace(record, lossless="broken", divergence=split) if i == 0 else record

    bad = changed(BEFORE, broken)
    for before in (BEFORE, bad):
        assert questions(check(before, bad), Verdict.FAIL) == {"lossless"}
    assert finding(check(BEFORE, bad), "lossless").now == "BROKEN 1, 49 exact"


@pytest.mark.parametrize("mark", ["lossy", "tie"])
def test_what_is_less_lossless_than_before_fails(mark: str) -> None:
    worse = changed(BEFORE, lambda i, record: replace(record, lossless=mark))
    assert "lossless" in questions(check(BEFORE, worse), Verdict.FAIL)
    assert "lossless" not in questions(check(worse, BEFORE), Verdict.FAIL)
    assert "lossless" not in questions(check(worse, worse), Verdict.FAIL)


def test_outputs_that_are_not_the_targets_in_law_fail() -> None:
    odd = Surprise(nats=90.0, expected_nats=10.0, variance=1.0)
    now = changed(BEFORE, lambda i, record: replace(record, lossless="law", surprise=odd))
    assert "not the target's distribution: p " in finding(check(BEFORE, now), "lossless").reason
    assert "lossless" in questions(check(BEFORE, now), Verdict.FAIL)


def test_a_request_that_fails_now_fails_the_method() -> None:
    now = replace(BEFORE, failures=[failure("echo", "code-0")])
    assert questions(check(BEFORE, now), Verdict.FAIL) == {"failed requests"}


def test_a_method_without_any_output_fails() -> None:
    now = replace(BEFORE, requests=[r for r in BEFORE.requests if r.method != "echo"])
    assert check(BEFORE, now, hard_only=True).verdict == Verdict.FAIL


def test_too_few_prompts_leave_the_speed_open() -> None:
    few = noisy_run(0, num_prompts=4)
    done = check(few, few)
    assert finding(done, "speed-up").verdict == done.verdict == Verdict.INCONCLUSIVE
    assert "too few prompts in both: 4" in finding(done, "speed-up").reason
    assert check(few, few, hard_only=True).verdict == Verdict.PASS


def test_a_wider_margin_lets_more_pass() -> None:
    now = noisy_run(1, slower=1.1)
    assert check(BEFORE, now).verdict == Verdict.FAIL
    assert check(BEFORE, now, margin=0.2).verdict == Verdict.PASS
    with pytest.raises(ValueError, match=r"--margin 1 is out of range; valid: above 0, below 1"):
        check(BEFORE, now, margin=1)


def info(part: str, **values: Any) -> dict[str, Any]:
    """A part of the info of `noisy_run` with some values changed."""
    return {part: {**BEFORE.info[part], **values}}


@pytest.mark.parametrize(
    ("group", "other", "text"),
    [
        ("weights", info("provenance", weights_sha256="cd"), "weights_sha256 is cd instead of ab"),
        ("dtype", info("target", dtype="float16"), "target.dtype is float16 instead of float32"),
        ("template", info("provenance", template_sha256="x"), "is x instead of not known"),
        ("prompts", info("workloads", code={"sha256": "x"}), "prompts.code.sha256 is x"),
        ("prompts", {"names": ["code"]}, "it lacks 50 of 50 requests of cre"),
        ("prompts", {"num_prompts": 20}, "it lacks 30 of 50 requests of code"),
        ("budget", info("settings", max_new_tokens=65), "settings.max_new_tokens is 65"),
        ("decoding", info("settings", seed=1), "settings.seed is 1 instead of 0"),
        ("decoding", info("settings", temperature=1.0), "settings.temperature is 1.0"),
        ("method", info("methods", echo={"label": "", "extra_bytes": 0, "depth": 9}), "depth is 9"),
    ],
)
def test_runs_that_were_measured_otherwise_are_refused_with_what_differs(
    group: str, other: dict[str, Any], text: str
) -> None:
    now = noisy_run(0, **other)
    with pytest.raises(ValueError, match=r"is not to be compared with before: ") as refused:
        check(BEFORE, now)
    assert text in str(refused.value)
    assert str(refused.value).endswith(f"--allow {group} compares them all the same")
    done = check(BEFORE, now, allow=[group])
    assert done.verdict in (Verdict.PASS, Verdict.FAIL)
    assert f"allowed to differ: {group}" in done.notes


def test_everything_that_differs_is_listed() -> None:
    now = noisy_run(0, **info("settings", seed=1), **info("target", dtype="float16"))
    with pytest.raises(ValueError, match="--allow decoding,dtype compares"):
        check(BEFORE, now)


def test_another_code_another_commit_and_another_time_are_what_a_check_is_for() -> None:
    about = {"label": "", "extra_bytes": 0, "source_sha256": "other"}
    later = {**INFO["provenance"], "commit": "fe", "started": "later", "packages": {"torch": "9"}}
    assert check(BEFORE, noisy_run(0, provenance=later, methods={"echo": about, "vanilla": {}}))


def test_weights_are_known_by_their_fingerprint_wherever_they_lie() -> None:
    def drafts_with(fingerprint: str, folder: str) -> dict[str, Any]:
        about = {"label": f"of {folder}", "weights": folder, "fingerprint": fingerprint}
        return {"methods": {"echo": about, "vanilla": {}}}

    before = noisy_run(0, **drafts_with("ab", "/here/head"))
    assert check(before, noisy_run(0, **drafts_with("ab", "/there/head"))).verdict == Verdict.PASS
    with pytest.raises(ValueError, match=r"echo\.fingerprint is cd instead of ab"):
        check(before, noisy_run(0, **drafts_with("cd", "/here/head")))
    with pytest.raises(ValueError, match=r"echo\.weights is /there/head"):
        check(
            noisy_run(0, **drafts_with("", "/here")), noisy_run(0, **drafts_with("", "/there/head"))
        )


def test_another_machine_leaves_the_speed_open_and_nothing_else() -> None:
    now = noisy_run(0, **info("provenance", cpu="Another CPU"))
    done = check(BEFORE, now)
    assert questions(done, Verdict.INCONCLUSIVE) == {"speed-up"}
    assert done.verdict == Verdict.INCONCLUSIVE
    assert "another machine: provenance.cpu is Another CPU instead of Made-up CPU" in done.notes
    assert check(BEFORE, now, hard_only=True).verdict == Verdict.PASS
    assert check(BEFORE, now, allow=["machine"]).verdict == Verdict.PASS


def test_other_workers_leave_the_speed_open_and_no_output() -> None:
    now = info("provenance", workers=7)
    done = check(BEFORE, noisy_run(0, **now))
    assert questions(done, Verdict.INCONCLUSIVE) == {"speed-up"}
    assert any("side by side: provenance.workers is 7 instead of" in note for note in done.notes)
    assert check(BEFORE, noisy_run(0, **now), allow=["workers"]).verdict == Verdict.PASS
    other = noisy_run(0, draft_seed=1, chance=0.3, **now)
    assert check(BEFORE, other, hard_only=True).verdict == Verdict.FAIL


def test_runs_without_a_workload_in_common_are_not_compared() -> None:
    other = noisy_run(0, workloads={"prose": {}})
    with pytest.raises(ValueError, match=r"shares no workload with .*; valid: code"):
        check(BEFORE, other, allow=["prompts"])


def test_another_machine_may_round_otherwise_but_not_be_lossy() -> None:
    elsewhere = info("provenance", cpu="Another CPU")
    done = check(BEFORE, noisy_run(0, draft_seed=1, chance=0.3, **elsewhere), hard_only=True)
    assert done.verdict == Verdict.INCONCLUSIVE
    assert {"target forwards", "tau"} <= questions(done, Verdict.INCONCLUSIVE)
    worse = noisy_run(0, draft_seed=1, chance=0.3)
    assert check(BEFORE, worse, hard_only=True).verdict == Verdict.FAIL
    broken = noisy_run(0, **elsewhere)
    broken.requests[-1] = replace(broken.requests[-1], lossless="broken")
    assert check(BEFORE, broken, hard_only=True).verdict == Verdict.FAIL


def test_a_baseline_that_is_not_as_fast_as_it_was_is_named() -> None:
    slow = [
        replace(t, decode_s=t.decode_s * 2, draft_s=0.0, forward_s=0.0, bookkeeping_s=0.0)
        for t in BEFORE.timings
    ]
    done = check(BEFORE, replace(BEFORE, timings=slow))
    assert done.verdict == Verdict.PASS
    note = "vanilla on code: 24.9 tokens/s, was 49.9; another load of the machine, or"
    assert any(one.startswith(note) for one in done.notes), done.notes
    assert not check(BEFORE, BEFORE).notes


def test_an_unknown_group_and_an_unknown_method_are_errors() -> None:
    with pytest.raises(ValueError, match=r"--allow dtpe: .*mean 'dtype'.*valid: weights, dtype, t"):
        check(BEFORE, BEFORE, allow=["dtpe"])
    with pytest.raises(ValueError, match=r"before has no method 'ecko' \(did you.*valid: echo"):
        check(BEFORE, BEFORE, method="ecko")
    bare = replace(BEFORE, info={**BEFORE.info, "methods": {"vanilla": {}}})
    with pytest.raises(ValueError, match="holds no method beside vanilla"):
        check(BEFORE, bare)


def test_a_run_that_is_not_whole_is_refused() -> None:
    torn = replace(BEFORE, missing_shards=["code-0"])
    with pytest.raises(ValueError, match="before lacks 1 of 1 shards; finish it: `specbench run"):
        check(BEFORE, torn)


def test_a_new_method_is_held_against_vanilla_and_the_best_of_its_kind() -> None:
    new = noisy_run(1, method="fresh")
    done = check(BEFORE, new)
    assert {f.question for f in done.findings} == {
        "lossless",
        "failed requests",
        "speed beside vanilla",
        "speed beside echo, the best of its kind",
    }
    assert done.verdict == Verdict.PASS
    assert done.notes == ["fresh is new: judged against vanilla and the best of its kind"]


def test_a_new_method_that_is_slower_than_either_fails() -> None:
    behind_echo = check(BEFORE, noisy_run(1, method="fresh", slower=1.15))
    assert questions(behind_echo, Verdict.FAIL) == {"speed beside echo, the best of its kind"}
    behind_both = check(BEFORE, noisy_run(1, method="fresh", slower=1.6))
    assert "speed beside vanilla" in questions(behind_both, Verdict.FAIL)


def test_a_method_with_weights_is_no_match_for_one_without() -> None:
    heavy = {"fresh": {"label": "", "extra_bytes": 1}, "vanilla": {}}
    done = check(BEFORE, noisy_run(1, method="fresh", methods=heavy))
    assert {f.question for f in done.findings if not f.is_hard} == {"speed beside vanilla"}


def test_a_rival_in_the_same_run_is_paired_there() -> None:
    """Its times are those of the run, not those of the baseline."""
    records = {repr(r): r for m, s in (("echo", 3), ("fresh", 2)) for r in paired(m, s)}
    about = {name: {"label": "", "extra_bytes": 0} for name in ("vanilla", "echo", "fresh")}
    old = {name: about[name] for name in ("vanilla", "echo")}
    before = made_run(*paired("echo", 1.5), workloads={"code": {}}, methods=old)
    now = made_run(*records.values(), workloads={"code": {}}, methods=about)
    done = check(before, now, method="fresh")
    rival = finding(done, "speed beside echo, the best of its kind")
    assert (rival.now, rival.verdict) == ("0.67", Verdict.FAIL)


def test_the_markdown_says_what_did_not_pass() -> None:
    text = as_markdown(check(BEFORE, noisy_run(1, chance=LESS_TAU, slower=1.2, folder="now")))
    assert text.startswith("# FAIL: now against before\n")
    assert "- hard part FAIL, exact: 12 findings" in text
    assert "- soft part FAIL, no more than 5 % below: 2 findings" in text
    assert "| echo | code | FAIL | FAIL |" in text
    assert "| echo | code | tau | 1." in text
    assert "| echo | code | lossless |" not in text
    hard = as_markdown(check(BEFORE, BEFORE, hard_only=True))
    assert "- soft part left out" in hard and "| echo | code | PASS | - |" in hard


def test_the_junit_file_has_a_case_for_each_finding() -> None:
    def cases(**info: Any) -> dict[tuple[str | None, str | None], ElementTree.Element]:
        done = check(BEFORE, noisy_run(0, chance=LESS_TAU, **info))
        suite = ElementTree.fromstring(as_junit(done))
        counts.append((suite.get("tests"), suite.get("failures"), suite.get("skipped")))
        return {(case.get("classname"), case.get("name")): case for case in suite}

    counts: list[tuple[str | None, ...]] = []
    here, elsewhere = cases(), cases(**info("provenance", cpu="Another CPU"))
    assert counts == [("14", "6", "0"), ("14", "0", "8")]
    failed = here["hard.echo.code", "tau"].find("failure")
    assert failed is not None and " -> " in (failed.get("message") or "")
    assert elsewhere["soft.echo.code", "speed-up"].find("skipped") is not None
    assert len(here["hard.echo.code", "lossless"]) == 0


@pytest.fixture
def at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to work in, with a run in it."""
    monkeypatch.chdir(tmp_path)
    filed_run(tmp_path / "run", paired("echo", 2, num_prompts=8), workloads={"code": {}})
    return tmp_path


def test_a_run_is_filed_as_a_baseline_and_found_by_its_name(at: Path) -> None:
    assert main(["baseline", "run", "--name", "first"]) == 0
    filed = find_baseline("first")
    assert filed == Path("results/baselines/first")
    assert read_run(filed) == replace(read_run(Path("run")), folder=filed)
    assert [path.name for path in filed.parent.iterdir()] == ["first"]
    assert find_baseline("run") == Path("run")
    with pytest.raises(ValueError, match=r"no baseline 'second'; valid: .*: first"):
        find_baseline("second")


@pytest.mark.parametrize("name", ["", "../first", "a/b", "a b", ".hidden"])
def test_a_baselines_name_is_one_word(at: Path, name: str) -> None:
    with pytest.raises(ValueError, match="is no name; valid: letters"):
        file_baseline(read_run(at / "run"), name)


def test_what_nothing_should_be_held_against_is_not_filed(at: Path) -> None:
    run = read_run(at / "run")
    file_baseline(run, "first")
    with pytest.raises(ValueError, match="first is there already; choose another --name"):
        file_baseline(run, "first")
    with pytest.raises(ValueError, match="is no baseline: 1 of 1 shard is missing"):
        file_baseline(replace(run, missing_shards=["code-0"]), "second")
    broken = [*run.requests, output("echo", "x", (0, 0, 0, 1), lossless="broken")]
    with pytest.raises(ValueError, match="1 output of echo on code is BROKEN"):
        file_baseline(replace(run, requests=broken), "second")


def test_a_run_whose_description_was_edited_is_neither_judged_nor_filed(at: Path) -> None:
    path = at / "run" / "run.json"
    main(["baseline", "run", "--name", "first"])
    path.write_text(path.read_text().replace("Made-up CPU", "Better CPU"))
    with pytest.raises(ValueError, match=r"run\.json has been edited: nothing can be told"):
        check(read_run(find_baseline("first")), read_run(at / "run"))
    with pytest.raises(ValueError, match=r"is no baseline: run\.json has been edited"):
        file_baseline(read_run(at / "run"), "second")


def test_a_baseline_is_no_part_of_the_leaderboard(at: Path) -> None:
    main(["baseline", "run", "--name", "first"])
    with pytest.raises(ValueError, match="holds no runs"):
        main_leaderboard(Path("results"))


def test_the_exit_code_is_the_verdict(at: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["baseline", "run", "--name", "first"])
    slow, few = paired("echo", 1, num_prompts=8), paired("echo", 2, num_prompts=4)
    filed_run(at / "slow", slow, workloads={"code": {}})
    filed_run(at / "few", few, workloads={"code": {}})
    assert main(["check", "first", "run"]) == 0
    assert main(["check", "first", "slow"]) == 1
    assert main(["check", "first", "slow", "--hard"]) == 0
    assert main(["check", "first", "few", "--allow", "prompts"]) == 3
    capsys.readouterr()
    assert main(["check", "first", "few"]) == 2
    assert "--allow prompts compares them all the same" in capsys.readouterr().err
    assert main(["check", "gone", "run"]) == 2
    words = ["check", "first", "slow", "--markdown", "check.md", "--junit", "check.xml"]
    assert main([*words, "--margin", "0.6", "--method", "echo"]) == 0
    assert Path("check.md").read_text().startswith("# PASS: slow against results/baselines/first")
    assert ElementTree.parse("check.xml").getroot().get("failures") == "0"
