"""Trees drafted level by level: their shape, what is drawn at each node, which nodes are run."""

from collections.abc import Sequence

import pytest
import torch

from specbench.conformance.decoding import GREEDY, make_request
from specbench.drafting import draft_tree
from specbench.method import Budget, Drawer, Proposal, Row
from specbench.sampling import Sampling, choose, position_key, warp
from specbench.tree import Tree

VOCAB = 12
LOGITS_VV = 2 * torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(0))
"""A drafter without memory: the logits behind each token."""
REJECTION = Sampling(temperature=0.9, top_k=6)
COUPLED = Sampling(temperature=0.9, top_k=6, rule="coupled")


class Drafter:
    """Writes down which nodes it is asked to run."""

    def __init__(self, logits_VV: torch.Tensor = LOGITS_VV) -> None:
        self.logits_VV = logits_VV
        self.calls: list[tuple[list[list[int]], list[Tree], list[int]]] = []

    def expand(
        self, tokens_BM: torch.Tensor, trees: Sequence[Tree], starts: Sequence[int]
    ) -> torch.Tensor:
        self.calls.append((tokens_BM.tolist(), list(trees), list(starts)))
        return self.logits_VV[tokens_BM]

    def draft(
        self,
        rows: Sequence[Row],
        budgets: Sequence[Budget],
        branching: Sequence[int] = (),
        sampling: Sampling = GREEDY,
    ) -> Proposal:
        roots_B1 = torch.tensor([[row.tokens[-1]] for row in rows])
        drawer = Drawer(sampling)
        return draft_tree(rows, budgets, branching, drawer, self.logits_VV[roots_B1], self.expand)


def make_rows(*roots: int) -> list[Row]:
    return [Row(make_request((root,), name=f"{b}"), [root]) for b, root in enumerate(roots)]


def best(token: int, count: int = 1) -> list[int]:
    return LOGITS_VV[token].topk(count).indices.tolist()


def tokens_of(proposal: Proposal, row: int) -> list[int]:
    """The drafted tokens of a row, without root and padding."""
    tokens: list[int] = proposal.tokens_BN[row, 1 : len(proposal.trees[row])].tolist()
    return tokens


def test_without_branching_a_greedy_chain_is_drafted() -> None:
    proposal = Drafter().draft(make_rows(4), [Budget(4, 64)])
    assert proposal.trees == [Tree.chain(4)]
    token, chain = 4, []
    for _ in range(4):
        (token,) = best(token)
        chain.append(token)
    assert tokens_of(proposal, 0) == chain


def test_a_tree_branches_as_asked_and_goes_on_as_chains() -> None:
    proposal = Drafter().draft(make_rows(4), [Budget(3, 64)], [3, 2])
    assert proposal.trees == [Tree((-1, 0, 0, 0, 1, 1, 2, 2, 3, 3, 4, 5, 6, 7, 8, 9))]
    tokens = [4, *tokens_of(proposal, 0)]
    for node, children in enumerate(proposal.trees[0].children):
        assert [tokens[child] for child in children] == best(tokens[node], len(children))


def test_nodes_that_run_out_are_given_to_the_first_parents() -> None:
    proposal = Drafter().draft(make_rows(4), [Budget(3, 5)], [2, 2])
    assert proposal.trees == [Tree((-1, 0, 0, 1, 1, 2))]
    proposal = Drafter().draft(make_rows(4), [Budget(3, 1)], [2, 2])
    assert proposal.trees == [Tree.chain(1)]


def test_every_row_is_drafted_within_its_own_budget() -> None:
    budgets = [Budget(2, 64), Budget(0, 0), Budget(4, 3), Budget(4, 64), Budget(1, 64)]
    rows = make_rows(4, 5, 6, 7, 8)
    proposal = Drafter().draft(rows, budgets, [2])
    assert [(tree.depth, tree.num_drafted) for tree in proposal.trees] == [
        (2, 4),
        (0, 0),
        (2, 3),
        (4, 8),
        (1, 2),
    ]
    for b, (row, budget) in enumerate(zip(rows, budgets, strict=True)):
        alone = Drafter().draft([row], [budget], [2])
        assert alone.trees[0] == proposal.trees[b]
        assert tokens_of(alone, 0) == tokens_of(proposal, b)


def test_levels_are_run_once_and_the_last_one_never() -> None:
    drafter = Drafter()
    proposal = drafter.draft(make_rows(4, 5), [Budget(3, 64), Budget(1, 64)], [2])
    assert len(drafter.calls) == 2
    first = tokens_of(proposal, 0)
    tokens, trees, starts = drafter.calls[0]
    # The second row has all its nodes: it gets none to run, and padding.
    assert (tokens, starts) == ([first[:2], [0, 0]], [1, 3])
    assert trees == [Tree((-1, 0, 0))] * 2
    tokens, trees, starts = drafter.calls[1]
    assert (tokens, starts) == ([first[2:4], [0, 0]], [3, 3])
    assert trees == [Tree((-1, 0, 0, 1, 2)), Tree((-1, 0, 0))]


@pytest.mark.parametrize("budget", [Budget(0, 0), Budget(1, 64), Budget(5, 2)])
def test_nothing_is_run_when_nothing_can_be_drafted_behind_it(budget: Budget) -> None:
    drafter = Drafter()
    proposal = drafter.draft(make_rows(4), [budget], [2])
    assert proposal.trees[0].num_drafted == min(2, budget.nodes)
    assert drafter.calls == []


def test_drawn_children_come_with_the_tensor_that_they_were_drawn_from() -> None:
    rows = make_rows(4, 5)
    proposal = Drafter().draft(rows, [Budget(3, 64)] * 2, [3, 2], REJECTION)
    assert proposal.logq is not None and not proposal.replacement
    for b, tree in enumerate(proposal.trees):
        tokens = [rows[b].tokens[-1], *tokens_of(proposal, b)]
        assert set(proposal.logq[b]) == {n for n, children in enumerate(tree.children) if children}
        for node, logq_V in proposal.logq[b].items():
            assert torch.equal(logq_V, warp(LOGITS_VV[tokens[node]][None], REJECTION)[0])
            children = [tokens[child] for child in tree.children[node]]
            assert len(set(children)) == len(children)
            assert all(logq_V[child] > -torch.inf for child in children)


def test_fewer_children_are_drawn_where_fewer_tokens_have_mass() -> None:
    logits_VV = torch.full((VOCAB, VOCAB), -1e9)
    logits_VV[:, :2] = 0
    for sampling in (Sampling(temperature=1.0), Sampling(temperature=1.0, rule="coupled")):
        proposal = Drafter(logits_VV).draft(make_rows(4), [Budget(2, 64)], [5, 1], sampling)
        assert proposal.trees == [Tree((-1, 0, 0, 1, 2))]
        assert sorted(tokens_of(proposal, 0)[:2]) == [0, 1]


@pytest.mark.parametrize("sampling", [REJECTION, COUPLED], ids=lambda sampling: sampling.rule)
def test_the_shape_does_not_depend_on_the_tokens_drawn(sampling: Sampling) -> None:
    rows = make_rows(*range(VOCAB), *range(VOCAB))
    proposal = Drafter().draft(rows, [Budget(3, 10)] * len(rows), [3, 2], sampling)
    assert len(set(proposal.trees)) == 1
    assert len({tuple(tokens_of(proposal, b)) for b in range(len(rows))}) == len(rows)


def test_coupled_drafts_are_what_the_target_would_choose_with_these_logits() -> None:
    rows = make_rows(4, 9)
    rows[1].tokens += [3, 8]
    proposal = Drafter().draft(rows, [Budget(3, 64)] * 2, [2], COUPLED)
    assert proposal.logq == [{}, {}]
    for b, row in enumerate(rows):
        tree, tokens = proposal.trees[b], [row.tokens[-1], *tokens_of(proposal, b)]
        for node, children in enumerate(tree.children):
            if children:
                key = position_key(row.request.key, len(row.tokens) + tree.depths[node], "target")
                logp_1V = warp(LOGITS_VV[tokens[node]][None], COUPLED)
                assert tokens[children[0]] == int(choose(logp_1V, [key]))
