"""Controllers keep the law of the output where drafts are drawn and go through rejection.

In closed form, over every draft that two rows can draw on a vocabulary of two tokens: what a
controller admits is known for each, so the exact law of a row's next two tokens is too. And in the
whole loop, by a goodness-of-fit test over many outputs. A search that looks at all chances before
it admits any must be caught by both.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from specbench.conformance import law
from specbench.conformance.cases import LAW
from specbench.conformance.decoding import make_request
from specbench.conformance.targets import law_target
from specbench.depth import Admission, Calibration, Confidence, DepthController, Survival
from specbench.method import Batch, Budget, Method, Proposal, Row
from specbench.tree import Tree
from specbench.verify import rejection
from tests.controllers import SETTINGS as CONTROLLER_SETTINGS
from tests.controllers import GlobalSearch, Rates, made, names
from tests.drafters import Setting, decode, make_method

Law = NDArray[np.float64]

TOKENS, DEPTH = (0, 1), 2
ROWS = [Row(make_request((0,), 9, name=name), [0]) for name in ("one", "other")]


class Model:
    """A target, a drafter and its chances over two positions: of each first token, of each second
    one behind it."""

    def __init__(self, target: Law, drafter: Law, first_chance: float, chances: Law) -> None:
        self.target, self.drafter = target, drafter
        """[3, 2]: the law of the first token, then of the second behind 0 and behind 1."""
        self.first_chance, self.chances = first_chance, chances

    def chance(self, tokens: Sequence[int]) -> float:
        """That a row drafts these."""
        first, second = tokens
        return float(self.drafter[0, first] * self.drafter[1 + first, second])


def proposed(drafts: Sequence[Sequence[int]], model: Model) -> Proposal:
    """These drafts, as a proposal."""
    chances = [[model.first_chance, float(model.chances[tokens[0]])] for tokens in drafts]
    trees = [Tree.chain(DEPTH)] * len(drafts)
    return Proposal.from_rows(ROWS[: len(drafts)], trees, drafts, chances=chances)


def committed(tokens: Sequence[int], num_admitted: int, model: Model) -> Law:
    """The law [2, 2] of a row's next two tokens once it drafted these and so many are verified.
    What comes behind the bonus is drawn from the target."""
    chances = np.zeros((2, 2))
    if num_admitted == 0:
        return true_law(model)
    accepted, residual = judged(model, 0, tokens[0])
    chances += (1 - accepted) * residual[:, None] * model.target[1:]
    if num_admitted == 1:
        chances[tokens[0]] += accepted * model.target[1 + tokens[0]]
        return chances
    second, residual = judged(model, 1 + tokens[0], tokens[1])
    chances[tokens[0]] += accepted * (1 - second) * residual
    chances[tokens[0], tokens[1]] += accepted * second
    return chances


def judged(model: Model, place: int, token: int) -> tuple[float, Law]:
    """The chance to accept a token, and what is drawn from when it is refused."""
    p, q = (torch.from_numpy(laws[place][None].copy()) for laws in (model.target, model.drafter))
    accept, residual = rejection(p, q, torch.tensor([[token]]), replacement=False)
    return float(accept), residual[0].numpy()


def output_law(controller: DepthController, model: Model, num_rows: int) -> Law:
    """The law [2, 2] of the first row's next two tokens."""
    chances = np.zeros((2, 2))
    for drafts in product(product(TOKENS, repeat=DEPTH), repeat=num_rows):
        controller.reset()
        admission = Admission(proposed(drafts, model))
        controller.admit(admission)
        weight = np.prod([model.chance(tokens) for tokens in drafts])
        chances += weight * committed(drafts[0], admission.num_nodes[0], model)
    return chances


def true_law(model: Model) -> Law:
    chances: Law = model.target[0][:, None] * model.target[1:]
    return chances


APPENDIX_A = Model(
    np.array([[0.7, 0.3]] * 3), np.array([[0.5, 0.5]] * 3), 0.8, np.array([1.0, 0.0])
)
JAGGED = Rates(1, 0.5, 0.45)


def test_the_papers_counterexample_is_lossless_by_early_stop_alone() -> None:
    """DSpark, Appendix A: global search makes (0.7, 0.3) into (0.85, 0.15)."""
    stops, searches = Survival(2, 2, times=JAGGED), GlobalSearch(2, 2, times=JAGGED)
    assert output_law(stops, APPENDIX_A, 1).sum(1) == pytest.approx([0.7, 0.3])
    assert output_law(searches, APPENDIX_A, 1).sum(1) == pytest.approx([0.85, 0.15])


def random_model(seed: int) -> Model:
    generator = np.random.default_rng(seed)
    target, drafter = generator.dirichlet([1, 1], 3), generator.dirichlet([1, 1], 3)
    return Model(target, drafter, float(generator.uniform()), generator.uniform(size=2))


def controllers(seed: int) -> list[DepthController]:
    """Those that read drafts, with random step times: the first node costs most."""
    generator = np.random.default_rng(seed)
    slower = [1, generator.uniform(0.5, 0.8), *generator.uniform(0.8, 1, 3)]
    times = Rates(*np.cumprod(slower).tolist())
    return [
        Survival(2, 2, times=times),
        Survival(2, 2, times=times, calibration=Calibration((2.0, 0.5))),
        Confidence(2, 2, threshold=float(generator.uniform())),
    ]


@pytest.mark.parametrize("num_rows", [1, 2])
def test_what_is_admitted_leaves_the_law_as_it_is(num_rows: int) -> None:
    for seed in range(40):
        model = random_model(seed)
        for controller in controllers(seed):
            found = output_law(controller, model, num_rows)
            assert found == pytest.approx(true_law(model), abs=1e-12)


def test_a_global_search_is_caught_in_closed_form() -> None:
    models = [random_model(seed) for seed in range(40)]
    for model in models:
        model.first_chance, model.chances = 0.8, np.array([1.0, 0.0])
    broken = GlobalSearch(2, 2, times=JAGGED)
    errors = [np.abs(output_law(broken, m, 1) - true_law(m)).max() for m in models]
    assert sum(error > 1e-3 for error in errors) >= 35


LEVEL = 1e-3
"""The chance of a false alarm."""
CHAIN = Setting("early_exit", (("exit_layer", "2"), ("branching", "")))
COPY = Setting("draft_model", (("model", "layers"), ("layers", "4"), ("branching", "")))
"""Draws from the target's own law, so that all it draws is accepted."""


def p_value(method: Method, controller: DepthController, max_rows: int) -> float:
    """How well the outputs of the whole loop fit the target's law."""
    found = decode(
        law_target(), method, law.requests(), LAW, max_rows=max_rows, controller=controller
    )
    assert any(row.drawn for row in found)
    return law.p_value(law.count(found), law.exact_law(law_target(), LAW))


def test_outputs_under_every_controller_follow_the_targets_law() -> None:
    method = make_method(law_target(), CHAIN)
    p_values = [p_value(method, made(name, knobs), 70) for name, knobs in CONTROLLER_SETTINGS]
    least = LEVEL / len(p_values)
    assert [name for name, p in zip(names(), p_values, strict=True) if p < least] == []


def test_a_global_search_is_caught_in_the_whole_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    method = make_method(law_target(), COPY)
    propose = method.propose

    def sure_behind_even_tokens(batch: Batch, budgets: Sequence[Budget]) -> Proposal:
        proposal = propose(batch, budgets)
        firsts = proposal.tokens_BN[:, 1:2].sum(1).tolist()
        chances = [
            [0.8, 1.0 - first % 2][: tree.num_drafted]
            for first, tree in zip(firsts, proposal.trees, strict=True)
        ]
        return replace(proposal, chances=chances)

    monkeypatch.setattr(method, "propose", sure_behind_even_tokens)
    assert p_value(method, GlobalSearch(2, 2, times=JAGGED), 1) < LEVEL
    assert p_value(method, Survival(2, 2, times=Rates(1, 0.6, 0.55)), 1) > LEVEL
