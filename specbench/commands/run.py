"""`specbench run`."""

import argparse
import shlex
import sys
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from specbench.commands.arguments import (
    EXIT_DONE,
    EXIT_FAILURES,
    EXIT_INTERRUPTED,
    Call,
    Commands,
    folder,
    names,
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
    add("--target", metavar="T", help="Hub name, folder or GGUF file (SmolLM2-135M-Instruct)")
    add("--methods", metavar="A,B", type=names, help="names, see `specbench methods` (all)")
    add(
        "--workloads",
        metavar="X,Y",
        type=names,
        help="names, data sets or files, see `specbench workloads` (humaneval,creative)",
    )
    add("--prompts", metavar="N", type=int, help="prompts per workload (12)")
    add("--max-new-tokens", metavar="N", type=int, help="token budget per request (64)")
    add("--temperature", metavar="T", type=float, help="0 is greedy (each workload's own)")
    add("--top-k", metavar="K", type=int, help="0 keeps all (each workload's own)")
    add("--top-p", metavar="P", type=float, help="1 keeps all (each workload's own)")
    add("--sampling", metavar="RULE", help="for drawn drafts: rejection or coupled (rejection)")
    add("--batch-size", metavar="B", type=int, help="requests decoded together (1)")
    add("--depth", metavar="D", type=int, help="draft depth of every method (each one's own)")
    add("--rounds", metavar="R", type=int, help="timed passes per prompt and method (2)")
    add("--workers", metavar="W", type=int, help="processes (one per GPU; on a CPU two)")
    add("--gpus-per-worker", metavar="N", type=int, help="GPUs that hold one target (1)")
    add("--dtype", metavar="D", help="float32, bfloat16 or float16 (what the device is good at)")
    add("--seed", metavar="S", type=int, help="of the random numbers (0)")
    run.add_argument(
        "--set",
        metavar="METHOD.KNOB=V",
        dest="knobs",
        action="append",
        default=[],
        help="a method's knob; may be given again",
    )
    add("--out", metavar="DIR", type=folder, help="a new folder for the results (runs/<time>)")
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
    from specbench import plan, registry
    from specbench.config import RunConfig

    given, knobs = vars(arguments), read_knobs(arguments.knobs)
    settings = {k: v for k, v in given.items() if k not in _NO_SETTINGS} | {"knobs": knobs}
    if "resume" not in given:
        problems: list[str] = []
        if "methods" not in given:
            target = settings.get("target", RunConfig.target)
            settings["methods"], problems = registry.usable(target, knobs)
        stamp = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
        todo = plan.new(RunConfig(**settings), given.get("out", Path("runs") / stamp))
        todo.notes += [f"left out: {problem}" for problem in problems]
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
