"""`specbench conform`."""

import argparse

from rich.console import Console

from specbench.commands.arguments import EXIT_DONE, EXIT_FAILURES, Call, Commands, add_knobs


def add(commands: Commands) -> None:
    """The parser of `conform`."""
    conform = commands.add_parser(
        "conform",
        help="check a method: is it right, is it lossless",
        description="Check a method on tiny models, in all settings that its knobs have.",
        allow_abbrev=False,
    )
    conform.add_argument("method", metavar="METHOD", help="a name, or package.module:Class")
    add_knobs(conform, "a knob that is not to vary; may be given again", "KNOB=V")


def _conform(arguments: argparse.Namespace) -> int:
    from specbench.conformance import kit
    from specbench.conformance.show import begin, show

    begin()
    knobs = kit.read_knobs(arguments.method, arguments.knobs)
    results = show(kit.subjects(arguments.method, knobs), Console())
    return EXIT_FAILURES if any(result.fault for result in results) else EXIT_DONE


CALLS: dict[str, Call] = {"conform": _conform}
