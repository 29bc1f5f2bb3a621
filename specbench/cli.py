"""The command line: parse, call, exit code. What a command does stands in `specbench.commands`."""

import io
import os
import sys
from collections.abc import Sequence

from specbench.commands import (
    compare,
    conform,
    lists,
    profile,
    results,
    run,
    serve,
    simulate,
    sweep,
    train,
)
from specbench.commands.arguments import EXIT_DONE, EXIT_INTERRUPTED, EXIT_USAGE, Call, Parser

_MODULES = (run, sweep, serve, results, profile, compare, simulate, train, conform, lists)
_CALLS: dict[str, Call] = {name: call for module in _MODULES for name, call in module.CALLS.items()}


def build_parser() -> Parser:
    """The whole command line."""
    parser = Parser(
        prog="specbench", description="Measure speculative decoding.", allow_abbrev=False
    )
    commands = parser.add_subparsers(dest="command", required=True, parser_class=Parser)
    for module in _MODULES:
        module.add(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command.

    Returns:
        0 done or passed, 1 done with failed prompts, cases or checks, 2 bad usage or input,
        3 a check that is inconclusive, 130 interrupted.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # A terminal that knows ASCII only gets question marks, not a traceback.
            stream.reconfigure(errors="replace")
    try:
        arguments = build_parser().parse_args(argv)
        return _CALLS[arguments.command](arguments)
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


if __name__ == "__main__":
    sys.exit(main())
