"""The benchmark that measures nothing: vanilla against itself."""

from pathlib import Path

import numpy as np
import scipy.stats

from specbench.conformance.models import save_tiny_model
from specbench.stats import LEVEL
from tests.benchmarks.against_itself import describe, measure, simulate
from tests.tiny_runs import chat_prompts, tiny_config, write_prompts

NUM_RUNS = 200


def test_simulated_runs_say_something_no_more_often_than_the_level_allows() -> None:
    """With prompts of unequal lengths, a machine that drifts, and noise with heavy tails."""
    generator = np.random.default_rng(0)
    runs = [simulate(generator, 6, 12, 2) for _ in range(NUM_RUNS)]
    loud = sum(any(e.verdict != "inconclusive" for e in run) for run in runs)
    assert loud <= scipy.stats.binom.ppf(0.99, NUM_RUNS, 1 - LEVEL)
    assert describe(runs).startswith(f"{loud} of 200 runs called something")


def test_real_runs_compare_the_baseline_with_itself_on_every_workload(tmp_path: Path) -> None:
    target = save_tiny_model(tmp_path / "tiny")
    source = write_prompts(tmp_path / "chat.jsonl", chat_prompts(5))
    (run,) = measure(tiny_config(target, source, max_new_tokens=2), num_names=2, num_runs=1)
    assert [estimate.num_clusters for estimate in run] == [5, 5]
    assert {estimate.num_judged for estimate in run} == {2}
