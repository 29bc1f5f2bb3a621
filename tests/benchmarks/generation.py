"""Tokens per second of a trainer's data generation, by batch size.

OMP_NUM_THREADS=1 python -m tests.benchmarks.generation
"""

import argparse
from collections.abc import Sequence

from specbench.method import Request
from specbench.sampling import Sampling, request_key
from specbench.target import load_target
from specbench.training.corpus import DRAWN, GREEDY, Writer
from specbench.workloads import build_prompt, load_workload


def main() -> None:
    """Prints speed and its ratio to that of the first batch size, greedily and drawn."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 16, 32, 64])
    parser.add_argument("--waves", type=int, default=4, help="answers, in batches")
    parser.add_argument("--tokens", type=int, default=128, help="of an answer")
    options = parser.parse_args()
    target = load_target()
    assert target.tokenizer is not None
    workloads = [load_workload(name) for name in ("humaneval", "creative", "chat")]
    prompts = [
        build_prompt(target.tokenizer, prompt.turns[:1], (), workload.instruction)
        for prompts in zip(*(workload.prompts for workload in workloads), strict=False)
        for workload, prompt in zip(workloads, prompts, strict=True)
    ]
    _measure(Writer(target, 8), prompts[:8], 16, GREEDY)
    for sampling in (GREEDY, DRAWN):
        first = 0.0
        for size in options.batch_sizes:
            writer = Writer(target, size)
            num_answers = max(8, options.waves * size)
            asked = [prompts[i % len(prompts)] for i in range(num_answers)]
            speed = _measure(writer, asked, options.tokens, sampling)
            first = first or speed
            print(
                f"T={sampling.temperature}, batch {size}: {speed:.0f} tokens/s, "
                f"{speed / first:.2f}x, {writer.target_share:.0%} of the time in the target, "
                f"{writer.prefill_share:.0%} in prompts",
                flush=True,
            )


def _measure(
    writer: Writer, prompts: Sequence[tuple[int, ...]], num_tokens: int, sampling: Sampling
) -> float:
    requests = [
        Request(id=f"{i}", prompt=prompt, max_new_tokens=num_tokens, key=request_key(0, f"{i}"))
        for i, prompt in enumerate(prompts)
    ]
    writer.answers(requests, sampling)
    return writer.speed.tokens / writer.speed.seconds


if __name__ == "__main__":
    main()
