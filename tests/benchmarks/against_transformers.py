"""Vanilla against transformers' generate, n-gram against its prompt lookup, a step of 8 nodes
against one, and the floor.

    OMP_NUM_THREADS=1 python -m tests.benchmarks.against_transformers [--dtype D] [--prompts N]
    [--tokens N]
"""

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch
import transformers
from transformers import AutoModelForCausalLM

from specbench import registry
from specbench.decode import Decoder
from specbench.depth import Fixed
from specbench.method import Method, Request
from specbench.profiling import measure_bandwidth
from specbench.sampling import Sampling
from specbench.target import DTYPES, Target, load_target
from specbench.target.loading import DEFAULT_TARGET, resolve
from specbench.tree import Tree
from specbench.workloads import build_prompt, load_workload

BASELINE_WORKLOADS = ("humaneval", "creative")
COPY_WORKLOADS = ("code_edit", "extraction", "summarise")
LOOKUP_TOKENS = (3, 5, 10)
LOOKUP_NGRAMS = (2, 3)
WIDTHS = (1, 2, 4, 8, 16)

Contestant = Callable[[tuple[int, ...]], list[int]]


def main() -> None:
    """Prints every ratio as median [lowest, highest] over the prompts."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="bfloat16")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--skip-lookup", action="store_true")
    options = parser.parse_args()
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    target = load_target(dtype=options.dtype)
    model = AutoModelForCausalLM.from_pretrained(
        resolve(DEFAULT_TARGET), dtype=DTYPES[options.dtype]
    ).eval()
    print(f"{options.dtype}, {torch.get_num_threads()} threads, torch {torch.__version__}")
    vanilla = _method(target, "vanilla")
    prompts = _prompts(target, BASELINE_WORKLOADS, options.prompts // len(BASELINE_WORKLOADS))
    contest: dict[str, Contestant] = {
        "generate": partial(generate, model, num_tokens=options.tokens),
        "vanilla": partial(_decode, target, vanilla, num_tokens=options.tokens),
    }
    _report("generate", contest, prompts)
    _steps(target)
    if not options.skip_lookup:
        ngram = _method(target, "ngram")
        contest = {
            f"prompt lookup {lookup}/{size}": partial(
                generate, model, num_tokens=options.tokens, lookup=lookup, ngram=size
            )
            for lookup in LOOKUP_TOKENS
            for size in LOOKUP_NGRAMS
        }
        contest["vanilla"] = partial(_decode, target, vanilla, num_tokens=options.tokens)
        contest["ngram"] = partial(_decode, target, ngram, num_tokens=options.tokens)
        for workload in COPY_WORKLOADS:
            print(workload)
            _report(None, contest, _prompts(target, (workload,), options.prompts // 2))


def _method(target: Target, name: str) -> Method:
    cls = registry.load_method(name)
    return cls(target, registry.make_config(name, cls, {}))


def _prompts(target: Target, workloads: Sequence[str], num: int) -> list[tuple[int, ...]]:
    assert target.tokenizer is not None
    found = []
    for name in workloads:
        workload = load_workload(name, num)
        for prompt in workload.prompts:
            found.append(build_prompt(target.tokenizer, prompt.turns[:1], (), workload.instruction))
    return found


def _decode(target: Target, method: Method, prompt: tuple[int, ...], num_tokens: int) -> list[int]:
    controller = Fixed(method.config.depth, method.config.max_nodes)
    decoder = Decoder(target, method, controller, Sampling())
    return decoder.run([Request(id="x", prompt=prompt, max_new_tokens=num_tokens)])[0].output


def generate(
    model: transformers.PreTrainedModel,
    prompt: tuple[int, ...],
    num_tokens: int,
    lookup: int | None = None,
    ngram: int | None = None,
) -> list[int]:
    """The output of transformers' greedy generate, with prompt lookup if ``lookup`` is given."""
    ids = torch.tensor([prompt])
    options = {"prompt_lookup_num_tokens": lookup, "max_matching_ngram_size": ngram}
    with torch.inference_mode():
        out = model.generate(  # type: ignore[operator]
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=num_tokens,
            do_sample=False,
            **{k: v for k, v in options.items() if v is not None},
        )
    return out[0, len(prompt) :].tolist()  # type: ignore[no-any-return]


def _report(
    base: str | None,
    contest: dict[str, Contestant],
    prompts: Sequence[tuple[int, ...]],
) -> None:
    """Seconds per token, every contestant in turn on each prompt, in an order that rotates."""
    per_token: dict[str, list[float]] = {name: [] for name in contest}
    outputs: dict[str, list[list[int]]] = {name: [] for name in contest}
    names = list(contest)
    for run in contest.values():
        run(prompts[0])
    for i, prompt in enumerate(prompts):
        turn = i % len(names)
        for name in names[turn:] + names[:turn]:
            begin = time.perf_counter()
            output = contest[name](prompt)
            per_token[name].append((time.perf_counter() - begin) / len(output))
            outputs[name].append(output)
    totals = {name: sum(times) for name, times in per_token.items()}
    base = base or min((n for n in names if n.startswith("prompt lookup")), key=totals.__getitem__)
    for name, times in per_token.items():
        ratios = [b / t for b, t in zip(per_token[base], times, strict=True)]
        equal = sum(a == b for a, b in zip(outputs[base], outputs[name], strict=True))
        print(
            f"  {name:20} {statistics.mean(times) * 1e3:6.1f} ms/token, prefill included; "
            f"{_spread(ratios)} times {base}; equal output {equal}/{len(prompts)}"
        )


def _steps(target: Target) -> None:
    """A target forward by its number of nodes, 256 tokens cached; and the floor of one node."""
    cache = target.new_cache(1, 512)
    cache.add_row()
    target.prefill(range(100, 356), cache, 0)
    times: dict[int, list[float]] = {width: [] for width in WIDTHS}
    for _ in range(40):
        for width in WIDTHS:
            begin = time.perf_counter()
            target.forward(torch.full((1, width), 7), [Tree.chain(width - 1)], cache)
            times[width].append(time.perf_counter() - begin)
    for width in WIDTHS[1:]:
        ratios = [t / one for t, one in zip(times[width], times[1], strict=True)]
        print(f"  a step of {width:2} nodes: {_spread(ratios)} times a step of one")
    one_s, bandwidth = statistics.median(times[1]), measure_bandwidth(target.device)
    floor_s = target.num_weight_bytes / bandwidth
    print(
        f"  one node {one_s * 1e3:.1f} ms; floor {floor_s * 1e3:.1f} ms "
        f"({target.num_weight_bytes / 2**20:.0f} MiB of weights, read at "
        f"{bandwidth / 1e9:.1f} GB/s); {one_s / floor_s:.2f} times the floor"
    )


def _spread(ratios: Sequence[float]) -> str:
    return f"{statistics.median(ratios):.2f} [{min(ratios):.2f}, {max(ratios):.2f}]"


if __name__ == "__main__":
    main()
