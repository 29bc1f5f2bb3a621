"""Runs the cases over a method in all its settings."""

import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from specbench import registry
from specbench.conformance.cases import CASES, Case
from specbench.conformance.faults import ERROR, Fault
from specbench.conformance.settings import Subject, settings
from specbench.conformance.targets import main_target
from specbench.conformance.trial import DoesNotApply, Trial
from specbench.decode import Decoder
from specbench.messages import in_one_line

PASS, FAIL, NO_MATTER = "pass", "FAIL", "-"


@dataclass(frozen=True)
class Result:
    """What became of a case.

    Args:
        case: its name.
        verdict: ``pass``, ``FAIL``, or ``-`` where it has nothing to ask.
        fault: the first fault, if it failed.
        where: in which setting, at which temperature and batch size that was.
        why: why it does not apply.
    """

    case: str
    verdict: str
    fault: Fault | None = None
    where: str = ""
    why: str = ""


def read_knobs(name: str, settings: Iterable[str]) -> dict[str, str]:
    """The knobs of a method from texts ``KNOB=VALUE`` or ``METHOD.KNOB=VALUE``.

    Raises:
        ValueError: a text is neither.
    """
    knobs = {}
    for setting in settings:
        knob, equals, value = setting.removeprefix(f"{name}.").partition("=")
        if not equals or not knob.isidentifier():
            raise ValueError(f"{setting!r} is not valid; valid: KNOB=VALUE")
        knobs[knob] = value
    return knobs


def subjects(name: str, knobs: Mapping[str, str]) -> list[Subject]:
    """A method in all settings to check it in.

    Args:
        name: its name, or the path ``package.module:Class``.
        knobs: knobs that are not to vary.

    Raises:
        ValueError: there is no such method, or it refuses the knobs.
    """
    if ":" in name:
        # A script's own folder comes first on the path, not the one that it is called in.
        if (here := os.getcwd()) not in sys.path:
            sys.path.insert(0, here)
        method = registry.load_path(name)
    else:
        method = registry.load_method(name)
    found = settings(name, method, knobs)
    return [one for i, one in enumerate(found) if _can_be_made(one, must=i == 0)]


def _can_be_made(subject: Subject, must: bool) -> bool:
    """Whether a derived setting suits a tiny target; the one that was asked for must."""
    try:
        subject.make(main_target())
    except ValueError:
        if must:
            raise
        return False
    return True


def conform(
    methods: Sequence[Subject],
    decoder: type[Decoder] = Decoder,
    cases: Iterable[str] = tuple(CASES),
) -> Iterator[Result]:
    """Runs cases, each over all settings up to its first fault.

    Args:
        methods: one method in several settings.
        decoder: the loop that is checked with it.
        cases: their names.
    """
    for name in cases:
        yield check(CASES[name], methods, decoder)


def check(case: Case, methods: Sequence[Subject], decoder: type[Decoder] = Decoder) -> Result:
    """Runs one case over a method in several settings."""
    applies, why = False, ""
    for trial in _trials(case, methods, decoder):
        try:
            case.run(trial)
            applies = True
        except DoesNotApply as reason:
            why = str(reason)
        except Fault as fault:
            return Result(case.name, FAIL, fault, str(trial))
        except Exception as error:
            raised = Fault(ERROR, f"{type(error).__name__}: {in_one_line(error)}")
            raised.__cause__ = error
            return Result(case.name, FAIL, raised, str(trial))
    return Result(case.name, PASS) if applies else Result(case.name, NO_MATTER, why=why)


def _trials(case: Case, methods: Sequence[Subject], decoder: type[Decoder]) -> Iterator[Trial]:
    """The first setting at every temperature, rule and batch size; each of the others at one of
    these, which rotates, so that over all cases it meets them all."""
    modes = list(product(case.samplings, case.batches))
    turn = list(CASES).index(case.name)
    for index, subject in enumerate(methods):
        for sampling, max_rows in [modes[(turn + index) % len(modes)]] if index else modes:
            yield Trial(subject, sampling, max_rows, decoder)
