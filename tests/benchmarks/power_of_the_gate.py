"""How often `specbench check` finds a planted regression and lets an unchanged method pass, on
simulated runs of two workloads and two rounds, by the number of prompts and the noise of a pass.

    OMP_NUM_THREADS=1 python -m tests.benchmarks.power_of_the_gate [--repeats N]
"""

import argparse
from collections import Counter
from typing import Any

from specbench.check import check
from specbench.judge import Verdict
from tests.made_runs import GREEDY, noisy_run

SAMPLED = {**GREEDY, "temperature": 0.8, "rule": "rejection"}
LESS_TAU = 0.46
"""The chance of a draft token that makes tau smaller by 0.1."""
PLANTED: dict[str, dict[str, Any]] = {
    "unchanged": {},
    "10 % slower": {"slower": 1 / 0.9},
    "tau 0.1 lower, greedy": {"chance": LESS_TAU},
    "tau 0.1 lower, T=0.8": {"chance": LESS_TAU, "decoding": SAMPLED},
}


def main() -> None:
    """Prints the shares of PASS, FAIL and INCONCLUSIVE."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=100)
    repeats = parser.parse_args().repeats
    for num_prompts in (12, 25, 50):
        for noise in (0.03, 0.05):
            print(f"{num_prompts} prompts, {noise:.0%} noise")
            for name, changes in PLANTED.items():
                found = outcomes(repeats, changes, num_prompts=num_prompts, noise=noise)
                shares = (f"{verdict} {found[verdict] / repeats:.0%}" for verdict in Verdict)
                print(f"  {name}: {', '.join(shares)}")


def outcomes(repeats: int, changes: dict[str, Any], **settings: Any) -> Counter[Verdict]:
    """The verdicts on a method with something planted, against what it was. What is drawn at T>0
    is drawn anew."""
    settings |= {"decoding": changes.get("decoding", GREEDY)}
    found: Counter[Verdict] = Counter()
    for i in range(repeats):
        drawn = {"draft_seed": i + 1} if "decoding" in changes else {}
        run = noisy_run(2 * i + 1, **(settings | changes | drawn))
        found[check(noisy_run(2 * i, **settings), run).verdict] += 1
    return found


if __name__ == "__main__":
    main()
