"""Tests of what is shown: tables in three formats, warnings and the leaderboard."""

import io
import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from specbench.definitions import DEFINITIONS
from specbench.records import Divergence, Record, Run, Surprise, TimingRecord, read_run
from specbench.report import FORMATS, main_leaderboard, print_report, render, render_leaderboard
from specbench.tables import NO_BREAK
from tests.made_runs import (
    GREEDY,
    INFO,
    failure,
    filed_run,
    made_run,
    output,
    paired,
    reference,
    resource,
)


def printed(runs: list[Run], width: int = 100) -> str:
    """The report as a pipe gets it."""
    file = io.StringIO()
    print_report(runs, Console(file=file, width=width))
    return file.getvalue()


def row(text: str, first: str, nth: int = 0) -> list[str]:
    """The cells of the nth Markdown row that starts with a cell."""
    rows = [line for line in text.splitlines() if line.startswith(f"| {first} |")]
    return [cell.strip() for cell in rows[nth].strip("|").split(" | ")]


def values(runs: list[Run]) -> list[Any]:
    """The workloads of the first section, from the JSON report."""
    workloads: list[Any] = json.loads(render(runs, "json"))["sections"][0]["workloads"]
    return workloads


def test_a_method_is_shown_with_all_its_numbers() -> None:
    text = render([made_run(*paired("echo", 1.5))], "md")
    assert row(text, "echo (copies)") == [
        "echo (copies)",
        "2.00",
        "50.0 %",
        f"1.50x{NO_BREAK}[1.50,{NO_BREAK}1.50]{NO_BREAK}faster".replace(NO_BREAK, " "),
        "0.9",  # 24 tokens in 39 / 1.5 seconds
        "25/50/25",
        "exact 6/6",
        "0",
    ]
    assert row(text, "vanilla")[:5] == ["vanilla", "1.00", "-", "1.00x baseline", "0.6"]


def test_costs_and_positions_have_tables_of_their_own() -> None:
    text = render([made_run(*paired("echo", 1.5))], "md")
    # 2 forwards of 6 nodes and 4 drafts for 4 tokens; of the drafts 2 were refused.
    paid = ["2.00", "37.5 %"]
    # One step accepts 2 of 3, the other 0 of 1.
    assert row(text, "echo", 0) == ["echo", "2.00", "2.00", "50.0 %", "100.0 %", "0.0 %"]
    assert row(text, "echo", 1) == [
        "echo",
        "0.500",
        "1.00",
        "50.0 %",
        *paid,
        "2166.7",
        "500.0",
        "3.0",
    ]
    assert row(text, "vanilla", 1) == [
        "vanilla",
        "1.000",
        "0.00",
        "-",
        "1.00",
        "0.0 %",
        "1625.0",
        "500.0",
        "0.0",
    ]


def test_theory_stands_beside_what_was_measured() -> None:
    text = render([made_run(*paired("echo", 1.5))], "md")
    tau = ["1.75", "1.75", "2.00"]
    # A step takes 1625 ms without drafts and 2166.7 ms with them, for 2 tokens.
    costs = ["1625.0", "812.5", "67.7", "135.4", "67.7", "1083.3"]
    assert row(text, "echo", 2) == ["echo", *tau, *costs, "2.00x", "1.50x"]


def test_json_holds_the_numbers_unrounded_with_what_they_are_made_of() -> None:
    (workload,) = values([made_run(*paired("echo", 1.5), resource(77.5))])
    vanilla, echo = workload["methods"]
    assert (vanilla["method"], vanilla["speed_up"]) == ("vanilla", None)
    assert echo["speed_up"]["value"] == pytest.approx(1.5)
    assert (echo["speed_up"]["verdict"], echo["speed_up"]["num_clusters"]) == ("faster", 6)
    assert (echo["acceptance"]["num_accepted"], echo["acceptance"]["num_offered"]) == (12, 24)
    assert echo["acceptance"]["positions"][1] == {
        "offered": 6,
        "reached": 6,
        "accepted": 6,
        "unconditional": 1.0,
        "conditional": 1.0,
    }


def test_the_formats_agree() -> None:
    runs = [made_run(*paired("echo", 1.37, num_prompts=7))]
    (workload,) = values(runs)
    echo = workload["methods"][1]
    speed = echo["speed_up"]
    shown = f"{speed['value']:.2f}x [{speed['low']:.2f}, {speed['high']:.2f}] {speed['verdict']}"
    text, terminal = render(runs, "md"), printed(runs).replace(NO_BREAK, " ")
    for word in (
        shown,
        f"{echo['acceptance']['tau']:.2f}",
        f"{100 * echo['acceptance']['rate']:.1f} %",
    ):
        assert word in text
        assert word in terminal


def test_workloads_are_ordered_by_their_entropy() -> None:
    records = [
        *paired("echo", 2, workload="high", entropy_nats=1.5),
        *paired("echo", 2, workload="low", entropy_nats=0.1),
        failure(None, "x"),  # all that is known of the workload code
        *paired("echo", 2, workload="middle", entropy_nats=0.7),
    ]
    assert [w["workload"] for w in values([made_run(*records)])] == [
        "low",
        "middle",
        "high",
        "code",
    ]


def test_the_line_of_a_workload_says_what_was_decoded_and_how() -> None:
    sampled = {**GREEDY, "temperature": 0.8, "top_p": 0.9, "top_k": 40, "rule": "coupled"}
    run = made_run(
        reference("a", num_tokens=30, entropy_nats=0.25, looping=True),
        reference("a/2", num_tokens=30, entropy_nats=0.75),
        reference("b", workload="creative", entropy_nats=2, decoding=sampled),
    )
    text = render([run], "md")
    assert (
        "- kind code; 1 prompt (2 turns); 60 tokens; entropy 0.50 nats; looping 50.0 %; "
        "greedy, at most 64 tokens"
    ) in text
    assert "T=0.8, top-k 40, top-p 0.9, rule coupled, at most 64 tokens" in text


@pytest.mark.parametrize(
    ("verdicts", "shown"),
    [
        (["exact", "exact"], "exact 2/2"),
        (["exact", "tie"], "1 exact, 1 tie"),
        (["tie", "exact", "tie"], "1 exact, 2 ties"),
        (["exact", "broken", "tie"], "BROKEN 1, 1 exact, 1 tie"),
        (["law", "law"], "in law"),
        (["law", "exact"], "1 exact, 1 in law"),
        (["lossy", "lossy"], "LOSSY"),
    ],
)
def test_losslessness_is_said_in_words(verdicts: list[str], shown: str) -> None:
    records: list[Record] = [
        output("echo", str(i), (1, 1, 1, 2), lossless=verdict) for i, verdict in enumerate(verdicts)
    ]
    assert row(render([made_run(*records)], "md"), "echo (copies)")[6] == shown


def surprising(nats: float) -> Run:
    """A run whose drawn outputs were so surprising where 40 nats were expected, give or take 4."""
    drawn = Surprise(nats=nats / 4, expected_nats=10.0, variance=4.0)
    return made_run(
        *(
            replace(output("echo", f"{i}", (1, 1, 1, 2), lossless="law"), surprise=drawn)
            for i in range(4)
        )
    )


def test_outputs_in_law_come_with_the_p_value_of_their_test() -> None:
    text = render([surprising(nats=44)], "md").replace(NO_BREAK, " ")
    assert row(text, "echo (copies)")[6] == "in law (p 0.32)"
    assert "NOT in law:" not in text


@pytest.mark.parametrize("nats", [20, 60])
def test_outputs_that_are_not_the_targets_are_marked(nats: float) -> None:
    text = render([surprising(nats)], "md").replace(NO_BREAK, " ")
    assert row(text, "echo (copies)")[6] == "NOT in law (p 5.7e-07)"
    assert "- NOT in law: echo on code, its tokens are not as surprising" in text
    assert row(text, "echo NOT IN LAW")
    assert "| - | echo (copies) |" in render_leaderboard([surprising(nats)])


def test_lossy_and_broken_methods_are_marked_in_every_table() -> None:
    text = render([made_run(*paired("echo", 2, lossless="lossy"))], "md")
    assert row(text, "echo LOSSY", 0)[1] == row(text, "echo LOSSY", 1)[2].replace("1.00", "2.00")
    assert "echo BROKEN" in render([made_run(*paired("echo", 2, lossless="broken"))], "md")


def test_few_prompts_show_neither_interval_nor_verdict() -> None:
    text = render([made_run(*paired("echo", 2, num_prompts=4))], "md")
    assert row(text, "echo (copies)")[3] == "2.00x, too few prompts to tell"
    one = render([made_run(*paired("echo", 2, num_prompts=1))], "md")
    assert row(one, "echo (copies)")[3] == "2.00x, too few prompts to tell"


def test_what_was_not_measured_is_a_dash_and_not_a_zero() -> None:
    run = made_run(reference("a"), output("echo", "a", (0, 0, 0, 1)), methods={})
    text = render([run], "md")
    assert row(text, "echo") == ["echo", "1.00", "-", "-", "-", "-", "exact 1/1", "0"]
    assert row(text, "echo", 1) == ["echo", "-", "0.00", "-", "1.00", "0.0 %", "-", "-", "-"]


def test_failures_are_counted_and_named() -> None:
    run = made_run(
        *paired("echo", 2),
        *(failure("echo", f"x{i}") for i in range(5)),
        failure(None, "y", "too long"),
    )
    text = render([run], "md")
    assert row(text, "echo (copies)")[7] == "6"
    assert row(text, "vanilla")[7] == "1"
    assert "- failed: echo on code, prompts x0, x1, x2 and 2 more: out of memory" in text
    assert "- failed: every method on code, prompt y: too long" in text


def test_a_failure_before_any_method_shows_up_for_all_of_them() -> None:
    text = render([made_run(failure(None, "x"))], "md")
    assert row(text, "echo (copies)") == ["echo (copies)", *["-"] * 6, "1"]


def test_outputs_without_a_time_are_named() -> None:
    run = made_run(*paired("echo", 2), output("echo", "late", (0, 0, 0, 1)))
    assert "- not timed: echo on code, prompt late; its times" in render([run], "md")
    assert "not timed" not in render([made_run(*paired("echo", 2))], "md")


def test_missing_shards_are_shown_with_the_way_to_resume() -> None:
    run = made_run(folder="runs/one", shards=["a", "b", "c"])
    run.missing_shards.extend(["a", "c"])
    resume = "2 of 3 shards are missing: resume with `specbench run --resume runs/one`"
    assert resume in render([run], "md")
    assert resume in printed([run])
    assert json.loads(render([run], "json"))["sections"][0]["missing_shards"] == ["a", "c"]


def test_a_broken_output_is_located() -> None:
    there = Divergence(position=17, expected=5, found=9, gap=3.21456, tolerance=1.0625)
    ended = Divergence(position=3, expected=5, found=None, gap=None, tolerance=None)
    run = made_run(
        output("echo", "a", (0, 0, 0, 1), lossless="broken", divergence=there),
        output("echo", "b", (0, 0, 0, 1), lossless="broken", divergence=ended),
    )
    assert (
        "BROKEN: echo on code, tokens differ from the target's: prompt a at 17: 9 instead of 5 "
        "(logit gap 3.21, a tie up to 1.06), prompt b at 3: the end instead of 5"
    ) in render([run], "md")


def test_ties_come_with_their_largest_gap() -> None:
    ties = [
        Divergence(position=1, expected=5, found=9, gap=gap, tolerance=0.5) for gap in (0.125, 0.25)
    ]
    run = made_run(
        output("echo", "a", (0, 0, 0, 1), lossless="tie", divergence=ties[0]),
        output("echo", "b", (0, 0, 0, 1), lossless="tie", divergence=ties[1]),
        output("echo", "c", (0, 0, 0, 1)),
    )
    shown = row(render([run], "md"), "echo (copies)")[6]
    assert shown.replace(NO_BREAK, " ") == "1 exact, 2 ties (logit gap up to 0.25)"


def test_doubtful_circumstances_are_shown() -> None:
    provenance = {**INFO["provenance"], "dirty": True, "load_average": 2.5, "cores": 2}
    text = render([made_run(provenance=provenance)], "md")
    assert "made: the machine was busy at the start (load average 2.5 on 2 cores)" in text
    assert "made: the code had changes that its commit does not hold" in text
    assert "busy" not in render([made_run()], "md")
    assert "had changes" not in render([made_run()], "md")


def test_files_that_are_no_part_of_the_run_are_named(tmp_path: Path) -> None:
    filed_run(tmp_path / "run", paired("echo", 2))
    (tmp_path / "run" / "shards" / "code-0 (copy).jsonl").write_text("")
    text = render([read_run(tmp_path / "run")], "md")
    assert "run holds files that the run does not list, they are left out: code-0 (copy)" in text


def test_an_edited_description_of_a_run_is_named(tmp_path: Path) -> None:
    filed_run(tmp_path / "run", paired("echo", 2))
    path = tmp_path / "run" / "run.json"
    assert "has been edited" not in render([read_run(path.parent)], "md")
    path.write_text(path.read_text().replace("Made-up CPU", "Better CPU"))
    assert "- run: run.json has been edited; what" in render([read_run(path.parent)], "md")


def test_a_machine_that_is_half_busy_is_named() -> None:
    provenance = {**INFO["provenance"], "load_average": 1.0, "cores": 2}
    assert "busy at the start (load average 1.0 on 2 cores)" in render(
        [made_run(provenance=provenance)], "md"
    )


def rounds(*speed_ups: float) -> list[Record]:
    """Six prompts in so many rounds, each with a speed-up of its own."""
    outputs = [r for r in paired("echo", 1) if not isinstance(r, TimingRecord)]
    timings = [
        replace(record, round=round_)
        for round_, value in enumerate(speed_ups)
        for record in paired("echo", value)
        if isinstance(record, TimingRecord)
    ]
    return [*outputs, *timings]


def test_rounds_that_differ_by_more_than_the_interval_are_named() -> None:
    text = render([made_run(*rounds(1.0, 1.5))], "md")
    assert "- noisy: echo on code, its rounds range from 1.00x to 1.50x, further" in text
    assert "noisy" not in render([made_run(*rounds(1.5, 1.5))], "md")


def test_too_few_prompts_are_named() -> None:
    text = render([made_run(*paired("echo", 2, num_prompts=4))], "md")
    assert "- too few prompts: echo on code; a verdict takes 5 that were timed" in text


def test_an_open_verdict_says_what_it_could_have_seen() -> None:
    records = [*paired("echo", 1.0), *paired("other", 1.5, workload="creative")]
    slow = [i for i, r in enumerate(records) if isinstance(r, TimingRecord) and r.method == "echo"]
    for i in slow[::2]:
        record = records[i]
        assert isinstance(record, TimingRecord)
        records[i] = replace(record, decode_s=record.decode_s * 1.2)
    run = made_run(*records)
    (code,) = (w for w in values([run]) if w["workload"] == "code")
    speed = code["methods"][1]["speed_up"]
    assert (speed["verdict"], speed["num_judged"]) == ("inconclusive", 2)
    assert speed["simultaneous"]["low"] < speed["low"] < speed["high"]
    shown = row(render([run], "md"), "echo (copies)")[3].replace(NO_BREAK, " ")
    assert shown.endswith(f"inconclusive, blind below {100 * speed['smallest_visible']:.0f} %")


def test_the_provenance_says_on_what_and_how_it_was_measured() -> None:
    text = render([made_run(resource(77.4))], "md")
    for line in (
        "- target: tiny, float32, 1.5 M parameters, weights sha256 abababababab",
        "- machine: device cpu, Made-up CPU, 2 workers, 1 thread each",
        "- code: specbench 0.1.0, commit 0123456789ab, python 3.11.7, torch 2.13.0, transformers",
        "- peak memory of a worker, with all methods: 77 MiB",
        "- made: `specbench run --workloads 'code, creative'`, started 2026-01-02T03:04:05Z, "
        "load average 0.25",
    ):
        assert line in text


def test_a_run_without_provenance_is_shown_all_the_same() -> None:
    run = Run(Path("bare"), {"schema": 1, "shards": []})
    run.references.append(reference("a"))
    run.requests.append(output("echo", "a", (1, 1, 1, 2)))
    text = render([run], "md")
    assert row(text, "echo")[1] == "2.00"
    assert "target not known" in text
    assert render_leaderboard([run])
    assert printed([run])


def test_every_definition_is_printed_with_the_tables() -> None:
    runs = [made_run(*paired("echo", 2))]
    text, terminal = render(runs, "md"), printed(runs)
    for word, meaning in DEFINITIONS.items():
        assert f"| {word} | {meaning} |" in text
        assert word in terminal


def test_runs_measured_otherwise_are_sections_that_say_why() -> None:
    half = {"name": "tiny", "dtype": "bfloat16", "num_parameters": 1_500_000}
    runs = [made_run(*paired("echo", 2)), made_run(*paired("echo", 3), target=half)]
    text = render(runs, "md")
    assert "# tiny, float32, Made-up CPU" in text
    assert "# tiny, bfloat16, Made-up CPU" in text
    assert (
        "- not to be compared with the first run: target.dtype is bfloat16 instead of float32\n"
    ) in text
    assert row(text, "echo (copies)", 0)[3].startswith("2.00x")
    assert row(text, "echo (copies)", 1)[3].startswith("3.00x")


def test_runs_measured_likewise_share_their_tables() -> None:
    runs = [made_run(*paired("echo", 2)), made_run(*paired("other", 4), folder="second")]
    (workload,) = values(runs)
    shown = {m["method"]: m["speed_up"] and m["speed_up"]["value"] for m in workload["methods"]}
    assert shown == {"vanilla": None, "echo": pytest.approx(2), "other": pytest.approx(4)}
    assert "- second: `specbench run" in render(runs, "md")


def test_the_unknown_format_and_no_runs_are_errors() -> None:
    with pytest.raises(ValueError, match="unknown format 'html'; valid: md, json"):
        render([made_run()], "html")
    for format in FORMATS:
        with pytest.raises(ValueError, match="no run to report"):
            render([], format)


def test_a_pipe_gets_whole_lines_of_at_most_a_hundred_columns() -> None:
    label = "a label of many words that has to be broken somewhere"
    methods = {**INFO["methods"], "echo": {"label": label, "extra_bytes": 0}}
    records = [*paired("echo", 1.02, num_prompts=5), failure("echo", "x" * 30, "a reason " * 12)]
    text = printed([made_run(*records, methods=methods)], width=40)
    assert max(map(len, text.splitlines())) <= 100
    assert "…" not in text
    assert f"1.02x{NO_BREAK}[1.02,{NO_BREAK}1.02]" in text
    assert all(word in text for word in label.split())
    assert re.search(r"exact 5/5 +1", text)


def test_a_terminal_narrower_than_the_tables_loses_no_digit() -> None:
    file = io.StringIO()
    run = made_run(*paired("echo", 1.5))
    print_report([run], Console(file=file, width=60, force_terminal=True, color_system=None))
    assert "25/50/25" in re.sub(r"\s+", " ", file.getvalue())


def test_labels_are_text_and_not_markup() -> None:
    methods = {**INFO["methods"], "echo": {"label": "[red]a|b[/red]", "extra_bytes": 0}}
    runs = [made_run(*paired("echo", 2), methods=methods)]
    assert "[red]a|b[/red]" in printed(runs)
    assert r"[red]a\|b[/red]" in render(runs, "md")


BOARD = [
    *paired("slow", 0.5),
    *paired("fast", 3),
    *paired("cheat", 9, lossless="broken"),
    *paired("typical", 8, lossless="lossy"),
]


def board_run(folder: str = "made") -> Run:
    """Four methods on one workload of low entropy, and one on a workload of high entropy."""
    records = {repr(record): record for record in BOARD}
    high = paired("slow", 0.7, workload="creative", entropy_nats=2)
    return made_run(*records.values(), *high, folder=folder, methods={})


def test_the_leaderboard_ranks_by_speed_up_what_is_lossless() -> None:
    lines = [line for line in render_leaderboard([board_run()]).splitlines() if "x [" in line]
    assert [line.split(" | ")[:2] for line in lines] == [
        ["| 1", "fast"],
        ["| 2", "slow"],
        ["| -", "cheat"],
        ["| -", "typical"],
        ["| 1", "slow"],
    ]


def test_the_leaderboard_groups_workloads_by_entropy_under_their_machine() -> None:
    headings = [line for line in render_leaderboard([board_run()]).splitlines() if line[:1] == "#"]
    assert headings == [
        "# Leaderboard",
        "## tiny, float32, Made-up CPU",
        "### Low entropy (below 1.0 nats)",
        "#### code",
        "### High entropy (1.0 nats and more)",
        "#### creative",
        "## Definitions",
    ]


def test_the_leaderboard_tells_machine_commit_and_command() -> None:
    text = render_leaderboard([board_run()])
    for word in ("Made-up CPU", "commit 0123456789ab", "`specbench run --workloads"):
        assert word in text


def test_make_leaderboard_writes_the_same_page_each_time(tmp_path: Path) -> None:
    for name, speed in (("b", 2.0), ("a", 3.0)):
        target = {"name": f"target-{name}"}
        filed_run(tmp_path / name, paired("echo", speed), target=target)
    deeper = {"name": "target-of-a-sweep"}
    filed_run(tmp_path / "sweep" / "batch-1", paired("echo", 2.0), target=deeper)
    main_leaderboard(tmp_path)
    page = (tmp_path / "leaderboard.md").read_text()
    main_leaderboard(tmp_path)
    assert (tmp_path / "leaderboard.md").read_text() == page
    assert page.index("target-a") < page.index("target-b")
    assert "target-of-a-sweep" not in page
    assert str(tmp_path) not in page


def test_a_results_folder_without_runs_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no runs"):
        main_leaderboard(tmp_path)


def run_python(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs Python as make does."""
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=False)


def test_the_module_writes_the_leaderboard(tmp_path: Path) -> None:
    filed_run(tmp_path / "one", paired("echo", 2), shards=["code-0"])
    done = run_python("-m", "specbench.report", str(tmp_path))
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert "2.00x" in (tmp_path / "leaderboard.md").read_text()


def test_the_module_fails_in_one_line(tmp_path: Path) -> None:
    done = run_python("-m", "specbench.report", str(tmp_path))
    assert done.returncode == 1
    assert done.stderr == f"error: {tmp_path} holds no runs; valid: a folder above run folders\n"
    assert "usage:" in run_python("-m", "specbench.report").stderr


def test_a_report_needs_neither_torch_nor_what_measures() -> None:
    forbidden = ["torch", "ray", "transformers", "specbench.bench", "specbench.target"]
    code = f"import sys, specbench.report; print([m for m in {forbidden} if m in sys.modules])"
    assert run_python("-c", code).stdout == "[]\n"


def test_an_interrupted_run_is_reported_from_its_folder(tmp_path: Path) -> None:
    run = filed_run(tmp_path, paired("echo", 2), shards=["code-0", "c"])
    assert "1 of 2 shards is missing" in render([run], "md")
