"""`specbench profile`."""

import argparse
import sys
from functools import partial
from pathlib import Path

from specbench.commands.arguments import (
    EXIT_DONE,
    Call,
    Commands,
    add_format,
    add_knobs,
    add_shared,
    given,
    names,
    numbers,
    read_knobs,
    show,
)


def add(commands: Commands) -> None:
    """The parser of `profile`."""
    profile = commands.add_parser(
        "profile",
        help="measure what forwards and drafts cost on this machine",
        description="Measure what forwards and drafts cost on this machine. In brackets: the "
        "defaults.",
        allow_abbrev=False,
    )
    add = partial(profile.add_argument, default=argparse.SUPPRESS)
    add_shared(profile, "--target", "--dtype")
    add("--methods", metavar="A,B", type=names, help="whose steps (all)")
    add_knobs(profile)
    add("--batches", metavar="B,C", type=numbers, help="rows (1,2,4,8)")
    add("--tokens", metavar="N,M", type=numbers, help="of a row in a forward (1,2,4,8,16,32)")
    add("--contexts", metavar="N,M", type=numbers, help="tokens in the cache of a row (128,512)")
    add("--depths", metavar="D,E", type=numbers, help="of the methods' steps (0,1,2,4)")
    add("--repeats", metavar="N", type=int, help="rounds over the grid (7)")
    add("--out", metavar="FILE", type=Path, help="where to file the profile (nowhere)")
    add_format(profile)


def _profile(arguments: argparse.Namespace) -> int:
    from specbench.plan import check_writable
    from specbench.profile import write_profile
    from specbench.profile_page import page
    from specbench.profiler import ProfileConfig, measure

    if "out" in arguments:
        if arguments.out.is_dir():
            raise ValueError(f"--out {arguments.out} is a folder; valid: a file")
        check_writable(arguments.out.parent)
    settings = given(arguments, "format", "out") | {"knobs": read_knobs(arguments.knobs)}
    profile = measure(ProfileConfig(**settings), _say)
    if "out" in arguments:
        write_profile(arguments.out, profile)
    show(page(profile), arguments.format)
    return EXIT_DONE


def _say(text: str) -> None:
    print(f"specbench: {text}", file=sys.stderr)


CALLS: dict[str, Call] = {"profile": _profile}
