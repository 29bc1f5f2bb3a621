"""Every acceptance rule against the law that it promises: in closed form where that is possible,
by goodness of fit where random numbers come in.

Closed form: all ordered draws of children are enumerated with their probabilities, and the law of
the committed token is summed up from what `rejection` says of them. The same sum must come out
wrong for wrong rules, and the goodness-of-fit tests must notice them too.
"""

import itertools
import math
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import scipy.stats
import torch
from numpy.typing import NDArray

from specbench import sampling as sampling_module
from specbench import verify as verify_module
from specbench.method import Drawer, Proposal, Request, Row, Typical
from specbench.sampling import Sampling, choose, position_key, request_key, warp
from specbench.tree import Tree
from specbench.verify import Rejection, Walk, rejection, typical_walk, verify

EXACT = 1e-12
CLEARLY_WRONG = 1e-3
LEVEL = 1e-3
POWER = 0.99

Counts = NDArray[np.float64]
Rule = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, bool], Rejection]
Laws = tuple[torch.Tensor, torch.Tensor]


def tv(left_V: torch.Tensor, right_V: torch.Tensor) -> float:
    return float((left_V - right_V).abs().sum() / 2)


# The law of one committed token, in closed form.


def laws(kind: str, seed: int, vocab_size: int = 6) -> Laws:
    """A target's and a drafter's distribution, float64 [V]."""
    rng = np.random.default_rng(seed)
    concentration = 0.15 if kind == "peaked" else 1.0
    p, q = rng.dirichlet([concentration] * vocab_size, size=2)
    half = vocab_size // 2
    if kind == "truncated":
        p[np.argsort(p)[:2]], q[np.argsort(q)[:3]] = 0, 0
    elif kind == "disjoint":
        p[:half], q[half:] = 0, 0
    elif kind == "equal":
        q = p
    elif kind == "point mass":
        q = np.eye(vocab_size)[rng.integers(vocab_size)]
    return torch.from_numpy(p / p.sum()), torch.from_numpy(q / q.sum())


KINDS = ("random", "peaked", "truncated", "equal", "disjoint", "point mass")


def drawn(
    q_V: torch.Tensor, num_children: int, replacement: bool
) -> tuple[list[list[int]], list[float]]:
    """All ordered draws of children from q, each with its probability."""
    support = [token for token, mass in enumerate(q_V.tolist()) if mass > 0]
    if replacement:
        draws = list(itertools.product(support, repeat=num_children))
    else:
        draws = list(itertools.permutations(support, min(num_children, len(support))))
    chances = []
    for draw in draws:
        chance, left = 1.0, 1.0
        for i, token in enumerate(draw):
            left = 1.0 if replacement else float(q_V.sum() - sum(q_V[list(draw[:i])]))
            chance *= float(q_V[token]) / left
        chances.append(chance)
    assert sum(chances) == pytest.approx(1, abs=1e-13)
    return [list(draw) for draw in draws], chances


def committed_law(
    p_V: torch.Tensor,
    q_V: torch.Tensor,
    draws: list[list[int]],
    chances: list[float],
    rule: Rule,
    replacement: bool,
) -> torch.Tensor:
    """The law of the committed token when the children are one of ``draws`` with these chances."""
    children_MK = torch.tensor(draws)
    num_draws = len(draws)
    accept_MK, residual_MV = rule(
        p_V.expand(num_draws, -1), q_V.expand(num_draws, -1), children_MK, replacement
    )
    refused_MK = (1 - accept_MK).cumprod(-1)
    reached_MK = torch.cat([torch.ones(num_draws, 1).double(), refused_MK[:, :-1]], dim=-1)
    law_MV = refused_MK[:, -1:] * residual_MV
    law_MV = law_MV.scatter_add(-1, children_MK, reached_MK * accept_MK)
    return torch.tensor(chances, dtype=torch.float64) @ law_MV


def induced_law(
    p_V: torch.Tensor,
    q_V: torch.Tensor,
    num_children: int,
    replacement: bool,
    rule: Rule = rejection,
) -> torch.Tensor:
    draws, chances = drawn(q_V, num_children, replacement)
    return committed_law(p_V, q_V, draws, chances, rule, replacement)


@pytest.mark.parametrize("replacement", [False, True])
@pytest.mark.parametrize("num_children", [1, 2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_recursive_rejection_commits_exactly_the_target_law(
    kind: str, num_children: int, replacement: bool
) -> None:
    for seed in range(10):
        p_V, q_V = laws(kind, seed)
        assert tv(induced_law(p_V, q_V, num_children, replacement), p_V) < EXACT


@pytest.mark.parametrize("num_children", [1, 2, 3])
def test_the_law_stays_exact_after_the_warpers(num_children: int) -> None:
    settings = Sampling(temperature=0.7, top_k=5, top_p=0.9)
    for seed in range(5):
        generator = torch.Generator().manual_seed(seed)
        logits_2V = 2 * torch.randn(2, 7, generator=generator).double()
        p_V, q_V = warp(logits_2V, settings).exp()
        assert 0 < (p_V == 0).sum() < 7
        assert tv(induced_law(p_V, q_V, num_children, False), p_V) < EXACT


def test_a_chain_accepts_with_one_minus_the_total_variation() -> None:
    for seed in range(10):
        p_V, q_V = laws("random", seed)
        accept_M1, _ = rejection(
            p_V.expand(6, -1), q_V.expand(6, -1), torch.arange(6)[:, None], False
        )
        assert float(q_V @ accept_M1[:, 0]) == pytest.approx(1 - tv(p_V, q_V), abs=EXACT)


def test_siblings_without_replacement_are_accepted_more_often() -> None:
    for seed in range(10):
        p_V, q_V = laws("random", seed)
        rates = []
        for num_children, replacement in [(1, False), (2, True), (2, False)]:
            draws, chances = drawn(q_V, num_children, replacement)
            rows = len(draws)
            accept_MK, _ = rejection(
                p_V.expand(rows, -1), q_V.expand(rows, -1), torch.tensor(draws), replacement
            )
            rates.append(
                1 - float(torch.tensor(chances, dtype=torch.float64) @ (1 - accept_MK).prod(-1))
            )
        assert rates[0] < rates[1] < rates[2] + EXACT


def softmax_residual(
    p: torch.Tensor, q: torch.Tensor, children: torch.Tensor, replacement: bool
) -> Rejection:
    """Wrong: the last residual goes through a softmax."""
    accept, residual = rejection(p, q, children, replacement)
    return Rejection(accept, residual.softmax(-1))


def no_residual(
    p: torch.Tensor, q: torch.Tensor, children: torch.Tensor, replacement: bool
) -> Rejection:
    """Wrong: the bonus after a refusal is drawn from the target's own distribution."""
    return Rejection(rejection(p, q, children, replacement).accept_MK, p)


def siblings_not_renormalised(
    p: torch.Tensor, q: torch.Tensor, children: torch.Tensor, replacement: bool
) -> Rejection:
    """Wrong: siblings without replacement are scored as if drawn with replacement."""
    return rejection(p, q, children, True)


def siblings_against_p(
    p: torch.Tensor, q: torch.Tensor, children: torch.Tensor, replacement: bool
) -> Rejection:
    """Wrong: later siblings are tested against the target's distribution, not the residual."""
    singles = [rejection(p, q, child[:, None], replacement) for child in children.unbind(-1)]
    accept = torch.cat([single.accept_MK for single in singles], dim=-1)
    return Rejection(accept, singles[-1].residual_MV)


def target_chance(
    p: torch.Tensor, q: torch.Tensor, children: torch.Tensor, replacement: bool
) -> Rejection:
    """Wrong: accepts with p(x) instead of p(x) / q(x)."""
    return Rejection(p.gather(-1, children), rejection(p, q, children, replacement).residual_MV)


@pytest.mark.parametrize(
    ("rule", "num_children"),
    [
        (softmax_residual, 1),
        (softmax_residual, 2),
        (no_residual, 1),
        (no_residual, 3),
        (siblings_not_renormalised, 2),
        (siblings_not_renormalised, 3),
        (siblings_against_p, 2),
        (target_chance, 1),
    ],
)
def test_the_closed_form_check_catches_wrong_rules(rule: Rule, num_children: int) -> None:
    for seed in range(10):
        p_V, q_V = laws("random", seed)
        assert tv(induced_law(p_V, q_V, num_children, False, rule), p_V) > CLEARLY_WRONG


def test_the_closed_form_check_catches_argmax_drafts_scored_with_a_softmax() -> None:
    for seed in range(10):
        p_V, q_V = laws("random", seed)
        best = [[int(q_V.argmax())]]
        assert tv(committed_law(p_V, q_V, best, [1.0], rejection, False), p_V) > CLEARLY_WRONG


@pytest.mark.parametrize("gap", [0.0, 1e-7])
def test_a_drafter_equal_to_the_target_is_always_accepted(gap: float) -> None:
    p_V, _ = laws("random", 0, vocab_size=50)
    p_1V = p_V[None].float()
    q_1V = p_1V * (1 + gap * torch.randn(1, 50, generator=torch.Generator().manual_seed(0)))
    accept_1K, residual_1V = rejection(p_1V, q_1V, torch.tensor([[3, 7, 11]]), False)
    assert accept_1K[0, 0] == pytest.approx(1, abs=1e-6)
    assert residual_1V.sum() == pytest.approx(1, abs=1e-5)


def test_a_token_that_the_drafter_cannot_give_has_no_chance_but_nan() -> None:
    p_V, q_V = laws("random", 0)
    q_V = torch.where(torch.arange(6) == 2, 0.0, q_V)
    accept_1K, _ = rejection(p_V[None], q_V[None] / q_V.sum(), torch.tensor([[1, 2]]), False)
    assert accept_1K.isnan().tolist() == [[False, True]]


# Whole trees, at T=0 and with point-mass children.


def make_rows(num_rows: int, prompt: Sequence[int] = (0,)) -> list[Row]:
    return [
        Row(
            Request(
                id=str(seed),
                prompt=tuple(prompt),
                max_new_tokens=8,
                key=request_key(seed, "request"),
            ),
            list(prompt),
        )
        for seed in range(num_rows)
    ]


def committed(proposal: Proposal, walks: Sequence[Walk]) -> list[list[int]]:
    tokens = proposal.tokens_BN.tolist()
    return [
        [*(tokens[b][node] for node in walk.path[1:]), walk.bonus] for b, walk in enumerate(walks)
    ]


TREE = Tree((-1, 0, 0, 1, 1, 2, 3))
"""Root; 1 and 2 below it; 3 and 4 below 1; 5 below 2; 6 below 3."""


TREE_TOKENS = [0, 3, 4, 5, 6, 8, 7]


@pytest.mark.parametrize(
    ("argmax_N", "expected"),
    [
        pytest.param([9, 5, 7, 7, 0, 0, 2], Walk([0], 9), id="no child"),
        pytest.param([3, 7, 8, 7, 0, 0, 2], Walk([0, 1], 7), id="a token of another branch"),
        pytest.param([4, 9, 8, 0, 0, 6, 0], Walk([0, 2, 5], 6), id="the second child"),
        pytest.param([3, 5, 7, 7, 0, 0, 2], Walk([0, 1, 3, 6], 2), id="down to a leaf"),
    ],
)
def test_the_greedy_walk_follows_the_argmax(argmax_N: list[int], expected: Walk) -> None:
    logits_BNV = torch.nn.functional.one_hot(torch.tensor([argmax_N]), 10).float()
    proposal = Proposal(tokens_BN=torch.tensor([TREE_TOKENS]), trees=[TREE])
    assert verify(logits_BNV, proposal, make_rows(1), Sampling()) == [expected]


def test_of_equal_logits_the_greedy_walk_takes_the_first() -> None:
    logits_BNV = torch.tensor([[[0.0, 2.0, 2.0], [2.0, 0.0, 2.0]]])
    proposal = Proposal(tokens_BN=torch.tensor([[0, 1]]), trees=[Tree.chain(1)])
    assert verify(logits_BNV, proposal, make_rows(1), Sampling()) == [Walk([0, 1], 0)]


@pytest.mark.parametrize("children", [[2], [4, 1], [0, 5, 3], [3, 3]])
def test_point_mass_children_commit_exactly_the_target_law(children: list[int]) -> None:
    p_V, _ = laws("random", 1)
    tree = Tree((-1,) + (0,) * len(children))
    proposal = Proposal(tokens_BN=torch.tensor([[0, *children]]), trees=[tree])
    law_V, accepted = torch.zeros(6).double(), 0.0
    for choice, chance in enumerate(p_V.tolist()):
        logits_V = torch.full((6,), -math.inf)
        logits_V[choice] = 0
        logits_BNV = logits_V.expand(1, len(tree), 6)
        walks = verify(logits_BNV, proposal, make_rows(1), Sampling(temperature=1.0))
        law_V[committed(proposal, walks)[0][0]] += chance
        accepted += chance * (len(walks[0].path) > 1)
    assert tv(law_V, p_V) < EXACT
    assert accepted == pytest.approx(float(p_V[list(set(children))].sum()), abs=EXACT)


def test_membership_accepts_as_often_as_recursive_rejection_of_point_masses() -> None:
    p_V, _ = laws("random", 2)
    left_1V, refused = p_V[None], 1.0
    for token in (4, 1, 5):
        point_1V = torch.nn.functional.one_hot(torch.tensor([token]), 6).double()
        accept_1K, left_1V = rejection(left_1V, point_1V, torch.tensor([[token]]), True)
        refused *= 1 - float(accept_1K)
    assert 1 - refused == pytest.approx(float(p_V[[4, 1, 5]].sum()), abs=EXACT)


# Whole trees drawn from a distribution: goodness of fit over many seeds.

SETTINGS = Sampling(temperature=0.8, top_k=4)
NUM_SEEDS = 1000
TARGET_VV, DRAFTER_VV = torch.randn(2, 5, 5, generator=torch.Generator().manual_seed(3))
"""Logits of the next token after each token, of a target and a drafter without further memory."""

Draft = tuple[Tree, list[int], dict[int, torch.Tensor]]
Drafter = Callable[[Row], Draft]


def tree_drafter(
    branching: Sequence[int],
    is_point_mass: Sequence[bool],
    replacement: bool = False,
    settings: Sampling = SETTINGS,
) -> Drafter:
    """Drafts a tree level by level; the children of a level are drawn, or the drafter's best."""
    drawer = Drawer(settings)

    def children_of(token: int, row: Row, depth: int) -> tuple[list[int], torch.Tensor | None]:
        logits_V, num_children = DRAFTER_VV[token], branching[depth]
        position = len(row.tokens) + depth
        if is_point_mass[depth]:
            return logits_V.topk(num_children).indices.tolist(), None
        if not replacement:
            draws = drawer.draw(logits_V, row, position, num_children)
            return draws.tokens, draws.logq_V
        logq_V = warp(logits_V[None], settings)[0]
        keys = [position_key(row.request.key, position, f"draft {i}") for i in range(num_children)]
        return choose(logq_V.expand(num_children, -1), keys).tolist(), logq_V

    def draft(row: Row) -> Draft:
        parents, tokens, logq = [-1], [row.tokens[-1]], dict[int, torch.Tensor]()
        level = [0]
        for depth in range(len(branching)):
            begin = len(parents)
            for node in level:
                children, logq_V = children_of(tokens[node], row, depth)
                parents += [node] * len(children)
                tokens += children
                if logq_V is not None:
                    logq[node] = logq_V
            level = list(range(begin, len(parents)))
        return Tree.of(tuple(parents)), tokens, logq

    return draft


DRAFTERS = {
    "chain": tree_drafter([1, 1], [False, False]),
    "tree without replacement": tree_drafter([3, 2], [False, False]),
    "tree with replacement": tree_drafter([2, 2], [False, False], replacement=True),
    "drawn below point masses": tree_drafter([2, 2], [True, False]),
    "point masses below drawn": tree_drafter([2, 2], [False, True]),
}
REPLACING = {"tree with replacement"}


def propose(rows: Sequence[Row], drafters: Sequence[Drafter], replacement: bool) -> Proposal:
    drafts = [drafter(row) for row, drafter in zip(rows, drafters, strict=True)]
    width = max(len(tree) for tree, _, _ in drafts)
    return Proposal(
        tokens_BN=torch.tensor([tokens + [0] * (width - len(tokens)) for _, tokens, _ in drafts]),
        trees=[tree for tree, _, _ in drafts],
        logq=[logq for _, _, logq in drafts],
        replacement=replacement,
    )


def decode(
    rows: list[Row], drafter: Drafter, settings: Sampling, num_tokens: int, replacement: bool
) -> list[tuple[int, ...]]:
    """The first tokens of each row's output."""
    active = rows
    while active:
        proposal = propose(active, [drafter] * len(active), replacement)
        walks = verify(TARGET_VV[proposal.tokens_BN], proposal, active, settings)
        for row, tokens in zip(active, committed(proposal, walks), strict=True):
            row.tokens += tokens
        active = [row for row in active if len(row.output) < num_tokens]
    return [tuple(row.output[:num_tokens]) for row in rows]


def count_pairs(name: str) -> Counts:
    """How often each pair of tokens comes first, [V, V]."""
    outputs = decode(make_rows(NUM_SEEDS), DRAFTERS[name], SETTINGS, 2, name in REPLACING)
    counts = np.zeros((5, 5))
    np.add.at(counts, tuple(np.array(outputs).T), 1)
    return counts


def p_value(counts: Counts, law: Counts) -> float:
    possible = law > 0
    if counts[~possible].any():
        return 0.0
    return float(scipy.stats.chisquare(counts[possible], NUM_SEEDS * law[possible]).pvalue)


def first_law() -> torch.Tensor:
    return warp(TARGET_VV[:1].double(), SETTINGS)[0].exp()


def pair_law() -> Counts:
    next_VV = warp(TARGET_VV.double(), SETTINGS).exp()
    return (first_law()[:, None] * next_VV).numpy()


@pytest.mark.parametrize("name", DRAFTERS)
def test_two_tokens_decoded_with_drawn_drafts_follow_the_target_law(name: str) -> None:
    counts = count_pairs(name)
    assert p_value(counts, pair_law()) > LEVEL
    assert p_value(counts.sum(-1), first_law().numpy()) > LEVEL


@pytest.mark.parametrize(
    ("rule", "name", "num_children"),
    [
        (softmax_residual, "chain", 1),
        (no_residual, "chain", 1),
        (siblings_not_renormalised, "tree without replacement", 3),
        (siblings_against_p, "tree without replacement", 3),
    ],
)
def test_the_goodness_of_fit_test_notices_wrong_rules(
    rule: Rule, name: str, num_children: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    p_V, q_V = first_law(), warp(DRAFTER_VV[:1].double(), SETTINGS)[0].exp()
    wrong_V = induced_law(p_V, q_V, num_children, False, rule)
    possible_V = p_V > 0
    noncentrality = NUM_SEEDS * ((wrong_V - p_V)[possible_V] ** 2 / p_V[possible_V]).sum()
    df = int(possible_V.sum()) - 1
    critical = scipy.stats.chi2.isf(LEVEL, df)
    assert scipy.stats.ncx2.sf(critical, df, float(noncentrality)) > POWER
    monkeypatch.setattr(verify_module, "rejection", rule)
    assert p_value(count_pairs(name).sum(-1), p_V.numpy()) < LEVEL


def test_a_refusal_does_not_bias_the_bonus() -> None:
    """Noise that also decided on the refusal would move 0.06 from token 1 to token 0, and noise
    that also drew the draft 0.06 the other way: 2500 seeds show either with a power of 0.99."""
    p_V, q_V = torch.tensor([0.45, 0.35, 0.2]), torch.tensor([0.3, 0.02, 0.68])
    settings = Sampling(temperature=1.0)
    rows = make_rows(2500)
    draws = [Drawer(settings).draw(q_V.log(), row, position=1) for row in rows]
    proposal = Proposal(
        tokens_BN=torch.tensor([[0, *draw.tokens] for draw in draws]),
        trees=[Tree.chain(1)] * len(rows),
        logq=[{} if draw.logq_V is None else {0: draw.logq_V} for draw in draws],
    )
    walks = verify(p_V.log().expand(len(rows), 2, 3), proposal, rows, settings)
    firsts = [tokens[0] for tokens in committed(proposal, walks)]
    expected = len(rows) * p_V.double() / p_V.double().sum()
    assert scipy.stats.chisquare(np.bincount(firsts), expected.numpy()).pvalue > LEVEL


# Coupled drafts, and point masses: the output is the target's own, token for token.

COUPLED = Sampling(temperature=0.8, top_k=4, rule="coupled")
EXACT_DRAFTERS = {
    "coupled chain": tree_drafter([1, 1, 1], [False] * 3, settings=COUPLED),
    "coupled tree": tree_drafter([3, 2], [False] * 2, settings=COUPLED),
    "point masses": tree_drafter([2, 2], [True] * 2),
}


@pytest.mark.parametrize("drafter", EXACT_DRAFTERS.values(), ids=EXACT_DRAFTERS)
def test_coupled_and_point_mass_drafts_leave_every_token_as_it_is(drafter: Drafter) -> None:
    nothing = tree_drafter([], [])
    vanilla = decode(make_rows(100), nothing, COUPLED, 5, replacement=False)
    assert decode(make_rows(100), drafter, COUPLED, 5, replacement=False) == vanilla
    assert len(set(vanilla)) > 50


@pytest.mark.parametrize("context", range(5))
def test_coupled_drafts_are_accepted_within_the_bounds_of_the_total_variation(context: int) -> None:
    num_seeds = 800
    rows = make_rows(num_seeds, prompt=(context,))
    drafter = tree_drafter([1], [False], settings=COUPLED)
    proposal = propose(rows, [drafter] * num_seeds, replacement=False)
    walks = verify(TARGET_VV[proposal.tokens_BN], proposal, rows, COUPLED)
    rate = sum(len(walk.path) == 2 for walk in walks) / num_seeds
    laws_2V = warp(torch.stack([TARGET_VV[context], DRAFTER_VV[context]]), COUPLED).exp()
    distance = tv(laws_2V[0], laws_2V[1])
    slack = scipy.stats.norm.isf(LEVEL) * math.sqrt(1 / 4 / num_seeds)
    assert (1 - distance) / (1 + distance) - slack < rate < 1 - distance + slack


# Deciding at all nodes at once, and what is asked of a proposal.


@pytest.mark.parametrize("settings", [SETTINGS, Sampling(temperature=1.3, top_p=0.8), Sampling()])
@pytest.mark.parametrize("replacement", [False, True])
def test_deciding_at_all_nodes_at_once_gives_the_same_walks(
    settings: Sampling, replacement: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = make_rows(60)
    for row in rows[::2]:
        row.tokens += [3, 1]
    drawn_so = [drafter for name, drafter in DRAFTERS.items() if (name in REPLACING) == replacement]
    drafters = [drawn_so[b % len(drawn_so)] for b in range(len(rows))]
    proposal = propose(rows, drafters, replacement)
    assert sum(map(len, proposal.trees)) > verify_module._NODES_AT_ONCE
    logits_BNV = TARGET_VV[proposal.tokens_BN]
    one_by_one = verify(logits_BNV, proposal, rows, settings)
    assert verify(logits_BNV, proposal, rows, settings, at_once=True) == one_by_one
    monkeypatch.setattr(sampling_module, "_on_cpu", lambda values: False)
    assert verify(logits_BNV, proposal, rows, settings, at_once=True) == one_by_one
    assert {len(walk.path) for walk in one_by_one} >= {1, 2}


def test_a_row_gets_the_same_walk_alone_and_in_a_batch() -> None:
    rows = make_rows(20)
    drafter = DRAFTERS["tree without replacement"]
    proposal = propose(rows, [drafter] * 20, replacement=False)
    together = verify(TARGET_VV[proposal.tokens_BN], proposal, rows, SETTINGS)
    for row, expected in zip(rows, together, strict=True):
        alone = propose([row], [drafter], replacement=False)
        assert verify(TARGET_VV[alone.tokens_BN], alone, [row], SETTINGS) == [expected]


def test_a_token_without_mass_in_its_draft_distribution_is_refused() -> None:
    logq_V = torch.tensor([0.0, -math.inf, -math.inf])
    proposal = Proposal(tokens_BN=torch.tensor([[0, 2]]), trees=[Tree.chain(1)], logq=[{0: logq_V}])
    with pytest.raises(ValueError, match=r"token 2 was drafted.*valid: the tensor"):
        verify(torch.zeros(1, 2, 3), proposal, make_rows(1), Sampling(temperature=1.0))


# Typical acceptance.


def walk_typically(
    tree: Tree, tokens: list[int], probs_NV: list[list[float]], typical: Typical
) -> Walk:
    logp_NV = torch.tensor(probs_NV).log()
    return typical_walk(tree, tokens, lambda node: logp_NV[node], lambda node: 100 + node, typical)


@pytest.mark.parametrize(
    ("probs_V", "is_typical_V"),
    [
        # H = 1.14 nats: 0.3 exp(-H) = 0.096, so epsilon = 0.09 decides.
        pytest.param([0.5, 0.3, 0.15, 0.05], [True, True, True, False], id="epsilon"),
        # H = ln 20: 0.3 / 20 = 0.015 decides.
        pytest.param([0.05] * 20, [True] * 20, id="flat"),
        # H = 2.57 nats: 0.3 exp(-H) = 0.023 decides.
        pytest.param(
            [0.35] + [0.04] * 15 + [0.02, 0.02, 0.01], [True] * 16 + [False] * 3, id="delta"
        ),
    ],
)
def test_a_token_is_typical_above_the_least_of_epsilon_and_delta_over_exp_of_entropy(
    probs_V: list[float], is_typical_V: list[bool]
) -> None:
    for token, is_typical in enumerate(is_typical_V):
        walk = walk_typically(Tree.chain(1), [0, token], [probs_V, probs_V], Typical())
        assert walk == (Walk([0, 1], 101) if is_typical else Walk([0], 100))


def test_delta_and_epsilon_are_settings() -> None:
    probs_V = [0.5, 0.3, 0.15, 0.05]
    for typical, num_typical in [
        (Typical(epsilon=0.2, delta=0.3), 3),
        (Typical(epsilon=0.2, delta=10.0), 2),
        (Typical(epsilon=0.01, delta=0.3), 4),
    ]:
        walks = [
            walk_typically(Tree.chain(1), [0, token], [probs_V, probs_V], typical)
            for token in range(4)
        ]
        assert sum(len(walk.path) == 2 for walk in walks) == num_typical


def test_the_longest_typical_path_wins_and_likelihood_breaks_ties() -> None:
    probs_NV = [[0.6, 0.2, 0.15, 0.05]] * 5
    typical = Typical()
    short_but_likely = Tree((-1, 0, 0, 2))
    assert walk_typically(short_but_likely, [9, 0, 2, 2], probs_NV, typical) == Walk([0, 2, 3], 103)
    equal_depth = Tree((-1, 0, 0, 1, 2))
    assert walk_typically(equal_depth, [9, 1, 0, 1, 1], probs_NV, typical) == Walk([0, 2, 4], 104)
    below_untypical = Tree((-1, 0, 1, 0))
    assert walk_typically(below_untypical, [9, 3, 0, 2], probs_NV, typical) == Walk([0, 3], 103)


def test_typical_acceptance_is_greedy_at_temperature_0() -> None:
    rows = make_rows(30)
    drafters = [DRAFTERS["tree without replacement"]] * 30
    proposal = propose(rows, drafters, replacement=False)
    logits_BNV = TARGET_VV[proposal.tokens_BN]
    walks = verify(logits_BNV, proposal, rows, Sampling(), Typical())
    assert walks == verify(logits_BNV, proposal, rows, Sampling())


def test_typical_acceptance_is_not_lossless() -> None:
    rows = make_rows(200)
    p_V = first_law()
    likeliest = int(p_V.argmax())
    proposal = Proposal(tokens_BN=torch.tensor([[0, likeliest]] * 200), trees=[Tree.chain(1)] * 200)
    logits_BNV = TARGET_VV[proposal.tokens_BN]
    assert p_V[likeliest] < 0.6
    for typical, is_lossless in [(None, True), (Typical(), False)]:
        walks = verify(logits_BNV, proposal, rows, SETTINGS, typical)
        firsts = [tokens[0] for tokens in committed(proposal, walks)]
        result = scipy.stats.binomtest(firsts.count(likeliest), 200, float(p_V[likeliest]))
        assert (result.pvalue > LEVEL) == is_lossless


def test_the_bonus_after_a_typical_path_is_the_targets_own_choice() -> None:
    rows = make_rows(50)
    proposal = Proposal.nothing(rows)
    logits_BNV = TARGET_VV[proposal.tokens_BN]
    walks = verify(logits_BNV, proposal, rows, SETTINGS, Typical())
    assert walks == verify(logits_BNV, proposal, rows, SETTINGS)
