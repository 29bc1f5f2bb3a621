"""The loop: where an output ends, what a step counts, who joins and leaves, what a method is told.

Scripted drafters make the cases exact; the same cases run over every real method in
test_methods.py.
"""

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from specbench.conformance.decoding import ALLOWED, GREEDY, make_request, reference
from specbench.conformance.drafters import Scripted
from specbench.conformance.models import (
    ASCII_VOCAB,
    looping_target,
    tiny_model,
    tiny_target,
    tiny_tokenizer,
)
from specbench.decode import Cut, Decoder, check_proposal, cut
from specbench.depth import DepthController, Fixed
from specbench.method import (
    Budget,
    Proposal,
    Request,
    Row,
    Step,
    Typical,
    Verdict,
)
from specbench.sampling import Sampling
from specbench.target import FINAL, Target
from specbench.tree import Tree
from tests.drafters import decode

PROMPT = (5, 40, 12, 77, 31, 5, 40)
DEPTH = ALLOWED.depth


@cache
def target() -> Target:
    """A target whose config names no end-of-sequence token."""
    return looping_target(eos_token_id=None)


@cache
def plain(num_tokens: int = 12) -> list[int]:
    """What the target says after the prompt when nothing ends it."""
    return reference(target(), make_request(PROMPT, num_tokens))


def text(tokens: Sequence[int]) -> str:
    return str(tiny_tokenizer().decode(list(tokens)))


def wrong(token: int) -> int:
    return (token + 1) % ASCII_VOCAB


def decode_script(model: Target, script: Sequence[int], request: Request) -> Row:
    return decode(model, Scripted(model, {request.id: script}), [request])[0]


# What a step counts.


def test_a_drafter_that_is_always_right_fills_every_step() -> None:
    row = decode_script(target(), plain(), make_request(PROMPT, 12))
    assert row.output == plain()
    assert row.steps == [(4, 4, 4, 5, 4), (4, 4, 4, 5, 4), (1, 1, 1, 2, 1)]
    assert row.finish == "length"


def test_a_drafter_that_is_always_wrong_costs_no_token_and_gains_none() -> None:
    row = decode_script(target(), [wrong(token) for token in plain()], make_request(PROMPT, 12))
    assert row.output == plain()
    assert [step.committed for step in row.steps] == [1] * 12
    assert [step.depth for step in row.steps] == [4] * 8 + [3, 2, 1, 0]
    assert {step.accepted for step in row.steps} == {0}


def test_right_tokens_behind_a_wrong_one_do_not_count() -> None:
    script = [plain()[0], wrong(plain()[1]), *plain()[2:]]
    row = decode_script(target(), script, make_request(PROMPT, 8))
    assert row.output == plain()[:8]
    assert row.steps[0] == Step(nodes=4, depth=4, accepted=1, committed=2, matched=1)


@pytest.mark.parametrize("num_tokens", range(1, DEPTH + 4))
def test_the_budget_is_met_within_a_block(num_tokens: int) -> None:
    row = decode_script(target(), plain(), make_request(PROMPT, num_tokens))
    assert (row.output, row.finish) == (plain()[:num_tokens], "length")
    assert row.steps[0].depth == min(DEPTH, num_tokens - 1)


# Where an output ends.


def test_a_target_without_an_end_of_sequence_token_runs_to_its_budget() -> None:
    assert target().eos_ids == frozenset()
    assert len(plain()) == 12


def first_seen_at(index: int) -> int:
    """A token of the plain output that stands at this index and not before."""
    token = plain()[index]
    assert plain().index(token) == index
    return token


def test_an_end_of_sequence_token_inside_a_block_ends_the_output_there() -> None:
    model = looping_target(eos_token_id=first_seen_at(1))
    row = decode_script(model, plain(), make_request(PROMPT, 12))
    assert (row.output, row.finish) == (plain()[:2], "eos")
    assert row.steps == [Step(nodes=4, depth=4, accepted=2, committed=2, matched=4)]


def test_an_end_of_sequence_token_may_be_the_first_token() -> None:
    model = looping_target(eos_token_id=first_seen_at(0))
    for script, accepted in [(plain(), 1), ([wrong(token) for token in plain()], 0)]:
        row = decode_script(model, script, make_request(PROMPT, 12))
        assert (row.output, row.finish) == (plain()[:1], "eos")
        assert [(step.accepted, step.committed) for step in row.steps] == [(accepted, 1)]


def test_an_end_of_sequence_token_may_be_the_bonus() -> None:
    model = looping_target(eos_token_id=first_seen_at(2))
    script = [*plain()[:2], *(wrong(token) for token in plain()[2:])]
    row = decode_script(model, script, make_request(PROMPT, 12))
    assert (row.output, row.finish) == (plain()[:3], "eos")
    assert row.steps == [Step(nodes=4, depth=4, accepted=2, committed=3, matched=2)]


@pytest.mark.parametrize("order", [1, -1])
def test_of_several_end_of_sequence_tokens_the_first_to_come_ends_the_output(order: int) -> None:
    model = looping_target(eos_token_id=[first_seen_at(1), first_seen_at(2)][::order])
    assert model.eos_ids == {first_seen_at(1), first_seen_at(2)}
    row = decode_script(model, plain(), make_request(PROMPT, 12))
    assert (row.output, row.finish) == (plain()[:2], "eos")


def test_a_stop_string_inside_a_block_ends_the_output_there() -> None:
    request = make_request(PROMPT, 12, stop=(text(plain()[1:3]),))
    row = decode_script(target(), plain(), request)
    assert (row.output, row.finish) == (plain()[:3], "stop")
    assert row.steps == [Step(nodes=4, depth=4, accepted=3, committed=3, matched=4)]


def test_a_stop_string_may_begin_in_one_step_and_end_in_the_next() -> None:
    request = make_request(PROMPT, 12, stop=(text(plain()[3:7]),))
    row = decode_script(target(), plain(), request)
    assert (row.output, row.finish) == (plain()[:7], "stop")
    assert [step.committed for step in row.steps] == [5, 2]


def test_a_stop_string_at_the_very_end_of_the_budget_is_a_stop() -> None:
    request = make_request(PROMPT, 4, stop=(text(plain()[2:4]),))
    row = decode_script(target(), plain(), request)
    assert (row.output, row.finish) == (plain()[:4], "stop")


def test_an_end_of_sequence_token_goes_before_a_stop_string_and_the_budget() -> None:
    model = looping_target(eos_token_id=first_seen_at(1))
    request = make_request(PROMPT, 2, stop=(text(plain()[1:2]),))
    assert decode_script(model, plain(), request).finish == "eos"


def test_a_stop_string_that_the_prompt_holds_or_ends_with_is_none() -> None:
    inside, across = text(PROMPT), text([PROMPT[-1], plain()[0]])
    assert inside not in text(plain()) and across not in text(plain())
    row = decode_script(target(), plain(), make_request(PROMPT, 12, stop=(inside, across)))
    assert (row.output, row.finish) == (plain(), "length")


def test_a_stop_string_may_be_cut_anywhere_by_tokens_that_are_parts_of_letters() -> None:
    model = tiny_target(eos_token_id=None)
    tokens = tiny_tokenizer()("aé€b")["input_ids"]
    assert len(tokens) == 7
    for stop, num_kept in [("é", 3), ("€", 6), ("é€", 6), ("€b", 7)]:
        row = Row(make_request(PROMPT, 12, stop=(stop,)), list(PROMPT))
        assert cut(row, tokens, model) == Cut(num_kept, "stop")
        assert cut(row, tokens[: num_kept - 1], model) == Cut(num_kept - 1, None)


def test_a_stop_string_inside_a_longer_token_ends_the_output_behind_that_token() -> None:
    vocab = {"a": 0, "b": 1, "c": 2, "bc": 3, "abc": 4}
    spelling = Tokenizer(models.BPE(vocab=vocab, merges=[("b", "c"), ("a", "bc")]))
    spelling.decoder = decoders.Fuse()
    model = Target(
        tiny_model(vocab_size=5, eos_token_id=None, bos_token_id=None),
        PreTrainedTokenizerFast(tokenizer_object=spelling),
    )
    row = Row(make_request(PROMPT, 12, stop=("ab",)), list(PROMPT))
    assert cut(row, [2, 0, 3, 1], model) == Cut(3, "stop")
    assert cut(row, [1, 4, 1], model) == Cut(2, "stop")
    assert cut(row, [1, 0, 0], model) == Cut(3, None)


def test_stop_strings_are_found_however_much_text_precedes_them() -> None:
    row = Row(make_request(PROMPT, 500, stop=("xyz",)), list(PROMPT))
    tokens = tiny_tokenizer()("xy" * 100 + "xyz" + "xyz")["input_ids"]
    row.tokens += tokens[:150]
    assert cut(row, tokens[150:], target()) == Cut(53, "stop")


def test_a_cut_keeps_no_token_beyond_the_budget() -> None:
    row = Row(make_request(PROMPT, 3), [*PROMPT, 9])
    assert row.num_left == 2
    assert cut(row, [7, 8, 9], target()) == Cut(2, "length")
    assert cut(row, [7], target()) == Cut(1, None)


# What is refused.


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"prompt": ()}, "prompt 'p' is empty; a prompt needs one token at least"),
        ({"max_new_tokens": 0}, "'p': max_new_tokens 0; valid: 1 or more"),
        ({"stop": ("a", "")}, "'p' has an empty stop string"),
    ],
)
def test_a_request_that_makes_no_sense_is_refused(settings: dict[str, Any], message: str) -> None:
    valid: dict[str, Any] = {"id": "p", "prompt": (1,), "max_new_tokens": 1}
    with pytest.raises(ValueError, match=message):
        Request(**(valid | settings))


@pytest.mark.parametrize("token", [-1, ASCII_VOCAB])
def test_a_prompt_with_a_token_that_the_target_does_not_have_is_refused(token: int) -> None:
    with pytest.raises(ValueError, match=rf"'p' holds token {token}; .* 0\.\.96"):
        decode_script(target(), [], make_request((3, token, 4), name="p"))


def test_stop_strings_need_a_tokenizer() -> None:
    model = Target(tiny_model())
    with pytest.raises(ValueError, match=r"'p' has stop strings, but target 'target' .* tokenizer"):
        decode_script(model, [], make_request(PROMPT, stop=("x",), name="p"))


def test_nothing_of_a_batch_is_taken_in_when_one_prompt_is_refused() -> None:
    decoder = Decoder(target(), Scripted(target(), {}), Fixed(*ALLOWED), GREEDY, max_rows=2)
    with pytest.raises(ValueError, match="'long'"):
        decoder.join([make_request(PROMPT), make_request(PROMPT, 600, name="long")])
    assert (decoder.rows, decoder.cache.lengths, decoder.num_free) == ([], [], 2)


@pytest.mark.parametrize(
    ("proposal", "message"),
    [
        (
            Proposal(tokens_BN=torch.tensor([[5, 6]]), trees=[Tree.chain(1)], chances=[(0.5, 0.5)]),
            "has not one for each drafted node",
        ),
        (Proposal(tokens_BN=torch.tensor([[7, 1, 2]]), trees=[Tree.chain(2)]), "depth 2 with 2"),
        (
            Proposal(tokens_BN=torch.tensor([[7, 1, 2, 3, 4]]), trees=[Tree.of((-1, 0, 0, 0, 0))]),
            "exceeds its budget: depth 1, 3 nodes",
        ),
        (Proposal(tokens_BN=torch.tensor([[7, 97]]), trees=[Tree.chain(1)]), r"97; .* 0\.\.96"),
        (Proposal(tokens_BN=torch.tensor([[7, -1]]), trees=[Tree.chain(1)]), r"-1; .* 0\.\.96"),
        (Proposal(tokens_BN=torch.tensor([[8, 1]]), trees=[Tree.chain(1)]), "has root 8; .* is 7"),
        (
            Proposal(tokens_BN=torch.tensor([[7]]), trees=[Tree.chain(1)]),
            "1 tokens for a tree of 2 nodes",
        ),
        (
            Proposal(tokens_BN=torch.tensor([[7], [7]]), trees=[Tree.chain(0)] * 2),
            "2 trees, 2 rows of tokens .* for 1 rows",
        ),
        (
            Proposal(tokens_BN=torch.tensor([[7]]), trees=[Tree.chain(0)], logq=[{}, {}]),
            "2 of draft distributions for 1 rows",
        ),
    ],
)
def test_a_proposal_that_breaks_the_contract_is_refused(proposal: Proposal, message: str) -> None:
    row = Row(make_request((3, 7)), [3, 7])
    with pytest.raises(ValueError, match=message):
        check_proposal(proposal, [row], [Budget(1, 3)], ASCII_VOCAB)
    check_proposal(Proposal.nothing([row]), [row], [Budget(0, 0)], ASCII_VOCAB)


@pytest.mark.parametrize("num_tokens", [0, 2, 4])
def test_drafted_tokens_must_be_as_many_as_their_trees_nodes(num_tokens: int) -> None:
    row = Row(make_request(PROMPT, 8), list(PROMPT))
    with pytest.raises(ValueError, match=f"has {num_tokens} drafted tokens for a tree of 3"):
        Proposal.from_rows([row], [Tree.chain(3)], [[5] * num_tokens])


class _Overshooting(Scripted):
    """Drafts one token more than it may."""

    def draft(self, row: Row, depth: int) -> list[int]:
        return super().draft(row, depth + 1)


def test_the_loop_refuses_a_method_that_drafts_too_much() -> None:
    request = make_request(PROMPT, 12)
    with pytest.raises(ValueError, match="depth 5 with 5 nodes exceeds its budget: depth 4"):
        decode(target(), _Overshooting(target(), {request.id: plain()}), [request])


# Who joins and leaves, and what a method is told.


def scripts(num_rows: int) -> tuple[list[Request], dict[str, list[int]]]:
    """Requests of different lengths and what they are answered, in part."""
    requests = [
        make_request(range(10 + i, 13 + 2 * i), 4 + 3 * (i % 3), name=f"row {i}")
        for i in range(num_rows)
    ]
    return requests, {
        request.id: [
            token if j % (2 + i) else wrong(token)
            for j, token in enumerate(reference(target(), request))
        ]
        for i, request in enumerate(requests)
    }


@pytest.mark.parametrize("max_rows", [1, 2, 3, 7])
def test_rows_that_join_and_leave_between_steps_do_not_change_each_other(max_rows: int) -> None:
    requests, script = scripts(7)
    alone = [decode_script(target(), script[request.id], request) for request in requests]
    rows = decode(target(), Scripted(target(), script), requests, max_rows=max_rows, audit=True)
    for row, one in zip(rows, alone, strict=True):
        assert row.output == one.output == reference(target(), row.request)
        assert row.steps == one.steps
    assert len({len(row.steps) for row in rows}) > 2


@torch.inference_mode()
def test_first_tokens_that_prompts_share_run_once() -> None:
    longest = list(range(10, 60))
    prompts = [longest, [*longest[:30], 3, 4, 5], longest[:31], [7, *longest], longest]
    requests = [make_request(ids, 6 + i, name=str(i)) for i, ids in enumerate(prompts)]
    script = {request.id: reference(target(), request) for request in requests}
    method = Scripted(target(), script)
    method.taps = ()
    decoder = Decoder(target(), method, Fixed(2, 4), Sampling(), 4, share_prefixes=True)
    ran: list[int] = []
    prefill = target().prefill

    def counted(tokens: Sequence[int], *rest: Any) -> Any:
        ran.append(len(tokens))
        return prefill(tokens, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decoder.target, "prefill", counted)
        rows = decoder.join(requests[:4])
        while decoder.rows:
            decoder.step()
            if len(rows) == 4 and decoder.num_free:
                rows += decoder.join(requests[4:])
    assert [row.output for row in rows] == list(script.values())
    assert ran == [49, 2, 0, 50, 19]  # the row with all 49 has left


class _Logging(Scripted):
    """Writes down what it is told."""

    taps = (1, FINAL)

    def __init__(self, model: Target, script: Mapping[str, Sequence[int]]) -> None:
        super().__init__(model, script)
        self.log: list[str] = []
        self.starts: list[Mapping[int, torch.Tensor]] = []
        self.verdicts: list[Verdict] = []

    def start(self, rows: Sequence[Row], taps: Sequence[Mapping[int, torch.Tensor]]) -> None:
        self.log.append(f"start {[row.request.id for row in rows]}")
        self.starts += taps

    def update(self, verdict: Verdict) -> None:
        self.log.append(f"update {[len(tokens) for tokens in verdict.committed]}")
        self.verdicts.append(verdict)

    def keep(self, rows: Sequence[int]) -> None:
        self.log.append(f"keep {list(rows)}")

    def reset(self) -> None:
        self.log.append("reset")


class _Watching(DepthController):
    """Allows depth 1, and writes down what it sees."""

    def __init__(self) -> None:
        self.seen: list[list[int]] = []

    def choose(self, rows: Sequence[Row]) -> list[Budget]:
        return [Budget(1, 1)] * len(rows)

    def observe(self, verdict: Verdict) -> None:
        self.seen.append([len(tokens) for tokens in verdict.committed])

    def reset(self) -> None:
        self.seen.append([])


def test_method_and_controller_are_told_what_happens_in_order() -> None:
    first, second = make_request((3, 4), 2, name="first"), make_request((5, 6), 3, name="second")
    script = {request.id: reference(target(), request) for request in (first, second)}
    method, controller, laps = _Logging(target(), script), _Watching(), list[str]()
    decoder = Decoder(target(), method, controller, GREEDY, max_rows=2, lap=laps.append)
    rows = decoder.join([first, second])
    assert decoder.num_free == 0
    assert decoder.step() == [rows[0]]
    assert decoder.num_free == 1
    assert decoder.step() == [rows[1]]
    assert method.log == [
        "reset",
        "start ['first', 'second']",
        "update [2, 2]",
        "keep [1]",
        "update [1]",
        "keep []",
    ]
    assert controller.seen == [[], [2, 2], [1]]
    drafting, verifying = ["bookkeeping", "draft"], ["bookkeeping", "forward"]
    step = [*drafting, *verifying, *drafting, "bookkeeping"]
    assert laps == ["prefill", *step, *step]


def test_taps_are_the_hidden_states_of_a_fresh_forward_over_the_text() -> None:
    requests, script = scripts(3)
    requests.append(make_request((9,), 5, name="one token"))
    script["one token"] = reference(target(), requests[-1])
    method = _Logging(target(), script)
    decoder = Decoder(target(), method, Fixed(*ALLOWED), GREEDY, max_rows=4)
    rows = decoder.join(requests)
    hidden: dict[str, list[torch.Tensor]] = {}
    for row, taps in zip(rows, method.starts, strict=True):
        assert set(taps) == (set() if row.request.id == "one token" else {1, FINAL})
        hidden[row.request.id] = [torch.stack([taps[1][0], taps[FINAL][0]])] if taps else []
    while decoder.rows:
        present = list(decoder.rows)
        decoder.step()
        verdict = method.verdicts[-1]
        for b, (row, path) in enumerate(zip(present, verdict.paths, strict=True)):
            hidden[row.request.id].append(
                torch.stack([verdict.taps[1][b, path], verdict.taps[FINAL][b, path]])
            )
    for row in rows:
        cache = target().new_cache(1)
        fresh = target().prefill(row.tokens[:-1], cache, cache.add_row(), (1, FINAL))
        torch.testing.assert_close(
            torch.cat(hidden[row.request.id], dim=1),
            torch.stack([fresh[1][0], fresh[FINAL][0]]),
            rtol=1e-5,
            atol=1e-5,
        )


def test_every_step_is_one_forward_of_the_target() -> None:
    request = make_request(PROMPT, 12)
    method = Scripted(target(), {request.id: plain()})
    decoder = Decoder(target(), method, Fixed(*ALLOWED), GREEDY)
    (row,) = decoder.join([request])
    begin = target().num_forwards
    while decoder.rows:
        decoder.step()
    assert target().num_forwards - begin == len(row.steps) == 3


# Typical acceptance.


class _Typical(Scripted):
    """Asks for typical acceptance, and takes every token for typical."""

    typical = Typical(epsilon=0.0, delta=0.0)


def test_typical_acceptance_is_greedy_at_temperature_0_and_lossy_above() -> None:
    request = make_request(PROMPT, 8)
    script = [wrong(token) for token in plain()]
    row = decode(target(), _Typical(target(), {request.id: script}), [request])[0]
    assert row.output == plain()[:8]
    assert {step.accepted for step in row.steps} == {0}
    sampling = Sampling(temperature=1.0)
    row = decode(target(), _Typical(target(), {request.id: script}), [request], sampling)[0]
    assert row.output[:4] == script[:4] != reference(target(), request, sampling)[:4]
    assert row.steps[0] == (4, 4, 4, 5, 4)
