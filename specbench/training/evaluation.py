"""How well a drafter does on the workloads, in a minute: while it is being trained."""

from specbench.decode import Decoder
from specbench.depth import Fixed
from specbench.method import Method, Request
from specbench.sampling import Sampling
from specbench.target import Target
from specbench.workloads import build_prompt, list_workloads, load_workload

_PROMPTS, _TOKENS = 2, 48


def held_out_tau(
    target: Target,
    method: Method,
    num_prompts: int = _PROMPTS,
    num_tokens: int = _TOKENS,
) -> dict[str, float]:
    """Committed tokens per step by kind of workload, greedily, on a few prompts of each that fit
    into the target's context."""
    assert target.tokenizer is not None
    steps: dict[str, list[tuple[int, int]]] = {}
    for card in list_workloads():
        workload = load_workload(card.name, num_prompts)
        for prompt in workload.prompts:
            ids = build_prompt(target.tokenizer, prompt.turns[:1], (), workload.instruction)
            if len(ids) + num_tokens > target.max_context:
                continue
            controller = Fixed(method.config.depth, method.config.max_nodes)
            request = Request(id=prompt.id, prompt=ids, max_new_tokens=num_tokens)
            (row,) = Decoder(target, method, controller, Sampling()).run([request])
            steps.setdefault(card.kind, []).append((len(row.output), len(row.steps)))
    return {
        kind: round(sum(tokens for tokens, _ in found) / sum(count for _, count in found), 3)
        for kind, found in steps.items()
    }
