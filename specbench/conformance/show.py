"""What `specbench conform` prints."""

from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context

import torch
from rich.console import Console
from rich.table import Table

from specbench.conformance.cases import CASES
from specbench.conformance.faults import ERROR, KINDS, Fault
from specbench.conformance.kit import FAIL, PASS, Result, check
from specbench.conformance.settings import Subject
from specbench.worker import hush

_STYLES = {PASS: "green", FAIL: "bold red"}


def show(methods: Iterable[Subject], console: Console) -> list[Result]:
    """Runs all cases over a method, and prints the table of verdicts and what was wrong.

    Args:
        methods: the method in its settings.
    """
    subjects = list(methods)
    with console.status("") as status:
        results = _in_two_processes(subjects, status.update)
    console.print(_table(results))
    settings = [str(one).removeprefix(one.name).strip() or "as it is" for one in subjects]
    console.print(f"in {len(settings)} settings: {'; '.join(settings)}", markup=False)
    for result in results:
        if result.fault:
            console.print(f"{result.case}: {result.fault}", style="red", markup=False)
            console.print(f"    with {result.where}", markup=False)
    for kind in dict.fromkeys(result.fault.kind for result in results if result.fault):
        console.print(f"{kind}: {KINDS[kind]}", markup=False)
    return results


def _in_two_processes(subjects: list[Subject], tell: Callable[[str], None]) -> list[Result]:
    """Every second case runs in a process beside this one. Which case follows which in a process
    never changes, so that a verdict does not either.

    Args:
        tell: takes the name of the case that is waited for.
    """
    beside = ProcessPoolExecutor(1, get_context("spawn"), initializer=begin)
    found: dict[str, Result] = {}
    try:
        others = {name: beside.submit(_check, name, subjects) for name in list(CASES)[1::2]}
        for name in list(CASES)[::2]:
            tell(name)
            found[name] = _check(name, subjects)
        for name, other in others.items():
            tell(name)
            try:
                found[name] = other.result()
            except BrokenProcessPool:
                fault = Fault(ERROR, "the process ended in this case, or before it")
                found[name] = Result(name, FAIL, fault, "any setting")
    finally:
        beside.shutdown(cancel_futures=True)
    return [found[name] for name in CASES]


def begin() -> None:
    """Readies a process: no chatter of the libraries, and one thread, for the models are too small
    for more."""
    hush()
    torch.set_num_threads(1)


def _check(name: str, subjects: list[Subject]) -> Result:
    return check(CASES[name], subjects)


def _table(results: list[Result]) -> Table:
    table = Table("case", "verdict", "")
    for result in results:
        note = result.fault.kind if result.fault else result.why
        table.add_row(result.case, result.verdict, note, style=_STYLES.get(result.verdict))
    return table
