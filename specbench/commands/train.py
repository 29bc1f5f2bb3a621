"""`specbench train`."""

import argparse
import shlex
from functools import partial
from pathlib import Path

from specbench.commands.arguments import (
    EXIT_DONE,
    EXIT_INTERRUPTED,
    Call,
    Commands,
    folder,
    given,
    terminable,
)


def add(commands: Commands) -> None:
    """The parser of `train`."""
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
    add("--out", metavar="DIR", type=folder, help="the folder of the run (runs/train-METHOD)")
    train.add_argument("--resume", action="store_true", help="go on with the run in --out")


def _train(arguments: argparse.Namespace) -> int:
    from specbench import registry
    from specbench.training.display import Terminal
    from specbench.training.trainer import open_run
    from specbench.worker import hush

    hush()
    settings = given(arguments, "out", "resume")
    out = vars(arguments).get("out", Path("runs") / f"train-{arguments.method}")
    with terminable(), Terminal() as display:
        try:
            open_run(settings, out, arguments.resume, display).run()
        except KeyboardInterrupt:
            if not out.exists():
                display.say("specbench: interrupted before there was anything to keep")
                return EXIT_INTERRUPTED
            again = f"{arguments.method} --out {shlex.quote(str(out))} --resume"
            display.say(f"specbench: interrupted; `specbench train {again}` goes on")
            return EXIT_INTERRUPTED
    knob = f"{arguments.method}.{registry.load_method(arguments.method).weights_knob}"
    print(f"`specbench run --set {shlex.quote(f'{knob}={out}')}` drafts with it")
    return EXIT_DONE


CALLS: dict[str, Call] = {"train": _train}
