"""Where a method's output leaves the target's, and how near the two tokens were."""

from collections.abc import Callable, Iterator, Sequence

from specbench.columns import number
from specbench.messages import suggest
from specbench.records import ReferenceRecord, RequestRecord, Run
from specbench.tables import MISSING, Heading, Note, Page

_BEFORE = 16
"""Tokens that are shown before the first difference."""
Decode = Callable[[Sequence[int]], str]
"""Tokens as text."""


def decoder(run: Run) -> Decode:
    """The run's own tokenizer; where its target is gone, tokens are shown as numbers."""
    from specbench.target.loading import load_tokenizer, resolve

    try:
        tokenizer = load_tokenizer(resolve(run.info["settings"]["target"]))
    except (OSError, ValueError, KeyError):
        return lambda tokens: " ".join(map(str, tokens))
    return lambda tokens: str(tokenizer.decode(list(tokens)))


def explain(run: Run, prompt: str, method: str | None, decode: Decode) -> Page:
    """What each method, or one, made of a prompt, held against the reference.

    Args:
        prompt: a request's id; that of a later turn ends in ``/2``, ``/3``, ...

    Raises:
        ValueError: there is no such prompt or method in the run.
    """
    references = [record for record in run.references if record.request == prompt]
    if not references:
        known = [record.request for record in run.references]
        raise ValueError(
            f"{run.folder} has no reference of prompt {prompt!r}{suggest(prompt, known)}; valid: "
            f"{', '.join(known[:8])}{', ...' if len(known) > 8 else ''}"
        )
    methods = list(run.info["methods"])
    if method is not None and method not in methods:
        raise ValueError(
            f"{run.folder} has no method {method!r}{suggest(method, methods)}; "
            f"valid: {', '.join(methods)}"
        )
    page: list[Heading | Note] = []
    for reference in references:
        page.append(Heading(f"{reference.workload}, prompt {prompt}", 1))
        for name in methods if method is None else [method]:
            page.append(Heading(name, 2))
            page += [Note(line) for line in _lines(run, reference, name, decode)]
    return page


def _lines(run: Run, reference: ReferenceRecord, method: str, decode: Decode) -> Iterator[str]:
    for failure in run.failures:
        if failure.request == reference.request and failure.method == method:
            yield f"failed: {failure.reason}"
    for record in run.requests:
        found = (record.workload, record.request, record.method)
        if found == (reference.workload, reference.request, method):
            yield from _compare(reference, record, decode)
            return
    yield "no output"


def _compare(reference: ReferenceRecord, record: RequestRecord, decode: Decode) -> Iterator[str]:
    expected, found = reference.tokens, record.tokens
    position = next(
        (i for i, (a, b) in enumerate(zip(expected, found, strict=False)) if a != b),
        min(len(expected), len(found)),
    )
    if expected == found:
        yield f"{record.lossless}: the reference's {len(expected)} tokens"
        return
    yield f"{record.lossless}: differs from the reference at token {position}"
    yield f"before: {decode(expected[max(0, position - _BEFORE) : position])!r}"
    split = record.divergence
    logits = (split.expected_logit, split.found_logit) if split else (None, None)
    for who, tokens, finish, logit in (
        ("reference", expected, reference.finish, logits[0]),
        (record.method, found, record.finish, logits[1]),
    ):
        yield f"{who}: {_token(tokens, position, finish, decode)}, logit {number(logit, 4)}"
        yield f"{who} goes on: {decode(tokens[position:])!r}"
    if split and split.gap is not None and split.tolerance is not None:
        yield f"gap {split.gap:.4g}, a tie up to {split.tolerance:.4g}"
    else:
        yield f"gap {MISSING}: {_why_no_gap(record)}"


def _why_no_gap(record: RequestRecord) -> str:
    if record.lossless == "law":
        return "its drafts are drawn, only the distribution is the target's"
    if record.lossless == "lossy":
        return "the method does not claim to be lossless"
    if record.divergence is None:
        return "its drafts are drawn, but the target would never choose one of its tokens"
    return "one of the two had ended there, or could not be chosen"


def _token(tokens: Sequence[int], position: int, finish: str, decode: Decode) -> str:
    if position == len(tokens):
        return f"the end ({finish})"
    return f"token {tokens[position]} {decode(tokens[position : position + 1])!r}"
