"""Controllers that go by what is measured: step times, and how far chances can be believed."""

from functools import cache

import pytest

from specbench.conformance.decoding import make_request, reference
from specbench.conformance.models import looping_target
from specbench.controllers import Controllers, measure
from specbench.depth import Choice, Survival
from specbench.target import Target
from tests.drafters import SETTINGS, Setting, decode, make_method

ONE_OF_EACH = list({setting.method: setting for setting in SETTINGS}.values())
REQUESTS = [make_request((3 + i, 40, 12), 10, name=str(i)) for i in range(5)]


@cache
def target() -> Target:
    """It knows all bytes, as it reads texts."""
    return looping_target(vocab_size=259)


@pytest.mark.parametrize("name", ["goodput", "survival"])
@pytest.mark.parametrize("setting", ONE_OF_EACH, ids=str)
def test_every_method_decodes_under_controllers_that_measure(setting: Setting, name: str) -> None:
    method = make_method(target(), setting)
    controller = Controllers(3).make(method, Choice.read(name))
    rows = decode(target(), method, REQUESTS, max_rows=3, controller=controller)
    assert [row.output for row in rows] == [reference(target(), r) for r in REQUESTS]


def test_what_is_known_of_a_method_is_measured_once_and_each_controller_is_new() -> None:
    method = make_method(target(), Setting("ngram", ()))
    controllers, choice = Controllers(2), Choice.read("survival")
    one, other = (controllers.make(method, choice) for _ in range(2))
    assert isinstance(one, Survival) and isinstance(other, Survival) and one is not other
    assert one.times is other.times and one.drafting is other.drafting


def test_the_grid_has_the_largest_batch_and_the_full_depth() -> None:
    method = make_method(target(), Setting("ngram", ()))
    known = measure(method, 6)
    assert known.steps.rows == known.verifying.rows == [1, 2, 4, 6]
    assert known.steps.nodes[-1] == method.config.depth


def test_verification_is_measured_by_nodes_whatever_the_depth() -> None:
    """A tree drafts its nodes at any depth; some of them may be verified."""
    method = make_method(target(), Setting("ngram", (("max_nodes", "12"),)))
    known = measure(method, 3)
    assert known.verifying.rows == known.drafting.rows == [1, 2, 3]
    assert known.verifying.nodes == [0, 1, 2, 4, 8, 12]
    assert known.drafting.nodes == known.steps.nodes
