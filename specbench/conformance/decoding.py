"""Decoding on tiny targets, and what is asked of any output."""

from collections.abc import Iterable, Sequence
from functools import cache
from itertools import islice

import torch

from specbench.conformance.faults import (
    BUDGET,
    CACHE,
    COUNTING,
    RULE,
    Fault,
    difference,
    wrong_token,
)
from specbench.decode import Decoder
from specbench.depth import DepthController, Fixed
from specbench.method import Batch, Budget, Method, MethodConfig, Proposal, Request, Row
from specbench.sampling import Sampling, request_key
from specbench.target import KVCache, Target

ALLOWED = Budget(depth=4, nodes=12)
"""The nodes run out in the fourth level of a tree that branches 2,2."""

GREEDY = Sampling()

_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 5e-2}
_MOST_AUDITED = 24


class Nothing(Method):
    """Drafts nothing: what the target says by itself."""

    def propose(self, batch: Batch, budgets: Sequence[Budget]) -> Proposal:
        """The roots alone."""
        return Proposal.nothing(batch.rows)


def make_request(
    prompt: Sequence[int], max_new_tokens: int = 12, stop: tuple[str, ...] = (), name: str = ""
) -> Request:
    """A request whose random numbers depend on its prompt, or on its name if it has one."""
    name = name or " ".join(map(str, prompt[:8]))
    return Request(
        id=name,
        prompt=tuple(prompt),
        max_new_tokens=max_new_tokens,
        stop=stop,
        key=request_key(0, name),
    )


def decode(
    target: Target,
    method: Method,
    requests: Iterable[Request],
    sampling: Sampling = GREEDY,
    *,
    max_rows: int = 1,
    budget: Budget = ALLOWED,
    auditor: "Auditor | None" = None,
    decoder: type[Decoder] = Decoder,
    controller: DepthController | None = None,
) -> list[Row]:
    """Decodes requests, of which at most ``max_rows`` run together; a free place is taken at once.

    Args:
        auditor: checks the caches after every step.
        decoder: the loop.
        controller: stays within the budget; by default it is fixed.

    Returns:
        Their rows in order.

    Raises:
        Fault: a cache is wrong, or an output breaks its budget or its end.
    """
    loop = decoder(target, method, controller or Fixed(*budget), sampling, max_rows)
    waiting, rows = list(requests), list[Row]()
    while waiting or loop.rows:
        joining, waiting = waiting[: loop.num_free], waiting[loop.num_free :]
        rows += loop.join(joining)
        loop.step()
        if auditor:
            auditor.take_down(loop)
    if auditor:
        auditor.check()
    for row in rows:
        check_row(row, target, budget)
    return rows


def reference(target: Target, request: Request, sampling: Sampling = GREEDY) -> list[int]:
    """What the target makes of a request by itself."""
    return _reference(target, request, sampling, target.eos_ids)


@cache
def _reference(
    target: Target, request: Request, sampling: Sampling, eos_ids: frozenset[int]
) -> list[int]:
    row = decode(target, Nothing(target, MethodConfig()), [request], sampling)[0]
    assert all(step == (0, 0, 0, 1, 0) for step in row.steps)
    return row.output


def check_row(row: Row, target: Target, budget: Budget = ALLOWED) -> None:
    """Holds an output to its budget, to its end and to what its steps say.

    Raises:
        Fault: it breaks one of them.
    """
    output, request = row.output, row.request
    if len(output) > request.max_new_tokens:
        raise Fault(
            BUDGET, f"request {request.id!r} has {len(output)} of {request.max_new_tokens} tokens"
        )
    for step in row.steps:
        if step.nodes > budget.nodes or step.depth > budget.depth:
            raise Fault(BUDGET, f"request {request.id!r} has a step beyond {budget}: {step}")
        if not (
            0 <= step.accepted <= step.matched <= step.depth <= step.nodes
            and 1 <= step.committed <= step.accepted + 1
        ):
            raise Fault(COUNTING, f"request {request.id!r} has a step that cannot be: {step}")
    if sum(step.committed for step in row.steps) != len(output):
        raise Fault(
            COUNTING, f"the steps of request {request.id!r} do not add up to {len(output)} tokens"
        )
    past = next((i for i, token in enumerate(output[:-1]) if token in target.eos_ids), None)
    if past is not None:
        kept = output[: past + 1]
        raise Fault(
            COUNTING,
            "tokens behind the end of sequence are kept",
            wrong_token(target, row, kept, past + 1),
        )
    if (row.finish == "eos") != (output[-1] in target.eos_ids) or (
        row.finish == "length" and len(output) != request.max_new_tokens
    ):
        raise Fault(
            COUNTING,
            f"request {request.id!r} is said to end by {row.finish!r} after {len(output)} of "
            f"{request.max_new_tokens} tokens, the last {output[-1]}",
        )


def check_output(row: Row, target: Target, expected: Sequence[int]) -> None:
    """Holds an output to what is expected.

    Raises:
        Fault: names the first wrong token.
    """
    differs = difference(expected, row.output)
    if differs is None:
        return
    wrong = wrong_token(target, row, expected, differs.position)
    if differs.is_end:
        late = len(row.output) > len(expected)
        message = f"the output ends too {'late' if late else 'early'}"
        raise Fault(COUNTING, message, wrong)
    raise Fault(RULE, "the target would choose another token", wrong)


class Auditor:
    """Takes down, after each step, what the target's cache holds; `check` compares it with what a
    fresh forward over the committed tokens writes, for the first rows."""

    def __init__(self) -> None:
        self.held: dict[Row, list[torch.Tensor]] = {}
        self.target: Target | None = None

    def take_down(self, loop: Decoder) -> None:
        """Called after a step."""
        self.target = loop.target
        for row, length in zip(loop.rows, loop.cache.lengths, strict=True):
            if length != len(row.tokens) - 1:
                raise Fault(
                    CACHE,
                    f"request {row.request.id!r} has {len(row.tokens)} tokens, and the target's "
                    f"cache {length} of them instead of {len(row.tokens) - 1}",
                )
        for row, length, held in zip(
            loop.rows, loop.cache.lengths, stores(loop.cache), strict=False
        ):
            self.held.setdefault(row, []).append(held[:, :length].clone())

    def check(self) -> None:
        """Raises a `Fault` where the two differ."""
        for row, all_held in islice(self.held.items(), _MOST_AUDITED):
            assert self.target is not None
            fresh = self.target.new_cache(1)
            tokens = row.tokens[: all_held[-1].shape[1]]
            self.target.prefill(tokens, fresh, fresh.add_row())
            for held in all_held:
                right = stores(fresh)[0, :, : held.shape[1]]
                error = (held - right).abs().amax((0, 2))
                tolerance = _TOLERANCE[held.dtype] * max(1.0, float(right.abs().max()))
                if (wrong := (error > tolerance).nonzero()).numel():
                    raise Fault(
                        CACHE,
                        f"the target's cache of request {row.request.id!r} is wrong from token "
                        f"{int(wrong[0])} of {held.shape[1]} on (by {float(error.max()):.2g})",
                    )


def stores(cache: KVCache) -> torch.Tensor:
    """All keys and values, [B, H, S, D], with the heads of all layers side by side."""
    if not cache.keys:
        return torch.empty(0)
    layers = sorted(cache.keys)
    return torch.cat([kind[layer] for kind in (cache.keys, cache.values) for layer in layers], 1)
