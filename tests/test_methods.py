"""Every registered method, in several settings: whatever it drafts, the output is vanilla's."""

from collections.abc import Sequence
from functools import cache

import pytest

from specbench.conformance.decoding import ALLOWED, GREEDY, make_request, reference
from specbench.conformance.models import looping_target
from specbench.decode import Decoder
from specbench.depth import Fixed
from specbench.method import Request
from specbench.sampling import Sampling
from specbench.target import Target
from tests.drafters import SETTINGS, Setting, decode, make_method

COUPLED = Sampling(temperature=0.8, top_p=0.9, rule="coupled")
REJECTION = Sampling(temperature=0.8, top_p=0.9)

all_settings = pytest.mark.parametrize("setting", SETTINGS, ids=str)
alone_and_together = pytest.mark.parametrize("max_rows", [1, 4])


@cache
def target() -> Target:
    return looping_target()


@pytest.fixture
def endless(monkeypatch: pytest.MonkeyPatch) -> Target:
    """The target without an end-of-sequence token."""
    monkeypatch.setattr(target(), "eos_ids", frozenset())
    return target()


PROMPT = (5, 40, 12, 77, 31, 5, 40)
MIXED = [
    make_request((9,), 7),
    make_request(range(10, 27), 9),
    make_request((3, 4, 3, 4, 3), 1),
    make_request([20, 21, 22] * 14, 6),
    make_request(PROMPT, 9),
    make_request((50, 50), 4),
]
"""Short and long prompts and budgets, more than there are places in a batch."""


def check_exact(
    setting: Setting,
    requests: Sequence[Request],
    sampling: Sampling = GREEDY,
    max_rows: int = 1,
    model: Target | None = None,
) -> None:
    model = model or target()
    rows = decode(model, make_method(model, setting), requests, sampling, max_rows=max_rows)
    for row in rows:
        assert row.output == reference(model, row.request, sampling)


@all_settings
@pytest.mark.parametrize("sampling", [GREEDY, COUPLED, REJECTION], ids=["T=0", "coupled", "drawn"])
def test_alone_and_in_a_batch_outputs_are_vanillas_and_caches_right_after_every_step(
    setting: Setting, sampling: Sampling
) -> None:
    method = make_method(target(), setting)
    alone, together = (
        decode(target(), method, MIXED, sampling, max_rows=max_rows, audit=True)
        for max_rows in (1, 4)
    )
    for one, other in zip(alone, together, strict=True):
        assert (one.output, one.steps, one.finish) == (other.output, other.steps, other.finish)
        assert one.drawn or one.output == reference(target(), one.request, sampling)
        assert not one.drawn or sampling is REJECTION


@all_settings
def test_a_prompt_is_decoded_alike_whatever_came_before(setting: Setting) -> None:
    method = make_method(target(), setting)
    request, *others = reversed(MIXED)
    first, again = (decode(target(), method, [request], REJECTION)[0] for _ in range(2))
    decode(target(), method, others, max_rows=4)
    afterwards = decode(target(), method, [request], REJECTION)[0]
    abandoned = Decoder(target(), method, Fixed(*ALLOWED), GREEDY, max_rows=3)
    abandoned.join(others[:3])
    abandoned.step()
    after_failure = decode(target(), method, [request], REJECTION)[0]
    fresh = decode(target(), make_method.__wrapped__(target(), setting), [request], REJECTION)[0]
    for row in (again, afterwards, after_failure, fresh):
        assert (row.output, row.steps) == (first.output, first.steps)


@all_settings
@alone_and_together
def test_every_budget_is_met_exactly(setting: Setting, max_rows: int, endless: Target) -> None:
    plain = reference(endless, make_request(PROMPT, 12))
    budgets = range(1, ALLOWED.depth + 3)
    requests = [make_request(PROMPT, budget, name=f"budget {budget}") for budget in budgets]
    rows = decode(endless, make_method(endless, setting), requests, max_rows=max_rows)
    for budget, row in zip(budgets, rows, strict=True):
        assert (row.output, row.finish) == (plain[:budget], "length")


@all_settings
def test_the_output_ends_at_the_first_end_of_sequence_token(
    setting: Setting, endless: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = make_request(PROMPT, 12)
    plain = reference(endless, request)
    method = make_method(endless, setting)
    for token in dict.fromkeys(plain):
        monkeypatch.setattr(endless, "eos_ids", frozenset([token, 96]))
        row = decode(endless, method, [request])[0]
        assert (row.output, row.finish) == (plain[: plain.index(token) + 1], "eos")


@all_settings
def test_the_output_ends_with_the_first_stop_string(setting: Setting, endless: Target) -> None:
    assert endless.tokenizer is not None
    plain = reference(endless, make_request(PROMPT, 12))
    text = str(endless.tokenizer.decode(plain))
    assert len(text) == len(plain)
    method = make_method(endless, setting)
    for begin in range(len(plain) - 2):
        stop = text[begin : begin + 2]
        request = make_request(PROMPT, 12, stop=("never", stop))
        row = decode(endless, method, [request])[0]
        assert (row.output, row.finish) == (plain[: text.index(stop) + 2], "stop")


@all_settings
def test_a_budget_of_depth_0_makes_vanilla_of_every_method(setting: Setting) -> None:
    method = make_method(target(), setting)
    rows = decode(target(), method, MIXED, REJECTION, max_rows=4, budget=ALLOWED._replace(depth=0))
    for row in rows:
        assert row.output == reference(target(), row.request, REJECTION)
        assert set(row.steps) == {(0, 0, 0, 1, 0)}


@cache
def short_target() -> Target:
    return looping_target(max_position_embeddings=40)


@all_settings
def test_prompt_and_budget_may_fill_the_targets_context(setting: Setting) -> None:
    check_exact(setting, [make_request([8, 9] * 14, 12)], model=short_target())
    with pytest.raises(ValueError, match=r"'too long' has 28 tokens .* 13 more; .* context is 40"):
        decode(
            short_target(),
            make_method(short_target(), setting),
            [make_request([8, 9] * 14, 13, name="too long")],
        )


@all_settings
def test_a_prompt_may_be_longer_than_a_chunk_of_the_prefill(setting: Setting) -> None:
    check_exact(setting, [make_request([7, 8, 9, 60] * 70, 4), MIXED[0]], max_rows=4)
