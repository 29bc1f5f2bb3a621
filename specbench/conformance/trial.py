"""A method in one setting, decoded under watch: its outputs, its drafts, and what is wrong with
them."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from tokenizers import Tokenizer

from specbench.conformance.decoding import (
    ALLOWED,
    GREEDY,
    Auditor,
    check_output,
    decode,
    reference,
)
from specbench.conformance.faults import CACHE, METADATA, RULE, STATE, Fault
from specbench.conformance.models import looping_model, tiny_tokenizer
from specbench.conformance.settings import Subject
from specbench.conformance.targets import main_target, trained_on
from specbench.conformance.watch import Drafted, Watched
from specbench.conformance.weights import new_folder
from specbench.decode import Decoder
from specbench.depth import Fixed
from specbench.method import Batch, Budget, Method, Request, Row
from specbench.sampling import Sampling
from specbench.target import Target

_SAME = 1e-3
"""Probabilities of a draft distribution that differ by less are the same."""
_ROUNDED = 0.25
"""The share of drafts that may differ: a drafter of 8-bit weights also rounds what it reads, and
one in ten of its distributions then differs by 0.02."""


class DoesNotApply(Exception):
    """A case has nothing to ask of this method."""


@dataclass(frozen=True)
class Trial:
    """A method in one setting, and how to decode.

    Args:
        subject: the method.
        sampling: how tokens are chosen.
        max_rows: requests decoded together.
        decoder: the loop.
    """

    subject: Subject
    sampling: Sampling = GREEDY
    max_rows: int = 1
    decoder: type[Decoder] = Decoder

    def __str__(self) -> str:
        sampling = self.sampling
        how = "T=0" if sampling.greedy else f"T={sampling.temperature}, {sampling.rule}"
        return f"{self.subject}, {how}, batch {self.max_rows}"

    def method(self, target: Target) -> Method:
        """The method for a target, made once: what one case leaves behind, the next must not
        see."""
        return _made(self.subject, target)

    def new_method(self, target: Target) -> Method:
        """One that has seen nothing."""
        return self.subject.make(target, trained_on(target))

    def run(
        self,
        requests: Sequence[Request],
        target: Target | None = None,
        *,
        budget: Budget = ALLOWED,
        method: Method | None = None,
    ) -> list[Row]:
        """Decodes requests under watch.

        Returns:
            Their rows; those whose drafts were not drawn equal the target's own outputs.

        Raises:
            Fault: what is wrong.
        """
        target = target or main_target()
        rows = self.watch(requests, target, budget=budget, method=method).rows
        for row in rows:
            if self.is_lossless(row, target) and target.dtype == torch.float32:
                self.check(row, target, budget)
        return rows

    def check(self, row: Row, target: Target, budget: Budget = ALLOWED) -> None:
        """Holds an output to the target's own.

        Raises:
            Fault: it differs.
        """
        expected = reference(target, row.request, self.sampling)
        try:
            check_output(row, target, expected)
        except Fault as fault:
            if fault.kind != RULE:
                raise
            alone = replace(self, max_rows=1).watch(
                [row.request], target, budget=budget, method=self.new_method(target)
            )
            if alone.rows[0].output == expected:
                raise Fault(STATE, "right alone, wrong among others", fault.wrong) from None
            raise

    def watch(
        self,
        requests: Sequence[Request],
        target: Target,
        *,
        budget: Budget = ALLOWED,
        method: Method | None = None,
    ) -> "Watch":
        """Decodes requests and takes down what was drafted."""
        watched = Watched(method or self.method(target))
        rows = decode(
            target,
            watched,
            requests,
            self.sampling,
            max_rows=self.max_rows,
            budget=budget,
            auditor=Auditor(),
            decoder=self.decoder,
        )
        return Watch(rows, watched.log)

    def is_lossless(self, row: Row, target: Target) -> bool:
        """Whether the output must be the target's own, ties apart, token for token.

        Raises:
            Fault: drafts are said to be drawn where none can be.
        """
        if row.drawn and (self.sampling.greedy or self.sampling.rule == "coupled"):
            raise Fault(METADATA, "drafts are said to be drawn where the drawer gave point masses")
        is_lossy = self.method(target).typical is not None and not self.sampling.greedy
        return not (row.drawn or is_lossy)

    def with_model(self, shuffled: bool = False, **settings: Any) -> "Trial":
        """The method with a tiny model as its drafter.

        Args:
            shuffled: its tokenizer gives the tokens other ids.
            settings: of the model.

        Raises:
            DoesNotApply: the method has no knob for a model, or refuses this one.
        """
        knob, knobs = self.subject.method.weights_knob, dict(self.subject.knobs)
        if knob not in self.subject.method.Config.__dataclass_fields__:
            raise DoesNotApply("it takes no model")
        knobs[knob] = _saved_model(shuffled, tuple(settings.items()))
        trial = replace(self, subject=replace(self.subject, knobs=tuple(knobs.items())))
        try:
            trial.method(main_target())
        except ValueError as error:
            raise DoesNotApply("no such model can be its drafter") from error
        return trial

    def check_drafts(self, log: Sequence[Drafted], target: Target) -> None:
        """Holds drafts to those of a method that reads the text so far for the first time.

        Raises:
            Fault: they depend on what the method keeps of the steps before, or of other prompts.
        """
        pairs = zip(log, self._draft_anew(log, target), strict=True)
        different = [(drafted, anew) for drafted, anew in pairs if not _is_same(drafted, anew)]
        if len(different) <= _ROUNDED * len(log):
            return
        drafted, anew = different[0]
        kind = CACHE if self._drafts_so_alone(drafted, target) else STATE
        raise Fault(
            kind,
            f"{len(different)} of {len(log)} drafts are not those of a method that reads the text "
            f"anew; request {drafted.request.id!r} after {len(drafted.tokens)} tokens: "
            f"{_show(drafted)} instead of {_show(anew)}",
        )

    def _draft_anew(self, log: Sequence[Drafted], target: Target) -> list[Drafted]:
        watched = Watched(self.new_method(target))
        loop = Decoder(target, watched, Fixed(*ALLOWED), self.sampling, len(log))
        loop.join([replace(one.request, prompt=one.tokens) for one in log])
        watched.propose(Batch(loop.rows, loop.cache), [one.budget for one in log])
        return watched.log

    def _drafts_so_alone(self, drafted: Drafted, target: Target) -> bool:
        """Whether a new method, alone with the request, comes to the same draft."""
        log = (
            replace(self, max_rows=1)
            .watch([drafted.request], target, method=self.new_method(target))
            .log
        )
        return any(one.tokens == drafted.tokens and _is_same(one, drafted) for one in log)


@dataclass(frozen=True)
class Watch:
    """What came of a decode, and what was drafted in it."""

    rows: list[Row]
    log: list[Drafted]


def same_steps(row: Row, other: Row, target: Target, when: str) -> None:
    """Holds two rows of one request to the same output by the same steps.

    Raises:
        Fault: they differ.
    """
    try:
        check_output(row, target, other.output)
    except Fault as fault:
        raise Fault(STATE, f"another output {when}", fault.wrong) from None
    if (row.steps, row.finish) != (other.steps, other.finish):
        raise Fault(STATE, f"request {row.request.id!r} takes other steps {when}")


def check_description(method: Method) -> None:
    """Holds what a method says of itself to what can be filed.

    Raises:
        Fault: it cannot.
    """
    try:
        json.dumps(method.describe())
    except (TypeError, ValueError) as error:
        raise Fault(METADATA, f"its description cannot be filed: {error}") from error
    if not isinstance(method.label, str) or method.num_extra_bytes < 0:
        raise Fault(
            METADATA, f"label {method.label!r}, {method.num_extra_bytes} bytes of extra weights"
        )


@cache
def _made(subject: Subject, target: Target) -> Method:
    return subject.make(target, trained_on(target))


@cache
def _saved_model(shuffled: bool, settings: tuple[tuple[str, Any], ...]) -> str:
    """The folder of a tiny model."""
    folder, tokenizer = new_folder(), tiny_tokenizer()
    looping_model(**dict(settings)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    if shuffled:
        file = folder / "tokenizer.json"
        spelling = json.loads(file.read_text())
        vocab = spelling["model"]["vocab"]
        special = len(spelling["added_tokens"])
        spelling["model"]["vocab"] = {
            token: index if index < special else len(vocab) - 1 + special - index
            for token, index in vocab.items()
        }
        file.write_text(json.dumps(spelling))
        assert Tokenizer.from_file(str(file)).get_vocab() != tokenizer.get_vocab()
    return str(folder)


def _is_same(one: Drafted, other: Drafted) -> bool:
    return (
        (one.tree, one.drafts) == (other.tree, other.drafts)
        and one.logq.keys() == other.logq.keys()
        and all(
            float((logq_V.exp() - other.logq[node].exp()).abs().max()) < _SAME
            for node, logq_V in one.logq.items()
        )
    )


def _show(drafted: Drafted) -> str:
    return f"{list(drafted.drafts)} below {list(drafted.tree.parents[1:])}"
