"""Made-up runs of a sweep, with answers that can be worked out by hand."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from specbench.records import Record, Run
from specbench.sweep.config import Setting
from tests.made_runs import INFO, made_run, output, reference, timing

NUM_BATCHES = 6
GAINS: Mapping[int, Mapping[str, float]] = {
    1: {"echo@d1": 1.2, "echo@d2": 1.5, "echo@d3": 1.4},
    2: {"echo@d1": 1.3, "echo@d2": 1.1, "echo@d3": 0.9},
    4: {"echo@d1": 1.02, "echo@d2": 0.8, "echo@d3": 0.7},
    8: {"echo@d1": 0.9, "echo@d2": 0.7, "echo@d3": 0.6},
}
"""By batch size and name, the speed-up."""
NOISY = {(4, "echo@d1")}
"""Where it is not proven."""


def batch_run(
    batch: int,
    gains: Mapping[str, float],
    *,
    noisy: Sequence[str] = (),
    num_batches: int = NUM_BATCHES,
    lossless: str = "exact",
    workload: str = "code",
) -> Run:
    """A run of a batch size. A request has 4 tokens: vanilla takes 4 steps of a batch for them, a
    method 2, in 4 + i seconds over its speed-up in batch i."""
    records: list[Record] = []
    for i in range(num_batches):
        names = [f"{workload}-{i}-{row}" for row in range(batch)]
        records += [reference(name, workload=workload) for name in names]
        records += [
            output("vanilla", name, *[(0, 0, 0, 1)] * 4, workload=workload) for name in names
        ]
        tokens = 4 * batch
        records.append(timing("vanilla", names, 4 + i, workload=workload, num_tokens=tokens))
        for method, gain in gains.items():
            setting = Setting.read(method)
            depth = setting.depth if setting else 0
            step = (depth, depth, 1, 2)
            records += [
                output(method, name, step, step, workload=workload, lossless=lossless)
                for name in names
            ]
            own = gain * math.exp(0.2 * (-1) ** i if method in noisy else 0.0)
            seconds = (4 + i) / own
            records.append(
                timing(method, names, seconds, workload=workload, num_tokens=tokens, num_forwards=2)
            )
    about = {name: {"label": "", "extra_bytes": 0} for name in gains}
    return made_run(
        *records,
        folder=str(Path("sweep") / f"batch-{batch}"),
        methods={"vanilla": INFO["methods"]["vanilla"], **about},
    )


def made_sweep(gains: Mapping[int, Mapping[str, float]] = GAINS) -> dict[int, Run]:
    """The runs of a sweep, by batch size."""
    return {
        batch: batch_run(batch, here, noisy=[name for name in here if (batch, name) in NOISY])
        for batch, here in gains.items()
    }
