"""What each controller decides."""

from collections.abc import Sequence
from functools import cache

import numpy as np
import pytest
import torch

from specbench.conformance.decoding import make_request
from specbench.conformance.models import looping_target
from specbench.decode import Decoder
from specbench.depth import (
    CONTROLLERS,
    Admission,
    ByBatch,
    Calibration,
    Choice,
    Confidence,
    DepthController,
    Ema,
    Goodput,
    Heuristic,
    OffAboveBatch,
    Recorder,
    StepTable,
    Survival,
    make_controller,
)
from specbench.depth.calibration import (
    LEAST_DRAFTS,
    Sample,
    check_calibration,
    expected_error,
    reliability,
)
from specbench.depth.feedback import best_threshold
from specbench.method import Budget, Proposal, Row, Step, Verdict
from specbench.sampling import Sampling
from specbench.target import Resume, Target
from specbench.tree import Tree
from tests.controllers import DEEPEST, SETTINGS, Rates, made, names
from tests.drafters import Setting, decode, make_method

BUDGET = Budget(DEEPEST, 12)


def rows(num: int) -> list[Row]:
    return [Row(make_request((5, 6), 50, name=str(i)), [5, 6]) for i in range(num)]


def proposal(
    drafting: Sequence[Row], trees: Sequence[Tree], chances: Sequence[Sequence[float]] | None
) -> Proposal:
    drafted = [[7] * tree.num_drafted for tree in trees]
    return Proposal.from_rows(drafting, trees, drafted, chances=chances)


def admitted(controller: DepthController, *chances: Sequence[float]) -> list[int]:
    """How much of chains with these chances."""
    trees = [Tree.chain(len(row)) for row in chances]
    admission = Admission(proposal(rows(len(chances)), trees, chances))
    controller.admit(admission)
    return admission.num_nodes


def tell(
    controller: DepthController,
    drafting: Sequence[Row],
    matched: Sequence[int],
    depth: int | None = None,
    chances: Sequence[Sequence[float]] | None = None,
) -> None:
    """What became of chains, as deep as the controller chose."""
    depths = [b.depth if depth is None else depth for b in controller.choose(drafting)]
    trees = [Tree.chain(d) for d in depths]
    for row, d, m in zip(drafting, depths, matched, strict=True):
        row.steps.append(Step(d, d, min(m, d), min(m, d) + 1, min(m, d)))
    made_of = proposal(drafting, trees, chances)
    paths = [list(range(row.steps[-1].matched + 1)) for row in drafting]
    controller.observe(Verdict(drafting, made_of, paths, paths, {}))


def depths(controller: DepthController, drafting: Sequence[Row]) -> list[int]:
    return [budget.depth for budget in controller.choose(drafting)]


def test_calibration_is_checked_on_texts_that_it_was_not_fitted_to() -> None:
    random = np.random.default_rng(0)
    texts = [[Sample((0.9,), int(random.random() < 0.5)) for _ in range(300)] for _ in range(8)]
    (found,) = check_calibration(texts)
    assert found.num == found.num_fitted == 1200 and (found.temperature or 0) > 5
    assert found.believed == pytest.approx(0.4, abs=0.05) and (found.calibrated or 1) < 0.1
    assert found.helped


def test_nothing_is_fitted_to_few_drafts() -> None:
    """Of depth 2 there is one too few; it is shown how well the chances do as they are."""
    deep, flat = Sample((0.9, 0.9), 0), Sample((0.9,), 0)
    text = [deep] * (LEAST_DRAFTS - 1) + [flat] * 9
    first, second = check_calibration([text, text])
    assert first.temperature and first.at_bound and first.num_fitted == LEAST_DRAFTS + 8
    assert (second.temperature, second.calibrated, second.helped) == (None, None, False)
    assert second.num_fitted == second.num == LEAST_DRAFTS - 1 and second.believed > 0.7
    assert Calibration.fit(text).temperatures[1:] == (1.0,)
    assert Calibration.fit(text[: LEAST_DRAFTS - 1]) == Calibration()


def test_off_above_batch_drafts_nothing_from_that_batch_on() -> None:
    controller = OffAboveBatch(3, 9, off_at=3)
    assert depths(controller, rows(2)) == [3, 3]
    assert controller.choose(rows(3)) == [Budget(0, 0)] * 3


def test_what_was_switched_off_stays_off_if_sticky() -> None:
    old, new = rows(3), rows(1)
    for sticky, left in ((False, 3), (True, 0)):
        controller = OffAboveBatch(3, 9, off_at=3, sticky=sticky)
        assert depths(controller, old) == [0, 0, 0]
        assert depths(controller, [old[0], *new]) == [left, 3]
        controller.reset()
        assert depths(controller, old[:1]) == [3]


def test_a_missing_knob_is_named_with_an_example() -> None:
    message = "by_batch needs its knob depths: .*; for example by_batch:depths=4:2/16:0"
    for text in ("by_batch", "by_batch:"):
        with pytest.raises(ValueError, match=message):
            Choice.read(text)
    assert Choice.read("goodput").knobs == {}


def test_by_batch_reads_its_table() -> None:
    controller = ByBatch(5, 9, depths={8: 0, 2: 9, 4: 1})
    assert [depths(controller, rows(n))[0] for n in (1, 2, 3, 4, 7, 8, 99)] == [5, 5, 5, 1, 1, 0, 0]


def test_the_heuristic_goes_two_up_and_one_down_for_each_row() -> None:
    controller, (lucky, unlucky) = Heuristic(7, 9, first=3), rows(2)
    assert depths(controller, [lucky, unlucky]) == [3, 3]
    tell(controller, [lucky, unlucky], [3, 2])
    assert depths(controller, [lucky, unlucky]) == [5, 2]
    for _ in range(3):
        tell(controller, [lucky, unlucky], [9, 0])
    assert depths(controller, [lucky, unlucky]) == [7, 1]
    tell(controller, [lucky], [0], depth=0)
    assert depths(controller, [lucky]) == [7]


def test_confidence_stops_behind_the_first_unsure_token() -> None:
    controller = Confidence(4, 9, threshold=0.4)
    found = admitted(controller, (0.9, 0.5, 0.3, 0.9), (0.2, 0.9), (0.9, 0.9), ())
    assert found == [3, 1, 2, 0]


def test_confidence_goes_by_the_parent_in_a_tree() -> None:
    tree = Tree.of((-1, 0, 0, 1, 2))
    admission = Admission(proposal(rows(1), [tree], [(0.9, 0.1, 0.9, 0.9)]))
    Confidence(4, 9, threshold=0.4).admit(admission)
    assert admission.num_nodes == [3]


def test_the_adaptive_threshold_parts_accepted_from_refused() -> None:
    seen = [(0.9, True), (0.7, True), (0.6, True), (0.5, False), (0.2, False)]
    assert best_threshold(seen, 0.4) == 0.6
    assert best_threshold([*seen, (0.8, False)], 0.4) == 0.6
    assert best_threshold(seen[:3], 0.4) == 0.4
    controller, (row,) = Confidence(3, 9, threshold=0.1, adaptive=True), rows(1)
    for _ in range(4):
        tell(controller, [row], [1], chances=[(0.8, 0.3, 0.9)])
    assert controller.threshold == 0.8
    controller.reset()
    assert controller.threshold == 0.1


def test_ema_moves_between_tiers_and_knows_batches_apart() -> None:
    controller, few, many = Ema(7, 9, warm_up=3, interval=2), rows(1), rows(8)
    assert depths(controller, few) == [3]
    for _ in range(30):
        tell(controller, few, [7])
    assert depths(controller, few) == [7]
    for _ in range(30):
        tell(controller, few, [0])
    assert depths(controller, few) == [1]
    assert depths(controller, many) == [3] * 8


def test_goodput_goes_as_deep_as_pays_for_the_whole_batch() -> None:
    times = StepTable({(r, n): 1 + 0.05 * r * n for r in (1, 32) for n in range(5)})
    controller, few = Goodput(4, 9, times=times, probe=0), rows(2)
    for _ in range(40):
        tell(controller, few, [9, 9])
    assert depths(controller, few) == [4, 4]
    assert depths(controller, rows(32)) == [0] * 32
    for _ in range(400):
        tell(controller, few, [0, 0], depth=1)
    assert depths(controller, few) == [0, 0]


def test_goodput_looks_again_after_a_while() -> None:
    """A level takes 0.96 seconds more, a step without drafts one: 0.3 of four steps pay for it."""
    controller, (row,) = Goodput(4, 9, times=Rates(1, 0.51), probe=0.3), rows(1)
    for _ in range(40):
        tell(controller, [row], [0])
    found = [depths(controller, [row])[0] for _ in range(12)]
    first = found.index(1)
    assert found[first:] == [1, *[0, 0, 0, 1] * 3][: len(found) - first] and first < 4


def test_goodput_does_not_look_where_no_draft_could_pay() -> None:
    controller = Goodput(4, 9, times=Rates(1, 0.1), probe=1)
    assert [depths(controller, rows(1))[0] for _ in range(99)] == [0] * 99


def test_survival_drafts_as_deep_as_goodput_and_knows_what_that_took() -> None:
    controller = Survival(2, 9, times=Rates(1, 0.9, 0.85), drafting=Rates(1e9, 10, 5))
    (row,) = rows(1)
    assert depths(controller, [row]) == [2]
    assert controller.drafting_s == 0.2
    for _ in range(40):
        tell(controller, [row], [0])
    assert depths(controller, [row]) == [0]


def test_survival_counts_the_likeliest_drafts_and_goodput_the_whole_tree() -> None:
    """Of two drafts for the next token the second is always right: as chains they would not pay."""
    for controller, expected in (
        (Goodput(1, 2, times=Rates(1, 0.8)), 1),
        (Survival(1, 2, times=Rates(1, 0.8)), 0),
    ):
        (row,) = rows(1)
        for _ in range(40):
            row.steps.append(Step(nodes=2, depth=1, accepted=1, committed=2, matched=1))
            made_of = proposal([row], [Tree((-1, 0, 0))], None)
            controller.observe(Verdict([row], made_of, [[0, 2]], [[7, 7]], {}))
        assert depths(controller, [row]) == [expected]


def test_survival_counts_drafts_that_it_refused_by_their_chance() -> None:
    """Of two rows' drafts it verifies the likely one, which is always right."""
    controller, batch = Survival(1, 1, times=Rates(1, 0.7, 0.45)), rows(2)
    for _ in range(200):
        controller.choose(batch)
        drafts = proposal(batch, [Tree.chain(1)] * 2, [(0.9,), (0.1,)])
        admission = Admission(drafts)
        controller.is_probing = False
        controller.admit(admission)
        assert admission.num_nodes == [1, 0]
        for row, num in zip(batch, admission.num_nodes, strict=True):
            row.steps.append(Step(num, num, num, 1 + num, num))
        paths = [[0, 1], [0]]
        cut = drafts.cut(admission.num_nodes)
        controller.observe(Verdict(batch, cut, paths, [[7, 7], [7]], {}))
    likely, unlikely = (controller.acceptance.chances(row)[0] for row in batch)
    assert likely > 0.9 and unlikely < 0.2
    assert controller.acceptance.chances(rows(1)[0])[0] == pytest.approx(0.55, abs=0.05)


def test_survival_does_not_count_what_lies_behind_a_rows_end() -> None:
    controller, (row,) = Survival(2, 2, times=Rates(1, 0.9, 0.8)), rows(1)
    before = controller.acceptance.chances(row)
    row.steps.append(Step(nodes=2, depth=2, accepted=0, committed=1, matched=2))
    controller.observe(Verdict([row], proposal([row], [Tree.chain(2)], None), [[0]], [[7]], {}))
    assert controller.acceptance.chances(row) == before


def test_survival_gives_each_row_its_own_depth_and_every_row_less_under_load() -> None:
    times = StepTable({(r, n): 1 + 0.01 * r + 0.04 * r * n for r in (1, 16) for n in range(5)})
    controller, sure, unsure = Survival(4, 9, times=times), (0.95,) * 4, (0.3,) * 4
    few = admitted(controller, sure, unsure)
    assert few[0] > few[1]
    many = admitted(controller, *[sure, unsure] * 8)
    assert sum(many) < 8 * sum(few)
    assert max(many) <= few[0]


def test_survival_stops_at_the_first_drop() -> None:
    jagged = Rates(1, 0.5, 0.45)
    assert admitted(Survival(2, 2, times=jagged), (0.8, 1.0)) == [0]
    assert admitted(Survival(2, 2, times=Rates(1, 0.7, 0.6)), (0.8, 0.9)) == [2]


def test_survival_drafts_nothing_where_no_draft_could_pay() -> None:
    controller = Survival(4, 9, times=Rates(1, 0.5, 0.3, 0.2, 0.1))
    assert depths(controller, rows(1)) == [0]


def test_survival_takes_match_statistics_where_a_drafter_has_no_chances() -> None:
    times = Rates(1, 0.65, 0.6)
    controller, (row,) = Survival(2, 9, times=times), rows(1)
    for matched, expected in ((2, [2]), (0, [0])):
        controller.reset()
        for _ in range(50):
            tell(controller, [row], [matched])
        controller.choose([row])
        admission = Admission(proposal([row], [Tree.chain(2)], None))
        controller.admit(admission)
        assert admission.num_nodes == expected


def test_a_chance_is_shown_only_when_what_is_before_it_is_admitted() -> None:
    admission = Admission(proposal(rows(1), [Tree.chain(2)], [(0.9, 0.1)]))
    first = admission.next(0)
    assert first == admission.next(0) == (0, 1, 0.9)
    admission.admit(0)
    assert admission.next(0) == (1, 2, 0.1)
    admission.admit(0)
    assert admission.next(0) is None


def test_a_cut_proposal_keeps_what_belongs_to_its_nodes() -> None:
    whole = Proposal(
        tokens_BN=torch.tensor([[5, 1, 2, 3], [6, 4, 0, 0]]),
        trees=[Tree.of((-1, 0, 0, 1)), Tree.chain(1)],
        logq=[{0: torch.zeros(1), 1: torch.zeros(1)}, {0: torch.zeros(1)}],
        resume=Resume(2, torch.zeros(2, 4, 8)),
        chances=[(0.9, 0.8, 0.7), (0.5,)],
    )
    cut = whole.cut([2, 0])
    assert cut.tokens_BN.tolist() == [[5, 1, 2], [6, 4, 0]]
    assert cut.trees == [Tree.of((-1, 0, 0)), Tree.chain(0)]
    assert cut.logq is not None and [list(by_node) for by_node in cut.logq] == [[0], []]
    assert cut.resume is not None and cut.resume.hidden_BNh.shape == (2, 3, 8)
    assert cut.chances == [(0.9, 0.8), ()]


def test_step_times_are_interpolated() -> None:
    seconds = {(1, 0): 1.0, (1, 4): 2.0, (4, 0): 4.0, (4, 4): 8.0}
    table = StepTable(seconds)
    assert table.step_s([2]) == 1.5
    assert table.step_s([0, 4, 4, 0]) == 6
    assert table.step_s([9] * 9) == 8
    with pytest.raises(ValueError, match="lack"):
        StepTable({(1, 0): 1.0, (2, 1): 2.0})


def test_calibration_makes_survival_come_true() -> None:
    generator, samples = np.random.default_rng(0), []
    for _ in range(4000):
        said = generator.uniform(0.05, 0.95, 2)
        true = 1 / (1 + ((1 - said) / said) ** (1 / np.array([3.0, 0.5])))
        taken = generator.uniform(size=2) < true
        samples.append(Sample(tuple(said.tolist()), int(taken[0]) + int(taken.all())))
    fitted = Calibration.fit(samples[:2000])
    assert fitted.temperatures == pytest.approx((3.0, 0.5), rel=0.2)
    held_out = samples[2000:]
    survived = np.array([sample.matched >= 2 for sample in held_out], dtype=np.float64)
    before = expected_error(Calibration().survivals(held_out, 2), survived)
    after = expected_error(fitted.survivals(held_out, 2), survived)
    assert after < 0.03 < before


def test_reliability_is_by_bin() -> None:
    found = reliability(np.array([0.1, 0.2, 0.9]), np.array([0.0, 1.0, 1.0]), num_bins=2)
    assert [(b.num, round(b.predicted, 9), b.observed) for b in found] == [
        (2, 0.15, 0.5),
        (1, 0.9, 1),
    ]


@cache
def target() -> Target:
    return looping_target()


DRAFTS = [
    Setting("draft_model", (("model", "layers"), ("layers", "3"), ("branching", ""))),
    Setting("draft_model", (("model", "layers"), ("layers", "3"), ("branching", "2,2"))),
    Setting("eagle", (("weights", "good3"),)),
    Setting("eagle", (("weights", "good1"), ("tree", "static"))),
    Setting("early_exit", (("exit_layer", "2"), ("branching", ""))),
    Setting("medusa", (("weights", "MADE"),)),
    Setting("ngram", ()),
]


CHAINS = [
    *(drafts for drafts in DRAFTS if drafts.method in ("early_exit", "ngram")),
    DRAFTS[0],
    Setting("eagle", (("weights", "good3"), ("tree", "chain"))),
    Setting("medusa", (("weights", "MADE"), ("tree", "1,1,1"))),
]


@pytest.mark.parametrize("drafts", CHAINS, ids=str)
def test_recorded_samples_say_what_was_taken(drafts: Setting) -> None:
    requests = [make_request((3 + i, 4 + i), 12) for i in range(4)]
    recorder = Recorder(DEEPEST, 4)
    decode(target(), make_method(target(), drafts), requests, controller=recorder, max_rows=2)
    assert any(s.chances for s in recorder.samples)
    assert all(0 <= chance <= 1 for s in recorder.samples for chance in s.chances)
    assert all(s.matched <= len(s.chances) for s in recorder.samples)


PAIRS = [
    pytest.param(drafts, name, knobs, id=f"{drafts} {called}")
    for drafts in DRAFTS
    for (name, knobs), called in zip(SETTINGS, names(), strict=True)
    if drafts is DRAFTS[0] or (CONTROLLERS[name].reads_drafts and len(knobs) < 2)
]
"""Every controller with one drafter, and those that read drafts with every drafter."""


@pytest.mark.parametrize(("drafts", "name", "knobs"), PAIRS)
def test_outputs_do_not_depend_on_the_controller(
    drafts: Setting, name: str, knobs: dict[str, object]
) -> None:
    requests = [make_request((3 + i, 4 + i), 14) for i in range(5)]
    method, vanilla = make_method(target(), drafts), make_method(target(), Setting("vanilla", ()))
    coupled = Sampling(temperature=0.9, rule="coupled")
    for sampling in (Sampling(), coupled):
        plain = decode(target(), vanilla, requests, sampling)
        found = decode(
            target(),
            method,
            requests,
            sampling,
            max_rows=3,
            controller=made(name, knobs),
            audit=True,
        )
        assert [row.output for row in found] == [row.output for row in plain]


@pytest.mark.parametrize(("name", "knobs"), SETTINGS, ids=names())
def test_nothing_is_left_of_one_run_in_the_next(name: str, knobs: dict[str, object]) -> None:
    requests = [make_request((3 + i, 4 + i), 14) for i in range(6)]
    method, controller = make_method(target(), DRAFTS[0]), made(name, knobs)
    first, second = (
        [
            [row.steps for row in decode(target(), method, requests, max_rows=3, controller=c)]
            for _ in range(2)
        ]
        for c in (controller, made(name, knobs))
    )
    assert first[0] == first[1] == second[0]


def test_all_of_it_is_verified_where_the_controller_reads_no_drafts() -> None:
    decoder = Decoder(
        target(), make_method(target(), DRAFTS[0]), made("fixed", {}), Sampling(), max_rows=1
    )
    assert not decoder.method.drawer.rates
    (row,) = decoder.run([make_request((3, 4), 10)])
    assert row.steps[0].depth == DEEPEST


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("off_above_batch:off_at=4,off_at=8", "off_at is given twice"),
        ("by_batch:depths=4:2/4:3", "depths '4:2/4:3' is not valid"),
    ],
)
def test_what_is_said_twice_is_an_error(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Choice.read(text)


def test_unknown_controllers_and_knobs_are_errors() -> None:
    with pytest.raises(ValueError, match="did you mean 'survival'"):
        make_controller("survial", 3, 9)
    with pytest.raises(ValueError, match="off_at"):
        make_controller("fixed", 3, 9, off_at=2)
    with pytest.raises(ValueError, match="times"):
        make_controller("goodput", 3, 9)
    for name, knobs in (
        ("fixed", {}),
        ("confidence", {"threshold": 2.0}),
        ("off_above_batch", {"off_at": 0}),
        ("by_batch", {"depths": {0: 1}}),
        ("ema", {"tiers": ()}),
        ("ema", {"warm_up": -5}),
        ("ema", {"up": float("nan")}),
        ("heuristic", {"first": -3}),
        ("goodput", {"times": Rates(1), "probe": float("nan")}),
        ("survival", {"times": Rates(1), "probe": -1.0}),
    ):
        with pytest.raises(ValueError, match="out of range"):
            make_controller(name, -1 if name == "fixed" else 3, 9, **knobs)
