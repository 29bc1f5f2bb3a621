"""A trained exit: an adapter that turns the hidden states after an early layer into those that the
target's head reads.

Kangaroo's adapter (Liu et al. 2024, section 3.1) is a norm and an attention with its residual,
without a feed-forward; then a final norm and the target's head. Ours may be a full decoder layer.
It has one layer, so its keys and values depend only on the target's own hidden states: those of an
accepted token are right as they were drafted. Shapes: B rows, N nodes, T tokens, W nodes not seen
yet, h hidden, D the draft vocabulary.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn
from transformers import LlamaConfig

from specbench.learned.checkpoint import Checkpoint, fill, load_checkpoint, save_checkpoint
from specbench.learned.layers import (
    DraftAttention,
    GatedMLP,
    Nodes,
    RMSNorm,
    Rotary,
    check_layer,
    open_nodes,
    prepare,
)
from specbench.learned.vocabulary import DraftVocabulary
from specbench.messages import in_one_line
from specbench.method import Drawer, pad_rows
from specbench.target import KVCache, Target
from specbench.tree import Tree

KIND = "exit_adapter"


class AdapterLayer(nn.Module):
    """The adapter's decoder layer; without a feed-forward unless ``config.full_layer``."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = DraftAttention(config, qk_norm=getattr(config, "qk_norm", False))
        self.full: bool = getattr(config, "full_layer", False)
        if self.full:
            self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
            self.mlp = GatedMLP(config)

    def feed_forward(self, hidden_BNh: torch.Tensor) -> torch.Tensor:
        """What follows the attention."""
        if not self.full:
            return hidden_BNh
        out: torch.Tensor = hidden_BNh + self.mlp(self.post_attention_layernorm(hidden_BNh))
        return out


class ExitAdapter(nn.Module):
    """One layer and a norm, with the tensors' names of Kangaroo's checkpoints.

    Args:
        config: a Llama-like config with ``exit_layer``: how many layers of the target it stands
            behind; and, ours, ``full_layer`` and ``qk_norm``.
        vocabulary: what it can draft; None for all of the target's tokens.
    """

    def __init__(self, config: LlamaConfig, vocabulary: DraftVocabulary | None = None) -> None:
        super().__init__()
        self.config, self.vocabulary = config, vocabulary
        self.exit_layer: int = getattr(config, "exit_layer")  # noqa: B009 - not a field of Llama's
        self.layers = nn.ModuleList([AdapterLayer(config)])
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rotary = Rotary(config)

    @property
    def layer(self) -> Any:
        """The one layer."""
        return self.layers[0]

    def place(self, device: torch.device, dtype: torch.dtype) -> "ExitAdapter":
        """Moves the weights; the rotary frequencies stay in float32."""
        self.layers.to(device, dtype)
        self.norm.to(device, dtype)
        self.rotary.to(device)
        return self

    def forward(self, hidden_BNh: torch.Tensor, nodes: Nodes, cache: KVCache) -> torch.Tensor:
        """Hidden states [B, N, h] for the head, of nodes that were opened in the cache."""
        rotations = self.rotary(hidden_BNh, nodes.positions_BN)
        normed_BNh = self.layer.input_layernorm(hidden_BNh)
        mixed_BNh = self.layer.self_attn(normed_BNh, rotations, nodes.mask_B1NS, cache)
        out: torch.Tensor = self.norm(self.layer.feed_forward(hidden_BNh + mixed_BNh))
        return out

    def remember(
        self, hidden_BNh: torch.Tensor, positions_BN: torch.Tensor, cache: KVCache
    ) -> None:
        """Only writes the keys and values of nodes that were opened in the cache."""
        attention: DraftAttention = self.layer.self_attn
        rotations = self.rotary(hidden_BNh, positions_BN)
        _, key, value = attention.project(self.layer.input_layernorm(hidden_BNh), rotations)
        cache.update(key, value, attention.layer)

    def whole(self, hidden_BTh: torch.Tensor) -> torch.Tensor:
        """Hidden states [B, T, h] for the head, over whole sequences from position 0 on."""
        positions_1T = torch.arange(hidden_BTh.shape[1], device=hidden_BTh.device)[None]
        rotations = self.rotary(hidden_BTh, positions_1T)
        attention: DraftAttention = self.layer.self_attn
        query, key, value = attention.project(self.layer.input_layernorm(hidden_BTh), rotations)
        mixed_BHTD = F.scaled_dot_product_attention(
            query, key, value, is_causal=True, enable_gqa=True
        )
        mixed_BTh = attention.mix(mixed_BHTD.transpose(1, 2))
        out: torch.Tensor = self.norm(self.layer.feed_forward(hidden_BTh + mixed_BTh))
        return out


def adapter_config(target: Target, exit_layer: int, full_layer: bool) -> LlamaConfig:
    """An adapter's config for a target: the shapes of one of its layers.

    Raises:
        ValueError: the target has no such exit.
    """
    source, attention = target.config, getattr(target.layers[-1], "self_attn", None)
    heads = source.num_attention_heads
    rope = getattr(source, "rope_parameters", None) or {}
    if "rope_type" not in rope or "partial_rotary_factor" in rope:
        rope = {"rope_type": "default", "rope_theta": 10000.0}
    settings: dict[str, Any] = {
        "hidden_size": source.hidden_size,
        "intermediate_size": getattr(source, "intermediate_size", None) or 4 * source.hidden_size,
        "num_hidden_layers": 1,
        "num_attention_heads": heads,
        "num_key_value_heads": getattr(source, "num_key_value_heads", None) or heads,
        "head_dim": getattr(source, "head_dim", None) or source.hidden_size // heads,
        "vocab_size": target.vocab_size,
        "max_position_embeddings": target.max_context,
        "rms_norm_eps": getattr(source, "rms_norm_eps", 1e-6),
        "rope_parameters": dict(rope),
        "attention_bias": getattr(getattr(attention, "q_proj", None), "bias", None) is not None,
        "exit_layer": check_exit(target, exit_layer),
        "full_layer": full_layer,
        "qk_norm": hasattr(attention, "q_norm"),
        "num_target_layers": target.num_layers,
    }
    return LlamaConfig(**settings)


def check_exit(target: Target, exit_layer: int) -> int:
    """The exit layer.

    Raises:
        ValueError: the target has no such exit.
    """
    if not 1 <= exit_layer < target.num_layers:
        raise ValueError(
            f"exit_layer {exit_layer} is out of range; valid for this target: "
            f"1..{target.num_layers - 1}"
        )
    return exit_layer


def save_exit_adapter(folder: Path, adapter: ExitAdapter) -> None:
    """Writes an adapter: ``layers.0.*``, ``norm.weight`` and, with a draft vocabulary, ``d2t``."""
    tensors: dict[str, torch.Tensor] = dict(adapter.state_dict())
    config = adapter.config.to_dict() | {"drafter": KIND}
    if adapter.vocabulary is not None:
        tensors["d2t"] = adapter.vocabulary.offsets_D
        config["draft_vocab_size"] = len(adapter.vocabulary)
    save_checkpoint(folder, config, tensors)


def load_exit_adapter(source: str | Path, target: Target, exit_layer: int = 0) -> ExitAdapter:
    """Reads an adapter of ours, or one that Kangaroo published (``config.json`` of one Llama layer,
    ``pytorch_model.bin``), which does not say where it leaves the target.

    Args:
        source: a folder, or a Hub name.
        target: what it drafts for.
        exit_layer: where to leave the target; 0 for what the checkpoint says.

    Returns:
        The adapter on the target's device, in its type.

    Raises:
        ValueError: it is no adapter, one for another target or for another exit, or its tensors
        are not those of an adapter.
    """
    checkpoint = load_checkpoint(source)
    with checkpoint.reading():
        return _load(checkpoint, target, exit_layer)


def _load(checkpoint: Checkpoint, target: Target, exit_layer: int) -> ExitAdapter:
    config = _config(checkpoint, target)
    tensors = {
        # Older versions of transformers stored these; they follow from the config.
        key: value
        for key, value in checkpoint.tensors.items()
        if not key.endswith("rotary_emb.inv_freq")
    }
    check_layer(config, checkpoint)
    setattr(config, "exit_layer", _exit_layer(checkpoint, target, exit_layer))  # noqa: B010
    vocabulary = DraftVocabulary.of(tensors, checkpoint, target)
    adapter = ExitAdapter(config, vocabulary).requires_grad_(False)
    fill(adapter, tensors, checkpoint)
    return adapter.place(target.device, target.dtype)


def _config(checkpoint: Checkpoint, target: Target) -> LlamaConfig:
    kind = checkpoint.config.get("drafter", KIND)
    if kind != KIND:
        raise checkpoint.error(f"is a drafter of kind {kind!r}; valid: {KIND!r}, or Kangaroo's")
    layers = {"num_target_layers": target.num_layers}
    checkpoint.check_made_for(
        {"hidden_size": target.hidden_size, "vocab_size": target.vocab_size}
        | (layers if layers.keys() & checkpoint.config.keys() else {})
    )
    try:
        return LlamaConfig(**checkpoint.config)
    except Exception as error:  # huggingface_hub raises classes of its own
        raise checkpoint.error(f"has a config.json that is no Llama's: {in_one_line(error)}") from (
            error
        )


def _exit_layer(checkpoint: Checkpoint, target: Target, asked: int) -> int:
    own = checkpoint.config.get("exit_layer")
    if own is None:
        if not asked:
            raise checkpoint.error(
                "does not say behind which layer of the target it stands; valid: an exit_layer of "
                f"1..{target.num_layers - 1}"
            )
        return check_exit(target, asked)
    if not isinstance(own, int):
        raise checkpoint.error(f"has exit_layer {own!r}; valid: 1..{target.num_layers - 1}")
    if asked not in (0, own):
        raise checkpoint.error(f"stands behind layer {own} of the target; exit_layer is {asked}")
    try:
        return check_exit(target, own)
    except ValueError as error:
        raise checkpoint.error(f"does not fit: {error}") from error


class ExitDrafter:
    """An adapter with its head and its cache, which holds all that the target's cache holds.

    Args:
        target: the target.
        adapter: for this target; its linear layers are packed where the target's are.
    """

    def __init__(self, target: Target, adapter: ExitAdapter) -> None:
        self.target, self.vocabulary = target, adapter.vocabulary
        head = adapter.vocabulary.head(target) if adapter.vocabulary else None
        self.num_bytes = sum(
            weight.numel() * weight.element_size()
            for part in (adapter, head)
            if part is not None
            for weight in part.parameters()
        )
        whole = cast(nn.Module, target.model.get_output_embeddings())
        parts = nn.ModuleDict({"adapter": adapter, "head": whole if head is None else head})
        prepare(parts, target)
        self.adapter, self.head = adapter, parts["head"]
        self.cache = KVCache(1)
        self.num_run: list[int] = []
        """By row, the nodes of this step's tree that the adapter ran."""

    def drawer(self, drawer: Drawer) -> Drawer:
        """Draws from this drafter's logits."""
        return self.vocabulary.drawer(drawer) if self.vocabulary else drawer

    def start(self, hidden_1Th: torch.Tensor | None) -> None:
        """Takes in a row.

        Args:
            hidden_1Th: the target's hidden states at the exit, of all the row's tokens but the
                last; None for a row of one token.
        """
        row = self.cache.add_row()
        self.num_run.append(0)
        if hidden_1Th is not None:
            self._remember(row, hidden_1Th, [hidden_1Th.shape[1]])

    @torch.inference_mode()
    def logits(
        self, hidden_BNh: torch.Tensor, trees: Sequence[Tree], starts: Sequence[int]
    ) -> torch.Tensor:
        """Logits [B, N, D] of nodes ``starts`` and on of each row's tree, from the target's hidden
        states at the exit."""
        dtype, device = self.target.dtype, self.target.device
        nodes = open_nodes(self.cache, trees, starts, hidden_BNh.shape[1], dtype, device)
        for row, (tree, start) in enumerate(zip(trees, starts, strict=True)):
            if start < len(tree):
                self.num_run[row] = len(tree)
        out: torch.Tensor = self.head(self.adapter(hidden_BNh, nodes, self.cache))
        return out

    @torch.inference_mode()
    def commit(self, paths: Sequence[Sequence[int]], hidden_BNh: torch.Tensor) -> None:
        """Keeps each row's path, and catches up on its nodes that drafted nothing.

        Args:
            paths: nodes of the step's trees, root first.
            hidden_BNh: the target's hidden states at the exit, of all nodes.
        """
        unseen = []
        for row, path in enumerate(paths):
            seen = [node for node in path if node < self.num_run[row]]
            self.cache.commit(row, seen)
            self.num_run[row] = 0
            unseen.append(path[len(seen) :])
        if any(unseen):
            nodes_BW = pad_rows(unseen).to(hidden_BNh.device)
            index_BWh = nodes_BW[..., None].expand(-1, -1, hidden_BNh.shape[2])
            self._remember(0, hidden_BNh.gather(1, index_BWh), list(map(len, unseen)))

    @torch.inference_mode()
    def _remember(
        self, first_row: int, hidden_BWh: torch.Tensor, num_tokens: Sequence[int]
    ) -> None:
        """Appends committed tokens to rows; each row has as many as it says, then padding."""
        width, device = hidden_BWh.shape[1], hidden_BWh.device
        self.cache.open(first_row, [0] * len(num_tokens), width, device)
        lengths = self.cache.lengths[first_row : first_row + len(num_tokens)]
        positions_BW = torch.tensor(lengths)[:, None] + torch.arange(width)
        self.adapter.remember(hidden_BWh, positions_BW.to(device, non_blocking=True), self.cache)
        for row, num in enumerate(num_tokens, start=first_row):
            self.cache.extend(row, num)

    def keep(self, rows: Sequence[int]) -> None:
        """Keeps these rows, ascending."""
        self.cache.keep(rows)
        self.num_run = [self.num_run[row] for row in rows]
