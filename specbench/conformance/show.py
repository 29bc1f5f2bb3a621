"""What `specbench conform` prints."""

from collections.abc import Iterable

from rich.console import Console
from rich.table import Table

from specbench.conformance.cases import CASES
from specbench.conformance.faults import KINDS
from specbench.conformance.kit import FAIL, PASS, Result, conform
from specbench.conformance.settings import Subject

_STYLES = {PASS: "green", FAIL: "bold red"}


def show(methods: Iterable[Subject], console: Console) -> list[Result]:
    """Runs all cases over a method, and prints the table of verdicts and what was wrong.

    Args:
        methods: the method in its settings.
    """
    subjects, results = list(methods), list[Result]()
    with console.status("") as status:
        for name in CASES:
            status.update(name)
            results += conform(subjects, cases=[name])
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


def _table(results: list[Result]) -> Table:
    table = Table("case", "verdict", "")
    for result in results:
        note = result.fault.kind if result.fault else result.why
        table.add_row(result.case, result.verdict, note, style=_STYLES.get(result.verdict))
    return table
