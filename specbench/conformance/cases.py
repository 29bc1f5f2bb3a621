"""The named cases, and what each asks of a method.

Every decode is under watch: proposals, counts and caches are checked at each step, and the output
must be the target's own, token for token, unless drafts were drawn from a distribution.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from specbench.conformance import law
from specbench.conformance.decoding import (
    ALLOWED,
    GREEDY,
    check_output,
    make_request,
    reference,
)
from specbench.conformance.faults import BUDGET, COUNTING, METADATA, RULE, Fault
from specbench.conformance.models import tiny_tokenizer
from specbench.conformance.targets import (
    half_target,
    law_target,
    main_target,
    rut_target,
    short_target,
    wild_target,
)
from specbench.conformance.trial import DoesNotApply, Trial, check_description, same_steps
from specbench.depth import Fixed
from specbench.lossless import compare
from specbench.method import Budget, Request, Row
from specbench.sampling import Sampling
from specbench.target import ending

COUPLED = Sampling(temperature=0.8, top_k=20, top_p=0.9, rule="coupled")
REJECTION = replace(COUPLED, rule="rejection")
LAW = Sampling(temperature=0.7, top_k=4, top_p=0.95)
LEVEL = 1e-5
"""The chance that the law of one setting is called wrong and is not."""

PROMPT = (5, 40, 12, 77, 31, 5, 40)
MIXED = [
    make_request((9,), 7),
    make_request(range(10, 27), 9),
    make_request((3, 4, 3, 4, 3), 1),
    make_request([20, 21, 22] * 14, 6),
    make_request(PROMPT, 9),
    make_request((50, 50), 4),
]
"""Short and long prompts and budgets, more than there are places in a batch."""
_DRAFT_CONTEXT = 24
_FEW = 3

Run = Callable[[Trial], None]


class Case(NamedTuple):
    """A named case."""

    name: str
    about: str
    run: Run
    samplings: tuple[Sampling, ...]
    batches: tuple[int, ...]


CASES: dict[str, Case] = {}
"""All cases by name, in order."""

EVERY = (GREEDY, COUPLED, REJECTION)


def _case(
    samplings: tuple[Sampling, ...] = EVERY, batches: tuple[int, ...] = (1, 4)
) -> Callable[[Run], Run]:
    def add(run: Run) -> Run:
        about = " ".join((run.__doc__ or "").split())
        CASES[run.__name__] = Case(run.__name__, about, run, samplings, batches)
        return run

    return add


def _sizes(name: str, *sizes: int) -> list[Request]:
    return [make_request(PROMPT, size, name=f"{name} {size}") for size in sizes]


# Prompts.


@_case((GREEDY,), (1,))
def empty_prompt(trial: Trial) -> None:
    """A prompt without tokens is refused."""
    try:
        make_request(())
    except ValueError:
        return
    raise Fault(METADATA, "an empty prompt is taken")


@_case()
def prompt_1_token(trial: Trial) -> None:
    """Prompts of one token, of which nothing has run before the first draft."""
    trial.run([make_request((token,), 7) for token in (9, 50, 3, 77)])


@_case()
def prompt_longer_than_prefill_chunk(trial: Trial) -> None:
    """A prompt that the target reads in two chunks, beside a short one."""
    trial.run([make_request([7, 8, 9, 60] * 70, 4), MIXED[0]])


@_case((GREEDY, REJECTION))
def prompt_longer_than_draft_ctx(trial: Trial) -> None:
    """Text beyond the drafter's own context, where a model can draft."""
    drafted = trial.with_model(max_position_embeddings=_DRAFT_CONTEXT)
    drafted.run([make_request([8, 9] * 10, 12), make_request(range(10, 50), 6)])


@_case()
def prompt_at_target_ctx(trial: Trial) -> None:
    """Prompt and budget fill the target's context; a token more is refused."""
    trial.run([make_request([8, 9] * 14, 12)], short_target())
    try:
        trial.run([make_request([8, 9] * 14, 13, name="too long")], short_target())
    except ValueError:
        return
    raise Fault(METADATA, "a request that does not fit into the context is taken")


@_case()
def ngram_no_match(trial: Trial) -> None:
    """A prompt in which no token stands twice."""
    trial.run([make_request(range(10, 60), 8), make_request((60, 61), 8)])


@_case()
def ngram_match_at_tail(trial: Trial) -> None:
    """A prompt that ends in its only repetition."""
    trial.run([make_request((30, 31, 32, 33, 30, 31), 8), make_request((40, 41, 41), 8)])


# Where an output ends.


def _outputs(trial: Trial) -> tuple[list[int], Row]:
    """What one request makes of the main target without an end, and its row."""
    with ending(main_target()):
        row = trial.run(_sizes("plain", 12))[0]
    return row.output, row


def _ends_at(trial: Trial, output: Sequence[int], tokens: Sequence[int]) -> None:
    """With each of these tokens as the end, the output is the same up to its first occurrence."""
    for token in dict.fromkeys(tokens):
        expected = list(output[: output.index(token) + 1])
        other = max(set(range(main_target().vocab_size)) - set(output))
        with ending(main_target(), token, other):
            rows = trial.run(_sizes("plain", 12) + _beside(trial))
        check_output(rows[0], main_target(), expected)
        if rows[0].finish != "eos":
            raise Fault(COUNTING, f"an output ends by {rows[0].finish!r} instead of 'eos'")


def _beside(trial: Trial) -> list[Request]:
    return MIXED[: trial.max_rows - 1]


@_case()
def eos_first_token(trial: Trial) -> None:
    """The first token ends the output."""
    output, _ = _outputs(trial)
    _ends_at(trial, output, output[:1])


@_case()
def eos_mid_block(trial: Trial) -> None:
    """A token ends the output with drafts accepted behind it; at T=0, any token."""
    output, row = _outputs(trial)
    inside = [token for i, token in enumerate(output) if i not in _bonuses(row)]
    _ends_at(trial, output, output if trial.sampling.greedy else inside[-_FEW:])


@_case()
def eos_as_bonus(trial: Trial) -> None:
    """The target's own token behind accepted drafts ends the output."""
    output, row = _outputs(trial)
    _ends_at(trial, output, [output[i] for i in _bonuses(row)][:_FEW])


def _bonuses(row: Row) -> list[int]:
    """The places of the bonus tokens in an output."""
    places, end = [], 0
    for step in row.steps:
        end += step.committed
        if step.committed == step.matched + 1:
            places.append(end - 1)
    return places


@_case()
def no_eos_configured(trial: Trial) -> None:
    """A target that knows no end runs to the budget."""
    with ending(main_target()):
        for row in trial.run(_sizes("endless", 12, 7, 9)):
            if row.finish != "length":
                raise Fault(COUNTING, f"an output ends by {row.finish!r} instead of 'length'")


@_case()
def cap_1(trial: Trial) -> None:
    """A budget of one token leaves nothing to draft."""
    for row in trial.run([make_request((token, 4), 1) for token in (3, 8, 50, 60)]):
        if row.steps != [(0, 0, 0, 1, 0)]:
            raise Fault(BUDGET, f"there was nothing to draft in the steps {row.steps}")


@_case()
def cap_inside_block(trial: Trial) -> None:
    """Every budget up to beyond a block is met exactly."""
    with ending(main_target()):
        for row in trial.run(_sizes("cap", *range(1, ALLOWED.depth + 3))):
            if row.finish != "length":
                raise Fault(COUNTING, f"an output ends by {row.finish!r} instead of 'length'")


@_case()
def stop_string_mid_block(trial: Trial) -> None:
    """A stop string ends the output wherever it stands."""
    output, _ = _outputs(trial)
    text = _text(output)
    begins = range(0, len(output) - 2, 1 if trial.sampling.greedy else _FEW)
    ends = {text[i : i + 2]: text.index(text[i : i + 2]) + 2 for i in begins}
    _stops(trial, output, [(stop, end, 12) for stop, end in ends.items()])


@_case()
def stop_and_cap_same_step(trial: Trial) -> None:
    """A stop string and the budget end in the same token: it is a stop."""
    output, _ = _outputs(trial)
    text = _text(output)
    ends = {text[i : i + 2]: text.index(text[i : i + 2]) + 2 for i in range(_FEW)}
    _stops(trial, output, [(stop, end, end) for stop, end in ends.items()])


def _text(output: Sequence[int]) -> str:
    """One letter for each token."""
    return str(tiny_tokenizer().decode(list(output)))


def _stops(trial: Trial, output: Sequence[int], stops: Sequence[tuple[str, int, int]]) -> None:
    """Each stop string ends the output behind so many tokens, within such a budget."""
    base = _sizes("plain", 12)[0]
    requests = [
        replace(base, id=f"stop {stop!r}", stop=("never", stop), max_new_tokens=size)
        for stop, _, size in stops
    ]
    with ending(main_target()):
        rows = trial.run(requests)
    for row, (_, end, size) in zip(rows, stops, strict=True):
        # Under rejection a shorter budget shortens drafts, and so changes what is drawn.
        if not row.drawn or size == base.max_new_tokens:
            check_output(row, main_target(), output[:end])
            if row.finish != "stop":
                raise Fault(COUNTING, f"an output ends by {row.finish!r} instead of 'stop'")


# Drafts.


@_case()
def depth_0(trial: Trial) -> None:
    """A method that may not draft is the target alone."""
    for row in trial.run(MIXED, budget=Budget(0, 12)):
        if set(row.steps) != {(0, 0, 0, 1, 0)}:
            raise Fault(BUDGET, f"there was nothing to draft in the steps {row.steps}")


@_case()
def draft_always_right(trial: Trial) -> None:
    """A target in a rut, of which a copy is always right."""
    trial.run(MIXED, rut_target())


@_case()
def draft_always_wrong(trial: Trial) -> None:
    """A target that no drafter can follow."""
    trial.run(MIXED, wild_target())


@_case((GREEDY, REJECTION))
def draft_vocab_smaller(trial: Trial) -> None:
    """A model drafts that lacks some of the target's tokens."""
    trial.with_model(vocab_size=80).run(MIXED)


@_case((GREEDY, REJECTION))
def draft_vocab_larger(trial: Trial) -> None:
    """A model drafts that has more tokens than the target."""
    trial.with_model(vocab_size=120).run(MIXED)


@_case((GREEDY,), (1,))
def tokenizer_mismatch(trial: Trial) -> None:
    """A model whose tokens mean something else is refused."""
    trial.with_model()
    try:
        trial.with_model(shuffled=True)
    except DoesNotApply:
        return
    raise Fault(METADATA, "a drafter with another tokenizer is taken")


@_case((GREEDY,), (1,))
def described(trial: Trial) -> None:
    """A method says what it is in terms that can be filed."""
    check_description(trial.method(main_target()))


# Batches, state, caches.


@_case()
def batch_mixed_lengths(trial: Trial) -> None:
    """Long and short requests come to the same outputs by the same steps alone and together."""
    rows, alone = trial.run(MIXED), replace(trial, max_rows=1)
    for row, one in zip(rows, alone.run(MIXED) if trial.max_rows > 1 else rows, strict=True):
        same_steps(row, one, main_target(), "alone and in a batch")


@_case(batches=(4,))
def batch_row_finishes_early(trial: Trial) -> None:
    """Rows leave a batch at each of its places, and others join."""
    sizes = (9, 1, 12, 5, 2, 7, 3, 8)
    trial.run([make_request((10 + i, 40, 12), size) for i, size in enumerate(sizes)])


@_case((GREEDY, REJECTION))
def state_reset_between_prompts(trial: Trial) -> None:
    """A prompt is decoded alike whatever came before, and by a method that is new."""
    target, (request, *others) = main_target(), MIXED[::-1]
    first, again = (trial.run([request])[0] for _ in range(2))
    trial.run(others)
    afterwards = trial.run([request])[0]
    method = trial.method(target)
    abandoned = trial.decoder(target, method, Fixed(*ALLOWED), trial.sampling, max_rows=3)
    abandoned.join(others[:3])
    abandoned.step()
    after_failure = trial.run([request])[0]
    fresh = trial.run([request], method=trial.new_method(target))[0]
    for row in (first, again, afterwards, after_failure):
        same_steps(row, fresh, target, "behind other prompts")


@_case()
def kv_rollback_audit(trial: Trial) -> None:
    """The target's cache is right after every step, and drafts are those of a method that reads
    the text so far for the first time."""
    requests = [replace(request, max_new_tokens=24) for request in MIXED]
    with ending(main_target()):
        watch = trial.watch(requests, main_target())
        if not trial.subject.method.remembers:
            trial.check_drafts(watch.log, main_target())


# Law and rounding.


@_case((LAW,), (200,))
def sampled_distribution_chi2(trial: Trial) -> None:
    """Outputs follow the target's law, where drafts are drawn from a distribution."""
    target, requests = law_target(), law.requests()
    if not any(row.drawn for row in trial.run(requests[:4], target)):
        raise DoesNotApply("its drafts are point masses, so outputs are exact")
    rows = trial.run(requests, target)
    alone = replace(trial, max_rows=1).run(requests[:8], target)
    for row, one in zip(rows, alone, strict=False):
        same_steps(row, one, target, "alone and in a batch")
    found = law.p_value(law.count(rows), law.exact_law(target, trial.sampling))
    if found < LEVEL:
        raise Fault(RULE, f"outputs do not follow the target's law (p = {found:.1e})")


@_case((GREEDY, COUPLED))
def bf16_tie(trial: Trial) -> None:
    """In half precision an output leaves the target's own only at a tie."""
    target = half_target()
    for row in trial.run(MIXED, target):
        expected = reference(target, row.request, trial.sampling)
        found = compare(target, row.request, trial.sampling, expected, row.output)
        if found.verdict == "broken" and trial.is_lossless(row, target):
            trial.check(row, target)
