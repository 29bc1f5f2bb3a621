"""What a forward costs: arithmetic and memory traffic of a decoder-only model, counted from its
config.

A multiplication with an addition is 2 FLOPs. Counted are the matrix products, attention over every
slot (as the kernels compute it, the masked ones too) and the head; norms, activations and rotary
embeddings, well under 1 % of a model of any size, are not. Traffic is weights, once for all rows,
and keys and values, for each row; activations are taken to stay on the chip.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple


class Cost(NamedTuple):
    """Arithmetic and memory traffic of one or more forwards."""

    flops: float = 0.0
    weight_bytes: float = 0.0
    kv_bytes: float = 0.0

    @property
    def num_bytes(self) -> float:
        """All traffic."""
        return self.weight_bytes + self.kv_bytes

    @property
    def intensity(self) -> float:
        """FLOPs for each byte of traffic; 0 where nothing is done."""
        return self.flops / self.num_bytes if self.num_bytes else 0.0

    def plus(self, other: "Cost") -> "Cost":
        """Both, one after the other."""
        return Cost(*(a + b for a, b in zip(self, other, strict=True)))

    def times(self, count: float) -> "Cost":
        """This, so many times."""
        return Cost(*(count * part for part in self))


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What a decoder-only model's costs depend on.

    Args:
        hidden, num_layers, num_heads, num_kv_heads, head_dim, vocab: as everywhere.
        inner: of a dense feed-forward; 0 where there is none.
        gated: whether a feed-forward has three matrices, or two.
        tied: whether the head is the embedding.
        num_experts, num_active, expert_inner: of a mixture of experts: how many, how many each
            token goes through, and the width of one. 0 for a dense model.
        shared_inner: of the experts that every token goes through, together.
        num_dense_layers: of a mixture of experts, the layers that have none.
        window: of sliding attention, in the layers that are not full.
        num_windowed: how many those are.
        width_in: width that the attention's projections read, where it is not ``hidden``.
    """

    hidden: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab: int
    inner: int
    gated: bool = True
    tied: bool = False
    num_experts: int = 0
    num_active: int = 0
    expert_inner: int = 0
    shared_inner: int = 0
    num_dense_layers: int = 0
    window: int = 0
    num_windowed: int = 0
    width_in: int = 0

    @property
    def head_weights(self) -> int:
        """Of the language-model head."""
        return self.vocab * self.hidden

    @property
    def attention_weights(self) -> int:
        """Of one layer's projections."""
        queries, keys = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        return (self.width_in or self.hidden) * (queries + 2 * keys) + queries * self.hidden

    @property
    def num_sparse_layers(self) -> int:
        """Layers with a mixture of experts."""
        return self.num_layers - self.num_dense_layers if self.num_experts else 0

    @property
    def num_weights(self) -> int:
        """All matrices, the embedding included."""
        embedding = 0 if self.tied else self.head_weights
        return round(self.layer_weights(self.num_experts) + self.head_weights + embedding)

    @property
    def num_active_weights(self) -> int:
        """The matrices that one token is multiplied with."""
        return round(self.layer_weights(self.num_active) + self.head_weights)

    def weights_read(self, num_tokens: int) -> float:
        """Weights of the layers that a forward over so many tokens reads. Which experts tokens go
        through is taken to be uniform and independent, so the more tokens, the more experts."""
        share = self.num_active / self.num_experts if self.num_experts else 0.0
        return self.layer_weights(self.num_experts * (1 - (1 - share) ** num_tokens))

    def kv_bytes(self, context: int, width: int) -> int:
        """Keys and values of one row with so many tokens, each number ``width`` bytes wide."""
        return 2 * self.num_kv_heads * self.head_dim * self.slots(context) * width

    def part(self, num_layers: int) -> "Shape":
        """Some of its layers, of each kind as many as their share."""
        share = num_layers / self.num_layers
        return replace(
            self,
            num_layers=num_layers,
            num_windowed=round(share * self.num_windowed),
            num_dense_layers=round(share * self.num_dense_layers),
        )

    def slots(self, context: int) -> int:
        """Slots that a query sees, summed over the layers."""
        windowed = min(context, self.window) if self.num_windowed else 0
        return (self.num_layers - self.num_windowed) * context + self.num_windowed * windowed

    def layer_weights(self, num_experts: float) -> float:
        """Weights of all layers, with so many experts in each."""
        matrices = 3 if self.gated else 2
        sparse = matrices * (num_experts * self.expert_inner + self.shared_inner)
        router = self.num_experts
        return (
            self.num_layers * self.attention_weights
            + (self.num_layers - self.num_sparse_layers) * matrices * self.hidden * self.inner
            + self.num_sparse_layers * self.hidden * (sparse + router)
        )


def shape_of(config: Mapping[str, Any]) -> Shape:
    """The shape that a config of transformers describes, given as in ``config.json``.

    Raises:
        ValueError: a field is missing, or its layers are of a kind that is not counted here.
    """
    config = config.get("text_config") or config
    get = _Fields(config)
    kinds = set(config.get("layer_types") or ())
    if unknown := sorted(kinds - {"full_attention", "sliding_attention"}):
        raise ValueError(f"layers of kind {', '.join(unknown)} are not counted; valid: attention")
    if config.get("kv_lora_rank"):
        raise ValueError("latent attention is not counted; valid: grouped or multi-head attention")
    hidden = get.number("hidden_size", "n_embd")
    num_layers = get.number("num_hidden_layers", "n_layer")
    num_heads = get.number("num_attention_heads", "n_head")
    num_experts = get.number("num_experts", "num_local_experts", "n_routed_experts", default=0)
    inner = get.number("intermediate_size", "n_inner", default=4 * hidden)
    expert_inner = get.number("moe_intermediate_size", default=inner) if num_experts else 0
    windowed = list(config.get("layer_types") or ()).count("sliding_attention")
    if not kinds and config.get("sliding_window") and config.get("use_sliding_window", True):
        windowed = num_layers
    return Shape(
        hidden=hidden,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=get.number("num_key_value_heads", default=num_heads),
        head_dim=get.number("head_dim", default=hidden // num_heads),
        vocab=get.number("vocab_size"),
        inner=inner,
        gated=config.get("model_type") not in _NOT_GATED,
        tied=bool(config.get("tie_word_embeddings", False)),
        num_experts=num_experts,
        num_active=get.number("num_experts_per_tok") if num_experts else 0,
        expert_inner=expert_inner,
        shared_inner=get.number("shared_expert_intermediate_size", default=0)
        or get.number("n_shared_experts", default=0) * expert_inner,
        num_dense_layers=_num_dense_layers(config, num_layers) if num_experts else 0,
        window=get.number("sliding_window", default=0) if windowed else 0,
        num_windowed=windowed,
    )


_NOT_GATED = {"gpt2", "gpt_neox", "gptj", "opt", "phi", "falcon", "starcoder2", "gpt_bigcode"}


class _Fields:
    """Reads numbers from a config."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.config = config

    def number(self, *names: str, default: int | None = None) -> int:
        """The first of these fields that is set."""
        for name in names:
            value = self.config.get(name)
            if value is not None:
                return int(value)
        if default is None:
            raise ValueError(f"the config has no {' or '.join(names)}")
        return default


def _num_dense_layers(config: Mapping[str, Any], num_layers: int) -> int:
    dense = set(config.get("mlp_only_layers") or ())
    dense |= set(range(int(config.get("first_k_dense_replace") or 0)))
    every = int(config.get("decoder_sparse_step") or 1)
    return len(dense | {layer for layer in range(num_layers) if (layer + 1) % every})


def forward_cost(
    shape: Shape,
    rows: int,
    tokens: int = 1,
    context: int = 0,
    *,
    width: int = 2,
    num_logits: int | None = None,
) -> Cost:
    """What one forward costs.

    Args:
        shape: of the model; with fewer layers for a part of one.
        rows: sequences.
        tokens: nodes of each row.
        context: tokens of each row in the cache before them.
        width: bytes of a number.
        num_logits: nodes of each row whose logits are computed; None for all.
    """
    num_tokens = rows * tokens
    num_logits = tokens if num_logits is None else num_logits
    slots = context + tokens
    head = shape.head_weights if num_logits else 0
    attention = 4 * shape.num_heads * shape.head_dim * shape.slots(slots) * num_tokens
    products = 2 * shape.layer_weights(shape.num_active) * num_tokens
    return Cost(
        products + attention + 2 * head * rows * num_logits,
        width * ((shape.weights_read(num_tokens) if num_tokens else 0) + head),
        rows * shape.kv_bytes(slots, width) if num_tokens else 0,
    )


class Memory(NamedTuple):
    """Bytes that have to be held."""

    weights: int
    kv: int

    @property
    def total(self) -> int:
        """Both."""
        return self.weights + self.kv


def memory(shape: Shape, rows: int, context: int, width: int = 2) -> Memory:
    """A model's weights, and the keys and values of so many rows."""
    return Memory(shape.num_weights * width, rows * shape.kv_bytes(context, width))
