"""Depth controllers on recorded steps: what each would have made of them."""

from collections.abc import Sequence
from math import inf

from specbench.depth.controller import Admission, DepthController
from specbench.depth.times import StepTimes
from specbench.method import Proposal, Request, Row, Step, Verdict
from specbench.trace import Replay, Room, Running, Span, Taken, Trace, play, span
from specbench.tree import Tree


def replay(
    traces: Sequence[Trace],
    room: int | Room,
    controller: DepthController,
    times: StepTimes,
    drafting: StepTimes | None = None,
    until_s: float = inf,
) -> Replay:
    """Plays traces under a controller. Records have no chances, so one that reads drafts goes by
    match statistics, if it can.

    Args:
        traces: see `specbench.trace.read_traces`.
        room: rows at a time, always or by the time.
        controller: chooses the depths; reset first.
        times: what steps cost; if ``drafting`` is given, whose drafts are there.
        drafting: what drafting costs, by the depth that each row drafts.
        until_s: when to stop, whatever is left.
    """
    controller.reset()
    rows = [_row(str(index), len(trace)) for index, trace in enumerate(traces)]

    def step(running: Sequence[Running]) -> Taken:
        batch_rows = [rows[one.trace] for one in running]
        budgets = controller.choose(batch_rows)
        asked = [
            min(*budget, row.num_left - 1) for row, budget in zip(batch_rows, budgets, strict=True)
        ]
        offered = [
            span(traces[one.trace], one.position, depth)
            for one, depth in zip(running, asked, strict=True)
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
        seconds = times.step_s([one.offered for one in verified])
        if drafting is not None:
            seconds += drafting.step_s(asked)
        return Taken(verified, seconds)

    return play(traces, room, step, until_s)


def _row(name: str, length: int) -> Row:
    """A row whose tokens do not matter."""
    return Row(Request(id=name, prompt=(0,), max_new_tokens=length), [0])


def _step(one: Span) -> Step:
    return Step(one.offered, one.offered, one.matched, one.matched + 1, one.matched)
