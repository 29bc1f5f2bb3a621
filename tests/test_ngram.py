"""N-gram drafting: what is copied, from where, how far, and what a step costs."""

from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest

from specbench import registry
from specbench.conformance.decoding import GREEDY, make_request, reference
from specbench.conformance.models import looping_target
from specbench.decode import Decoder
from specbench.depth import Fixed
from specbench.method import Batch, Budget, Drawer, Method, Row
from specbench.target import Target
from specbench.tree import Tree
from specbench_methods import ngram
from tests.drafters import decode

EOS = 2
WIDE = Budget(8, 64)


@cache
def target() -> Target:
    return looping_target()


def make_ngram(**knobs: str) -> Method:
    cls = registry.load_method("ngram")
    method = cls(target(), registry.make_config("ngram", cls, {"tokens_per_match": "0"} | knobs))
    method.drawer = Drawer(GREEDY)
    return method


def draft(text: Sequence[int], budget: Budget = WIDE, **knobs: str) -> tuple[Tree, list[int]]:
    """The tree and the tokens that are drafted behind a prompt."""
    method, row = make_ngram(**knobs), Row(make_request(text), list(text))
    method.start([row], [{}])
    proposal = method.propose(Batch([row], target().new_cache(1)), [budget])
    tree = proposal.trees[0]
    assert proposal.tokens_BN[0, 0] == text[-1]
    return tree, proposal.tokens_BN[0, 1 : len(tree)].tolist()


@pytest.mark.parametrize("text", [[7], [7, 8], [3, 4, 5, 6, 7]])
def test_without_an_earlier_occurrence_nothing_is_drafted(text: list[int]) -> None:
    assert draft(text) == (Tree.chain(0), [])


def test_without_any_match_decoding_is_vanilla() -> None:
    request = make_request((5, 6, 7), 6)
    output = reference(target(), request)
    assert len({*request.prompt, *output}) == 3 + len(output)
    (row,) = decode(target(), make_ngram(), [request])
    assert row.output == output
    assert set(row.steps) == {(0, 0, 0, 1, 0)}


def test_what_followed_before_is_drafted_as_far_as_the_budget_goes() -> None:
    text = [9, 10, 11, 12, 13, 14, 9, 10]
    assert draft(text, Budget(3, 64)) == (Tree.chain(3), [11, 12, 13])
    assert draft(text, Budget(3, 2)) == (Tree.chain(2), [11, 12])
    assert draft(text, Budget(0, 0)) == (Tree.chain(0), [])


def test_a_match_at_the_tail_goes_on_through_its_own_draft() -> None:
    assert draft([9, 10, 11, 10], Budget(5, 64))[1] == [11, 10, 11, 10, 11]
    assert draft([8, 8], Budget(3, 64))[1] == [8, 8, 8]


def test_the_longest_match_goes_first_and_of_equals_the_latest() -> None:
    longer_but_earlier = [5, 6, 7, 20, 30, 7, 21, 30, 5, 6, 7]
    assert draft(longer_but_earlier)[1][0] == 20
    assert draft(longer_but_earlier, max_match="1")[1][0] == 21
    assert draft([7, 20, 30, 7, 21, 30, 7])[1][0] == 21


def test_shorter_matches_than_asked_for_do_not_count() -> None:
    text = [5, 7, 20, 30, 6, 7]
    assert draft(text, Budget(1, 64), min_match="1")[1] == [20]
    assert draft(text, Budget(1, 64), min_match="2") == (Tree.chain(0), [])


def test_a_draft_is_no_longer_than_its_match_warrants() -> None:
    text = [5, 6, 7, *range(20, 40), 5, 6, 7]
    assert draft(text, tokens_per_match="2")[1] == list(range(20, 26))
    assert draft([7, *range(20, 40), 7], tokens_per_match="2")[1] == [20, 21]


def test_a_continuation_ends_with_the_end_of_sequence() -> None:
    assert draft([7, 8, EOS, 9, 7], Budget(5, 64)) == (Tree.chain(2), [8, EOS])


def test_several_continuations_share_their_beginnings() -> None:
    text = [7, 20, 21, 7, 20, 22, 7, 30, 7]
    tree, tokens = draft(text, Budget(2, 64), branches="2")
    assert tree == Tree((-1, 0, 1, 0, 3))
    assert tokens == [30, 7, 20, 22]
    tree, tokens = draft(text, Budget(2, 64), branches="3")
    assert tree == Tree((-1, 0, 1, 0, 3, 3))
    assert tokens == [30, 7, 20, 22, 21]


def test_siblings_are_distinct_and_nodes_limited_whatever_the_text() -> None:
    for period in range(1, 12):
        text = [3 + (i * i) % period for i in range(60)]
        tree, tokens = draft(text, Budget(4, 7), branches="5")
        assert tree.num_drafted <= 7 and tree.depth <= 4
        for children in tree.children:
            siblings = [tokens[child - 1] for child in children]
            assert len(set(siblings)) == len(siblings)


@pytest.mark.parametrize("branches", ["1", "3"])
@pytest.mark.parametrize("period", [1, 7, 90])
def test_a_step_looks_up_no_more_in_a_long_text_than_in_a_short_one(
    branches: str, period: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked_up = list[int]()
    continuation = ngram._Index.continuation

    def counting(*arguments: Any) -> Any:
        looked_up[-1] += 1
        return continuation(*arguments)

    monkeypatch.setattr(ngram._Index, "continuation", counting)
    for length in (1000, 4000):
        looked_up.append(0)
        draft([3 + i % period for i in range(length)], branches=branches)
    assert looked_up[0] == looked_up[1] > 0


def test_a_step_indexes_the_new_tokens_only() -> None:
    method = make_ngram(max_match="4")
    decoder = Decoder(target(), method, Fixed(*WIDE), GREEDY)
    (row,) = decoder.join([make_request([3, 4, 5] * 30, 12)])
    while decoder.rows:
        (index,) = method.indices  # type: ignore[attr-defined]
        before = sum(len(positions) for positions in index.behind.values())
        decoder.step()
        added = sum(len(positions) for positions in index.behind.values()) - before
        assert added == 4 * row.steps[-1].committed
        assert index.tokens == row.tokens


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"min_match": "9"}, "valid: 1 <= min_match <= max_match"),
        ({"min_match": "0"}, "valid: 1 <= min_match <= max_match"),
        ({"branches": "0"}, "branches 0 is out of range; valid: 1"),
        ({"branches": "65"}, "branches 65 is out of range; valid: 1..64"),
        ({"max_match": "65"}, "max_match <= 64"),
        ({"tokens_per_match": "-1"}, "tokens_per_match -1 is out of range; valid: 0 or more"),
        ({"depth": "-1"}, "depth -1 is out of range; valid: 0 or more"),
        ({"max_nodes": "0"}, "max_nodes 0 is out of range; valid: 1 or more"),
    ],
)
def test_knobs_out_of_range_are_refused(knobs: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_ngram(**knobs)


def test_longer_matches_are_trusted_more() -> None:
    method = make_ngram(branches="3")
    method.drawer = Drawer(GREEDY, rates=True)
    prompt = [5, 6, 7, 8, 9, 7, 3, 5, 6, 7]
    row = Row(make_request(prompt), list(prompt))
    method.start([row], [{}])
    proposal = method.propose(Batch([row], target().new_cache(1)), [Budget(2, 9)])
    assert proposal.tokens_BN.tolist() == [[7, 8, 9, 3, 5]]
    assert proposal.chances == [[3 / 4, 3 / 4, 1 / 2, 1 / 2]]
