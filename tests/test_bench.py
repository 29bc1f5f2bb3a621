"""One shard: references, rotated passes, times, and what becomes of requests that fail."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from specbench import stopwatch
from specbench.conformance.models import save_tiny_model
from specbench.records import (
    FailureRecord,
    Record,
    ReferenceRecord,
    RequestRecord,
    ResourceRecord,
    TimingRecord,
)
from specbench.shards import Shard, load_workloads, plan_shards
from specbench.stopwatch import Stopwatch
from specbench.worker import Worker
from tests.tiny_runs import (
    chat_prompts,
    installed_methods,
    of_method,
    outputs,
    tiny_config,
    write_prompts,
)

Measure = Callable[..., list[Record]]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A tiny model of 128 positions, with the methods that break installed."""
    with installed_methods(tmp_path_factory.mktemp("methods")):
        yield save_tiny_model(tmp_path_factory.mktemp("target"), max_position_embeddings=128)


@pytest.fixture
def measure(target: Path, tmp_path: Path) -> Measure:
    """Measures a shard of prompts with some methods."""

    def run(prompts: list[dict[str, Any]], *methods: str, **settings: Any) -> list[Record]:
        path = write_prompts(tmp_path / "chat.jsonl", prompts)
        config = tiny_config(target, path, *methods, **settings)
        return Worker(config).run(first_shard(path, config.batch_size))

    return run


def first_shard(path: Path, batch_size: int = 1) -> Shard:
    """The first block of a file's prompts."""
    (workload,) = load_workloads([str(path)], None)
    return plan_shards(workload, batch_size)[0]


def requests(records: list[Record], method: str) -> list[str]:
    """Requests with an output of a method."""
    return [r.request for r in of_method(records, method) if isinstance(r, RequestRecord)]


def failures(records: list[Record]) -> dict[tuple[str | None, str], str]:
    """Reasons by method and request."""
    return {(r.method, r.request): r.reason for r in records if isinstance(r, FailureRecord)}


def timings(records: list[Record]) -> list[TimingRecord]:
    """The timed passes."""
    return [record for record in records if isinstance(record, TimingRecord)]


def test_every_request_has_a_reference_and_one_output_of_each_method(measure: Measure) -> None:
    """A later turn is a request of its own."""
    records = measure(chat_prompts(4), "ngram", rounds=2)
    expected = ["p0", "p0/2", "p1", "p2", "p3", "p3/2"]
    assert [r.request for r in records if isinstance(r, ReferenceRecord)] == expected
    for method in ("vanilla", "ngram"):
        assert requests(records, method) == expected
    assert failures(records) == {}
    assert isinstance(records[-1], ResourceRecord)


def test_vanilla_commits_exactly_one_token_per_step(measure: Measure) -> None:
    """So its tau is exactly 1."""
    records = of_method(measure(chat_prompts(2), temperature=0.8), "vanilla")
    steps = [step for r in records if isinstance(r, RequestRecord) for step in r.steps]
    assert len(steps) >= 6
    assert all(step == [0, 0, 0, 1, 0] for step in steps)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_methods_without_draft_distributions_repeat_the_reference(
    measure: Measure, temperature: float
) -> None:
    """Token for token, also when sampling."""
    records = measure(chat_prompts(3), "ngram", temperature=temperature)
    found = [r.lossless for r in records if isinstance(r, RequestRecord)]
    assert found and set(found) == {"exact"}


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_outputs_do_not_depend_on_the_batch_size(measure: Measure, temperature: float) -> None:
    """In float32 the records are equal, times aside."""
    methods = ("ngram", "early_exit", "breaks")
    knobs = {"breaks": {"prompt": "p2"}}
    alone, together = (
        measure(chat_prompts(4), *methods, temperature=temperature, batch_size=size, knobs=knobs)
        for size in (1, 4)
    )
    assert outputs(alone) == outputs(together)
    assert {len(t.requests) for t in timings(alone)} == {1}
    assert {len(t.requests) for t in timings(together)} == {2, 4}


def test_the_order_of_methods_rotates_from_round_to_round(measure: Measure) -> None:
    """Each method comes first in turn, and every pass says where it came."""
    records = measure(chat_prompts(1)[:1], "ngram", "idle", rounds=4, max_new_tokens=2)
    order = {
        round_: [
            t.method
            for t in sorted(timings(records), key=lambda t: t.order)
            if t.round == round_ and t.requests == ["p0"]
        ]
        for round_ in range(4)
    }
    assert order == {
        0: ["vanilla", "ngram", "idle"],
        1: ["ngram", "idle", "vanilla"],
        2: ["idle", "vanilla", "ngram"],
        3: ["vanilla", "ngram", "idle"],
    }


def test_no_method_comes_first_on_every_prompt_of_one_round(measure: Measure) -> None:
    records = measure(chat_prompts(3)[1:], "ngram", rounds=1, max_new_tokens=2)
    first = {t.requests[0]: t.method for t in timings(records) if t.order == 0}
    assert first == {"p1": "vanilla", "p2": "ngram"}


def test_an_output_whose_drafts_were_drawn_says_how_surprising_it_is(measure: Measure) -> None:
    """And no other output does."""
    records = measure(chat_prompts(3), "draft_model", "ngram", temperature=1.0)
    found = [r for r in records if isinstance(r, RequestRecord)]
    assert {r.method for r in found if r.surprise} == {"draft_model"}
    assert {r.lossless for r in found if r.surprise} == {"law"}
    assert all(r.surprise.expected_nats > 0 for r in found if r.surprise)


def test_a_later_turn_sees_the_answer_of_the_reference(target: Path, tmp_path: Path) -> None:
    """And both turns of the user around it."""
    path = write_prompts(tmp_path / "two.jsonl", [{"id": "p0", "turns": ["first", "second"]}])
    worker = Worker(tiny_config(target, path, "listens"))
    records = worker.run(first_shard(path))
    answer = next(r.text for r in records if isinstance(r, ReferenceRecord))
    tokenizer: Any = worker.target.tokenizer
    listens: Any = worker.methods["listens"]
    second = tokenizer.decode(list(listens.heard["p0/2"].prompt))
    assert answer
    assert second == f"<user>first\n<assistant>{answer}\n<user>second\n<assistant>"


def test_a_prompt_beyond_the_context_fails_alone(measure: Measure) -> None:
    """It says by how much; its later turns fail with it, other prompts do not."""
    long = {"id": "long", "turns": ["x" * 200, "and again"]}
    records = measure([long, *chat_prompts(2)[1:]], "ngram", batch_size=4)
    found = failures(records)
    assert set(found) == {(None, "long"), (None, "long/2")}
    assert "the target's context is 128" in found[None, "long"]
    assert found[None, "long/2"] == "turn 1 failed"
    assert requests(records, "ngram") == requests(records, "vanilla") == ["p1"]


def test_a_second_turn_that_does_not_fit_leaves_the_first(measure: Measure) -> None:
    """Only what fails is lost."""
    records = measure([{"id": "p0", "turns": ["short", "y" * 200]}], "ngram")
    assert set(failures(records)) == {(None, "p0/2")}
    assert requests(records, "ngram") == ["p0"]


def test_one_prompt_that_breaks_a_method_fails_alone_in_its_batch(measure: Measure) -> None:
    """The others have outputs but no times, and other methods do not notice."""
    records = measure(
        chat_prompts(3)[1:], "breaks", batch_size=4, knobs={"breaks": {"prompt": "p2"}}
    )
    (failure,) = failures(records).items()
    assert failure[0] == ("breaks", "p2")
    assert re.fullmatch(
        r"RuntimeError: no draft for this one \(drafters_that_break.py, line \d+\)", failure[1]
    )
    assert requests(records, "breaks") == ["p1"]
    assert [t.method for t in timings(records)] == ["vanilla"]


def test_a_request_that_fails_has_no_number_of_any_round(measure: Measure) -> None:
    """A method that only fails in later rounds has no output either."""
    records = measure(chat_prompts(2)[1:], "fickle", temperature=1.0, rounds=2)
    assert failures(records) == {("fickle", "p1"): "its output changed from one round to another"}
    assert [r for r in of_method(records, "fickle") if not isinstance(r, FailureRecord)] == []


def test_a_batch_that_only_fails_together_fails_as_one(measure: Measure) -> None:
    """None of its requests is to blame, so none has a number."""
    records = measure(chat_prompts(3)[1:], "crowded", batch_size=4)
    found = failures(records)
    assert found.keys() == {("crowded", "p1"), ("crowded", "p2")}
    assert all(reason.startswith("RuntimeError: out of memory (") for reason in found.values())
    assert requests(records, "crowded") == []


def test_a_lost_device_is_the_workers_end(measure: Measure) -> None:
    """Else every prompt after it would be recorded as failed."""
    with pytest.raises(torch.AcceleratorError):
        measure(chat_prompts(2), "loses_device", knobs={"loses_device": {"prompt": "p1"}})


def test_a_method_that_cannot_be_set_up_is_named_with_the_place(measure: Measure) -> None:
    """In one line, since its traceback may lie in another process."""
    with pytest.raises(
        ValueError,
        match=r"'unready' cannot be set up: TypeError: no such head "
        r"\(drafters_that_break.py, line \d+\)$",
    ):
        measure(chat_prompts(1), "unready")


def test_a_budget_beyond_the_context_is_refused_at_once(measure: Measure) -> None:
    """No prompt could be decoded."""
    with pytest.raises(ValueError, match=r"--max-new-tokens 128 .* valid: 1\.\.127"):
        measure(chat_prompts(1), max_new_tokens=128)


def test_a_warm_up_that_does_not_fit_harms_nothing(tmp_path: Path, target: Path) -> None:
    """A short context may be enough for the prompts."""
    short = save_tiny_model(tmp_path / "short", max_position_embeddings=48)
    path = write_prompts(tmp_path / "w.jsonl", [{"id": "p0", "prompt": "hello"}])
    records = Worker(tiny_config(short, path)).run(first_shard(path))
    assert requests(records, "vanilla") == ["p0"]


def test_phases_add_up_to_the_decode_time(measure: Measure) -> None:
    """Prefill is apart, and tokens are those of the outputs."""
    records = measure(chat_prompts(2), "ngram", batch_size=2)
    tokens = {(r.method, r.request): len(r.tokens) for r in records if isinstance(r, RequestRecord)}
    for t in timings(records):
        assert t.decode_s == pytest.approx(t.draft_s + t.forward_s + t.bookkeeping_s)
        assert min(t.forward_s, t.prefill_s, t.bookkeeping_s) > 0
        assert t.num_tokens == sum(tokens[t.method, request] for request in t.requests)


def test_the_stopwatch_sums_each_phase_and_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every moment belongs to the phase that ends next."""
    moments = iter([10.0, 11.0, 13.0, 17.0])
    monkeypatch.setattr(stopwatch.time, "perf_counter", lambda: next(moments))
    watch = Stopwatch(torch.device("cpu"))
    for phase in ("draft", "forward", "draft"):
        watch.lap(phase)
    assert watch.seconds() == {"draft": 5.0, "forward": 2.0}
