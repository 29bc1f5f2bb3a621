"""The draft model: its context, its vocabulary, and the cache that it keeps for itself."""

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from specbench import registry
from specbench.conformance.decoding import ALLOWED, GREEDY, make_request, reference
from specbench.conformance.models import ASCII_VOCAB, looping_model, looping_target, tiny_tokenizer
from specbench.decode import Decoder
from specbench.depth import DepthController, Fixed
from specbench.method import Budget, Method, Row, Verdict
from specbench.sampling import Sampling
from specbench.target import Target
from specbench_methods.draft_model import default_copy
from tests.drafters import Auditor, Setting, decode, make_method

SAMPLINGS = [
    GREEDY,
    Sampling(temperature=0.8, top_p=0.9, rule="coupled"),
    Sampling(temperature=0.8, top_p=0.9),
]
COPY = Setting("draft_model", (("model", "layers"), ("layers", "4"), ("branching", "")))


@cache
def target() -> Target:
    return looping_target(eos_token_id=None)


def save_drafter(
    folder: Path, change: Callable[[Any], None] = lambda model: None, **settings: Any
) -> Path:
    """Saves the target's own weights, changed, as a draft model."""
    model = looping_model(**({"eos_token_id": None} | settings))
    change(model)
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def load(folder: Path | str, **knobs: str) -> Method:
    cls = registry.load_method("draft_model")
    config = registry.make_config("draft_model", cls, {"model": str(folder), **knobs})
    return cls(target(), config)


# Context.

WINDOW = 24


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> Method:
    """A drafter that is always right, in a context of its own."""
    folder = save_drafter(tmp_path_factory.mktemp("narrow"), max_position_embeddings=WINDOW)
    return load(folder, branching="2")


@pytest.mark.parametrize("max_rows", [1, 3, 8])
@pytest.mark.parametrize("sampling", SAMPLINGS[:2], ids=["T=0", "coupled"])
def test_beyond_the_drafters_context_decoding_goes_on_without_drafts(
    narrow: Method, max_rows: int, sampling: Sampling
) -> None:
    lengths = [5, WINDOW - 4, WINDOW - 1, WINDOW, WINDOW + 1, 3 * WINDOW, 3, WINDOW - 2]
    requests = [make_request([7 + i, *range(20, 19 + n)], 12) for i, n in enumerate(lengths)]
    rows = decode(target(), narrow, requests, sampling, max_rows=max_rows, audit=True)
    for row in rows:
        assert row.output == reference(target(), row.request, sampling)
        length = len(row.request.prompt)
        for step in row.steps:
            deepest = min(ALLOWED.depth, row.request.max_new_tokens - 1, WINDOW - length)
            assert step.depth <= max(0, deepest)
            assert step.depth > 0 or length >= WINDOW or length == len(row.tokens) - 1
            assert step.accepted == step.depth
            length += step.committed


# Vocabulary.


@pytest.mark.parametrize("vocab_size", [ASCII_VOCAB - 40, ASCII_VOCAB + 31])
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["T=0", "coupled", "drawn"])
def test_the_draft_vocabulary_may_be_smaller_or_padded(
    vocab_size: int, sampling: Sampling, tmp_path: Path
) -> None:
    method = load(save_drafter(tmp_path, lambda model: _resize(model, vocab_size)), branching="2")
    requests = [make_request((9 + i, 90 - i, 60), 12) for i in range(4)]
    rows = decode(target(), method, requests, sampling, max_rows=4)
    outputs = [reference(target(), request, sampling) for request in requests]
    if sampling is not SAMPLINGS[2]:
        assert [row.output for row in rows] == outputs
    num_foreign = sum(token >= vocab_size for output in outputs for token in output)
    num_steps = sum(len(row.steps) for row in rows)
    if vocab_size > ASCII_VOCAB:
        assert num_foreign == 0 and num_steps < 20
    else:
        assert num_foreign > 0 and num_steps < 48


def _resize(model: Any, vocab_size: int) -> None:
    model.resize_token_embeddings(vocab_size, mean_resizing=False)


def words(vocab: dict[str, int]) -> PreTrainedTokenizerBase:
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(vocab, unk_token="a")), unk_token="a"
    )


@pytest.mark.parametrize(
    ("theirs", "problem"),
    [
        ({"a": 0, "b": 1}, "2 tokens instead of 3"),
        ({"a": 0, "b": 2, "c": 1}, "token 'b' has id 2 instead of 1"),
        ({"a": 0, "b": 1, "d": 2}, "token 'c' has id None instead of 2"),
    ],
)
def test_another_tokenizer_is_refused_by_its_first_difference(
    theirs: dict[str, int], problem: str, tmp_path: Path
) -> None:
    save_drafter(tmp_path)
    words(theirs).save_pretrained(tmp_path)
    cls = registry.load_method("draft_model")
    model = Target(looping_model(), words({"a": 0, "b": 1, "c": 2}), name="big")
    with pytest.raises(ValueError, match=f"has another tokenizer than target 'big': {problem}"):
        cls(model, registry.make_config("draft_model", cls, {"model": str(tmp_path)}))


def test_without_a_tokenizer_the_vocabularies_must_be_of_one_size(tmp_path: Path) -> None:
    save_drafter(tmp_path, lambda model: _resize(model, 50))
    cls = registry.load_method("draft_model")
    with pytest.raises(ValueError, match="has 50 tokens, target 'target' 97"):
        cls(
            Target(looping_model()),
            registry.make_config("draft_model", cls, {"model": str(tmp_path)}),
        )


# The drafter's own cache.


def test_after_full_acceptance_the_drafter_catches_up_in_the_next_steps_first_forward() -> None:
    method: Any = make_method(target(), COPY)
    decoder = Decoder(target(), method, Fixed(4, 64), GREEDY)
    (row,) = decoder.join([make_request((5, 6, 7), 30)])
    for _ in range(3):
        begin = method.drafter.num_forwards
        decoder.step()
        assert row.steps[-1] == (4, 4, 4, 5, 4)
        assert method.drafter.num_forwards - begin == 4
        # It ran all but the last draft; that and the bonus it has yet to see.
        assert method.cache.lengths == [len(row.tokens) - 2]


class _Watching(Fixed):
    """Counts the accepted nodes that had to move in the caches."""

    num_moved = 0

    def observe(self, verdict: Verdict) -> None:
        for path in verdict.paths:
            self.num_moved += sum(node != i for i, node in enumerate(path))


def test_paths_that_leave_the_first_branch_are_kept_by_both_caches() -> None:
    setting = Setting("draft_model", (("model", "layers"), ("layers", "2"), ("branching", "2,2")))
    controller = _Watching(*ALLOWED)
    decoder = Decoder(target(), make_method(target(), setting), controller, GREEDY, max_rows=6)
    rows = decoder.join([make_request((3 + i, 50 - i), 12) for i in range(6)])
    decode_audited(decoder)
    assert controller.num_moved >= 6
    assert [row.output for row in rows] == [reference(target(), row.request) for row in rows]


def decode_audited(decoder: Decoder) -> None:
    auditor = Auditor()
    while decoder.rows:
        decoder.step()
        auditor.take_down(decoder)
    auditor.check()


class _InTurns(DepthController):
    """Lets every row draft in some steps only, each at another time."""

    def __init__(self) -> None:
        self.num_steps = 0

    def choose(self, rows: Sequence[Row]) -> list[Budget]:
        self.num_steps += 1
        return [Budget(3 * ((self.num_steps + b) % 4 == 0), 6) for b in range(len(rows))]


def test_a_row_that_does_not_draft_for_some_steps_catches_up_later() -> None:
    method: Any = make_method(target(), COPY)
    decoder = Decoder(target(), method, _InTurns(), GREEDY, max_rows=3)
    rows = decoder.join([make_request((5 + i, 6), 20 + i) for i in range(3)])
    decode_audited(decoder)
    for row in rows:
        assert row.output == reference(target(), row.request)
        assert {step.depth for step in row.steps} >= {0, 3}
        assert all(step.accepted == step.depth for step in row.steps)


# Knobs and description.


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"branching": "2,0"}, r"branching \(2, 0\) is out of range; valid: 1 or more"),
        ({"layers": "-1"}, "layers -1 is out of range; valid: 0 or more"),
        ({"model": "layers", "layers": "5"}, r"layers 5 is out of range; valid: 1\.\.4"),
        ({"model": "no/such folder"}, "no/such folder"),
    ],
)
def test_knobs_out_of_range_are_refused(knobs: dict[str, str], message: str) -> None:
    cls = registry.load_method("draft_model")
    with pytest.raises(ValueError, match=message):
        cls(target(), registry.make_config("draft_model", cls, knobs))


def test_it_says_what_drafts_and_how_large_that_is() -> None:
    whole, int8 = make_method(target(), COPY), make_method(target(), Setting("draft_model", ()))
    half = make_method(target(), Setting("draft_model", (("model", "layers"), ("layers", "2"))))
    assert (whole.label, int8.label) == ("4 of the target's 4 layers", "int8 copy of the target")
    assert whole.num_extra_bytes == target().num_weight_bytes
    assert whole.num_extra_bytes > half.num_extra_bytes
    assert whole.num_extra_bytes > int8.num_extra_bytes > whole.num_extra_bytes / 4
    assert half.describe()["num_parameters"] < whole.describe()["num_parameters"]
    assert half.describe()["layers"] == 2


def test_without_knobs_a_copy_drafts_that_the_device_can_run() -> None:
    assert make_method(target(), Setting("draft_model", ())).label == "int8 copy of the target"
    assert [default_copy(torch.device(kind)) for kind in ("cpu", "cuda")] == ["int8", "layers"]
    quarter = make_method(target(), Setting("draft_model", (("model", "layers"),)))
    assert quarter.label == "1 of the target's 4 layers"
