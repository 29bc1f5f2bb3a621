"""What is timed, in which order, on what; and the command. No absolute times."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from specbench import profiling
from specbench.cli import main
from specbench.conformance.models import save_tiny_model, tiny_target
from specbench.method import Batch, Budget, Method, MethodConfig, Proposal
from specbench.profile import Pass, load_profile, step_table
from specbench.profiler import ProfileConfig
from specbench.profiling import (
    measure_bandwidth,
    measure_forwards,
    measure_rate,
    measure_steps,
    memory_bytes,
)
from specbench.target import Target, ending
from specbench.tree import Tree


@pytest.fixture(scope="module")
def target() -> Target:
    """Tiny, of 128 positions."""
    return tiny_target(max_position_embeddings=128)


class Wild(Method):
    """Drafts a chain of any tokens, and writes down what it was asked for."""

    def __init__(self, target: Target) -> None:
        super().__init__(target, MethodConfig(max_nodes=3))
        self.asked: list[tuple[int, int]] = []
        self.prompts: set[tuple[int, ...]] = set()

    def propose(self, batch: Batch, budgets: Sequence[Budget]) -> Proposal:
        self.asked.append((len(budgets), budgets[0].depth))
        self.prompts |= {row.request.prompt for row in batch.rows}
        depths = [min(budget) for budget in budgets]
        drafted = [[5] * depth for depth in depths]
        return Proposal.from_rows(batch.rows, [Tree.chain(d) for d in depths], drafted)


def watch_forwards(target: Target, monkeypatch: pytest.MonkeyPatch) -> list[Pass]:
    """The list that every later forward with logits is added to."""
    seen: list[Pass] = []
    forward: Callable[..., Any] = target.forward

    def watched(tokens_BN: torch.Tensor, trees: Sequence[Tree], cache: Any, **more: Any) -> Any:
        if not more:
            assert len({*cache.lengths}) == 1 and [*map(len, trees)] == [tokens_BN.shape[1]] * len(
                tokens_BN
            )
            seen.append(Pass(len(tokens_BN), tokens_BN.shape[1], cache.lengths[0]))
        return forward(tokens_BN, trees, cache, **more)

    monkeypatch.setattr(target, "forward", watched)
    return seen


def test_forwards_are_timed_in_turns_after_one_that_is_not(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = watch_forwards(target, monkeypatch)
    grid = [Pass(1, 1, 20), Pass(2, 3, 20), Pass(3, 1, 0), Pass(2, 8, 120)]
    found = measure_forwards(target, grid, repeats=2)
    assert seen == grid * 3
    assert [one.place for one in found] == grid
    for one in found:
        assert len(one.seconds) == 2 and min(one.seconds) > 0


def test_a_forward_beyond_the_context_is_refused(target: Target) -> None:
    with pytest.raises(ValueError, match=r"2 tokens behind 127 does not fit; .* context is 128"):
        measure_forwards(target, [Pass(1, 1, 127), Pass(1, 2, 127)], repeats=1)
    assert measure_forwards(target, [], repeats=1) == []


def test_steps_are_real_steps_at_every_rows_and_depth(target: Target) -> None:
    method = Wild(target)
    found = measure_steps(target, method, (1, 3), (2, 5), repeats=4)
    assert [(one.rows, one.depth) for one in found] == [(b, d) for b in (1, 3) for d in (0, 2, 5)]
    for one in found:
        # No more than its own most.
        assert one.nodes == [min(one.depth, 3)] * 4
        assert len(one.total_s) == 4 and min(one.forward_s) > 0
        assert one.context > 20
    # Two steps a visit, rows and depths in turns; the depth that comes first rotates.
    assert len(method.asked) == 4 * 2 * 3 * 2
    firsts = [depth for _, depth in method.asked[::12]]
    assert [min(depth, 3) for depth in firsts] == [0, 2, 3, 0]
    assert len(method.prompts) >= 3
    assert step_table(found).step_s([2]) > 0


def test_rows_do_not_end_at_an_end_of_sequence_token(target: Target) -> None:
    every = frozenset(range(target.vocab_size))
    with ending(target, *every):
        found = measure_steps(target, Wild(target), (2,), (1,), repeats=2)
        assert target.eos_ids == every
    assert [len(one.nodes) for one in found] == [2, 2]


def test_steps_that_find_no_room_are_refused() -> None:
    short = tiny_target(max_position_embeddings=64)
    assert measure_steps(short, Wild(short), (1,), (8,), repeats=1)
    with pytest.raises(ValueError, match="context is 64"):
        measure_steps(short, Wild(short), (1,), (30,), repeats=1)
    silent = tiny_target(max_position_embeddings=64)
    silent.tokenizer = None
    with pytest.raises(ValueError, match="no tokenizer"):
        measure_steps(silent, Wild(silent), (1,), (), repeats=1)


def test_bandwidth_and_rate_are_the_best_of_several(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    monkeypatch.setattr(profiling, "_BUFFER_BYTES", {"cpu": 4000})
    monkeypatch.setattr(profiling, "_MATRIX_WIDTH", {"cpu": 10})
    monkeypatch.setattr(profiling, "_times", lambda call, device: iter([2.0, 0.5, 1.0]))
    assert measure_bandwidth(cpu) == 8000
    assert measure_rate(cpu, torch.float32) == 4000
    monkeypatch.undo()
    monkeypatch.setattr(profiling, "_BUFFER_BYTES", {"cpu": 4000})
    monkeypatch.setattr(profiling, "_MATRIX_WIDTH", {"cpu": 10})
    assert measure_bandwidth(cpu) > 0 and measure_rate(cpu, torch.bfloat16) > 0
    assert memory_bytes(cpu) > 2**20


def test_a_grid_leaves_out_what_finds_no_room() -> None:
    config = ProfileConfig(batches=(1,), tokens=(8, 1), contexts=(100, 124), methods=("vanilla",))
    grid = config.grid(128)
    assert grid.passes == [Pass(1, 1, 100), Pass(1, 1, 124), Pass(1, 8, 100)]
    assert grid.left_out == [Pass(1, 8, 124)]
    with pytest.raises(ValueError, match=r"--contexts 100,124 do not fit; .* context is 64"):
        config.grid(64)


def test_one_token_and_no_draft_are_always_measured() -> None:
    config = ProfileConfig(tokens=(4,), depths=(3, 3), batches=(2, 1))
    assert (config.tokens, config.depths, config.batches) == ((1, 4), (0, 3), (1, 2))
    assert replace(config, depths=()).depths == (0,)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model."""
    return save_tiny_model(tmp_path_factory.mktemp("target"), max_position_embeddings=160)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine is measured quickly."""
    monkeypatch.setattr(profiling, "_BUFFER_BYTES", {"cpu": 2**20})
    monkeypatch.setattr(profiling, "_MATRIX_WIDTH", {"cpu": 64})


@pytest.mark.usefixtures("small")
def test_a_profile_is_measured_filed_shown_and_simulated_on(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = f"--target {folder} --dtype float32 --methods ngram --set ngram.max_match=4"
    sizes = "--batches 1,2 --tokens 1,2,4 --contexts 20,158 --depths 1,3 --repeats 2"
    path = tmp_path / "profile.json"
    command = ["profile", *words.split(), *sizes.split(), "--out", str(path)]
    assert main([*command, "--format", "md"]) == 0
    shown = capsys.readouterr()
    assert "left out: 4 tokens behind a context of 158, beyond the target's 160" in shown.out
    assert "| ngram | 2 | 3 |" in shown.out and "specbench: measuring 10 forwards" in shown.err
    profile = load_profile(path)
    assert profile.dtype == "float32" and profile.target["name"] == str(folder)
    assert profile.methods["ngram"]["max_match"] == 4
    assert profile.provenance["threads"] == torch.get_num_threads()
    assert profile.provenance["weights_sha256"] == profile.target["weights_sha256"]
    assert [one.depth for one in profile.steps["vanilla"]] == [0, 0]
    assert max(max(one.nodes) for one in profile.steps["ngram"]) > 0
    words = f"simulate --profile {path} --acceptance 0.5 --method ngram"
    assert main(words.split()) == 0
    assert "interpolated" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--repeats 0", "--repeats 0 is out of range"),
        ("--batches 0", "--batches 0 is out of range"),
        ("--tokens x", "argument --tokens"),
        ("--methods nothing", "unknown method 'nothing'"),
        ("--set ngram.dept=2", "has no knob 'dept'"),
        ("--dtype int3", "unknown dtype 'int3'"),
        ("--target gone/gone/gone", "no model folder"),
        ("--out .", "--out . is a folder; valid: a file"),
        ("--contexts 5000 --methods vanilla", "--contexts 5000 do not fit"),
    ],
)
def test_bad_input_is_one_line(
    words: str, message: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["profile", "--target", str(folder), "--dtype", "float32", *words.split()]) == 2
    shown = capsys.readouterr()
    line = shown.err.splitlines()[-1]
    assert message in line and shown.out == ""
