"""The server: requests that arrive, wait, join late and leave early, on a clock that jumps."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest

from specbench.conformance.cases import COUPLED
from specbench.conformance.decoding import GREEDY, Nothing, make_request, reference
from specbench.conformance.targets import main_target, short_target
from specbench.decode import Decoder
from specbench.depth import DepthController, Fixed, make_controller
from specbench.method import Batch, Budget, Method, MethodConfig, Proposal, Request, Row
from specbench.sampling import Sampling
from specbench.serving.arrivals import Arrival, arrive, poisson_times
from specbench.serving.server import Server, Visit
from specbench.target import Target
from tests.drafters import SETTINGS, Auditor, Setting, make_method

PREFILL_S, STEP_S = 3.0, 1.0


class Jumping:
    """A clock that stands still but for what the loop does, at made-up costs, and jumps where it is
    to wait."""

    def __init__(self, prefill_s: float = PREFILL_S) -> None:
        self.prefill_s, self.time_s = prefill_s, 0.0
        self.waits: list[float] = []

    def now(self) -> float:
        return self.time_s

    def wait_until(self, time_s: float) -> None:
        assert time_s > self.time_s, "there is nothing to wait for"
        self.waits.append(time_s)
        self.time_s = time_s

    def lap(self, phase: str) -> None:
        self.time_s += {"prefill": self.prefill_s, "forward": STEP_S}.get(phase, 0.0)


class Audited(Decoder):
    """Has all caches looked at after every step."""

    auditor: Auditor | None = None

    def step(self) -> list[Row]:
        done = super().step()
        if self.auditor:
            self.auditor.take_down(self)
        return done


def serve(
    arrivals: Sequence[Arrival],
    method: Method | None = None,
    *,
    max_batch: int = 2,
    target: Target | None = None,
    sampling: Sampling = GREEDY,
    controller: DepthController | None = None,
    auditor: Auditor | None = None,
    prefill_s: float = PREFILL_S,
) -> list[Visit]:
    """Serves on the jumping clock; by default with what drafts nothing."""
    model = target or main_target()
    drafter = method or Nothing(model, MethodConfig())
    clock = Jumping(prefill_s)

    def make(max_rows: int) -> Decoder:
        chooses = controller or Fixed(4, 12)
        loop = Audited(model, drafter, chooses, sampling, max_rows, clock.lap)
        loop.auditor = auditor
        return loop

    visits = Server(make, max_batch, clock).serve(arrivals)
    if auditor:
        auditor.check()
    return visits


def output(visit: Visit) -> list[int]:
    assert visit.row is not None, visit.failure
    return visit.row.output


def arriving(requests: Sequence[Request], *times: float) -> list[Arrival]:
    return [Arrival(time, request) for time, request in zip(times, requests, strict=True)]


def short(count: int, num_tokens: int = 3) -> list[Request]:
    """Requests of so many tokens each: nothing that they say ends them before."""
    found = [make_request((5 + i, 40, 12), num_tokens, name=f"r{i}") for i in range(count)]
    assert all(len(reference(main_target(), request)) == num_tokens for request in found)
    return found


# Every method.

CONTROLLERS: dict[str, dict[str, Any]] = {
    "off_above_batch": {"off_at": 3},
    "by_batch": {"depths": {2: 2, 3: 0}},
}
"""They change depth as the batch does."""


BUSY = arriving(
    [
        make_request((5, 40, 12, 77, 31, 5, 40), 14),
        make_request(range(10, 27), 9),
        make_request((3, 4, 3, 4, 3), 1),
        make_request([20, 21, 22] * 14, 6),
        make_request((9,), 7),
        make_request((50, 50), 4),
    ],
    *(0, 0.5, 1.5, 1.6, 4, 60),
)
"""The batch grows to three rows, shrinks and grows again; the last request finds nobody."""


@pytest.mark.parametrize("controller", CONTROLLERS)
@pytest.mark.parametrize("sampling", [GREEDY, COUPLED], ids=["T=0", "coupled"])
@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_rows_that_join_late_and_leave_early_say_what_they_say_alone(
    setting: Setting, sampling: Sampling, controller: str
) -> None:
    method = make_method(main_target(), setting)
    visits = serve(
        BUSY,
        method,
        max_batch=3,
        sampling=sampling,
        controller=make_controller(controller, 4, 12, **CONTROLLERS[controller]),
        auditor=Auditor(),
        prefill_s=0.1,
    )
    for visit in visits:
        assert output(visit) == reference(main_target(), visit.request, sampling)
    starts, ends = [v.start_s for v in visits], [v.step_ends_s[-1] for v in visits]
    assert starts[1] < ends[0] and {size for v in visits for size in v.batches} == {1, 2, 3}
    depths = {size: max(step.depth for v in visits for step in _at(v, size)) for size in (1, 2, 3)}
    assert depths[3] == 0
    assert setting.method == "vanilla" or max(depths.values()) > 0


def _at(visit: Visit, size: int) -> list[Any]:
    assert visit.row is not None
    pairs = zip(visit.row.steps, visit.batches, strict=True)
    return [step for step, batch in pairs if batch == size]


# Times.


def test_what_each_request_saw_is_known_to_the_second() -> None:
    one, two, three = serve(arriving(short(3), 10, 11, 50))
    assert (one.start_s, one.step_ends_s, one.batches) == (10, [14, 18, 19], [1, 2, 2])
    # The second comes during the first's prefill, and waits for the step; its own prefill holds
    # the first up.
    assert (two.start_s, two.step_ends_s, two.batches) == (14, [18, 19, 20], [2, 2, 1])
    assert (three.start_s, three.step_ends_s) == (50, [54, 55, 56])


def test_nothing_is_waited_for_while_there_is_work() -> None:
    clock = Jumping()
    model = main_target()

    def make(max_rows: int) -> Decoder:
        drafter = Nothing(model, MethodConfig())
        return Decoder(model, drafter, Fixed(0, 0), GREEDY, max_rows, clock.lap)

    Server(make, 2, clock).serve(arriving(short(3), 1, 2, 40))
    assert clock.waits == [1, 40]


def test_many_at_once_are_served_first_come_first_served_and_none_is_lost() -> None:
    requests = short(11)
    visits = serve(arriving(requests, *[0.0] * 11), max_batch=2)
    assert [visit.request for visit in visits] == requests
    assert [output(v) for v in visits] == [reference(main_target(), r) for r in requests]
    starts = [visit.start_s for visit in visits]
    assert starts == sorted(starts) and len(set(starts)) == 6
    assert max(size for visit in visits for size in visit.batches) == 2


def test_short_ones_do_not_overtake_a_long_one_in_the_queue() -> None:
    long = make_request((9,), 30, name="long")
    few = short(6, 1)
    arrivals = arriving([few[0], few[1], long, *few[2:]], 0, 0, 0, 1, 1, 1, 1)
    visits = serve(arrivals, max_batch=2)
    starts = {visit.request.id: visit.start_s for visit in visits}
    assert all(starts["long"] <= starts[request.id] for request in few[2:])
    assert all(output(visit) for visit in visits)


# Failures.


def test_a_request_that_does_not_fit_fails_and_the_others_go_on() -> None:
    long = make_request(range(10, 45), 30, name="long")
    first, second = (make_request((9, 8 + i), 4, name=f"s{i}") for i in range(2))
    visits = serve(arriving([first, long, second], 0, 0, 0), max_batch=2, target=short_target())
    assert visits[1].failure is not None and "the target's context is 40" in visits[1].failure
    assert visits[1].row is None
    # It takes nobody's place.
    assert visits[0].start_s == visits[2].start_s
    for visit in (visits[0], visits[2]):
        assert output(visit) == reference(short_target(), visit.request)


class Breaks(Method):
    """Raises where a certain request is in the batch, or where so many are."""

    def __init__(self, request: str = "", most: int = 9) -> None:
        super().__init__(main_target(), MethodConfig())
        self.request, self.most = request, most

    def propose(self, batch: Batch, budgets: Sequence[Budget]) -> Proposal:
        if len(batch.rows) > self.most:
            raise RuntimeError("out of memory")
        if any(row.request.id == self.request for row in batch.rows):
            raise RuntimeError("no draft for this one")
        return Proposal.nothing(batch.rows)


def test_a_request_that_fails_takes_nobody_along() -> None:
    requests = short(5)
    visits = serve(arriving(requests, 0, 0, 1, 2, 3), Breaks("r1"), max_batch=3)
    failed = [visit for visit in visits if visit.failure]
    assert [visit.request.id for visit in failed] == ["r1"]
    assert "RuntimeError: no draft for this one" in str(failed[0].failure)
    for visit in visits:
        if not visit.failure:
            assert output(visit) == reference(main_target(), visit.request)
            assert len(visit.step_ends_s) == len(visit.batches) == 3
    # The one beside it begins anew, before those that came later.
    assert visits[0].start_s <= visits[2].start_s


def test_requests_that_fail_only_together_fail_and_the_run_ends() -> None:
    visits = serve(arriving(short(5), 0, 0, 0, 0, 90), Breaks(most=1), max_batch=2)
    assert ["out of memory" in str(visit.failure) for visit in visits] == [True] * 4 + [False]
    assert output(visits[4]) == reference(main_target(), visits[4].request)


# Arrivals.


def test_arrivals_are_a_poisson_stream() -> None:
    times = poisson_times(4.0, 20_000, (0, 0))
    gaps = [b - a for a, b in pairwise(times)]
    assert sum(gaps) / len(gaps) == pytest.approx(0.25, rel=0.03)
    assert sum(gap > 0.25 for gap in gaps) / len(gaps) == pytest.approx(0.368, abs=0.015)


def test_a_load_that_swings_has_spells_and_the_same_mean() -> None:
    times = poisson_times(4.0, 20_000, (0, 0), swing=9)
    assert times[-1] / len(times) == pytest.approx(0.25, rel=0.03)
    ends = [0.0, *times[4_999::5_000]]
    slow, fast, slow_again, fast_again = (b - a for a, b in pairwise(ends))
    assert slow / fast == pytest.approx(9, rel=0.06) == slow_again / fast_again
    assert poisson_times(4.0, 9, (0, 0), swing=1) == poisson_times(4.0, 9, (0, 0))
    assert len(poisson_times(4.0, 3, (0, 0), swing=9)) == 3


def test_arrivals_follow_the_seed_and_only_their_speed_the_rate() -> None:
    one, again, other = (poisson_times(2.0, 9, seed) for seed in [(3, 0), (3, 0), (3, 1)])
    assert one == again != other
    assert poisson_times(1.0, 9, (3, 0)) == pytest.approx([2 * time for time in one])
    assert [a.time_s for a in arrive(short(3), float("inf"), (0, 0))] == [0.0] * 3
