"""Drafts that are drawn from a distribution: the output of the whole loop follows the target's law.

For every method that draws, hundreds of outputs of three tokens over a tiny vocabulary are counted
and compared with the target's exact joint law, at a level that holds for all methods together. Two
broken verifiers must be noticed by the same test; for one of them its power is known beforehand.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import scipy.stats
import torch
from numpy.typing import NDArray

from specbench import verify as verify_module
from specbench.conformance.decoding import make_request
from specbench.conformance.models import looping_target
from specbench.sampling import Sampling, choose, warp
from specbench.target import Target
from specbench.tree import Tree
from tests.drafters import SETTINGS, Setting, decode, make_method

SAMPLING = Sampling(temperature=2.0, top_p=0.95)
PROMPT = (3,)
VOCAB, LENGTH = 6, 3
NUM_OUTPUTS = 400
LEVEL = 1e-3
"""The chance of any false alarm over all methods."""
POWER = 0.99
LEAST_EXPECTED = 5
"""Outputs that are expected less often are counted together."""

Law = NDArray[np.float64]


@cache
def target() -> Target:
    model = looping_target(vocab_size=VOCAB)
    model.eos_ids = frozenset()
    return model


def exact_law(sampling: Sampling) -> Law:
    """The chance of every output, [V, V, V]."""
    prefixes = torch.cartesian_prod(*[torch.arange(VOCAB)] * (LENGTH - 1))
    tokens_BN = torch.cat([torch.tensor(PROMPT).expand(len(prefixes), -1), prefixes], dim=1)
    cache = target().new_cache(len(prefixes))
    for _ in prefixes:
        cache.add_row()
    trees = [Tree.chain(tokens_BN.shape[1] - 1)] * len(prefixes)
    logits_BNV = target().forward(tokens_BN, trees, cache).logits_BMV[:, -LENGTH:].double()
    p_BNV = warp(logits_BNV.flatten(0, 1), sampling).exp().view(-1, LENGTH, VOCAB)
    chance_B1 = torch.ones(len(prefixes), 1, dtype=torch.float64)
    for i in range(LENGTH - 1):
        chance_B1 = chance_B1 * p_BNV[:, i].gather(1, prefixes[:, i : i + 1])
    return (chance_B1 * p_BNV[:, -1]).reshape(VOCAB, VOCAB, VOCAB).numpy()


def count_outputs(setting: Setting) -> Law | None:
    """How often each output comes, [V, V, V]; None for a method that does not draw."""
    requests = [make_request(PROMPT, LENGTH, name=str(i)) for i in range(NUM_OUTPUTS)]
    rows = decode(target(), make_method(target(), setting), requests, SAMPLING, max_rows=200)
    if not any(row.drawn for row in rows):
        return None
    counts = np.zeros([VOCAB] * LENGTH)
    np.add.at(counts, tuple(np.array([row.output for row in rows]).T), 1)
    return counts


def pooled(values: Law, law: Law) -> Law:
    """By output, those that are rare under the law summed up in one."""
    is_common = law * NUM_OUTPUTS >= LEAST_EXPECTED
    return np.append(values[is_common], values[~is_common].sum())


def p_value(counts: Law, law: Law) -> float:
    if counts[law == 0].any():
        return 0.0
    expected = NUM_OUTPUTS * pooled(law, law)
    return float(scipy.stats.chisquare(pooled(counts, law), expected).pvalue)


def rejected(p_values: Sequence[float], level: float) -> list[bool]:
    """Holm's step-down test: which hypotheses fall."""
    falls = [False] * len(p_values)
    for rank, i in enumerate(np.argsort(p_values)):
        if p_values[i] > level / (len(p_values) - rank):
            break
        falls[i] = True
    return falls


def test_outputs_of_every_method_that_draws_follow_the_targets_law() -> None:
    law = exact_law(SAMPLING)
    assert law.sum() == pytest.approx(1, abs=1e-9)
    p_values = {}
    for setting in SETTINGS:
        counts = count_outputs(setting)
        if counts is not None:
            p_values[str(setting)] = p_value(counts, law)
    falls = rejected(list(p_values.values()), LEVEL)
    assert [name for name, fall in zip(p_values, falls, strict=True) if fall] == []
    assert len(p_values) >= 10


CHAIN = Setting("early_exit", (("exit_layer", "2"),))
TREE = Setting("draft_model", (("model", "layers"), ("layers", "3"), ("branching", "2,2")))


@pytest.mark.parametrize("setting", [CHAIN, TREE], ids=str)
def test_a_verifier_that_ignores_the_temperature_is_noticed(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    law, hot = exact_law(SAMPLING), replace(SAMPLING, temperature=1.0)
    right, wrong = (pooled(values, law) for values in (law, exact_law(hot)))
    is_possible = right > 0
    distance = ((wrong - right)[is_possible] ** 2 / right[is_possible]).sum()
    df = int(is_possible.sum()) - 1
    critical = scipy.stats.chi2.isf(LEVEL / len(SETTINGS), df)
    assert scipy.stats.ncx2.sf(critical, df, NUM_OUTPUTS * distance) > POWER
    monkeypatch.setattr(verify_module, "warp", lambda logits, sampling: warp(logits, hot))
    counts = count_outputs(setting)
    assert counts is not None
    assert p_value(counts, law) < LEVEL / len(SETTINGS)


@pytest.mark.parametrize("setting", [CHAIN, TREE], ids=str)
def test_a_temperature_ignored_on_the_bonus_alone_is_noticed(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    def hot(logp_MV: torch.Tensor, keys: Sequence[int]) -> torch.Tensor:
        return choose((logp_MV * SAMPLING.temperature).log_softmax(-1), keys)

    monkeypatch.setattr(verify_module, "choose", hot)
    counts = count_outputs(setting)
    assert counts is not None
    assert p_value(counts, exact_law(SAMPLING)) < LEVEL / len(SETTINGS)
