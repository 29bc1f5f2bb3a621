"""`specbench report`, `check`, `baseline` and `explain`: what is made of finished runs."""

import argparse
import sys
from functools import partial
from pathlib import Path

from rich.console import Console

from specbench.commands.arguments import (
    EXIT_DONE,
    EXIT_FAILURES,
    EXIT_OPEN,
    Call,
    Commands,
    names,
)


def add(commands: Commands) -> None:
    """Their parsers."""
    report = commands.add_parser(
        "report", help="draw tables from result folders", allow_abbrev=False
    )
    report.add_argument("folders", metavar="DIR", nargs="+", type=Path)
    report.add_argument("--format", choices=("rich", "md", "json"), default="rich")
    check = commands.add_parser(
        "check",
        help="judge a run's methods against a baseline",
        description="Judge a run's methods against a baseline: PASS (exit code 0), FAIL (1) or "
        "INCONCLUSIVE (3). In brackets: the defaults.",
        allow_abbrev=False,
    )
    check.add_argument("baseline", metavar="BASELINE", help="a run's folder, or a baseline's name")
    check.add_argument("run", metavar="RUN", type=Path, help="a run's folder")
    check.add_argument("--method", metavar="M", help="the one to judge (all)")
    add = partial(check.add_argument, default=argparse.SUPPRESS)
    add("--margin", metavar="X", type=float, help="loss that the soft part lets pass (0.05)")
    add("--allow", metavar="A,B", type=names, help="what may differ: dtype, machine, ...")
    check.add_argument("--hard", action="store_true", help="the exact part only")
    check.add_argument("--markdown", metavar="FILE", type=Path, help="for a pull request")
    check.add_argument("--junit", metavar="FILE", type=Path, help="JUnit XML, for CI")
    baseline = commands.add_parser("baseline", help="file a run as a baseline", allow_abbrev=False)
    baseline.add_argument("run", metavar="RUN", type=Path)
    baseline.add_argument("--name", metavar="N", required=True)
    explain = commands.add_parser(
        "explain", help="show where outputs leave the target's", allow_abbrev=False
    )
    explain.add_argument("folder", metavar="DIR", type=Path)
    explain.add_argument("--prompt", metavar="ID", required=True)
    explain.add_argument("--method", metavar="M", help="the one to show (all)")


def _report(arguments: argparse.Namespace) -> int:
    from specbench import report
    from specbench.records import read_run

    runs = [read_run(folder) for folder in arguments.folders]
    if arguments.format == "rich":
        report.print_report(runs, Console())
    else:
        print(report.render(runs, arguments.format), flush=True)
    return EXIT_DONE


def _check(arguments: argparse.Namespace) -> int:
    from specbench import baselines, verdicts
    from specbench.check import check
    from specbench.files import write_atomically
    from specbench.judge import Verdict
    from specbench.records import read_run
    from specbench.tables import print_page

    if arguments.markdown and arguments.markdown == arguments.junit:
        raise ValueError(f"--markdown and --junit both name {arguments.junit}; valid: two files")
    given = {key: vars(arguments)[key] for key in ("margin", "allow") if key in arguments}
    done = check(
        read_run(baselines.find_baseline(arguments.baseline)),
        read_run(arguments.run),
        method=arguments.method,
        hard_only=arguments.hard,
        **given,
    )
    print_page(verdicts.page(done), Console())
    if arguments.markdown:
        write_atomically(arguments.markdown, verdicts.as_markdown(done))
    if arguments.junit:
        write_atomically(arguments.junit, verdicts.as_junit(done))
    exits = {Verdict.PASS: EXIT_DONE, Verdict.FAIL: EXIT_FAILURES, Verdict.INCONCLUSIVE: EXIT_OPEN}
    return exits[done.verdict]


def _baseline(arguments: argparse.Namespace) -> int:
    from specbench import baselines
    from specbench.records import read_run

    run = read_run(arguments.run)
    folder = baselines.file_baseline(run, arguments.name)
    for doubt in baselines.doubts(run):
        print(f"specbench: {doubt}", file=sys.stderr)
    print(f"filed as {folder}; `specbench check {arguments.name} RUN` holds a run against it")
    return EXIT_DONE


def _explain(arguments: argparse.Namespace) -> int:
    from specbench.explain import decoder, explain
    from specbench.records import read_run
    from specbench.tables import print_page
    from specbench.worker import hush

    hush()
    run = read_run(arguments.folder)
    print_page(explain(run, arguments.prompt, arguments.method, decoder(run)), Console())
    return EXIT_DONE


CALLS: dict[str, Call] = {
    "report": _report,
    "check": _check,
    "baseline": _baseline,
    "explain": _explain,
}
