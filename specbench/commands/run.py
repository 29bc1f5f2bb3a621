"""`specbench run`."""

import argparse
import shlex
import sys
from functools import partial
from typing import TYPE_CHECKING

from rich.console import Console

from specbench.commands.arguments import (
    EXIT_DONE,
    EXIT_FAILURES,
    EXIT_INTERRUPTED,
    Call,
    Commands,
    add_knobs,
    add_shared,
    choose_methods,
    folder,
    out_folder,
    read_knobs,
    terminable,
)
from specbench.messages import option

if TYPE_CHECKING:
    from specbench.plan import Plan

_NO_SETTINGS = {"command", "out", "resume", "no_ray"}
_RESUMABLE = {"command", "resume", "no_ray", "workers", "knobs"}


def add(commands: Commands) -> None:
    """The parser of `run`."""
    run = commands.add_parser(
        "run",
        help="measure methods on workloads",
        description="Measure methods on workloads. In brackets: the defaults.",
        allow_abbrev=False,
    )
    add = partial(run.add_argument, default=argparse.SUPPRESS)
    add_shared(run, "--target", "--methods", "--workloads")
    add("--prompts", metavar="N", type=int, help="prompts per workload (12)")
    add_shared(run, "--max-new-tokens", "--temperature")
    add("--top-k", metavar="K", type=int, help="0 keeps all (each workload's own)")
    add("--top-p", metavar="P", type=float, help="1 keeps all (each workload's own)")
    add_shared(run, "--sampling")
    add("--batch-size", metavar="B", type=int, help="requests decoded together (1)")
    add("--depth", metavar="D", type=int, help="draft depth of every method (each one's own)")
    add("--rounds", metavar="R", type=int, help="timed passes per prompt and method (2)")
    add_shared(run, "--workers")
    add("--gpus-per-worker", metavar="N", type=int, help="GPUs that hold one target (1)")
    add_shared(run, "--dtype")
    add("--seed", metavar="S", type=int, help="of the random numbers (0)")
    add_knobs(run)
    add_shared(run, "--out")
    add("--resume", metavar="DIR", type=folder, help="go on with the run in a folder")
    run.add_argument("--no-ray", action="store_true", help="run in this process")


def _run(arguments: argparse.Namespace) -> int:
    with terminable():
        from specbench import cluster, plan, report

        todo = plan_for(arguments)
        if not todo.pending:
            print("specbench: nothing is left to do", file=sys.stderr)
        try:
            run = cluster.run(todo, use_ray=not arguments.no_ray)
        except KeyboardInterrupt:
            print(
                f"specbench: interrupted; {plan.what_is_kept(todo.folder)}",
                file=sys.stderr,
            )
            return EXIT_INTERRUPTED
    if not run.references:
        raise ValueError(
            f"no prompt could be decoded, {run.folder} says why; the first: "
            f"{run.failures[0].reason}"
        )
    report.print_report([run], Console(), define=False)
    print(f"`specbench report {shlex.quote(str(run.folder))}` shows this again, with definitions")
    return EXIT_FAILURES if run.failures else EXIT_DONE


def plan_for(arguments: argparse.Namespace) -> "Plan":
    """The run that is asked for, new or resumed."""
    from specbench import plan
    from specbench.config import RunConfig

    given, knobs = vars(arguments), read_knobs(arguments.knobs)
    settings = {k: v for k, v in given.items() if k not in _NO_SETTINGS} | {"knobs": knobs}
    if "resume" not in given:
        notes = choose_methods(settings, RunConfig.target)
        todo = plan.new(RunConfig(**settings), out_folder(arguments))
        todo.notes += notes
        return todo
    extra = (set(given) - _RESUMABLE) | ({"set"} if knobs else set())
    if extra:
        names = ", ".join(map(option, sorted(extra)))
        raise ValueError(
            f"--resume goes on with the run's own settings; remove {names}; "
            "valid beside it: --workers, --no-ray"
        )
    return plan.resume(given["resume"], given.get("workers"))


CALLS: dict[str, Call] = {"run": _run}
