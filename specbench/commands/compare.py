"""`specbench compare`."""

import argparse
from functools import partial
from pathlib import Path

from specbench.commands.arguments import (
    EXIT_DONE,
    Call,
    Commands,
    add_format,
    controllers,
    given,
    numbers,
    show,
)


def add(commands: Commands) -> None:
    """The parser of `compare`."""
    compare = commands.add_parser(
        "compare",
        help="replay a run's outputs under depth controllers",
        description="Replay a run's recorded outputs under every fixed depth, depth controllers "
        "and the per-step oracle, at the step times of a profile. In brackets: the defaults.",
        allow_abbrev=False,
    )
    compare.add_argument("run", metavar="RUN", type=Path, help="a run's folder")
    compare.add_argument("--profile", metavar="FILE", type=Path, required=True)
    compare.add_argument("--method", metavar="M", required=True, help="whose outputs")
    add = partial(compare.add_argument, default=argparse.SUPPRESS)
    add("--workload", metavar="X", help="on what (all)")
    add("--batches", metavar="B,C", type=numbers, help="rows at a time (the profile's)")
    add("--controllers", metavar="A,B", type=controllers, help="with their knobs (five of them)")
    add("--depth", metavar="N", type=int, help="the deepest draft (the profile's)")
    add_format(compare)


def _compare(arguments: argparse.Namespace) -> int:
    from specbench import comparison
    from specbench.profile import load_profile
    from specbench.records import read_run
    from specbench.trace import check_replayable

    settings = given(arguments, "run", "profile", "method", "workload", "format")
    workload = vars(arguments).get("workload")
    run = read_run(arguments.run)
    found = [
        record
        for record in run.requests
        if record.method == arguments.method and workload in (None, record.workload)
    ]
    if not found:
        on = f" on {workload}" if workload else ""
        raise ValueError(f"{arguments.run} has no outputs of method {arguments.method!r}{on}")
    check_replayable(run.info, arguments.method)
    page = comparison.page(load_profile(arguments.profile), arguments.method, found, **settings)
    show(page, arguments.format)
    return EXIT_DONE


CALLS: dict[str, Call] = {"compare": _compare}
