"""Depth controllers on recorded steps: what each would have made of them."""

from collections.abc import Sequence
from math import inf

from specbench.depth.controller import Admission, DepthController
from specbench.depth.times import StepTimes
from specbench.method import Proposal, Request, Row, Step, Verdict
from specbench.trace import Replay, Room, Running, Span, Trace, play, span
from specbench.tree import Tree


def replay(
    traces: Sequence[Trace],
    room: int | Room,
    controller: DepthController,
    times: StepTimes,
    until_s: float = inf,
) -> Replay:
    """Plays traces under a controller. Records have no chances, so one that reads drafts goes by
    match statistics, if it can.

    Args:
        traces: see `specbench.trace.read_traces`.
        room: rows at a time, always or by the time.
        controller: chooses the depths; reset first.
        times: what steps cost.
        until_s: when to stop, whatever is left.
    """
    controller.reset()
    rows = [_row(str(index), len(trace)) for index, trace in enumerate(traces)]

    def decide(running: Sequence[Running]) -> list[Span]:
        batch_rows = [rows[one.trace] for one in running]
        budgets = controller.choose(batch_rows)
        offered = [
            span(traces[one.trace], one.position, min(budget))
            for one, budget in zip(running, budgets, strict=True)
        ]
        trees = [Tree.chain(one.offered) for one in offered]
        proposal = Proposal.from_rows(batch_rows, trees, [[0] * one.offered for one in offered])
        if controller.reads_drafts:
            admission = Admission(proposal)
            controller.admit(admission)
            proposal = proposal.cut(admission.num_nodes)
        verified = [
            Span(tree.depth, min(tree.depth, one.matched))
            for tree, one in zip(proposal.trees, offered, strict=True)
        ]
        for row, one in zip(batch_rows, verified, strict=True):
            row.tokens += [0] * (one.matched + 1)
            row.steps.append(_step(one))
        paths = [list(range(one.matched + 1)) for one in verified]
        controller.observe(Verdict(batch_rows, proposal, paths, paths, {}))
        return verified

    return play(traces, room, decide, times.step_s, until_s)


def _row(name: str, length: int) -> Row:
    """A row whose tokens do not matter."""
    return Row(Request(id=name, prompt=(0,), max_new_tokens=length), [0])


def _step(one: Span) -> Step:
    return Step(one.offered, one.offered, one.matched, one.matched + 1, one.matched)
