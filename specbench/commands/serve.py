"""`specbench serve`."""

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
    controllers,
    floats,
    folder,
    given,
    names,
    read_knobs,
    terminable,
)
from specbench.messages import option

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
    add("--target", metavar="T", help="Hub name, folder or GGUF file (SmolLM2-135M-Instruct)")
    add("--methods", metavar="A,B", type=names, help="names, see `specbench methods` (all)")
    add(
        "--controllers",
        metavar="C,D",
        type=controllers,
        help="depth controllers, off_above_batch:off_at=4; each for every method (its own knob)",
    )
    add(
        "--workloads",
        metavar="X,Y",
        type=names,
        help="names, data sets or files, see `specbench workloads` (humaneval,creative)",
    )
    add(
        "--loads",
        metavar="L,M",
        type=floats,
        help="arrival rates as shares of vanilla's capacity, measured first (0.5,0.8,1.2)",
    )
    add("--rates", metavar="R,S", type=floats, help="in place of it, requests per second")
    add("--requests", metavar="N", type=int, help="arrivals at each rate (32)")
    add("--rounds", metavar="R", type=int, help="passes at each rate, of other arrivals (2)")
    add("--max-batch", metavar="B", type=int, help="the most decoded together (8)")
    add("--max-new-tokens", metavar="N", type=int, help="token budget per request (64)")
    add("--temperature", metavar="T", type=float, help="0 is greedy (0.0)")
    add("--sampling", metavar="RULE", help="for drawn drafts: rejection or coupled (rejection)")
    add("--dtype", metavar="D", help="float32, bfloat16 or float16 (what the device is good at)")
    add("--seed", metavar="S", type=int, help="of arrivals, prompts and random numbers (0)")
    serve.add_argument(
        "--set",
        metavar="METHOD.KNOB=V",
        dest="knobs",
        action="append",
        default=[],
        help="a method's knob; may be given again",
    )
    add("--out", metavar="DIR", type=folder, help="a new folder for the results (runs/<time>)")
    add("--report", metavar="DIR", type=folder, help="show what is in a folder again")
    serve.add_argument("--format", choices=("rich", "md"), default="rich")


def _serve(arguments: argparse.Namespace) -> int:
    from specbench.serving.records import read_serving

    if "report" in arguments:
        extra = sorted(set(given(arguments, "report", "format", "knobs")))
        if extra or arguments.knobs:
            raise ValueError(
                f"--report shows a finished run; remove "
                f"{', '.join(map(option, extra)) or '--set'}; valid beside it: --format"
            )
        _show(arguments, read_serving(arguments.report), define=True)
        return EXIT_DONE
    return _measure(arguments)


def _measure(arguments: argparse.Namespace) -> int:
    with terminable():
        from specbench import registry
        from specbench.serving.config import ServeConfig
        from specbench.serving.run import serve

        knobs = read_knobs(arguments.knobs)
        settings = given(arguments, "out", "format") | {"knobs": knobs}
        problems: list[str] = []
        if "methods" not in arguments:
            target = settings.get("target", ServeConfig.target)
            settings["methods"], problems = registry.usable(target, knobs)
        stamp = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
        out: Path = vars(arguments).get("out", Path("runs") / f"serving-{stamp}")
        notes = [f"left out: {problem}" for problem in problems]
        try:
            run = serve(ServeConfig(**settings), out, notes)
        except KeyboardInterrupt:
            kept = f"; `{_again(out)}` shows what is finished" if out.exists() else ""
            print(f"specbench: interrupted{kept}", file=sys.stderr)
            return EXIT_INTERRUPTED
    _show(arguments, run, define=False)
    if arguments.format == "rich":
        print(f"`{_again(out)}` shows this again, with definitions")
    failed = bool(run.failures) or any(one.failures for one in run.passes)
    return EXIT_FAILURES if failed else EXIT_DONE


def _again(out: Path) -> str:
    return f"specbench serve --report {shlex.quote(str(out))}"


def _show(arguments: argparse.Namespace, run: "ServingRun", *, define: bool) -> None:
    from specbench import tables
    from specbench.serving.page import page

    shown = page(run, define=define or arguments.format == "md")
    if arguments.format == "rich":
        tables.print_page(shown, Console())
    else:
        print(tables.markdown(shown), flush=True)


CALLS: dict[str, Call] = {"serve": _serve}
