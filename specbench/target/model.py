"""The target: any decoder-only causal model of transformers, run over token trees on a cache with
ragged rows.

The modeling code is used as it is. Three things are wrapped around it: an attention function, a
gate on every decoder layer (to tap its output, pass it by, or resume there), and a gate on the
head (to compute logits only where asked). Shapes: B rows, N nodes, M nodes with logits, S slots, V
vocabulary, h hidden.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from specbench.target import packing
from specbench.target.cache import KVCache
from specbench.tree import Tree

FINAL = -1
"""The tap of the last hidden state, after the final norm; taps 0..L-1 are the outputs of the
decoder layers."""

_PREFILL_CHUNK = 256


@dataclass(frozen=True)
class Resume:
    """Hidden states that already went through the layers before ``layer``: [B, N, h], its input."""

    layer: int
    hidden_BNh: torch.Tensor


@dataclass(frozen=True)
class Forward:
    """What one forward returns: logits [B, M, V] at the nodes asked for, and hidden states [B, N,
    h] by tap."""

    logits_BMV: torch.Tensor
    taps: dict[int, torch.Tensor]


@dataclass
class _Gates:
    """What the gates do in the forward that is running."""

    skip: frozenset[int] = frozenset()
    resume: Resume | None = None
    wanted: frozenset[int] = frozenset()
    taps: dict[int, torch.Tensor] = field(default_factory=dict)
    logits_at: slice | torch.Tensor = field(default_factory=lambda: slice(None))

    def runs(self, layer: int) -> bool:
        return layer not in self.skip and (self.resume is None or layer >= self.resume.layer)


class Target:
    """A causal language model that scores token trees.

    Args:
        model: a causal model of transformers in eval mode, with explicit-mask attention.
        tokenizer: its tokenizer, if there is one.
        name: how tables and messages call it.
        pack: pack the linear layers for the CPU's kernels where that is possible.

    Raises:
        ValueError: its decoder layers or its head cannot be found, or it fails the token-tree
        probe.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None = None,
        name: str = "target",
        pack: bool = True,
    ) -> None:
        self.model, self.tokenizer, self.name = model.eval(), tokenizer, name
        self.config = model.config.get_text_config(decoder=True)
        self.num_layers: int = self.config.num_hidden_layers
        self.vocab_size: int = self.config.vocab_size
        self.hidden_size: int = self.config.hidden_size
        self.max_context: int = getattr(self.config, "max_position_embeddings", None) or 1 << 20
        self.dtype: torch.dtype = model.dtype
        self.device: torch.device = model.get_input_embeddings().weight.device
        self.num_parameters = sum(p.numel() for p in model.parameters())
        self.num_weight_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
        self.eos_ids = _eos_ids(model)
        self.num_forwards = 0
        self._mask_kinds = _mask_kinds(self.config)
        self._gates = _Gates()
        head = model.get_output_embeddings()
        if head is None:
            raise ValueError(f"{name}: {type(model).__name__} has no language-model head")
        self.packed = (
            pack and self.device.type == "cpu" and packing.available() and packing.pack(model) > 0
        )
        self.layers = _decoder_layers(model, self.num_layers, name)
        for index, layer in enumerate(self.layers):
            layer.forward = self._layer_gate(index, layer.forward)  # type: ignore[method-assign]
        head = cast(nn.Module, model.get_output_embeddings())
        head.forward = self._head_gate(head.forward)  # type: ignore[method-assign]
        self._probe()

    def new_cache(self, max_rows: int, capacity: int = 256) -> KVCache:
        """An empty cache for up to ``max_rows`` sequences."""
        return KVCache(max_rows, capacity)

    @torch.inference_mode()
    def forward(
        self,
        tokens_BN: torch.Tensor,
        trees: Sequence[Tree],
        cache: KVCache,
        *,
        first_row: int = 0,
        start: int = 0,
        logits_at: slice | torch.Tensor = slice(None),
        taps: Iterable[int] = (),
        skip: frozenset[int] = frozenset(),
        resume: Resume | None = None,
    ) -> Forward:
        """Runs nodes start, start + 1, ... of each row's tree; their keys and values go behind the
        row's length.

        Args:
            tokens_BN: the nodes' tokens; a row with fewer nodes is padded with any token.
            trees: the shape of each row's tree, the earlier nodes included.
            cache: holds the committed tokens, and the nodes before ``start`` from earlier calls.
            first_row: the cache row of the first of the B rows.
            start: nodes of the tree that the cache already holds behind the committed tokens.
            logits_at: the nodes whose logits are wanted: a slice over N, or indices [B, M].
            taps: hidden states to return: a layer's index for its output, `FINAL` for the last,
            after the final norm. skip: layers to pass by.
            resume: go on at a layer from given hidden states; the layers before it are not run.

        Returns:
            Logits and hidden states. The cache's lengths do not change: `KVCache.commit` does that.
        """
        batch, num_nodes = tokens_BN.shape
        num_slots = cache.open(first_row, batch, start, num_nodes, self.device)
        lengths = cache.lengths[first_row : first_row + batch]
        positions_BN = self._positions(lengths, trees, start, num_nodes)
        masks = self._masks(lengths, trees, start, num_nodes, num_slots)
        self._gates = _Gates(skip, resume, frozenset(taps), {}, logits_at)
        try:
            out = self.model(
                input_ids=tokens_BN.to(self.device),
                attention_mask=masks,
                position_ids=positions_BN,
                cache=cache,
                use_cache=True,
            )
            found = self._gates.taps
        finally:
            self._gates = _Gates()
        self.num_forwards += 1
        return Forward(out.logits, found)

    @torch.inference_mode()
    def prefill(
        self,
        tokens: Sequence[int],
        cache: KVCache,
        row: int,
        taps: Iterable[int] = (),
        skip: frozenset[int] = frozenset(),
    ) -> dict[int, torch.Tensor]:
        """Appends tokens to a row of the cache, without logits, in chunks.

        Returns:
            The hidden states asked for, [1, len(tokens), h] by tap; nothing when there are no
            tokens.
        """
        found: dict[int, list[torch.Tensor]] = {}
        for begin in range(0, len(tokens), _PREFILL_CHUNK):
            chunk = torch.tensor([tokens[begin : begin + _PREFILL_CHUNK]])
            out = self.forward(
                chunk,
                [Tree.chain(chunk.shape[1] - 1)],
                cache,
                first_row=row,
                logits_at=slice(0),
                taps=taps,
                skip=skip,
            )
            cache.extend(row, chunk.shape[1])
            for tap, hidden in out.taps.items():
                found.setdefault(tap, []).append(hidden)
        return {tap: torch.cat(parts, dim=1) for tap, parts in found.items()}

    def _positions(
        self, lengths: Sequence[int], trees: Sequence[Tree], start: int, num_nodes: int
    ) -> torch.Tensor:
        rows = []
        for length, tree in zip(lengths, trees, strict=True):
            depths = tree.depths[start : start + num_nodes]
            rows.append([length + depth for depth in depths] + [length] * (num_nodes - len(depths)))
        return torch.tensor(rows, device=self.device)

    def _masks(
        self,
        lengths: Sequence[int],
        trees: Sequence[Tree],
        start: int,
        num_nodes: int,
        num_slots: int,
    ) -> torch.Tensor | dict[str, torch.Tensor]:
        """Additive masks [B, 1, N, S], one for each kind of layer, by depth and not by slot."""
        device = torch.device("cpu")
        seen_BNS = torch.zeros(len(trees), num_nodes, num_slots, dtype=torch.bool, device=device)
        distance_BNS = None
        if any(window is not None for window in self._mask_kinds.values()):
            distance_BNS = torch.zeros(len(trees), num_nodes, num_slots, dtype=torch.long)
        for row, (length, tree) in enumerate(zip(lengths, trees, strict=True)):
            nodes = range(start, min(start + num_nodes, len(tree)))
            seen_BNS[row, : len(nodes), :length] = True
            seen_BNS[row, : len(nodes), length : length + nodes.stop] = tree.ancestors_NN[
                start : nodes.stop, : nodes.stop
            ]
            for pad in range(len(nodes), num_nodes):
                seen_BNS[row, pad, length + start + pad] = True
            if distance_BNS is not None:
                slots = torch.tensor(
                    [*range(length), *(length + d for d in tree.depths[: nodes.stop])]
                )
                queries = torch.tensor([length + d for d in tree.depths[start : nodes.stop]])
                distance_BNS[row, : len(nodes), : len(slots)] = queries[:, None] - slots
        masks = {}
        for kind, window in self._mask_kinds.items():
            seen = (
                seen_BNS
                if window is None or distance_BNS is None
                else seen_BNS & (distance_BNS < window)
            )
            mask = torch.zeros(seen.shape, dtype=self.dtype).masked_fill_(
                ~seen, torch.finfo(self.dtype).min
            )
            masks[kind] = mask[:, None].to(self.device, non_blocking=True)
        return masks if len(masks) > 1 else next(iter(masks.values()))

    def _layer_gate(self, index: int, forward: Callable[..., Any]) -> Callable[..., Any]:
        def gate(hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            gates = self._gates
            if gates.resume is not None and index == gates.resume.layer:
                hidden_states = gates.resume.hidden_BNh
            out = forward(hidden_states, *args, **kwargs) if gates.runs(index) else hidden_states
            if index in gates.wanted:
                gates.taps[index] = out
            return out

        return gate

    def _head_gate(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        def gate(hidden_BNh: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            gates = self._gates
            if FINAL in gates.wanted:
                gates.taps[FINAL] = hidden_BNh
            if isinstance(gates.logits_at, slice):
                picked = hidden_BNh[:, gates.logits_at]
            else:
                index = gates.logits_at.to(hidden_BNh.device)[..., None].expand(
                    -1, -1, hidden_BNh.shape[-1]
                )
                picked = hidden_BNh.gather(1, index)
            return forward(picked, *args, **kwargs)

        return gate

    def _probe(self) -> None:
        """Checks on four tokens that a tree scores like each of its branches alone: what a
        verifier stands on."""
        tokens = [token % self.vocab_size for token in (5, 11, 17, 23)]
        tree = Tree.of((-1, 0, 0, 2))
        cache = self.new_cache(1, 16)
        try:
            cache.add_row()
            self.prefill(tokens[:2], cache, 0)
            whole = self.forward(torch.tensor([tokens]), [tree], cache).logits_BMV[0].float()
            branch = (
                self.forward(
                    torch.tensor([[tokens[0], tokens[2], tokens[3]]]), [Tree.chain(2)], cache
                )
                .logits_BMV[0]
                .float()
            )
        except (TypeError, AttributeError, RuntimeError, IndexError) as error:
            raise ValueError(
                f"{self.name}: {type(self.model).__name__} cannot be run over a token tree with a cache ({error}); "
                "valid: decoder-only models with full attention"
            ) from error
        difference = (whole[[0, 2, 3]] - branch).abs().max().item()
        if not difference <= (1e-3 if self.dtype == torch.float32 else 0.1) * (
            1 + branch.abs().max().item()
        ):
            raise ValueError(
                f"{self.name}: {type(self.model).__name__} scores a branch of a token tree differently from the "
                f"branch alone (by {difference:.2g}): its positions or masks cannot be given from outside"
            )
        self.num_forwards = 0


def _decoder_layers(model: PreTrainedModel, num_layers: int, name: str) -> list[nn.Module]:
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == num_layers:
            return list(module)
    raise ValueError(f"{name}: no list of {num_layers} decoder layers in {type(model).__name__}")


def _eos_ids(model: PreTrainedModel) -> frozenset[int]:
    """End-of-sequence ids: the generation config's, which knows all of a chat model's, else the
    config's."""
    for config in (model.generation_config, model.config):
        ids = getattr(config, "eos_token_id", None)
        if ids is not None:
            return frozenset(ids) if isinstance(ids, Iterable) else frozenset([int(ids)])
    return frozenset()


def _mask_kinds(config: Any) -> dict[str, int | None]:
    """Attention window by layer type, None for full attention, as the modeling code of
    transformers names them."""
    window = getattr(config, "sliding_window", None)
    types = list(dict.fromkeys(getattr(config, "layer_types", None) or ()))
    if not types:
        types = ["sliding_attention" if window else "full_attention"]
    unknown = set(types) - {"full_attention", "sliding_attention"}
    if unknown:
        raise ValueError(
            f"layers of type {', '.join(sorted(unknown))} are not supported; valid: full or sliding attention"
        )
    return {kind: window if kind == "sliding_attention" else None for kind in types}
