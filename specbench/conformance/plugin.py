"""The kit as a plug-in of pytest: `pytest --specbench-method package.module:Class` runs one test
for each case.

It imports nothing heavy until it is asked for a method.
"""

from collections.abc import Iterator
from functools import cache
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from specbench.conformance.kit import Result
    from specbench.conformance.settings import Subject


def pytest_addoption(parser: pytest.Parser) -> None:
    """The options."""
    group = parser.getgroup("specbench")
    group.addoption(
        "--specbench-method",
        metavar="M",
        action="append",
        default=[],
        help="check a speculative decoding method: a name, or package.module:Class",
    )
    group.addoption(
        "--specbench-set",
        metavar="KNOB=V",
        action="append",
        default=[],
        help="a knob of these methods that is not to vary",
    )


def pytest_collection_modifyitems(
    session: pytest.Session, config: pytest.Config, items: list[pytest.Item]
) -> None:
    """Adds a test for each case and method."""
    for method in config.getoption("--specbench-method"):
        items += _Method.from_parent(session, name=method, nodeid=method).collect()


class _Method(pytest.Collector):
    """A method; its tests are the cases."""

    def collect(self) -> Iterator[pytest.Item]:
        from specbench.conformance.cases import CASES

        settings = tuple(self.config.getoption("--specbench-set"))
        try:
            subjects = _subjects(self.name, settings)
        except ValueError as error:
            raise pytest.UsageError(str(error)) from error
        for name in CASES:
            yield _Case.from_parent(self, name=name, subjects=subjects)


class _Case(pytest.Item):
    """One case over all settings of a method."""

    def __init__(self, *, subjects: "list[Subject]", **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.subjects = subjects

    def runtest(self) -> None:
        from specbench.conformance.cases import CASES
        from specbench.conformance.kit import check

        result = check(CASES[self.name], self.subjects)
        if result.fault:
            raise _Failed(result)
        if result.why:
            pytest.skip(result.why)

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], *_: Any) -> str:
        if isinstance(excinfo.value, _Failed):
            return str(excinfo.value)
        return str(super().repr_failure(excinfo))

    def reportinfo(self) -> tuple[str, None, str]:
        return self.nodeid, None, self.nodeid


class _Failed(Exception):
    """A case that failed: the fault, and where."""

    def __init__(self, result: "Result") -> None:
        super().__init__(f"{result.fault}\nwith {result.where}")
        self.__cause__ = result.fault and result.fault.__cause__


@cache
def _subjects(method: str, settings: tuple[str, ...]) -> "list[Subject]":
    from specbench.conformance.kit import read_knobs, subjects

    return subjects(method, read_knobs(method, settings))
