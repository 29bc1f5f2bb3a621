"""`specbench sweep`."""

import argparse
import shlex
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from specbench.commands.arguments import (
    EXIT_DONE,
    EXIT_FAILURES,
    EXIT_INTERRUPTED,
    Call,
    Commands,
    add_format,
    add_knobs,
    add_shared,
    choose_methods,
    folder,
    given,
    numbers,
    out_folder,
    read_knobs,
    refuse_settings,
    show,
    terminable,
)

if TYPE_CHECKING:
    from specbench.profile import Profile
    from specbench.sweep.running import Sweep

_SHOWN = ("format", "plots", "profile")
"""What says how a sweep is shown."""
_BESIDE = ("no_ray", *_SHOWN)
"""What may stand beside the folder of a sweep."""
_NO_SETTINGS = ("out", "resume", "report", "no_ray", "knobs", *_SHOWN)


def add(commands: Commands) -> None:
    """The parser of `sweep`."""
    sweep = commands.add_parser(
        "sweep",
        help="measure batch sizes x depths x methods",
        description="Measure methods at several batch sizes and depths, and say where speculation "
        "pays. In brackets: the defaults.",
        allow_abbrev=False,
    )
    add = partial(sweep.add_argument, default=argparse.SUPPRESS)
    add_shared(sweep, "--target", "--methods", "--workloads")
    add("--batches", metavar="B,C", type=numbers, help="batch sizes (1,2,4,8)")
    add("--depths", metavar="D,E", type=numbers, help="draft depths (1,2,3,5)")
    add("--nodes", metavar="N,M", type=numbers, help="tree sizes, where trees are drafted")
    add("--prompts", metavar="N", type=int, help="per workload (5 batches of the largest size)")
    add_shared(sweep, "--max-new-tokens")
    add("--rounds", metavar="R", type=int, help="timed passes per batch and method (2)")
    add_shared(sweep, "--temperature", "--dtype", "--workers")
    add_knobs(sweep, "a method's knob at all depths; may be given again")
    add_shared(sweep, "--out")
    add("--resume", metavar="DIR", type=folder, help="go on with the sweep in a folder")
    add("--report", metavar="DIR", type=folder, help="show a sweep again, measure nothing")
    sweep.add_argument("--no-ray", action="store_true", help="run in this process")
    add_format(sweep)
    add("--profile", metavar="FILE", type=Path, help="hold its predictions against the sweep")
    sweep.add_argument("--plots", action="store_true", help="draw curves, in DIR/plots")


def _sweep(arguments: argparse.Namespace) -> int:
    from specbench.prediction import Forwards
    from specbench.profile import load_profile

    if arguments.plots:
        from specbench.sweep import plots

        plots.require()
    profile = load_profile(arguments.profile) if "profile" in arguments else None
    if profile is not None:
        # What it lacks is said before anything is measured.
        Forwards(profile)
    if "report" in arguments:
        refuse_settings(arguments, "report", "sweep", _BESIDE)
        return _show(arguments.report, arguments, profile)
    with terminable():
        todo = _plan(arguments)
        try:
            todo.run(not arguments.no_ray, lambda line: print(line, file=sys.stderr))
        except KeyboardInterrupt:
            print(
                "specbench: interrupted; what is finished is kept, go on with "
                f"`specbench sweep --resume {shlex.quote(str(todo.folder))}`",
                file=sys.stderr,
            )
            return EXIT_INTERRUPTED
    return _show(todo.folder, arguments, profile)


def _plan(arguments: argparse.Namespace) -> "Sweep":
    """The sweep that is asked for, new or resumed."""
    from specbench.sweep import running
    from specbench.sweep.config import SweepConfig

    if "resume" in arguments:
        refuse_settings(arguments, "resume", "sweep", ("workers", *_BESIDE))
        return running.resume(arguments.resume, vars(arguments).get("workers"))
    settings = given(arguments, *_NO_SETTINGS) | {"knobs": read_knobs(arguments.knobs)}
    notes = choose_methods(settings, SweepConfig.target)
    todo = running.new(SweepConfig(**settings), out_folder(arguments, "sweep-"))
    todo.notes += notes
    return todo


def _show(folder: Path, arguments: argparse.Namespace, profile: "Profile | None") -> int:
    from specbench.describe import title
    from specbench.sweep import pages, plots, points, running, validation

    again = f"specbench sweep --report {shlex.quote(str(folder))}"
    runs = running.read_runs(folder)
    found = points.measure(runs)
    page = pages.page(runs, found, running.read_about(folder)["notes"])
    if profile is not None:
        again += f" --profile {shlex.quote(str(arguments.profile))}"
        page = [*page, *validation.page(validation.hold(profile, runs, found))]
    show(page, arguments.format)
    about = title(next(iter(runs.values())))
    files = plots.draw(found, about, folder / "plots") if arguments.plots else []
    if files:
        print(f"{len(files)} plots in {folder / 'plots'}", file=sys.stderr)
    print(f"`{again}` shows this again", file=sys.stderr)
    return EXIT_FAILURES if any(run.failures for run in runs.values()) else EXIT_DONE


CALLS: dict[str, Call] = {"sweep": _sweep}
