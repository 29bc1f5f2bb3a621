"""The trainer: prompts, corpus, hidden states, updates; cut and gone on with."""

import json
import math
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from specbench import registry
from specbench.cli import main
from specbench.conformance.models import save_tiny_model
from specbench.sampling import Sampling
from specbench.target import FINAL, Target, load_target
from specbench.target.attention import NAME
from specbench.training import corpus as corpora
from specbench.training import state
from specbench.training import trainer as trainers
from specbench.training.corpus import Answered, Corpus, Writer, write
from specbench.training.display import Display
from specbench.training.evaluation import held_out_tau
from specbench.training.features import Features
from specbench.training.prompts import Evaluated, UserTurn, source_prompts, usable
from specbench.training.recipe import Recipe, draft_vocabulary
from specbench.training.state import Progress
from specbench.training.trainer import check_target, open_run, schedule
from specbench.workloads import load_workload


@pytest.fixture(scope="module")
def evaluated() -> Evaluated:
    return Evaluated()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("target") / "tiny", max_position_embeddings=4096)


@pytest.fixture(scope="module")
def target(folder: Path) -> Target:
    return load_target(str(folder), dtype="float32")


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECBENCH_CACHE", str(tmp_path / "cache"))


def test_every_prompt_of_every_workload_is_kept_out(evaluated: Evaluated) -> None:
    for name in ("humaneval", "creative", "math", "chat"):
        for prompt in load_workload(name, 5).prompts:
            text = prompt.turns[0]
            assert evaluated.overlap(text)
            assert evaluated.overlap(f"Please, {text.upper()} Thank you.")
    assert not evaluated.overlap("Write a haiku about the colour of a lighthouse at noon, please.")


def test_a_source_loses_its_overlapping_prompts_and_a_workload_is_refused(
    evaluated: Evaluated, tmp_path: Path
) -> None:
    known = load_workload("creative", 1).prompts[0].turns[0]
    own = ["Name three rivers of the north and say where they end.", "What is a hinge?"]
    source = tmp_path / "own.jsonl"
    source.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in [*own, known]))
    assert source_prompts(str(source), evaluated) == (own, 1)
    source.write_text(json.dumps({"prompt": known}) + "\n")
    with pytest.raises(ValueError, match=r"all 1 prompts of .* overlap the workloads"):
        source_prompts(str(source), evaluated)
    with pytest.raises(ValueError, match="'humaneval' is a workload"):
        source_prompts("humaneval", evaluated)


def test_invented_prompts_are_used_once_and_not_if_they_are_a_workloads(
    evaluated: Evaluated,
) -> None:
    known = load_workload("math", 1).prompts[0].turns[0]
    texts = {3: "Explain what a hinge is for.", 4: "Hm.", 5: known, 6: "Tell me of a pond."}
    assert usable(texts | {9: texts[3]}, evaluated) == [3, 6]


def test_the_users_turn_is_found_in_a_chat_template(target: Target) -> None:
    assert target.tokenizer is not None
    turn = UserTurn.of(target.tokenizer)
    text = target.tokenizer.apply_chat_template(
        [{"role": "user", "content": "xyz"}], add_generation_prompt=True, tokenize=False
    )
    before, _, after = str(text).partition("xyz")
    assert target.tokenizer.decode(list(turn.before)) == before
    assert turn.end and after.lstrip().startswith(turn.end)


def test_a_corpus_holds_the_targets_own_answers_and_only_grows(
    target: Target, evaluated: Evaluated, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert target.tokenizer is not None
    prompts = [f"Say {number} things about ponds." for number in range(70)]

    def grow(folder: Path, num_tokens: int) -> Corpus:
        corpus = Corpus(folder, target.vocab_size)
        write(
            corpus,
            Writer(target, 8),
            prompts,
            evaluated,
            num_tokens=num_tokens,
            num_new_tokens=6,
            seed=1,
            display=Display(lambda text: None),
        )
        return corpus

    monkeypatch.setattr(corpora, "_CHUNK", 64)
    small = grow(tmp_path / "a", 10)
    assert [one.number for one in small.sequences] == list(range(64))
    with small.path.open("a") as file:
        file.write('{"number": 64, "prom')
    whole, again = grow(tmp_path / "b", 10**6), grow(tmp_path / "a", 10**6)
    assert len(whole) == 70 and again.sequences == whole.sequences
    assert Corpus(tmp_path / "a", target.vocab_size).sequences == whole.sequences
    writer = Writer(target, 1)
    for one in whole.sequences[:6]:
        sampling = Sampling() if one.temperature == 0 else corpora.DRAWN
        request = corpora.Request(
            id="x",
            prompt=tuple(one.prompt),
            max_new_tokens=6,
            key=corpora.request_key(1, f"answer-{one.number}"),
        )
        assert writer.answers([request], sampling)[0].output == one.answer
    assert {one.temperature for one in whole.sequences} == {0, corpora.DRAWN.temperature}
    held_out, trained = whole.indices(True), whole.indices(False)
    assert sorted(held_out + trained) == list(range(70)) and len(held_out) == 3
    counts = whole.token_counts(target.vocab_size)
    assert counts.sum() == sum(len(whole.sequences[i].answer) for i in trained)


def test_the_target_invents_prompts(target: Target) -> None:
    first = Writer(target, 4).invent(0, range(12))
    assert Writer(target, 3).invent(0, range(6)) == {n: t for n, t in first.items() if n < 6}
    assert first


def test_hidden_states_are_those_of_the_target_kept_or_not(target: Target, tmp_path: Path) -> None:
    corpus = Corpus(tmp_path, target.vocab_size)
    corpus.add(Answered(n, [5 + n, 6, 7][: 1 + n % 3], [8, 9, 10 + n], 0.0) for n in range(5))
    taps = (0, 2, FINAL)
    kept = Features(target, corpus, taps, tmp_path / "h", 10**9)
    fresh = Features(target, corpus, taps, tmp_path / "none", 0)
    assert kept.kept and not fresh.kept and not (tmp_path / "none").exists()
    for features in (kept, kept, fresh, Features(target, corpus, taps, tmp_path / "h", 10**9)):
        batch = features.batch([4, 1])
        assert batch.tokens_BT.tolist() == [[9, 6, 8, 9, 14], [6, 6, 8, 9, 11]]
        assert batch.written_BT.tolist() == [[False, False, True, True, True]] * 2
        for row, index in enumerate([4, 1]):
            cache = target.new_cache(1)
            states = target.prefill(corpus.sequences[index].tokens, cache, cache.add_row(), taps)
            for tap in taps:
                found = batch.hidden[tap][row]
                assert torch.equal(found, states[tap][0].bfloat16()) and not found.is_inference()
    ragged = fresh.batch([0, 2])
    assert ragged.tokens_BT.tolist() == [[5, 8, 9, 10, 0, 0], [7, 6, 7, 8, 9, 12]]
    assert not ragged.hidden[0][0, 4:].any() and not ragged.written_BT[0, 4:].any()


def test_a_draft_vocabulary_is_what_was_written_filled_up_with_low_ids() -> None:
    counts = torch.tensor([0, 0, 5, 0, 9, 1, 0, 9])
    assert draft_vocabulary(counts, 2).tolist() == [4, 7]
    assert draft_vocabulary(counts, 5).tolist() == [0, 2, 4, 5, 7]
    assert draft_vocabulary(counts, 99).tolist() == list(range(8))


def test_the_learning_rate_rises_and_falls() -> None:
    rates = [schedule(i / 200) for i in range(201)]
    peak = rates.index(max(rates))
    assert 0 < peak < 20 and rates[peak] == pytest.approx(1, abs=0.01)
    assert rates[:peak] == sorted(rates[:peak])
    assert rates[peak:] == sorted(rates[peak:], reverse=True) and rates[-1] == pytest.approx(0.05)


SETTINGS: dict[str, Any] = {
    "tokens": 300,
    "minutes": 0.05,
    "max_new_tokens": 6,
    "batch_size": 8,
    "batch_tokens": 40,
    "evaluate_minutes": 100.0,
    "dtype": "float32",
    "vocab": 60,
}


def settings(folder: Path, tmp_path: Path, **others: Any) -> dict[str, Any]:
    source = tmp_path / "prompts.jsonl"
    source.write_text(
        "".join(json.dumps({"prompt": f"Say {n} things of ponds."}) + "\n" for n in range(90))
    )
    given = {"method": "medusa", "target": str(folder), "prompts": str(source)}
    return given | SETTINGS | others


@pytest.mark.parametrize(
    "method", [name for name in registry.sources() if registry.load_method(name).Recipe]
)
def test_every_learned_method_is_trained_and_drafts_with_what_was_trained(
    method: str, folder: Path, tmp_path: Path
) -> None:
    said: list[str] = []
    out = tmp_path / "out"
    open_run(settings(folder, tmp_path, method=method), out, False, Display(said.append)).run()
    card = json.loads((out / trainers.CARD).read_text())
    assert card["training"]["updates"] > 0 and card["corpus"]["answer_tokens"] >= 300
    assert set(card["held_out_tau"]) >= {"code", "creative"}
    assert all(tau >= 1 for tau in card["held_out_tau"].values())
    assert list(card["sha256"])
    target = load_target(str(folder), dtype="float32")
    cls = registry.load_method(method)
    config = registry.make_config(method, cls, {cls.weights_knob: str(out)})
    assert held_out_tau(target, cls(target, config)) == card["held_out_tau"]
    log = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    assert log[-1]["loss"] > 0 and log[-1]["tokens_per_s"] > 0


def test_a_run_that_is_cut_goes_on_with_the_same_updates(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Clock:
        """Every update takes the same time, to the bit."""

        now = 0.0

        def perf_counter(self) -> float:
            Clock.now += 0.0625
            return Clock.now

    monkeypatch.setattr(trainers, "time", Clock())

    def weights(out: Path) -> dict[str, torch.Tensor]:
        found: dict[str, Any] = torch.load(out / "state.pt", weights_only=True)
        return found["module"]  # type: ignore[no-any-return]

    given = settings(folder, tmp_path)
    open_run(given, tmp_path / "whole", False, Display(lambda text: None)).run()

    class Cut(Exception):
        pass

    save = state.save

    def save_and_cut(recipe: Recipe, optimiser: Any, progress: Progress, out: Path) -> None:
        save(recipe, optimiser, progress, out)
        assert 0 < progress.updates < 40
        raise Cut

    monkeypatch.setattr(trainers, "_SAVE_EVERY_S", 1.0)
    monkeypatch.setattr(state, "save", save_and_cut)
    with pytest.raises(Cut):
        open_run(given, tmp_path / "cut", False, Display(lambda text: None)).run()
    monkeypatch.setattr(state, "save", save)
    said: list[str] = []
    open_run(given, tmp_path / "cut", True, Display(said.append)).run()
    assert any("going on after" in text for text in said)
    whole, cut = weights(tmp_path / "whole"), weights(tmp_path / "cut")
    assert whole.keys() == cut.keys() and all(torch.equal(whole[k], cut[k]) for k in whole)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["ngram"], "method 'ngram' has nothing to train; valid: .*medusa"),
        (["nothing"], "unknown method 'nothing'"),
        (["medusa", "--tokens", "0"], "--tokens 0 is out of range; valid: 1 or more"),
        (["medusa", "--minutes", "0"], "--minutes 0.0 is out of range; valid: above 0"),
        (["medusa", "--prompts", "humaneval"], "'humaneval' is a workload"),
        (["medusa", "--resume"], "no training run in"),
        (["medusa", "--learning-rate", "nan"], "--learning-rate nan is out of range; valid: 0..1"),
        (["medusa", "--disk-gib", "inf"], "--disk-gib inf is out of range"),
        (["medusa", "--seed", str(10**30)], "--seed 1000.* is out of range"),
        (["medusa", "--dtype", "float16"], "--dtype float16 .*valid: float32, bfloat16"),
        (["eagle", "--layers", "2"], "--layers has no meaning for eagle; valid: --unroll"),
        (["early_exit", "--exit-layer", "9"], "exit_layer 9 is out of range; valid.*1..3"),
        (["draft_model", "--layers", "99"], "valid.*1..4"),
        (["medusa", "--max-new-tokens", "4096"], "leaves no room for a prompt .*valid: 1..4094"),
    ],
)
def test_bad_input_is_one_line(
    words: list[str],
    message: str,
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = ["--target", str(folder), "--out", str(tmp_path / "out")]
    assert main(["train", *words, *out]) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert re.search(message, error)
    assert not (tmp_path / "out").exists()


def test_what_cannot_be_answered_ends_the_run(folder: Path, tmp_path: Path) -> None:
    """Instead of being asked again and again."""
    given = settings(folder, tmp_path, max_new_tokens=4000)
    long = [{"prompt": f"{n} " + "x" * 200} for n in range(300)]
    Path(given["prompts"]).write_text("".join(json.dumps(one) + "\n" for one in long))
    with pytest.raises(ValueError, match="of prompts 0 to 255 none can be answered"):
        open_run(given, tmp_path / "out", False, Display(lambda text: None)).run()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("null", r"sequences.jsonl, line 2: .*remove the line or the file"),
        ('{"number": 1}', r"line 2: .*prompt"),
        (
            '{"number": 1, "prompt": [1], "answer": [1000], "temperature": 0}',
            "line 2: a token that",
        ),
    ],
)
def test_a_damaged_corpus_is_named(line: str, message: str, target: Target, tmp_path: Path) -> None:
    corpus = Corpus(tmp_path, target.vocab_size)
    corpus.add([Answered(0, [1, 2], [3], 0.0)])
    with corpus.path.open("a") as file:
        file.write(line + "\n")
    with pytest.raises(ValueError, match=message):
        Corpus(tmp_path, target.vocab_size)


def test_of_two_answers_to_a_prompt_the_first_counts(target: Target, tmp_path: Path) -> None:
    """Two runs that knew nothing of each other may have made them."""
    corpus = Corpus(tmp_path, target.vocab_size)
    corpus.add([Answered(n, [1], [3 + n], 0.0) for n in (0, 2)])
    corpus.add([Answered(n, [1], [9 + n], 0.0) for n in (0, 1, 2)])
    again = Corpus(tmp_path, target.vocab_size)
    assert [(one.number, one.answer[0]) for one in again.sequences] == [(0, 3), (2, 5), (1, 10)]
    assert again.next_number == 3


@pytest.mark.parametrize("damage", ["gone", "short"])
def test_hidden_states_that_are_lost_are_computed_again(
    damage: str, target: Target, tmp_path: Path
) -> None:
    corpus = Corpus(tmp_path, target.vocab_size)
    corpus.add([Answered(0, [5, 6], [7, 8], 0.0)])
    expected = Features(target, corpus, (0,), tmp_path, 10**9).batch([0]).hidden[0]
    (file,) = tmp_path.glob("hidden.*")
    file.unlink() if damage == "gone" else os.truncate(file, 10)
    found = Features(target, corpus, (0,), tmp_path, 10**9).batch([0]).hidden[0]
    assert found.any() and torch.equal(found, expected)


def test_hidden_states_without_room_are_computed_each_time(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    corpus = Corpus(tmp_path, target.vocab_size)
    corpus.add([Answered(0, [5, 6], [7, 8], 0.0)])
    features = Features(target, corpus, (0,), tmp_path, 10**9)
    assert not features.kept and features.batch([0]).hidden[0].any()
    assert [path.name for path in tmp_path.iterdir()] == ["sequences.jsonl"]


def test_a_loss_that_is_no_number_ends_the_run_and_spoils_nothing(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given, out = settings(folder, tmp_path, evaluate_minutes=0.0001), tmp_path / "out"
    recipe = registry.load_method("medusa").Recipe
    assert recipe is not None
    loss = recipe.loss

    def broken(self: Any, batch: Any) -> Any:
        total, shown = loss(self, batch)
        return total * (torch.nan if (out / "config.json").is_file() else 1.0), shown

    monkeypatch.setattr(recipe, "loss", broken)
    with pytest.raises(ValueError, match="the loss is nan at update"):
        open_run(given, out, False, Display(lambda text: None)).run()
    (weights,) = out.glob("*.safetensors")
    assert all(tensor.isfinite().all() for tensor in load_file(weights).values())


@pytest.mark.parametrize(
    "damage", ["empty", "list", "shape", "optimiser", "seconds", "place", "target"]
)
def test_a_damaged_state_is_named(damage: str, folder: Path, tmp_path: Path) -> None:
    given, out = settings(folder, tmp_path), tmp_path / "out"
    open_run(given, out, False, Display(lambda text: None)).run()
    path = out / "state.pt"
    state = torch.load(path, weights_only=True)
    if damage == "shape":
        state["module"] = {name: weight[:1] for name, weight in state["module"].items()}
    elif damage == "optimiser":
        for kept in state["optimiser"]["state"].values():
            kept["exp_avg"] = kept["exp_avg"][:1]
    elif damage == "seconds":
        state["progress"]["seconds"] = math.nan
    elif damage == "place":
        state["progress"]["place"] = -7
    elif damage == "target":
        state["target"] = "another"
    torch.save([] if damage == "list" else state, path)
    if damage == "empty":
        path.write_bytes(b"")
    message = "other weights" if damage == "target" else f"{path} is damaged"
    with pytest.raises(ValueError, match=message):
        open_run(given, out, True, Display(lambda text: None)).run()


def test_each_prompt_file_has_a_corpus_of_its_own(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By what is in it: the same name in another folder is another."""
    corpora_of = []
    for name in ("cats", "volcanoes"):
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        lines = [json.dumps({"prompt": f"{name}, please: {i}"}) for i in range(6)]
        Path("p.jsonl").write_text("\n".join(lines) + "\n")
        given = settings(folder, tmp_path) | {"prompts": "p.jsonl", "tokens": 20}
        said: list[str] = []
        open_run(given, tmp_path / name / "out", False, Display(said.append)).run()
        corpora_of += [line for line in said if line.startswith("corpus ")]
    first, second = corpora_of
    assert "0 tokens in 0 answers" in first and "0 tokens in 0 answers" in second


def test_a_full_disk_is_one_error_and_leaves_no_part(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(ValueError, match=r"state\.pt cannot be written: .*No space left"):
        open_run(settings(folder, tmp_path), tmp_path / "out", False, Display(print)).run()
    assert not list((tmp_path / "out").glob("*state*"))


def test_a_target_that_caps_its_logits_is_refused() -> None:
    config = AutoConfig.for_model(
        "gemma2",
        vocab_size=97,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        final_logit_softcapping=0.5,
        initializer_range=0.5,
        pad_token_id=0,
    )
    model = AutoModelForCausalLM.from_config(config, attn_implementation=NAME)
    with pytest.raises(ValueError, match="scales or caps the logits"):
        check_target(Target(model, name="capped"), 16)


def test_a_folder_that_is_not_empty_is_not_written_over(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").write_text("mine")
    words = ["train", "medusa", "--target", str(folder), "--out", str(tmp_path / "out")]
    assert main(words) == 2
    assert "is not empty" in capsys.readouterr().err
    assert os.listdir(tmp_path / "out") == ["thesis.txt"]
