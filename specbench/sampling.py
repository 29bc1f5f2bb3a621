"""Temperature, top-k and top-p, and random numbers keyed by (seed, request, position) instead of
by the order of calls.

The target's choice at a position is argmax(log p + Gumbel noise of that position): a draw from p
(the Gumbel-max trick) that is the same whatever method, batch or worker comes to that position. V
is the vocabulary, M any number of rows.
"""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

RULES = ("rejection", "coupled")
_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
# Nucleus candidates: the tokens above the first of these probabilities that together reach top-p
# are sorted, not all.
_FLOORS = (1e-3, 1e-5)


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the next token is chosen.

    Args:
        temperature: 0 takes the argmax; top-k and top-p then do nothing.
        top_k: keep the k most likely tokens; 0 keeps all.
        top_p: keep the smallest set of most likely tokens whose mass reaches p; 1 keeps all.
        rule: for drafts drawn from a distribution q: ``rejection`` (lossless in law) or
        ``coupled`` (drawn with the
            target's own noise, so the output equals vanilla's token for token).

    Raises:
        ValueError: a value out of range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    rule: str = "rejection"

    def __post_init__(self) -> None:
        if not (self.temperature >= 0 and math.isfinite(self.temperature)):
            raise ValueError(f"temperature {self.temperature} is out of range; valid: 0 or above")
        if self.top_k < 0:
            raise ValueError(f"top-k {self.top_k} is out of range; valid: 0 (off) or above")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top-p {self.top_p} is out of range; valid: above 0, at most 1")
        if self.rule not in RULES:
            raise ValueError(f"unknown sampling rule {self.rule!r}; valid: {', '.join(RULES)}")

    @property
    def greedy(self) -> bool:
        """Whether the argmax is taken."""
        return self.temperature == 0


def warp(logits_MV: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Log-probabilities [M, V] after temperature, top-k and top-p, in transformers' order; removed
    tokens get -inf.

    Float32, or float64 for float64 input. Logits equal to the k-th all stay; at the edge of the
    nucleus the lower indices.
    """
    logits = logits_MV if logits_MV.dtype == torch.float64 else logits_MV.float()
    logits = logits / sampling.temperature
    if 0 < sampling.top_k < logits.shape[-1]:
        least_M1 = logits.topk(sampling.top_k, dim=-1).values[..., -1:]
        logits = logits.masked_fill(logits < least_M1, -math.inf)
    logp = logits.log_softmax(dim=-1)
    if sampling.top_p < 1:
        logp = torch.stack([_nucleus(row_V, sampling.top_p) for row_V in logp.unbind()])
    return logp


def _nucleus(logp_V: torch.Tensor, top_p: float) -> torch.Tensor:
    probs_V = logp_V.exp()
    candidates = None
    if probs_V.device.type == "cpu":
        for floor in _FLOORS:
            index = torch.nonzero(probs_V > floor).squeeze(-1)
            if probs_V[index].sum() > top_p:
                candidates = index
                break
    if candidates is None:
        candidates = torch.arange(len(probs_V), device=probs_V.device)
    sorted_probs, order = probs_V[candidates].sort(descending=True, stable=True)
    kept = sorted_probs.cumsum(0) - sorted_probs < top_p
    kept[0] = True
    out = torch.full_like(logp_V, -math.inf)
    # Indexing by a mask would synchronise on a GPU: write -inf over the removed ones instead.
    values = logp_V[candidates[order]].masked_fill(~kept, -math.inf)
    out[candidates[order]] = values
    return out - out.logsumexp(0)


def request_key(seed: int, request_id: str) -> int:
    """The 64-bit key of a request's random numbers."""
    digest = hashlib.blake2b(f"{seed}\0{request_id}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def position_key(request: int, position: int, purpose: str) -> int:
    """The 64-bit key of one draw: a request's key, the index of the token in its sequence, and
    what is drawn."""
    data = request.to_bytes(8, "little") + position.to_bytes(8, "little") + purpose.encode()
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


def uniform(keys: Sequence[int], ids: torch.Tensor) -> torch.Tensor:
    """Uniform numbers in (0, 1), float64 [len(keys), len(ids)]: a hash of key and id (SplitMix64,
    Steele et al. 2014)."""
    key_M1 = torch.tensor([_signed(key) for key in keys], dtype=torch.long, device=ids.device)[
        :, None
    ]
    z = key_M1 + (ids.long() + 1) * _signed(_GOLDEN)
    z = (z ^ _shift(z, 30)) * _signed(0xBF58476D1CE4E5B9)
    z = (z ^ _shift(z, 27)) * _signed(0x94D049BB133111EB)
    z = z ^ _shift(z, 31)
    return (_shift(z, 11).double() + 0.5) * 2.0**-53


def gumbel(keys: Sequence[int], ids: torch.Tensor) -> torch.Tensor:
    """Standard Gumbel noise, float64 [len(keys), len(ids)]."""
    return -torch.log(-torch.log(uniform(keys, ids)))


def draw(logp_V: torch.Tensor, key: int, num_draws: int = 1) -> torch.Tensor:
    """Draws without replacement by Gumbel top-k (Kool et al. 2019), in drawing order; fewer if
    fewer have mass.

    The first of several draws is the one that a single draw with the same key gives.
    """
    if logp_V.device.type == "cpu":
        ids = torch.nonzero(logp_V > -math.inf).squeeze(-1)
    else:
        ids = torch.arange(len(logp_V), device=logp_V.device)
    noisy = logp_V[ids].double() + gumbel([key], ids)[0]
    if num_draws == 1:
        return ids[noisy.argmax()[None]]
    return ids[noisy.topk(min(num_draws, len(ids))).indices]


def _signed(value: int) -> int:
    value &= _MASK
    return value - (1 << 64) if value >> 63 else value


def _shift(z: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical right shift of int64."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)
