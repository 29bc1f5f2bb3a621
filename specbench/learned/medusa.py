"""Medusa's heads (Cai et al. 2024): guesses at several tokens ahead from one hidden state, and the
formats that they are published in.

Head k (from 0), on the target's last hidden state at position t, after the final norm, guesses
token t + 2 + k; the target's own head knows t + 1. Shapes: M hidden states, h hidden, K heads, V
vocabulary, D draft vocabulary.
"""

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from specbench.learned.checkpoint import WEIGHTS, Checkpoint, fill, load_checkpoint, save_checkpoint
from specbench.learned.vocabulary import DraftVocabulary, frozen_head
from specbench.ranks import RankTree
from specbench.target import Target

FILE = "medusa_lm_head.safetensors"
_FILES = (FILE, "medusa_lm_head.pt", WEIGHTS, "pytorch_model.bin")
_NUMBERED = re.compile(r"(\d+)\.(\d+)\.linear\.(?:weight|bias)")
_VLLM = re.compile(r"blocks\.(\d+)\.layers\.(\d+)\.(?:weight|bias)")
_TREE_NODES = 256
_NUM_RANKS = 10
# For heads that come without calibration: top-1 accuracy of Medusa-1's five heads for Vicuna-7B,
# and the ratio from rank to rank that leads to their top-5 accuracy (Medusa's medusa_acc.csv).
_PUBLISHED = ((0.56, 0.28), (0.316, 0.45), (0.201, 0.54), (0.147, 0.55), (0.118, 0.65))

ReadOut = Callable[[torch.Tensor], torch.Tensor]
"""[..., h] -> logits [..., D]."""


class ResBlock(nn.Module):
    """x + SiLU(W x + b); the identity until it is trained."""

    def __init__(self, hidden_size: int, bias: bool = True) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden_size, hidden_size, bias=bias)
        for parameter in self.linear.parameters():
            nn.init.zeros_(parameter)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., h] -> [..., h]"""
        return x + F.silu(self.linear(x))


class MedusaHeads(nn.Module):
    """K heads, each some blocks and a language-model head.

    Args:
        hidden_size: the target's.
        num_heads: K.
        num_layers: blocks of each head.
        own_vocab: tokens of a language-model head of its own for each head; 0 where all share one,
            which is then put into ``lm_head``.
        bias: whether the blocks have a bias.
    """

    lm_head: ReadOut | None
    """What all heads share. A module set here is a part of this one; the target's own head is not,
    and comes as its call."""
    ids_D: torch.Tensor | None
    """The tokens that the logits stand for; None for the whole vocabulary."""

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_layers: int = 1,
        own_vocab: int = 0,
        bias: bool = True,
    ) -> None:
        super().__init__()
        self.num_heads, self.num_layers = num_heads, num_layers
        self.blocks = nn.ModuleList(
            nn.Sequential(*[ResBlock(hidden_size, bias) for _ in range(num_layers)])
            for _ in range(num_heads)
        )
        self.lm_heads = nn.ModuleList(
            nn.Linear(hidden_size, own_vocab, bias=False)
            for _ in range(num_heads if own_vocab else 0)
        )
        self.lm_head = None
        self.register_buffer("ids_D", None, persistent=False)

    def logits(self, head: int, hidden_Mh: torch.Tensor) -> torch.Tensor:
        """One head's logits [M, D]."""
        return self._read_out(head)(self.blocks[head](hidden_Mh))

    def forward(self, hidden_Mh: torch.Tensor, num_heads: int | None = None) -> torch.Tensor:
        """The first heads' logits, [M, K, D]."""
        heads = range(self.num_heads if num_heads is None else num_heads)
        states = [self.blocks[head](hidden_Mh) for head in heads]
        if self.lm_head is not None:
            return self.lm_head(torch.stack(states, dim=1))
        return torch.stack([self._read_out(head)(states[head]) for head in heads], dim=1)

    def _read_out(self, head: int) -> ReadOut:
        return self.lm_head or self.lm_heads[head]


def numbered(heads: MedusaHeads) -> nn.ModuleList:
    """The same layers under the names of Medusa's own files: ``{head}.{layer}.linear.weight`` and
    ``.bias``, and ``{head}.{num_layers}.weight`` for a language-model head of its own."""
    return nn.ModuleList(
        nn.ModuleList([*blocks.children(), *heads.lm_heads[head : head + 1]])
        for head, blocks in enumerate(heads.blocks)
    )


def in_vllm(heads: MedusaHeads) -> nn.ModuleDict:
    """The same layers under vLLM's names: ``blocks.{head}.layers.{layer}.weight`` (and ``.bias``),
    ``lm_heads.{head}.weight``, or ``lm_heads.0.weight`` for all."""
    shared = [heads.lm_head] if isinstance(heads.lm_head, nn.Module) else []
    blocks = [
        nn.ModuleList(block.get_submodule("linear") for block in blocks.children())
        for blocks in heads.blocks
    ]
    return nn.ModuleDict(
        {
            "blocks": nn.ModuleList(nn.ModuleDict({"layers": layers}) for layers in blocks),
            "lm_heads": nn.ModuleList([*heads.lm_heads, *shared]),
        }
    )


def save_heads(heads: MedusaHeads, folder: Path, config: Mapping[str, Any]) -> None:
    """Writes heads in Medusa's own layout: "version 2" where they share the target's head.

    A reduced vocabulary is written beside them as EAGLE-3 does: ``d2t[i] + i`` is the token of
    logit i.
    """
    version = {} if heads.lm_heads else {"version": "2"}
    layers = {"medusa_num_heads": heads.num_heads, "medusa_num_layers": heads.num_layers}
    tensors = numbered(heads).state_dict()
    if heads.ids_D is not None:
        layers["draft_vocab_size"] = len(heads.ids_D)
        tensors["d2t"] = heads.ids_D - torch.arange(len(heads.ids_D), device=heads.ids_D.device)
    save_checkpoint(folder, {**config, **layers, **version}, tensors, FILE)


class LoadedHeads(NamedTuple):
    """Heads in the target's type and on its device, and the tree that their checkpoint asks for."""

    heads: MedusaHeads
    tree: RankTree


def load_heads(source: str | Path, target: Target) -> LoadedHeads:
    """Loads heads for a target from a folder or Hub name, in any of the published formats.

    - Medusa v0.1, ``medusa_lm_head.pt``: heads with language-model heads of their own. How many is
      read from the tensors: the published configs are wrong. Blocks that its code repeats are
      saved once for each time.
    - "Version 2", ``medusa_lm_head.safetensors``: on the target's own head.
    - v1.0: a whole model; its ``medusa_head.*`` tensors, for that model as the target.
    - vLLM's: ``blocks.*``, ``lm_heads.*``, ``token_map``.

    Raises:
        ValueError: no such checkpoint; tensors that are missing, unknown or of another shape; or
        heads made for another target.
    """
    checkpoint = load_checkpoint(source, _FILES)
    with checkpoint.reading():
        return _load(checkpoint, target)


def _load(checkpoint: Checkpoint, target: Target) -> LoadedHeads:
    for name, expected in (("hidden_size", target.hidden_size), ("vocab_size", target.vocab_size)):
        if checkpoint.config.get(name, expected) != expected:
            raise checkpoint.error(
                f"is for a target of {name} {checkpoint.config[name]}; target {target.name!r} has "
                f"{expected}"
            )
    tensors = _of_heads(checkpoint, target)
    ids_D = _draft_ids(tensors, checkpoint, target)
    heads = _fill_heads(tensors, ids_D, checkpoint, target)
    if heads.lm_head is None and not heads.lm_heads:
        if ids_D is not None:
            heads.lm_head = frozen_head(target, ids_D)
        else:
            head = target.model.get_output_embeddings()
            assert head is not None
            heads.lm_head = head.__call__
    heads.ids_D = ids_D
    return LoadedHeads(heads, _tree(checkpoint, heads.num_heads))


def _of_heads(checkpoint: Checkpoint, target: Target) -> dict[str, torch.Tensor]:
    """The tensors of the heads alone, without a prefix."""
    prefix = "medusa_head."
    if not any(key.startswith(prefix) for key in checkpoint.tensors):
        return {
            key.removeprefix("medusa_heads."): value for key, value in checkpoint.tensors.items()
        }
    base = checkpoint.tensors.get("lm_head.weight")
    if base is not None:
        own = target.model.get_output_embeddings()
        assert own is not None
        rows = own.weight.detach()[:64].cpu()
        if not torch.equal(base[:64].to(rows.dtype), rows):
            raise checkpoint.error(
                f"is a whole model, and its heads are for it, not for target {target.name!r}; "
                f"valid: --target {checkpoint.name}"
            )
    return {
        key.removeprefix(prefix): value
        for key, value in checkpoint.tensors.items()
        if key.startswith(prefix)
    }


def _draft_ids(
    tensors: dict[str, torch.Tensor], checkpoint: Checkpoint, target: Target
) -> torch.Tensor | None:
    """Takes the reduced vocabulary out of the tensors, if there is one."""
    if (ids_D := tensors.pop("token_map", None)) is not None:
        return DraftVocabulary.from_ids(ids_D, checkpoint, target).ids_D
    vocabulary = DraftVocabulary.of(tensors, checkpoint, target)
    return vocabulary.ids_D if vocabulary else None


def _fill_heads(
    tensors: dict[str, torch.Tensor],
    ids_D: torch.Tensor | None,
    checkpoint: Checkpoint,
    target: Target,
) -> MedusaHeads:
    """Makes heads of the tensors' extent, and fills them."""
    is_vllm = any(_VLLM.fullmatch(key) for key in tensors)
    pattern, lm_head = (
        (_VLLM, r"lm_heads\.(\d+)\.weight") if is_vllm else (_NUMBERED, r"(\d+)\.\d+\.weight")
    )
    blocks = {key: match for key in tensors if (match := pattern.fullmatch(key))}
    if not blocks:
        raise checkpoint.error(
            f"has no Medusa heads, but {', '.join(sorted(tensors)[:4])}; valid: tensors such as "
            "0.0.linear.weight or blocks.0.layers.0.weight"
        )
    if "lm_head.weight" in tensors and is_vllm:
        tensors["lm_heads.0.weight"] = tensors.pop("lm_head.weight")
    lm_heads = [key for key in tensors if re.fullmatch(lm_head, key)]
    num_heads = len({match[1] for match in blocks.values()})
    vocab = target.vocab_size if ids_D is None else len(ids_D)
    is_shared = is_vllm and len(lm_heads) == 1 < num_heads
    with torch.device("meta"):
        heads = MedusaHeads(
            target.hidden_size,
            num_heads,
            num_layers=len({match[2] for match in blocks.values()}),
            own_vocab=vocab if lm_heads and not is_shared else 0,
            bias=not is_vllm or any(key.endswith("bias") for key in blocks),
        )
        if is_shared:
            heads.lm_head = nn.Linear(target.hidden_size, vocab, bias=False)
    heads = heads.to(target.dtype).to_empty(device=target.device).requires_grad_(False)
    if ids_D is not None:
        # Heads over the whole vocabulary are cut to the reduced one, as vLLM does.
        for key in lm_heads:
            if len(tensors[key]) == target.vocab_size:
                tensors[key] = tensors[key][ids_D.cpu()]
    fill(in_vllm(heads) if is_vllm else numbered(heads), tensors, checkpoint)
    return heads


def _tree(checkpoint: Checkpoint, num_heads: int) -> RankTree:
    """The tree that calibration wrote down, else the one that rank accuracies call for."""
    config = checkpoint.config
    accuracy = config.get("rank_accuracy") or [
        [first * ratio**rank for rank in range(_NUM_RANKS)]
        for first, ratio in (*_PUBLISHED, *[_PUBLISHED[-1]] * num_heads)[:num_heads]
    ]
    try:
        if "tree" in config:
            tree = RankTree.from_json(config["tree"])
            return RankTree(path for path in tree.paths if len(path) <= num_heads)
        return RankTree.from_accuracy(accuracy[:num_heads], _TREE_NODES)
    except (TypeError, ValueError) as error:
        raise checkpoint.error(f"has no valid tree or rank_accuracy: {error}") from error
