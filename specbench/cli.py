"""The command line: parse, call, exit code; no logic."""

import argparse
import contextlib
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from specbench.plan import Plan
    from specbench.records import Run

EXIT_DONE, EXIT_FAILURES, EXIT_USAGE, EXIT_INTERRUPTED = 0, 1, 2, 130
_NO_SETTINGS = {"command", "out", "resume", "no_ray"}
_RESUMABLE = {"command", "resume", "no_ray", "workers", "knobs"}


class _Parser(argparse.ArgumentParser):
    """Bad usage is one line, like every other bad input."""

    def error(self, message: str) -> Any:
        raise ValueError(f"{message}; `{self.prog} --help` lists what is valid")


def build_parser() -> argparse.ArgumentParser:
    """The whole command line."""
    parser = _Parser(
        prog="specbench", description="Measure speculative decoding.", allow_abbrev=False
    )
    commands = parser.add_subparsers(dest="command", required=True, parser_class=_Parser)
    run = commands.add_parser("run", help="measure methods on workloads", allow_abbrev=False)
    unset: Any = argparse.SUPPRESS
    run.add_argument("--target", metavar="T", default=unset, help="Hub name, folder or GGUF file")
    run.add_argument("--methods", metavar="A,B", type=_names, default=unset, help="default: all")
    run.add_argument("--workloads", metavar="X,Y", type=_names, default=unset)
    run.add_argument("--prompts", metavar="N", type=int, default=unset, help="per workload")
    run.add_argument("--max-new-tokens", metavar="N", type=int, default=unset)
    run.add_argument(
        "--temperature", metavar="T", type=float, default=unset, help="default: the workload's"
    )
    run.add_argument("--top-k", metavar="K", type=int, default=unset)
    run.add_argument("--top-p", metavar="P", type=float, default=unset)
    run.add_argument("--sampling", metavar="RULE", default=unset, help="rejection or coupled")
    run.add_argument("--batch-size", metavar="B", type=int, default=unset)
    run.add_argument("--depth", metavar="D", type=int, default=unset, help="default: the method's")
    run.add_argument(
        "--rounds", metavar="R", type=int, default=unset, help="timed passes per prompt"
    )
    run.add_argument("--workers", metavar="W", type=int, default=unset)
    run.add_argument("--gpus-per-worker", metavar="N", type=int, default=unset)
    run.add_argument("--dtype", metavar="D", default=unset, help="float32, bfloat16 or float16")
    run.add_argument("--seed", metavar="S", type=int, default=unset)
    run.add_argument("--set", metavar="METHOD.KNOB=V", dest="knobs", action="append", default=[])
    run.add_argument("--out", metavar="DIR", type=Path, default=unset, help="default: runs/<time>")
    run.add_argument("--resume", metavar="DIR", type=Path, default=unset, help="go on with a run")
    run.add_argument("--no-ray", action="store_true", help="run in this process")
    report = commands.add_parser(
        "report", help="draw tables from result folders", allow_abbrev=False
    )
    report.add_argument("folders", metavar="DIR", nargs="+", type=Path)
    report.add_argument("--format", choices=("rich", "md", "json"), default="rich")
    commands.add_parser("methods", help="list the methods", allow_abbrev=False)
    commands.add_parser("workloads", help="list the workloads", allow_abbrev=False)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command.

    Returns:
        0 done, 1 done with failed prompts, 2 bad usage or input, 130 interrupted.
    """
    try:
        arguments = build_parser().parse_args(argv)
        command = {"run": _run, "report": _report, "methods": _methods, "workloads": _workloads}
        return command[arguments.command](arguments)
    except BrokenPipeError:
        # Who reads the output has seen enough; nothing more is to be written when Python ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_DONE
    except (ValueError, OSError) as error:
        print(f"specbench: {' '.join(str(error).split())}", file=sys.stderr)
        return EXIT_USAGE
    except KeyboardInterrupt:
        print("specbench: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED


def _names(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    if not names:
        raise argparse.ArgumentTypeError(f"{text!r} names nothing; valid: names with commas")
    return names


def _knobs(settings: Sequence[str]) -> dict[str, dict[str, str]]:
    knobs: dict[str, dict[str, str]] = {}
    for setting in settings:
        name, equals, value = setting.partition("=")
        method, dot, knob = name.partition(".")
        if not (equals and dot and method and knob):
            raise ValueError(f"--set {setting!r} is not valid; valid: METHOD.KNOB=VALUE")
        knobs.setdefault(method, {})[knob] = value
    return knobs


def _run(arguments: argparse.Namespace) -> int:
    with _terminable():
        from specbench import cluster, plan

        todo = _plan(arguments)
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
    _print_report([run])
    return EXIT_FAILURES if run.failures else EXIT_DONE


def _plan(arguments: argparse.Namespace) -> "Plan":
    """The run that is asked for, new or resumed."""
    from specbench import plan
    from specbench.config import RunConfig

    given, knobs = vars(arguments), _knobs(arguments.knobs)
    settings = {k: v for k, v in given.items() if k not in _NO_SETTINGS} | {"knobs": knobs}
    if "resume" not in given:
        stamp = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
        return plan.new(RunConfig(**settings), given.get("out", Path("runs") / stamp))
    extra = (set(given) - _RESUMABLE) | ({"set"} if knobs else set())
    if extra:
        names = ", ".join(f"--{name.replace('_', '-')}" for name in sorted(extra))
        raise ValueError(
            f"--resume goes on with the run's own settings; remove {names}; "
            "valid beside it: --workers, --no-ray"
        )
    return plan.resume(given["resume"], given.get("workers"))


@contextlib.contextmanager
def _terminable() -> Iterator[None]:
    """SIGTERM ends a run as Ctrl-C does."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _print_report(runs: "Sequence[Run]") -> None:
    from specbench import report

    report.print_report(runs, Console())


def _report(arguments: argparse.Namespace) -> int:
    from specbench import report
    from specbench.records import read_run

    runs = [read_run(folder) for folder in arguments.folders]
    if arguments.format == "rich":
        _print_report(runs)
    else:
        print(report.render(runs, arguments.format), flush=True)
    return EXIT_DONE


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


if __name__ == "__main__":
    sys.exit(main())
