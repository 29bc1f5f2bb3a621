"""EAGLE heads for tests: checkpoints with exactly the published keys and shapes, a plain
reimplementation of what they compute, and heads that draft well without training."""

import json
import math
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from specbench.target import Target

Tensors = dict[str, torch.Tensor]


def write(folder: Path, config: dict[str, Any], tensors: Tensors, name: str = "") -> Path:
    """Writes a checkpoint as it is; ``pytorch_model.bin`` if so named."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if name == "pytorch_model.bin":
        torch.save(tensors, folder / name)
    else:
        save_file({key: value.contiguous() for key, value in tensors.items()}, folder / WEIGHTS)
    return folder


WEIGHTS = "model.safetensors"


@dataclass(frozen=True)
class Dims:
    """Widths of a head: hidden, the target's hidden, inner, heads, key-value heads, head
    dimension."""

    h: int = 32
    w: int = 32
    i: int = 48
    heads: int = 4
    kv: int = 2
    d: int = 8

    def config(self, **more: Any) -> dict[str, Any]:
        """What every config.json says of them."""
        return {
            "model_type": "llama",
            "hidden_size": self.h,
            "intermediate_size": self.i,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv,
            "num_hidden_layers": 1,
            "rms_norm_eps": 1e-5,
            "hidden_act": "silu",
            "max_position_embeddings": 64,
        } | more


class Maker:
    """Random tensors of given shapes."""

    def __init__(self, seed: int = 0) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def weight(self, *shape: int) -> torch.Tensor:
        """Large enough that every part matters."""
        return torch.randn(shape, generator=self.generator) * (1.2 / math.sqrt(shape[-1]))

    def norm(self, width: int) -> torch.Tensor:
        """A norm's weight, unlike any other."""
        return 1 + 0.3 * torch.randn(width, generator=self.generator)

    def layer(self, dims: Dims, prefix: str, in_width: int) -> Tensors:
        """Attention, feed-forward and the norm between them: what all formats have."""
        q, kv = dims.heads * dims.d, dims.kv * dims.d
        return {
            f"{prefix}self_attn.q_proj.weight": self.weight(q, in_width),
            f"{prefix}self_attn.k_proj.weight": self.weight(kv, in_width),
            f"{prefix}self_attn.v_proj.weight": self.weight(kv, in_width),
            f"{prefix}self_attn.o_proj.weight": self.weight(dims.h, q),
            f"{prefix}mlp.gate_proj.weight": self.weight(dims.i, dims.h),
            f"{prefix}mlp.up_proj.weight": self.weight(dims.i, dims.h),
            f"{prefix}mlp.down_proj.weight": self.weight(dims.h, dims.i),
            f"{prefix}post_attention_layernorm.weight": self.norm(dims.h),
        }

    def wide(self, dims: Dims, prefix: str) -> Tensors:
        """EAGLE-3's first layer."""
        return self.layer(dims, prefix, 2 * dims.h) | {
            f"{prefix}input_layernorm.weight": self.norm(dims.h),
            f"{prefix}hidden_norm.weight": self.norm(dims.h),
        }

    def qk_norms(self, dims: Dims, prefix: str) -> Tensors:
        """Qwen3's."""
        return {f"{prefix}self_attn.{x}_norm.weight": self.norm(dims.d) for x in "qk"}

    def vocabulary(self, ids: Sequence[int], vocab_size: int) -> Tensors:
        """d2t and t2d."""
        t2d = torch.zeros(vocab_size, dtype=torch.bool)
        t2d[list(ids)] = True
        return {"d2t": torch.tensor(ids) - torch.arange(len(ids)), "t2d": t2d}


@dataclass
class Plain:
    """What a head computes, written down again from the published code's behaviour: float32, one
    sequence, no cache, nothing shared with specbench.

    Args:
        t: the checkpoint's tensors.
        embed: [V, h].
        head: [D, h].
        dims: the widths.
        layers: prefixes of its layers' keys.
        theta: base of the rotary embeddings.
        scale: positions are divided by it (linear scaling).
        eps: of the norms.
        wide: prefixes of the layers that see token and feature; none for EAGLE-1.
        parts: keys of norms of the parts of the fused hidden states.
        whole: key of the norm of all of them.
        residual_normed, norm_out, feed_normed: speculators' and SpecForge's flags.
    """

    t: Tensors
    embed: torch.Tensor
    head: torch.Tensor
    dims: Dims
    layers: Sequence[str]
    theta: float = 10000.0
    scale: float = 1.0
    eps: float = 1e-5
    wide: Sequence[str] = ()
    parts: Sequence[str] = ()
    whole: str = ""
    residual_normed: bool = False
    norm_out: bool = True
    feed_normed: bool = False
    trace: list[torch.Tensor] = field(default_factory=list)

    def rms(self, x: torch.Tensor, key: str) -> torch.Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + self.eps).sqrt() * self.t[key]

    def features(self, hidden: Sequence[torch.Tensor]) -> torch.Tensor:
        """The taps' hidden states, [T, w] each -> [T, h]."""
        x = torch.cat(list(hidden), -1)
        if not self.wide:
            return x
        if self.whole:
            x = self.rms(x, self.whole)
        if self.parts:
            chunks = x.chunk(len(self.parts), dim=-1)
            x = torch.cat([self.rms(c, k) for c, k in zip(chunks, self.parts, strict=True)], -1)
        return x @ self.t["fc.weight"].T

    def rotate(self, x: torch.Tensor) -> torch.Tensor:
        """[T, H, d] at positions 0, 1, ..."""
        half = self.dims.d // 2
        out = torch.empty_like(x)
        for position in range(len(x)):
            for i in range(half):
                angle = torch.tensor(position / self.scale * self.theta ** (-i / half))
                a, b = x[position, :, i], x[position, :, i + half]
                out[position, :, i] = a * angle.cos() - b * angle.sin()
                out[position, :, i + half] = b * angle.cos() + a * angle.sin()
        return out

    def attention(self, x: torch.Tensor, p: str) -> torch.Tensor:
        d, length = self.dims.d, len(x)
        q, k, v = (
            (x @ self.t[f"{p}self_attn.{name}_proj.weight"].T).view(length, -1, d) for name in "qkv"
        )
        if f"{p}self_attn.q_norm.weight" in self.t:
            q = self.rms(q, f"{p}self_attn.q_norm.weight")
            k = self.rms(k, f"{p}self_attn.k_norm.weight")
        q, k = self.rotate(q), self.rotate(k)
        out = torch.empty(length, self.dims.heads, d)
        for head in range(self.dims.heads):
            group = head * self.dims.kv // self.dims.heads
            for i in range(length):
                weights = (k[: i + 1, group] @ q[i, head] / d**0.5).softmax(0)
                out[i, head] = weights @ v[: i + 1, group]
        return out.flatten(1) @ self.t[f"{p}self_attn.o_proj.weight"].T

    def run(self, tokens: Sequence[int], features: torch.Tensor) -> torch.Tensor:
        """Tokens and features of entries 0, 1, ... -> what is fed back, [T, h]."""
        embeds, hidden = self.embed[list(tokens)], features
        if not self.wide:
            hidden = torch.cat([embeds, features], -1) @ self.t["fc.weight"].T
            hidden = hidden + self.t.get("fc.bias", torch.zeros(()))
        for index, p in enumerate(self.layers):
            residual = hidden
            if p in self.wide:
                normed = self.rms(hidden, f"{p}hidden_norm.weight")
                x = torch.cat([self.rms(embeds, f"{p}input_layernorm.weight"), normed], -1)
                residual = normed if self.residual_normed else hidden
            else:
                x = self.rms(hidden, f"{p}input_layernorm.weight") if index else hidden
            hidden = residual + self.attention(x, p)
            y = self.rms(hidden, f"{p}post_attention_layernorm.weight")
            gate = F.silu(y @ self.t[f"{p}mlp.gate_proj.weight"].T)
            inner = gate * (y @ self.t[f"{p}mlp.up_proj.weight"].T)
            hidden = hidden + inner @ self.t[f"{p}mlp.down_proj.weight"].T
        return self.rms(hidden, "norm.weight") if self.feed_normed else hidden

    def logits(self, out: torch.Tensor) -> torch.Tensor:
        if self.wide and self.norm_out and not self.feed_normed:
            out = self.rms(out, "norm.weight")
        return out @ self.head.T

    def after(
        self, tokens: Sequence[int], features: torch.Tensor, drafted: Sequence[int]
    ) -> torch.Tensor:
        """The output [h] of the last of the drafted tokens, which stand one behind another behind
        the entries with true features; of the last of those if none is drafted."""
        tokens = list(tokens)
        out = self.run(tokens, features)
        for token in drafted:
            tokens, features = [*tokens, token], torch.cat([features, out[-1:]])
            out = self.run(tokens, features)
        return out[-1]


def good_eagle1(dims: Dims, vocab_size: int, ids: Sequence[int] | None) -> tuple[Any, Tensors]:
    """An EAGLE-1 head whose feature is the token's embedding, more or less: good for a target whose
    next token depends mostly on the last."""
    make = Maker(1)
    tensors = make.layer(dims, "layers.0.", dims.h)
    eye = torch.eye(dims.h) / 6
    tensors["fc.weight"] = torch.cat([eye, 0.02 * make.weight(dims.h, dims.h)], -1)
    for key in ("self_attn.o_proj", "mlp.down_proj"):
        tensors[f"layers.0.{key}.weight"] *= 0.1
    config = dims.config(vocab_size=vocab_size, bias=False)
    if ids is not None:
        tensors |= make.vocabulary(ids, vocab_size)
        config["draft_vocab_size"] = len(ids)
    return config, tensors


def good_eagle3(dims: Dims, vocab_size: int, ids: Sequence[int] | None) -> tuple[Any, Tensors]:
    """An EAGLE-3 head with the target's head that does the same: every entry attends to itself and
    copies its token's embedding."""
    assert dims.kv == dims.heads and dims.heads * dims.d == dims.h
    make = Maker(3)
    tensors = make.wide(dims, "midlayer.")
    tensors["midlayer.input_layernorm.weight"] = torch.ones(dims.h)
    token_only = torch.cat([torch.eye(dims.h), torch.zeros(dims.h, dims.h)], -1)
    for name, scale in (("q", 3.0), ("k", 3.0), ("v", 1.0)):
        tensors[f"midlayer.self_attn.{name}_proj.weight"] = scale * token_only
    tensors["midlayer.self_attn.o_proj.weight"] = torch.eye(dims.h)
    tensors["midlayer.mlp.down_proj.weight"] *= 0.1
    tensors["fc.weight"] = 0.002 * make.weight(dims.h, 3 * dims.w)
    tensors["norm.weight"] = torch.ones(dims.h)
    config = dims.config(vocab_size=vocab_size, draft_head="target")
    config["draft_vocab_size"] = vocab_size
    if ids is not None:
        tensors |= make.vocabulary(ids, vocab_size)
        config["draft_vocab_size"] = len(ids)
    return config, tensors


def wild_eagle3(dims: Dims, vocab_size: int, ids: Sequence[int] | None) -> tuple[Any, Tensors]:
    """A random EAGLE-3 head, in which everything matters."""
    config, tensors = good_eagle3(dims, vocab_size, ids)
    make = Maker(4)
    wild = make.wide(dims, "midlayer.") | {"fc.weight": make.weight(dims.h, 3 * dims.w)}
    return config, tensors | wild


HEADS = {"good1": good_eagle1, "good3": good_eagle3, "wild3": wild_eagle3}


@cache
def made_folder(name: str, vocab_size: int) -> str:
    """A folder with one of these heads for a tiny target; with ``-reduced`` in its name, one that
    may not draft every third token."""
    kind, _, reduced = name.partition("-")
    ids = [i for i in range(vocab_size) if i % 3] if reduced else None
    config, tensors = HEADS[kind](Dims(kv=4), vocab_size, ids)
    # Gone when the tests end.
    _FOLDERS.append(tempfile.TemporaryDirectory())
    return str(write(Path(_FOLDERS[-1].name), config, tensors))


_FOLDERS: list["tempfile.TemporaryDirectory[str]"] = []


def weights_for(target: Target, name: str) -> str:
    """The knob ``eagle.weights`` for one of these heads."""
    return made_folder(name, target.vocab_size)
