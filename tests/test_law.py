"""The test of an output's law: its law is exact, and what it must notice it notices."""

from dataclasses import replace

import numpy as np
import pytest
import scipy.stats

from specbench.conformance import law
from specbench.conformance.cases import LAW, LEVEL, sampled_distribution_chi2
from specbench.conformance.targets import law_target
from specbench.conformance.trial import DoesNotApply, Trial
from specbench.sampling import Sampling
from tests.drafters import SETTINGS, subject

POWER = 0.99


@pytest.mark.parametrize("sampling", [LAW, replace(LAW, temperature=2.0)])
def test_the_chances_of_all_outputs_add_up_to_one(sampling: Sampling) -> None:
    assert law.exact_law(law_target(), sampling).sum() == pytest.approx(1, abs=1e-9)


def test_counts_that_follow_the_law_are_called_wrong_as_often_as_is_said() -> None:
    exact, random = law.exact_law(law_target(), LAW), np.random.default_rng(0)
    draws = random.multinomial(law.NUM_OUTPUTS, exact.flatten(), size=2000)
    p_values = [law.p_value(counts.reshape(exact.shape), exact) for counts in draws]
    assert scipy.stats.binomtest(sum(p < 0.05 for p in p_values), 2000, 0.05).pvalue > 1e-3
    assert min(p_values) > LEVEL


def test_a_verifier_that_ignores_the_temperature_is_sure_to_be_noticed() -> None:
    """By outputs that top-p rules out at the right one."""
    exact = law.exact_law(law_target(), LAW)
    hot = law.exact_law(law_target(), replace(LAW, temperature=1.0))
    impossible = hot[exact == 0].sum()
    assert 1 - (1 - impossible) ** law.NUM_OUTPUTS > POWER


def test_outputs_of_every_method_that_draws_follow_the_targets_law() -> None:
    """In every setting; a fault would be raised."""
    num_drawn = 0
    for setting in SETTINGS:
        try:
            sampled_distribution_chi2(Trial(subject(setting), LAW, 200))
            num_drawn += 1
        except DoesNotApply:
            continue
    assert num_drawn >= 10
