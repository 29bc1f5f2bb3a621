"""`specbench methods` and `specbench workloads`."""

import argparse

from rich.console import Console
from rich.table import Table

from specbench.commands.arguments import EXIT_DONE, Call, Commands


def add(commands: Commands) -> None:
    """Their parsers."""
    commands.add_parser("methods", help="list the methods", allow_abbrev=False)
    commands.add_parser("workloads", help="list the workloads", allow_abbrev=False)


def _methods(arguments: argparse.Namespace) -> int:
    from specbench import registry

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
    return EXIT_DONE


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
