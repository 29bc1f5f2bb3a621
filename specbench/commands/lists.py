"""`specbench methods` and `specbench workloads`."""

import argparse

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from specbench.commands.arguments import EXIT_DONE, Call, Commands


def add(commands: Commands) -> None:
    """Their parsers."""
    methods = commands.add_parser(
        "methods",
        help="list the methods, or the knobs of one",
        description="List the methods; or say what the knobs of one mean, and the depth "
        "controllers that its knob controller may name.",
        allow_abbrev=False,
    )
    methods.add_argument("method", metavar="METHOD", nargs="?", help="whose knobs")
    commands.add_parser("workloads", help="list the workloads", allow_abbrev=False)


def _methods(arguments: argparse.Namespace) -> int:
    from specbench import registry

    if arguments.method is not None:
        _show_knobs(arguments.method)
        return EXIT_DONE
    table = Table("method", "knobs and defaults", "from", "what it does")
    for name, source in registry.sources().items():
        try:
            method = registry.load_method(name)
            knobs = ", ".join(f"{k}={v}" for k, v in vars(method.Config()).items())
            about = (method.__doc__ or "").strip().split("\n")[0]
        except ValueError as error:
            knobs, about = "-", f"cannot be used: {error}"
        table.add_row(name, knobs, source.origin, about)
    Console().print(table)
    Console().print("`specbench methods METHOD` says what its knobs mean", markup=False)
    return EXIT_DONE


def _show_knobs(name: str) -> None:
    from specbench import knobs, registry
    from specbench.depth import CONTROLLERS

    table = Table("knob", "default", "what it is", title=f"{name}: --set {name}.KNOB=VALUE")
    for knob in knobs.method_knobs(registry.load_method(name)):
        table.add_row(*map(escape, knob))
    choices = Table("controller", "its knobs", title=f"--set {name}.controller=NAME:KNOB=VALUE,...")
    for controller, found in knobs.controller_knobs().items():
        lines = [f"{one.name} ({one.default}): {one.meaning}" for one in found]
        about = knobs.first_line(CONTROLLERS[controller])
        choices.add_row(controller, escape("\n".join([about, *lines])))
    Console().print(table, choices)


def _workloads(arguments: argparse.Namespace) -> int:
    from specbench.workloads import list_workloads

    table = Table("workload", "kind", "prompts", "decoding", "licence", "origin")
    for card in list_workloads():
        decoding = card.decoding
        how = (
            f"T={decoding.temperature}, top-p {decoding.top_p}"
            if decoding.temperature
            else "greedy"
        )
        table.add_row(card.name, card.kind, str(card.num_prompts), how, card.licence, card.origin)
    Console().print(table)
    return EXIT_DONE


CALLS: dict[str, Call] = {"methods": _methods, "workloads": _workloads}
