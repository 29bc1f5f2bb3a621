"""What a user is shown of an output that is not the reference's."""

from dataclasses import replace
from pathlib import Path

import pytest

from specbench.cli import main
from specbench.conformance.models import save_tiny_model
from specbench.explain import decoder, explain
from specbench.records import Divergence, Record, Run, write_run, write_shard
from specbench.tables import Heading, Note
from tests.made_runs import INFO, failure, made_run, output, reference

SPLIT = Divergence(
    position=2, expected=2, found=9, gap=0.25, tolerance=0.5, expected_logit=7.5, found_logit=7.25
)


def spell(tokens: object) -> str:
    """Tokens as letters."""
    assert isinstance(tokens, list)
    return "".join(chr(ord("a") + token) for token in tokens)


def made(found: list[int], lossless: str, divergence: Divergence | None) -> Run:
    """A run of one prompt of four tokens, 'abcd', and what a method made of it."""
    record = output("echo", "p", *[(0, 0, 0, 1)] * len(found))
    record = replace(record, tokens=found, lossless=lossless, divergence=divergence)
    return made_run(reference("p"), output("vanilla", "p", *[(0, 0, 0, 1)] * 4), record)


def lines(run: Run, method: str | None = "echo") -> list[str]:
    """What is shown, line by line."""
    page = explain(run, "p", method, spell)
    return [one.text for one in page if isinstance(one, Heading | Note)]


@pytest.mark.parametrize("lossless", ["tie", "broken"])
def test_both_texts_both_tokens_and_their_gap_are_shown(lossless: str) -> None:
    assert lines(made([0, 1, 9, 3], lossless, SPLIT)) == [
        "code, prompt p",
        "echo",
        f"{lossless}: differs from the reference at token 2",
        "before: 'ab'",
        "reference: token 2 'c', logit 7.5000",
        "reference goes on: 'cd'",
        "echo: token 9 'j', logit 7.2500",
        "echo goes on: 'jd'",
        "gap 0.25, a tie up to 0.5",
    ]


def test_an_output_that_ended_early_has_an_end_and_no_gap() -> None:
    ended = Divergence(position=2, expected=2, found=None, gap=None, tolerance=None)
    shown = lines(made([0, 1], "broken", ended))
    assert "echo: the end (length), logit -" in shown
    assert shown[-1].startswith("gap -: one of the two had ended there")


def test_where_only_the_law_is_the_targets_it_says_so() -> None:
    assert "its drafts are drawn" in lines(made([0, 1, 9, 3], "law", None))[-1]
    assert "would never choose" in lines(made([0, 1, 9, 3], "broken", None))[-1]
    assert "does not claim" in lines(made([0, 1, 9, 3], "lossy", None))[-1]


def test_all_methods_are_shown_unless_one_is_asked_for() -> None:
    run = made([0, 1, 9, 3], "tie", SPLIT)
    assert "exact: the reference's 4 tokens" in lines(run, None)
    assert "vanilla" not in lines(run, "echo")


def test_what_failed_has_its_reason() -> None:
    run = made_run(reference("p"), failure("echo", "p", "out of memory"))
    assert lines(run) == ["code, prompt p", "echo", "failed: out of memory", "no output"]


def test_a_prompt_or_method_that_is_not_there_is_an_error() -> None:
    run = made([0, 1, 9, 3], "tie", SPLIT)
    with pytest.raises(ValueError, match=r"made has no reference of prompt 'q'.*; valid: p"):
        explain(run, "q", None, spell)
    with pytest.raises(ValueError, match=r"no method 'ecko' \(did you mean 'echo'\?\); valid: van"):
        explain(run, "p", "ecko", spell)


def test_the_command_shows_the_targets_own_text(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And numbers where the target is gone."""
    records: list[Record] = [
        replace(reference("p"), tokens=[ord(c) for c in "abcd"]),
        replace(
            output("echo", "p", *[(0, 0, 0, 1)] * 4, lossless="tie", divergence=SPLIT),
            tokens=[ord(c) for c in "abxd"],
        ),
    ]
    target = save_tiny_model(tmp_path / "tiny")
    settings = {**INFO["settings"], "target": str(target)}
    write_run(tmp_path / "run", INFO | {"shards": ["code-0"], "settings": settings})
    write_shard(tmp_path / "run", "code-0", records)
    words = ["explain", str(tmp_path / "run"), "--prompt", "p", "--method", "echo"]
    assert main(words) == 0
    shown = capsys.readouterr().out
    assert "tie: differs from the reference at token 2" in shown
    assert "gap 0.25, a tie up to 0.5" in shown
    assert main([*words, "--method", "nobody"]) == 2
    gone = made_run(reference("p"), settings={"target": str(tmp_path / "gone")})
    assert decoder(gone)([5, 6]) == "5 6"
