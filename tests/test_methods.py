"""Every registered method, in several settings: whatever it drafts, the output is vanilla's."""

from itertools import groupby

import pytest

from specbench.conformance.cases import CASES, COUPLED, MIXED, REJECTION, Case
from specbench.conformance.decoding import GREEDY, reference
from specbench.conformance.kit import check
from specbench.conformance.settings import Subject
from specbench.conformance.targets import main_target
from specbench.sampling import Sampling
from tests.drafters import SETTINGS, Setting, decode, make_method, subject

METHODS = [
    [subject(setting) for setting in settings]
    for _, settings in groupby(SETTINGS, lambda setting: setting.method)
]


@pytest.mark.parametrize("methods", METHODS, ids=lambda methods: methods[0].name)
@pytest.mark.parametrize("case", CASES.values(), ids=lambda case: case.name)
def test_every_method_passes_every_case(case: Case, methods: list[Subject]) -> None:
    result = check(case, methods)
    assert result.fault is None, f"{result.fault}\nwith {result.where}"


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
@pytest.mark.parametrize("sampling", [GREEDY, COUPLED, REJECTION], ids=["T=0", "coupled", "drawn"])
def test_alone_and_in_a_batch_outputs_are_vanillas_and_caches_right_after_every_step(
    setting: Setting, sampling: Sampling
) -> None:
    """In every setting, and the caches of drafters beside the target's."""
    method = make_method(main_target(), setting)
    alone, together = (
        decode(main_target(), method, MIXED, sampling, max_rows=max_rows, audit=True)
        for max_rows in (1, 4)
    )
    for one, other in zip(alone, together, strict=True):
        assert (one.output, one.steps, one.finish) == (other.output, other.steps, other.finish)
        assert one.drawn or one.output == reference(main_target(), one.request, sampling)
        assert not one.drawn or sampling is REJECTION
