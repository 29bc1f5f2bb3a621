"""Checks a greedy float32 run's references against transformers' generate, prompt by prompt.

OMP_NUM_THREADS=1 python -m tests.benchmarks.equals_generate RUN
"""

import argparse
from pathlib import Path

import transformers
from transformers import AutoModelForCausalLM

from specbench.records import read_run
from specbench.target import DTYPES
from specbench.target.loading import load_tokenizer, resolve
from specbench.workloads import build_prompt, load_workload
from tests.benchmarks.against_transformers import generate


def main() -> None:
    """Prints how many outputs are equal, and where the others first differ."""
    parser = argparse.ArgumentParser()
    parser.add_argument("run", type=Path)
    run = read_run(parser.parse_args().run)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    settings = run.info["settings"]
    folder = resolve(settings["target"])
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=DTYPES[run.info["target"]["dtype"]]
    ).eval()
    tokenizer = load_tokenizer(folder)
    found = {(record.workload, record.request): record for record in run.references}
    for name in settings["workloads"]:
        workload = load_workload(name, settings["prompts"])
        equal = 0
        for prompt in workload.prompts:
            reference = found[workload.name, prompt.id].tokens
            ids = build_prompt(tokenizer, prompt.turns[:1], (), workload.instruction)
            output = generate(model, ids, num_tokens=settings["max_new_tokens"])
            equal += output == reference
            if output != reference:
                pairs = zip(output, reference, strict=False)
                first = next((i for i, (a, b) in enumerate(pairs) if a != b), "the end")
                print(f"  {prompt.id} differs at {first}")
        print(f"{workload.name}: {equal} of {len(workload.prompts)} outputs equal generate's")


if __name__ == "__main__":
    main()
