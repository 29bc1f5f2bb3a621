"""What is recommended, in the settings of inference engines, as far as these can say it. An
engine's own crossover lies where its kernels put it: these are where to begin."""

import json
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from specbench.sweep.choices import Fixed, Span, best_fixed, recommend, spans
from specbench.sweep.points import Point

_ALL_BATCHES = 4096
"""Beyond any batch size that vLLM schedules by default: the end of the range that is off."""


class Advice(NamedTuple):
    """An engine, what to set, and what of the recommendation that leaves unsaid."""

    engine: str
    setting: str
    unsaid: str


def advise(points: Sequence[Point]) -> list[Advice]:
    """Settings for one method; none where it pays nowhere.

    Args:
        points: the method's on one workload.
    """
    choices = recommend(points)
    if not any(choices.values()):
        return []
    fixed = best_fixed(points)
    return [
        _vllm(choices),
        *([_old_vllm(fixed), _sglang(fixed)] if fixed else []),
        *([_transformers(choices)] if 1 in choices else []),
    ]


def _vllm(choices: Mapping[int, Point | None]) -> Advice:
    ranges = spans(choices)
    largest = ranges[-1]
    if largest.depth:
        ranges = [*ranges, Span(largest.last + 1, _ALL_BATCHES, 0)]
    else:
        ranges = [*ranges[:-1], largest._replace(last=_ALL_BATCHES)]
    config = {
        "num_speculative_tokens": max(span.depth for span in ranges),
        "num_speculative_tokens_per_batch_size": [list(span) for span in ranges],
    }
    return Advice(
        "vLLM with dynamic speculative decoding",
        f"--speculative-config '{json.dumps(config)}'",
        "beside the drafter's own `method` and `model`; it drafts chains, so the size of a tree is "
        "not said; not with data parallelism; off beyond the largest batch size with a verdict",
    )


def _old_vllm(fixed: Fixed) -> Advice:
    return Advice(
        "vLLM before 0.10",
        f"--num-speculative-tokens {_depth(fixed.point)} "
        f"--speculative-disable-by-batch-size {fixed.last + 1}",
        "one depth for all loads; it goes by the running queue, not by the batch of a step, and "
        "later versions took the setting without heeding it",
    )


def _sglang(fixed: Fixed) -> Advice:
    depth, topk, unsaid = _depth(fixed.point), " --speculative-eagle-topk 1", ""
    if fixed.point.is_tree:
        topk = ""
        unsaid = "a tree also takes --speculative-eagle-topk, the children of a node; "
    return Advice(
        "SGLang",
        f"--speculative-num-steps {depth}{topk} "
        f"--speculative-num-draft-tokens {1 + fixed.point.most_nodes}",
        f"beside the drafter's own flags; {unsaid}it cannot switch off by batch size: "
        f"--max-running-requests {fixed.last} keeps the batch where it pays, and what is beyond "
        "takes a server without speculation",
    )


def _transformers(choices: Mapping[int, Point | None]) -> Advice:
    point = choices.get(1)
    if point is None:
        setting = "no assistant_model and no prompt_lookup_num_tokens"
    else:
        depth = _depth(point)
        setting = (
            f"assistant_model.generation_config.update(num_assistant_tokens={depth}, "
            'num_assistant_tokens_schedule="constant", assistant_confidence_threshold=0.0), or '
            f"prompt_lookup_num_tokens={depth} for n-grams"
        )
    return Advice(
        "transformers",
        setting,
        "its assisted generation takes batch size 1 only: for more rows the caller leaves the "
        "assistant out; it drafts chains",
    )


def _depth(point: Point) -> int:
    assert point.setting is not None, "what is recommended is no baseline"
    return point.setting.depth
