"""`specbench simulate`."""

import argparse
from functools import partial
from pathlib import Path

from specbench.commands.arguments import (
    EXIT_DONE,
    Call,
    Commands,
    add_format,
    floats,
    given,
    numbers,
    show,
)


def add(commands: Commands) -> None:
    """The parser of `simulate`."""
    simulate = commands.add_parser(
        "simulate",
        help="predict speed-ups on another machine",
        description="Predict what speculation gains on another machine, by a cost model. In "
        "brackets: the defaults.",
        allow_abbrev=False,
    )
    add = partial(simulate.add_argument, default=argparse.SUPPRESS)
    simulate.add_argument(
        "run", metavar="RUN", nargs="?", type=Path, help="a run whose steps are replayed"
    )
    add("--method", metavar="M", help="whose steps (the one that drafts)")
    add("--workload", metavar="X", help="on what (all)")
    add(
        "--static",
        action="store_true",
        help="batches of recorded outputs that empty, as a run's do (always full)",
    )
    add(
        "--acceptance",
        metavar="A,B",
        type=floats,
        help="chance by position, and so how deep, without a run",
    )
    add("--model", metavar="T", help="name, folder, config.json or Hub name (llama-3.1-70b)")
    add("--device", metavar="D", help="A100, H100, H200, L40S or RTX4090 (H200)")
    add("--devices", metavar="N", type=int, help="how many hold the model (1)")
    add("--bandwidth-gb-s", metavar="G", type=float, help="of another device")
    add("--tflops", metavar="F", type=float, help="of another device")
    add("--overhead-us", metavar="U", type=float, help="of its passes, for each layer")
    add("--profile", metavar="FILE", type=Path, help="of `specbench profile`, for this machine")
    add("--dtype", metavar="D", help="float32, bfloat16 or float16 (bfloat16)")
    add(
        "--drafter",
        metavar="R",
        help="cost of a level over the target's step (0: look-up), heads, features, layers:N, "
        "exit:N or a model (as recorded, or profiled)",
    )
    add("--batches", metavar="B,C", type=numbers, help="batch sizes (1,2,4,...,256, or profiled)")
    add("--context", metavar="N", type=int, help="tokens of each row (1024, or profiled)")
    add(
        "--depth",
        metavar="N",
        type=int,
        help="the deepest draft (as the acceptance goes, and the profile)",
    )
    add_format(simulate)


def _simulate(arguments: argparse.Namespace) -> int:
    from specbench.simulate import SimulateConfig
    from specbench.simulate_page import page

    show(page(SimulateConfig(**given(arguments, "format"))), arguments.format)
    return EXIT_DONE


CALLS: dict[str, Call] = {"simulate": _simulate}
