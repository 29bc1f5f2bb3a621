"""`specbench serve`."""

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
    controllers,
    floats,
    folder,
    given,
    out_folder,
    read_knobs,
    refuse_settings,
    show,
    terminable,
)

if TYPE_CHECKING:
    from specbench.serving.records import ServingRun


def add(commands: Commands) -> None:
    """The parser of `serve`."""
    serve = commands.add_parser(
        "serve",
        help="measure latency against arrival rate",
        description="Serve requests that arrive at given rates, batched continuously, and show "
        "what each method does to their latency. In brackets: the defaults.",
        allow_abbrev=False,
    )
    add = partial(serve.add_argument, default=argparse.SUPPRESS)
    add_shared(serve, "--target", "--methods")
    add(
        "--controllers",
        metavar="C,D",
        type=controllers,
        help="depth controllers, off_above_batch:off_at=4; each for every method (its own knob)",
    )
    add_shared(serve, "--workloads")
    add(
        "--loads",
        metavar="L,M",
        type=floats,
        help="arrival rates as shares of vanilla's capacity, measured first (0.5,0.8,1.2)",
    )
    add("--rates", metavar="R,S", type=floats, help="in place of it, requests per second")
    add(
        "--swing",
        metavar="K",
        type=float,
        help="a load that changes: every other spell of requests comes K times as fast (1)",
    )
    add("--requests", metavar="N", type=int, help="arrivals at each rate (32)")
    add("--rounds", metavar="R", type=int, help="passes at each rate, of other arrivals (3)")
    add("--max-batch", metavar="B", type=int, help="the most decoded together (8)")
    add_shared(serve, "--max-new-tokens")
    add("--temperature", metavar="T", type=float, help="0 is greedy (0.0)")
    add_shared(serve, "--sampling", "--dtype")
    add("--seed", metavar="S", type=int, help="of arrivals, prompts and random numbers (0)")
    add_knobs(serve)
    add_shared(serve, "--out")
    add("--resume", metavar="DIR", type=folder, help="go on with what is in a folder")
    add("--report", metavar="DIR", type=folder, help="show what is in a folder again")
    add_format(serve)


def _serve(arguments: argparse.Namespace) -> int:
    from specbench.serving.records import read_serving

    for mode in ("report", "resume"):
        if mode in arguments:
            refuse_settings(arguments, mode, "run", ("format",))
    if "report" in arguments:
        _show(arguments, read_serving(arguments.report), define=True)
        return EXIT_DONE
    return _measure(arguments)


def _measure(arguments: argparse.Namespace) -> int:
    with terminable():
        from specbench.serving.config import ServeConfig
        from specbench.serving.run import resume, resume_command, serve

        out: Path = vars(arguments).get("resume") or out_folder(arguments, "serving-")
        try:
            if "resume" in arguments:
                run = resume(out)
            else:
                settings = given(arguments, "out", "format") | {
                    "knobs": read_knobs(arguments.knobs)
                }
                notes = choose_methods(settings, ServeConfig.target)
                run = serve(ServeConfig(**settings), out, notes)
        except KeyboardInterrupt:
            is_kept = (out / "serving.json").exists()
            kept = f"; `{_again(out)}` shows what is finished, go on with `{resume_command(out)}`"
            print(f"specbench: interrupted{kept * is_kept}", file=sys.stderr)
            return EXIT_INTERRUPTED
    _show(arguments, run, define=False)
    if arguments.format == "rich":
        print(f"`{_again(out)}` shows this again, with definitions")
    failed = bool(run.failures) or any(one.failures for one in run.passes)
    return EXIT_FAILURES if failed else EXIT_DONE


def _again(out: Path) -> str:
    return f"specbench serve --report {shlex.quote(str(out))}"


def _show(arguments: argparse.Namespace, run: "ServingRun", *, define: bool) -> None:
    from specbench.serving.page import page

    show(page(run, define=define or arguments.format == "md"), arguments.format)


CALLS: dict[str, Call] = {"serve": _serve}
