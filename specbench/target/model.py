"""The target: any decoder-only causal model of transformers, run over token trees on a cache with
ragged rows.

The modeling code is used as it is. Three things are wrapped around it: an attention function, a
gate on every decoder layer (to tap its output, pass it by, or resume there), and a gate on the
head (to compute logits only where asked). Shapes: B rows, N nodes, M nodes with logits, S slots, V
vocabulary, h hidden.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, cast

import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from specbench.costs import Shape, shape_of
from specbench.messages import in_one_line
from specbench.target import lean, packing
from specbench.target.attention import Real, note_extents
from specbench.target.cache import KVCache
from specbench.target.masks import (
    mask_kinds,
    row_extents,
    tree_mask,
    tree_positions,
    within_window,
)
from specbench.tree import Tree

FINAL = -1
"""The tap of the last hidden state, after the final norm; taps 0..L-1 are the outputs of the
decoder layers."""

_PREFILL_CHUNK = 256
_PROBE = (5, 11, 3, 17, 23, 7)
_PROBED = 20


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
    real: Real = field(default_factory=lambda: Real(None))

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
        self.note = ""
        self.config = model.config.get_text_config(decoder=True)
        self.num_layers: int = self.config.num_hidden_layers
        self.vocab_size: int = self.config.vocab_size
        self.hidden_size: int = self.config.hidden_size
        self.max_context: int = getattr(self.config, "max_position_embeddings", None) or 1 << 20
        self.dtype: torch.dtype = model.dtype
        self.device = cast(torch.Tensor, model.get_input_embeddings().weight).device
        self.num_parameters = sum(p.numel() for p in model.parameters())
        self.num_weight_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
        self.fingerprint = fingerprint(model)
        self.eos_ids = _eos_ids(model)
        self.num_forwards = 0
        self.bitwise = False
        """Whether the probe's nodes were scored to the bit as if each came alone."""
        try:
            self._mask_kinds = mask_kinds(self.config)
        except ValueError as error:
            raise ValueError(f"{name}: {type(model).__name__} {error}") from error
        self._gates = _Gates()
        self._layers_return_tuples = False
        if model.get_output_embeddings() is None:
            raise ValueError(f"{name}: {type(model).__name__} has no language-model head")
        self.kernels = packing.pack_for(model, self.dtype, self.device) if pack else "torch"
        self.layers = _decoder_layers(model, self.num_layers, name)
        rotary = lean.Rotary()
        for index, layer in enumerate(self.layers):
            shorter = lean.LeanLayer(layer, rotary) if lean.is_common(layer) else None
            layer.forward = self._layer_gate(index, layer.forward, shorter)
        head = cast(nn.Module, model.get_output_embeddings())
        head.forward = self._head_gate(head.forward)
        self._probe()

    @property
    def shape(self) -> Shape:
        """What its costs depend on.

        Raises:
            ValueError: they are not counted for layers of its kind.
        """
        return shape_of(self.config.to_dict())

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
        start: int | Sequence[int] = 0,
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
            start: nodes of the tree that the cache already holds behind the committed tokens; one
                number for each row where they differ.
            logits_at: the nodes whose logits are wanted: a slice over N, or indices [B, M].
            taps: hidden states to return: a layer's index for its output, `FINAL` for the last,
            after the final norm. Behind a ``resume`` at layer e, those from e - 1 on.
            skip: layers to pass by.
            resume: go on at a layer from given hidden states; the layers before it are not run.

        Returns:
            Logits and hidden states. The cache's lengths do not change: `KVCache.commit` does that.
        """
        taps = frozenset(taps)
        assert resume is None or not taps & set(range(resume.layer - 1)), "a tap of a layer not run"
        batch, num_nodes = tokens_BN.shape
        starts = [start] * batch if isinstance(start, int) else start
        num_slots = cache.open(first_row, starts, num_nodes, self.device)
        lengths = cache.lengths[first_row : first_row + batch]
        positions_BN = tree_positions(lengths, trees, starts, num_nodes)
        masks = self._masks(lengths, trees, starts, positions_BN, num_slots)
        real = Real(next(iter(masks.values())) if isinstance(masks, dict) else masks)
        self._gates = _Gates(skip, resume, taps, {}, logits_at, real)
        try:
            out = self.model(
                input_ids=tokens_BN.to(self.device, non_blocking=True),
                attention_mask=masks,
                position_ids=positions_BN.to(self.device, non_blocking=True),
                cache=cache,
                use_cache=True,
            )
            found = self._gates.taps
        finally:
            self._gates = _Gates()
        self.num_forwards += 1
        # A model spread over several devices leaves each tap where its layer is.
        return Forward(out.logits, {tap: hidden.to(self.device) for tap, hidden in found.items()})

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

    def _masks(
        self,
        lengths: Sequence[int],
        trees: Sequence[Tree],
        starts: Sequence[int],
        positions_BN: torch.Tensor,
        num_slots: int,
    ) -> torch.Tensor | dict[str, torch.Tensor]:
        """Additive masks [B, 1, N, S]: one, or one for each kind of layer where there are two."""
        full = tree_mask(lengths, trees, starts, positions_BN.shape[1], num_slots, self.dtype)
        masks = {
            kind: full
            if window is None
            else within_window(full, positions_BN, window, lengths, trees)
            for kind, window in self._mask_kinds.items()
        }
        if self.device.type == "cpu":
            extents = row_extents(lengths, trees, starts, positions_BN.shape[1])
            for mask in masks.values():
                note_extents(mask, extents)
        found = {kind: mask.to(self.device, non_blocking=True) for kind, mask in masks.items()}
        return found if len(found) > 1 else next(iter(found.values()))

    def _layer_gate(
        self, index: int, forward: Callable[..., Any], shorter: lean.LeanLayer | None
    ) -> Callable[..., Any]:
        def gate(hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            gates = self._gates
            if gates.resume is not None and index <= gates.resume.layer:
                hidden_states = gates.resume.hidden_BNh
            if gates.runs(index):
                run = shorter if shorter and isinstance(kwargs.get("cache"), KVCache) else forward
                out = run(hidden_states, *args, **kwargs)
                self._layers_return_tuples = isinstance(out, tuple)
                hidden_states = out[0] if self._layers_return_tuples else out
            if index in gates.wanted:
                gates.taps[index] = hidden_states
            return (hidden_states,) if self._layers_return_tuples else hidden_states

        return gate

    def _head_gate(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        def gate(hidden_BNh: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            gates = self._gates
            if FINAL in gates.wanted:
                gates.taps[FINAL] = hidden_BNh
            if gates.logits_at == slice(None):
                return gates.real.place(forward(gates.real.pick(hidden_BNh)), hidden_BNh)
            if isinstance(gates.logits_at, slice):
                picked = hidden_BNh[:, gates.logits_at]
            else:
                index = gates.logits_at.to(hidden_BNh.device, non_blocking=True)[..., None].expand(
                    -1, -1, hidden_BNh.shape[-1]
                )
                picked = hidden_BNh.gather(1, index)
            return forward(picked, *args, **kwargs)

        return gate

    @torch.inference_mode()
    def _probe(self) -> None:
        """Checks on a few tokens that a tree behind a cache scores like the model's own forward
        over one of its branches: what a verifier stands on."""
        kind = type(self.model).__name__
        prompt, nodes = _PROBE[:2], _PROBE[2:]
        tokens = torch.tensor([_PROBE]) % self.vocab_size
        branch = torch.tensor([[*prompt, nodes[0], nodes[2], nodes[3]]]) % self.vocab_size
        cache = self.new_cache(1, 16)
        try:
            cache.add_row()
            self.prefill(tokens[0, :2].tolist(), cache, 0)
            out = self.forward(
                tokens[:, 2:], [Tree.of((-1, 0, 0, 2))], cache, taps=range(self.num_layers)
            )
            own = (
                self.model(input_ids=branch.to(self.device), use_cache=False).logits[0, 2:].float()
            )
            self.bitwise = self.kernels == packing.BlockedProduct.name and self._scores_alone(
                branch[:, 2:], out.logits_BMV[0, [0, 2, 3]]
            )
        except (
            TypeError,
            AttributeError,
            LookupError,
            RuntimeError,
            ValueError,
            AssertionError,
        ) as error:
            raise ValueError(
                f"{self.name}: {kind} cannot be run over a token tree with a cache "
                f"({in_one_line(error)}); valid: decoder-only models with full or sliding attention"
            ) from error
        # Only the likeliest tokens: some models set the logits of others to -inf.
        expected, tokens_MI = own.topk(min(_PROBED, own.shape[-1]))
        if not expected.isfinite().all():
            raise ValueError(
                f"{self.name}: {kind} has logits that are no numbers in {self.dtype}: its weights "
                "are damaged, or the dtype is too narrow for it"
            )
        found = out.logits_BMV[0, [0, 2, 3]].float().gather(-1, tokens_MI)
        by_node = (found - expected).abs().amax(-1)
        if self.dtype == torch.float32:
            difference, tolerance = by_node.max().item(), 1e-3
        else:
            # Rounding alone may turn a token's massive activations; a wrong mask or position, both
            # deeper nodes.
            difference, tolerance = by_node[1:].min().item(), 0.1
        if not difference <= tolerance * (1 + expected.abs().max().item()):
            raise ValueError(
                f"{self.name}: {kind} scores a branch of a token tree differently from the branch "
                f"alone (by {difference:.2g}): its positions or masks cannot be given from outside"
            )
        self.num_forwards = 0

    def _scores_alone(self, branch_1N: torch.Tensor, logits_NV: torch.Tensor) -> bool:
        """Whether the tokens of the probe's branch have the same logits, to the bit, when they come
        one by one."""
        cache = self.new_cache(1, 16)
        cache.add_row()
        self.prefill([token % self.vocab_size for token in _PROBE[:2]], cache, 0)
        for i, expected_V in enumerate(logits_NV):
            alone = self.forward(branch_1N[:, i : i + 1], [Tree.chain(0)], cache)
            cache.commit(0, [0])
            if not torch.equal(alone.logits_BMV[0, 0], expected_V):
                return False
        return True


@contextmanager
def ending(target: Target, *eos_ids: int) -> Iterator[Target]:
    """A target with other end-of-sequence tokens."""
    before, target.eos_ids = target.eos_ids, frozenset(eos_ids)
    try:
        yield target
    finally:
        target.eos_ids = before


def fingerprint(model: nn.Module) -> str:
    """A SHA-256 over the weights' names, shapes and a sample of up to 4096 evenly spread values
    each: the same whatever file they came from, and quick for the largest model."""
    digest = hashlib.sha256()
    for name, weight in sorted(model.named_parameters()):
        flat = weight.detach().flatten()
        sample = flat[:: max(1, flat.numel() // 4096)].float().cpu()
        digest.update(f"{name} {tuple(weight.shape)} {weight.dtype}".encode())
        digest.update(sample.numpy().tobytes())
    return digest.hexdigest()


def _decoder_layers(model: PreTrainedModel, num_layers: int, name: str) -> list[nn.Module]:
    # The decoder first: a vision tower may have as many layers.
    for module in chain(model.get_decoder().modules(), model.modules()):
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
