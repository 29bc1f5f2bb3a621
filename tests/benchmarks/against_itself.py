"""Vanilla against itself under other names: how often a run that measures nothing says something.

OMP_NUM_THREADS=1 python -m tests.benchmarks.against_itself [--simulated N] [--real N]
[--target T] [--workloads X,Y] [--prompts N] [--tokens N] [--rounds R] [--names N]
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from scipy.stats import binomtest

from specbench import registry
from specbench.bench import Bench
from specbench.config import RunConfig
from specbench.metrics import pair_times
from specbench.records import BASELINE, Record, ReferenceRecord, Run, TimingRecord
from specbench.shards import load_workloads, plan_shards
from specbench.stats import Estimate, Floats, judge_together, speed_up
from specbench.target import load_target
from specbench.worker import hush

_LENGTHS, _ROUND_NOISE, _DRIFT = 0.5, 0.06, 0.03
"""Of the simulation, in the logarithm: how unequal outputs are, how passes of one prompt scatter,
and how the machine drifts from one prompt to the next. As two workers on two cores show them."""


def main() -> None:
    """Prints the share of runs, and of comparisons, that were called faster or slower."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--simulated", type=int, default=200)
    parser.add_argument("--real", type=int, default=0)
    parser.add_argument("--target", default=RunConfig.target)
    parser.add_argument("--workloads", default="humaneval,creative")
    parser.add_argument("--prompts", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--names", type=int, default=3)
    options = parser.parse_args()
    workloads = options.workloads.split(",")
    num_compared = options.names * len(workloads)
    if options.simulated:
        generator = np.random.default_rng(0)
        runs = [
            simulate(generator, num_compared, options.prompts, options.rounds)
            for _ in range(options.simulated)
        ]
        print(f"simulated: {describe(runs)}")
    if options.real:
        config = RunConfig(
            target=options.target,
            methods=(BASELINE,),
            workloads=tuple(workloads),
            prompts=options.prompts,
            max_new_tokens=options.tokens,
            rounds=options.rounds,
        )
        print(f"real: {describe(measure(config, options.names, options.real))}")


def simulate(
    generator: np.random.Generator, num_compared: int, num_prompts: int, num_rounds: int
) -> list[Estimate]:
    """The verdicts of a run whose methods all are the baseline."""
    found = [_simulated_times(generator, num_prompts, num_rounds) for _ in range(num_compared)]
    return judge_together([speed_up(pairs_C4) for pairs_C4 in found])


def _simulated_times(generator: np.random.Generator, num_prompts: int, num_rounds: int) -> Floats:
    tokens_C = generator.lognormal(3.5, _LENGTHS, num_prompts).round() + 1
    drift_C = np.cumsum(generator.normal(0, _DRIFT, num_prompts))
    noise_2RC = generator.standard_t(4, (2, num_rounds, num_prompts)) * _ROUND_NOISE / np.sqrt(2)
    seconds_2C = 0.02 * tokens_C * np.median(np.exp(noise_2RC + drift_C), axis=1)
    return np.stack([seconds_2C[0], tokens_C, seconds_2C[1], tokens_C], axis=1)


def measure(config: RunConfig, num_names: int, num_runs: int) -> list[list[Estimate]]:
    """The verdicts of runs of the baseline beside itself, one after the other in this process."""
    hush()
    target = load_target(config.target, dtype=config.dtype)
    vanilla = registry.load_method(BASELINE)
    names = [BASELINE, *(f"{BASELINE}-{i}" for i in range(1, num_names + 1))]
    methods = {name: vanilla(target, config.method_config(BASELINE, vanilla)) for name in names}
    bench = Bench(config, target, methods)
    bench.warm_up()
    workloads = load_workloads(config.workloads, config.prompts)
    shards = [shard for w in workloads for shard in plan_shards(w, config.batch_size)]
    runs = []
    for number in range(1, num_runs + 1):
        run = _run([record for shard in shards for record in bench.measure(shard)])
        pairs = [pair_times(run, w.name, name) for w in workloads for name in names[1:]]
        runs.append(judge_together([speed_up(pairs_C4) for pairs_C4 in pairs]))
        print(
            f"  run {number}: " + ", ".join(f"{e.value:.3f} {e.verdict}" for e in runs[-1]),
            flush=True,
        )
    return runs


def _run(records: Sequence[Record]) -> Run:
    run = Run(Path(), {})
    run.references.extend(record for record in records if isinstance(record, ReferenceRecord))
    run.timings.extend(record for record in records if isinstance(record, TimingRecord))
    return run


def describe(runs: Sequence[Sequence[Estimate]]) -> str:
    """How many runs said anything, how many comparisons would have if judged alone, and how far
    apart they were."""
    every = [estimate for run in runs for estimate in run]
    loud = sum(any(e.verdict != "inconclusive" for e in run) for run in runs)
    alone = sum(e.p_value <= 0.05 for e in every)
    interval = binomtest(loud, len(runs)).proportion_ci()
    return (
        f"{loud} of {len(runs)} runs called something faster or slower, {loud / len(runs):.1%} "
        f"[{interval.low:.1%}, {interval.high:.1%}]; judged alone, {alone} of {len(every)} "
        f"comparisons, {alone / len(every):.1%}; ratios from {min(e.value for e in every):.3f} to "
        f"{max(e.value for e in every):.3f}"
    )


if __name__ == "__main__":
    main()
