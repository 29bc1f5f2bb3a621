"""How many workers a run gets, and how many threads and GPUs each."""

import pytest

from specbench.layout import Layout, Node, most_threads, plan_layout

CPU = Node(num_cores=16, num_gpus=0)
GPU = Node(num_cores=32, num_gpus=8)


@pytest.mark.parametrize(
    ("nodes", "workers", "expected"),
    [
        ([CPU], None, Layout(2, 8, 0)),
        ([CPU], 1, Layout(1, 16, 0)),
        ([CPU], 3, Layout(3, 5, 0)),
        ([Node(1, 0)], None, Layout(1, 1, 0)),
        ([Node(0, 0), CPU], None, Layout(2, 8, 0)),
        ([CPU, CPU], None, Layout(4, 8, 0)),
        ([CPU, CPU], 2, Layout(2, 16, 0)),
        ([CPU, Node(4, 0)], 2, Layout(2, 8, 0)),
        ([CPU, Node(4, 0)], 5, Layout(5, 4, 0)),
    ],
)
def test_workers_on_cpus_share_the_cores_and_fit_their_nodes(
    nodes: list[Node], workers: int | None, expected: Layout
) -> None:
    """Never more threads than cores, on any node."""
    assert plan_layout(nodes, workers, 1, None) == expected


@pytest.mark.parametrize(
    ("nodes", "workers", "gpus_per_worker", "expected"),
    [
        ([GPU], None, 1, Layout(8, 4, 1)),
        ([GPU], None, 2, Layout(4, 8, 2)),
        ([GPU], None, 3, Layout(2, 16, 3)),
        ([GPU], 2, 1, Layout(2, 4, 1)),
        ([CPU, GPU, Node(4, 4)], None, 1, Layout(12, 1, 1)),
        ([Node(2, 8)], None, 1, Layout(8, 1, 1)),
    ],
)
def test_a_worker_takes_a_group_of_gpus_of_one_node(
    nodes: list[Node], workers: int | None, gpus_per_worker: int, expected: Layout
) -> None:
    """Nodes without GPUs get none."""
    assert plan_layout(nodes, workers, gpus_per_worker, None) == expected


@pytest.mark.parametrize(
    ("nodes", "workers", "gpus_per_worker", "valid"),
    [
        ([Node(2, 0)], 3, 1, r"--workers 3 .* valid: 1\.\.2"),
        ([CPU], None, 2, r"--gpus-per-worker 2 .* valid: 1, as there are no GPUs"),
        ([GPU], None, 9, r"--gpus-per-worker 9 .* valid: 1\.\.8"),
        ([GPU, GPU], None, 9, r"--gpus-per-worker 9 .* valid: 1\.\.8"),
        ([GPU], 9, 1, r"--workers 9 .* valid: 1\.\.8"),
        ([GPU], 5, 2, r"--workers 5 with --gpus-per-worker 2 .* valid: 1\.\.4"),
    ],
)
def test_workers_that_do_not_fit_are_refused(
    nodes: list[Node], workers: int | None, gpus_per_worker: int, valid: str
) -> None:
    """They would wait for ever."""
    with pytest.raises(ValueError, match=valid):
        plan_layout(nodes, workers, gpus_per_worker, None)


@pytest.mark.parametrize(
    ("variable", "most"), [("4", 4), ("6,3", 6), ("", None), ("all", None), ("0", None)]
)
def test_a_lower_omp_num_threads_is_honoured(
    monkeypatch: pytest.MonkeyPatch, variable: str, most: int | None
) -> None:
    """A higher one is not."""
    monkeypatch.setenv("OMP_NUM_THREADS", variable)
    assert most_threads() == most
    assert plan_layout([CPU], 2, 1, most_threads()).num_threads == min(8, most or 8)
    assert plan_layout([GPU], 8, 1, most_threads()).num_threads == min(4, most or 4)
