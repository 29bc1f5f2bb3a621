"""The command line: parse, call, exit code; no logic."""

import argparse
import contextlib
import io
import os
import shlex
import signal
import sys
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from specbench.messages import option

if TYPE_CHECKING:
    from specbench.plan import Plan
    from specbench.records import Run

EXIT_DONE, EXIT_FAILURES, EXIT_USAGE, EXIT_OPEN, EXIT_INTERRUPTED = 0, 1, 2, 3, 130
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
    run = commands.add_parser(
        "run",
        help="measure methods on workloads",
        description="Measure methods on workloads. In brackets: the defaults.",
        allow_abbrev=False,
    )
    add = partial(run.add_argument, default=argparse.SUPPRESS)
    add("--target", metavar="T", help="Hub name, folder or GGUF file (SmolLM2-135M-Instruct)")
    add("--methods", metavar="A,B", type=_names, help="names, see `specbench methods` (all)")
    add(
        "--workloads",
        metavar="X,Y",
        type=_names,
        help="names, data sets or files, see `specbench workloads` (humaneval,creative)",
    )
    add("--prompts", metavar="N", type=int, help="prompts per workload (12)")
    add("--max-new-tokens", metavar="N", type=int, help="token budget per request (64)")
    add("--temperature", metavar="T", type=float, help="0 is greedy (each workload's own)")
    add("--top-k", metavar="K", type=int, help="0 keeps all (each workload's own)")
    add("--top-p", metavar="P", type=float, help="1 keeps all (each workload's own)")
    add("--sampling", metavar="RULE", help="for drawn drafts: rejection or coupled (rejection)")
    add("--batch-size", metavar="B", type=int, help="requests decoded together (1)")
    add("--depth", metavar="D", type=int, help="draft depth of every method (each one's own)")
    add("--rounds", metavar="R", type=int, help="timed passes per prompt and method (2)")
    add("--workers", metavar="W", type=int, help="processes (one per GPU; on a CPU two)")
    add("--gpus-per-worker", metavar="N", type=int, help="GPUs that hold one target (1)")
    add("--dtype", metavar="D", help="float32, bfloat16 or float16 (what the device is good at)")
    add("--seed", metavar="S", type=int, help="of the random numbers (0)")
    run.add_argument(
        "--set",
        metavar="METHOD.KNOB=V",
        dest="knobs",
        action="append",
        default=[],
        help="a method's knob; may be given again",
    )
    add("--out", metavar="DIR", type=_folder, help="a new folder for the results (runs/<time>)")
    add("--resume", metavar="DIR", type=_folder, help="go on with the run in a folder")
    run.add_argument("--no-ray", action="store_true", help="run in this process")
    report = commands.add_parser(
        "report", help="draw tables from result folders", allow_abbrev=False
    )
    report.add_argument("folders", metavar="DIR", nargs="+", type=Path)
    report.add_argument("--format", choices=("rich", "md", "json"), default="rich")
    check = commands.add_parser(
        "check",
        help="judge a run's methods against a baseline",
        description="Judge a run's methods against a baseline: PASS (exit code 0), FAIL (1) or "
        "INCONCLUSIVE (3). In brackets: the defaults.",
        allow_abbrev=False,
    )
    check.add_argument("baseline", metavar="BASELINE", help="a run's folder, or a baseline's name")
    check.add_argument("run", metavar="RUN", type=Path, help="a run's folder")
    check.add_argument("--method", metavar="M", help="the one to judge (all)")
    add = partial(check.add_argument, default=argparse.SUPPRESS)
    add("--margin", metavar="X", type=float, help="loss that the soft part lets pass (0.05)")
    add("--allow", metavar="A,B", type=_names, help="what may differ: dtype, machine, ...")
    check.add_argument("--hard", action="store_true", help="the exact part only")
    check.add_argument("--markdown", metavar="FILE", type=Path, help="for a pull request")
    check.add_argument("--junit", metavar="FILE", type=Path, help="JUnit XML, for CI")
    baseline = commands.add_parser("baseline", help="file a run as a baseline", allow_abbrev=False)
    baseline.add_argument("run", metavar="RUN", type=Path)
    baseline.add_argument("--name", metavar="N", required=True)
    explain = commands.add_parser(
        "explain", help="show where outputs leave the target's", allow_abbrev=False
    )
    explain.add_argument("folder", metavar="DIR", type=Path)
    explain.add_argument("--prompt", metavar="ID", required=True)
    explain.add_argument("--method", metavar="M", help="the one to show (all)")
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
    add("--acceptance", metavar="A,B", type=_floats, help="chance by position, without a run")
    add("--model", metavar="T", help="name, folder, config.json or Hub name (llama-3.1-70b)")
    add("--device", metavar="D", help="A100, H100, H200, L40S or RTX4090 (H200)")
    add("--devices", metavar="N", type=int, help="how many hold the model (1)")
    add("--bandwidth-gb-s", metavar="G", type=float, help="of another device")
    add("--tflops", metavar="F", type=float, help="of another device")
    add("--overhead-us", metavar="U", type=float, help="of its passes, for each layer")
    add("--dtype", metavar="D", help="float32, bfloat16 or float16 (bfloat16)")
    add(
        "--drafter",
        metavar="R",
        help="cost of a level over the target's step (0: look-up), heads, features or a model",
    )
    add("--batches", metavar="B,C", type=_numbers, help="batch sizes (1,2,4,...,256)")
    add("--context", metavar="N", type=int, help="tokens of each row (1024)")
    add("--depth", metavar="N", type=int, help="the deepest draft (8, or as recorded)")
    simulate.add_argument("--format", choices=("rich", "md"), default="rich")
    train = commands.add_parser(
        "train",
        help="train a method's drafter",
        description="Train a method's drafter on the target's own outputs. In brackets: the "
        "defaults.",
        allow_abbrev=False,
    )
    train.add_argument("method", metavar="METHOD", help="a method that has weights")
    add = partial(train.add_argument, default=argparse.SUPPRESS)
    add("--target", metavar="T", help="Hub name, folder or GGUF file (SmolLM2-135M-Instruct)")
    add("--prompts", metavar="SOURCE", help="a data set or file (the target invents its own)")
    add("--tokens", metavar="N", type=int, help="tokens of answers to train on (300000)")
    add("--minutes", metavar="M", type=float, help="of training, data apart (60)")
    add("--max-new-tokens", metavar="N", type=int, help="token budget of an answer (128)")
    add("--batch-size", metavar="B", type=int, help="prompts answered together (64)")
    add("--batch-tokens", metavar="N", type=int, help="tokens for each update (768)")
    add("--learning-rate", metavar="R", type=float, help="at its height (the method's own)")
    add("--vocab", metavar="N", type=int, help="tokens that can be drafted (the method's own)")
    add("--unroll", metavar="N", type=int, help="steps, or heads (the method's own)")
    add("--layers", metavar="N", type=int, help="decoder layers (the method's own)")
    add("--exit-layer", metavar="N", type=int, help="where the stack is left (the method's own)")
    add("--disk-gib", metavar="G", type=float, help="for the target's hidden states (8)")
    add("--evaluate-minutes", metavar="M", type=float, help="between two evaluations (10)")
    add("--dtype", metavar="D", help="float32 or bfloat16 (what the device is good at)")
    add("--seed", metavar="S", type=int, help="of the random numbers (0)")
    add("--out", metavar="DIR", type=_folder, help="the folder of the run (runs/train-METHOD)")
    train.add_argument("--resume", action="store_true", help="go on with the run in --out")
    check = commands.add_parser(
        "conform",
        help="check a method: is it right, is it lossless",
        description="Check a method on tiny models, in all settings that its knobs have.",
        allow_abbrev=False,
    )
    check.add_argument("method", metavar="METHOD", help="a name, or package.module:Class")
    check.add_argument(
        "--set",
        metavar="KNOB=V",
        dest="knobs",
        action="append",
        default=[],
        help="a knob that is not to vary; may be given again",
    )
    commands.add_parser("methods", help="list the methods", allow_abbrev=False)
    commands.add_parser("workloads", help="list the workloads", allow_abbrev=False)
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
        return _COMMANDS[arguments.command](arguments)
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


def _folder(text: str) -> Path:
    if not text:
        raise argparse.ArgumentTypeError("'' names no folder")
    return Path(text)


def _names(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    if not names:
        raise argparse.ArgumentTypeError(f"{text!r} names nothing; valid: names with commas")
    return names


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in _names(text))


def _floats(text: str) -> tuple[float, ...]:
    return tuple(float(number) for number in _names(text))


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
        if not todo.pending:
            print("specbench: nothing is left to do", file=sys.stderr)
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
    _print_report([run], define=False)
    print(f"`specbench report {shlex.quote(str(run.folder))}` shows this again, with definitions")
    return EXIT_FAILURES if run.failures else EXIT_DONE


def _plan(arguments: argparse.Namespace) -> "Plan":
    """The run that is asked for, new or resumed."""
    from specbench import plan, registry
    from specbench.config import RunConfig

    given, knobs = vars(arguments), _knobs(arguments.knobs)
    settings = {k: v for k, v in given.items() if k not in _NO_SETTINGS} | {"knobs": knobs}
    if "resume" not in given:
        problems: list[str] = []
        if "methods" not in given:
            target = settings.get("target", RunConfig.target)
            settings["methods"], problems = registry.usable(target, knobs)
        stamp = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
        todo = plan.new(RunConfig(**settings), given.get("out", Path("runs") / stamp))
        todo.notes += [f"left out: {problem}" for problem in problems]
        return todo
    extra = (set(given) - _RESUMABLE) | ({"set"} if knobs else set())
    if extra:
        names = ", ".join(map(option, sorted(extra)))
        raise ValueError(
            f"--resume goes on with the run's own settings; remove {names}; "
            "valid beside it: --workers, --no-ray"
        )
    return plan.resume(given["resume"], given.get("workers"))


@contextlib.contextmanager
def _terminable() -> Iterator[None]:
    """SIGTERM ends a run as Ctrl-C does; another signal does not disturb what then puts things in
    order."""
    signals = (signal.SIGINT, signal.SIGTERM)
    before = {one: signal.getsignal(one) for one in signals}

    def interrupt(number: int, frame: object) -> None:
        for one in signals:
            signal.signal(one, signal.SIG_IGN)
        raise KeyboardInterrupt

    for one in signals:
        if before[one] is not signal.SIG_IGN:
            signal.signal(one, interrupt)
    try:
        yield
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)


def _print_report(runs: "Sequence[Run]", define: bool = True) -> None:
    from specbench import report

    report.print_report(runs, Console(), define=define)


def _report(arguments: argparse.Namespace) -> int:
    from specbench import report
    from specbench.records import read_run

    runs = [read_run(folder) for folder in arguments.folders]
    if arguments.format == "rich":
        _print_report(runs)
    else:
        print(report.render(runs, arguments.format), flush=True)
    return EXIT_DONE


def _check(arguments: argparse.Namespace) -> int:
    from specbench import baselines, verdicts
    from specbench.check import check
    from specbench.files import write_atomically
    from specbench.judge import Verdict
    from specbench.records import read_run
    from specbench.tables import print_page

    given = {key: vars(arguments)[key] for key in ("margin", "allow") if key in arguments}
    done = check(
        read_run(baselines.find_baseline(arguments.baseline)),
        read_run(arguments.run),
        method=arguments.method,
        hard_only=arguments.hard,
        **given,
    )
    print_page(verdicts.page(done), Console())
    if arguments.markdown:
        write_atomically(arguments.markdown, verdicts.as_markdown(done))
    if arguments.junit:
        write_atomically(arguments.junit, verdicts.as_junit(done))
    exits = {Verdict.PASS: EXIT_DONE, Verdict.FAIL: EXIT_FAILURES, Verdict.INCONCLUSIVE: EXIT_OPEN}
    return exits[done.verdict]


def _baseline(arguments: argparse.Namespace) -> int:
    from specbench import baselines
    from specbench.records import read_run

    run = read_run(arguments.run)
    folder = baselines.file_baseline(run, arguments.name)
    for doubt in baselines.doubts(run):
        print(f"specbench: {doubt}", file=sys.stderr)
    print(f"filed as {folder}; `specbench check {arguments.name} RUN` holds a run against it")
    return EXIT_DONE


def _explain(arguments: argparse.Namespace) -> int:
    from specbench.explain import decoder, explain
    from specbench.records import read_run
    from specbench.tables import print_page
    from specbench.worker import hush

    hush()
    run = read_run(arguments.folder)
    print_page(explain(run, arguments.prompt, arguments.method, decoder(run)), Console())
    return EXIT_DONE


def _simulate(arguments: argparse.Namespace) -> int:
    from specbench import tables
    from specbench.simulate import SimulateConfig, simulate

    settings = {k: v for k, v in vars(arguments).items() if k not in ("command", "format")}
    page = simulate(SimulateConfig(**settings))
    if arguments.format == "rich":
        tables.print_page(page, Console())
    else:
        print(tables.markdown(page), flush=True)
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


def _train(arguments: argparse.Namespace) -> int:
    from specbench import registry
    from specbench.training.display import Terminal
    from specbench.training.trainer import open_run
    from specbench.worker import hush

    hush()
    given = {k: v for k, v in vars(arguments).items() if k not in ("command", "out", "resume")}
    out = vars(arguments).get("out", Path("runs") / f"train-{arguments.method}")
    with _terminable(), Terminal() as display:
        try:
            open_run(given, out, arguments.resume, display).run()
        except KeyboardInterrupt:
            again = f"{arguments.method} --out {shlex.quote(str(out))} --resume"
            display.say(f"specbench: interrupted; `specbench train {again}` goes on")
            return EXIT_INTERRUPTED
    knob = f"{arguments.method}.{registry.load_method(arguments.method).weights_knob}"
    print(f"`specbench run --set {shlex.quote(f'{knob}={out}')}` drafts with it")
    return EXIT_DONE


def _conform(arguments: argparse.Namespace) -> int:
    from specbench.worker import hush

    hush()
    from specbench.conformance import kit
    from specbench.conformance.show import show

    knobs = kit.read_knobs(arguments.method, arguments.knobs)
    results = show(kit.subjects(arguments.method, knobs), Console())
    return EXIT_FAILURES if any(result.fault for result in results) else EXIT_DONE


_COMMANDS = {
    "run": _run,
    "report": _report,
    "check": _check,
    "baseline": _baseline,
    "explain": _explain,
    "simulate": _simulate,
    "train": _train,
    "conform": _conform,
    "methods": _methods,
    "workloads": _workloads,
}


if __name__ == "__main__":
    sys.exit(main())
