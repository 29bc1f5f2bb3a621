"""Temperature, top-k and top-p, and random numbers keyed by (seed, request, position) instead of
by the order of calls.

The target's choice at a position is argmax(log p + Gumbel noise of that position): a draw from p
(the Gumbel-max trick) that is the same whatever method, batch or worker comes to that position.
Shapes: V vocabulary, M any number of rows, I some ids of the vocabulary.
"""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

RULES = ("rejection", "coupled")
# Tokens below e^-87 have no mass: about the least probability that float32 holds in full.
_LEAST_LOGP = -87.0
NO_MASS = 1.5e-38
"""What draws take for 0 where logarithms are taken: that of 0 itself is ten times slower."""
# The nucleus is looked for among the tokens above the first of these log-probabilities whose mass
# suffices: sorting a few hundred is fast, sorting the vocabulary is not.
_FLOORS = (-7.0, -12.0, -math.inf)
_GOLDEN = 0x9E3779B97F4A7C15
_ROUNDS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))

Array = TypeVar("Array", NDArray[Any], torch.Tensor)


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the next token is chosen.

    Args:
        temperature: 0 takes the argmax; top-k and top-p then do nothing.
        top_k: keep the k most likely tokens; 0 keeps all.
        top_p: keep the smallest set of most likely tokens whose mass reaches p; 1 keeps all.
        rule: for drafts drawn from a distribution q: ``rejection`` (lossless in law) or
            ``coupled`` (drawn with the target's own noise, so the output equals vanilla's token
            for token).

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

    Float32, or float64 for float64 input. Tokens equal to the last one kept all stay.
    """
    assert not sampling.greedy, "at temperature 0 there is no distribution, only an argmax"
    logits_MV = logits_MV if logits_MV.dtype == torch.float64 else logits_MV.float()
    # The largest is 0 first: divided by a tiny temperature it would overflow.
    logits_MV = (logits_MV - logits_MV.amax(-1, keepdim=True)) / sampling.temperature
    if 0 < sampling.top_k < logits_MV.shape[-1]:
        logp_MV = _keep_from(logits_MV, logits_MV.topk(sampling.top_k).values[:, -1:])
    else:
        logp_MV = logits_MV.log_softmax(-1)
    if sampling.top_p < 1:
        logp_MV = _keep_from(logp_MV, _nucleus_edge(logp_MV, sampling.top_p))
    return logp_MV


def _keep_from(logits_MV: torch.Tensor, least_M1: torch.Tensor) -> torch.Tensor:
    """The log-softmax over the logits of ``least_M1`` or more; -inf for the others."""
    if not _on_cpu(logits_MV):
        return logits_MV.masked_fill(logits_MV < least_M1, -math.inf).log_softmax(-1)
    logp_MV = torch.full_like(logits_MV, -math.inf)
    for logp, logits, least in zip(_array(logp_MV), _array(logits_MV), least_M1, strict=True):
        ids = np.flatnonzero(logits >= least.item())
        logp[ids] = torch.from_numpy(logits[ids]).log_softmax(-1)
    return logp_MV


def _nucleus_edge(logp_MV: torch.Tensor, top_p: float) -> torch.Tensor:
    """The least log-probability [M, 1] in each row's nucleus."""
    if _on_cpu(logp_MV):
        edges = [[_row_edge(logp, top_p)] for logp in _array(logp_MV)]
        return torch.tensor(edges, dtype=logp_MV.dtype)
    descending_MV = logp_MV.sort(descending=True).values
    mass_MV = descending_MV.double().exp().cumsum(-1)
    last_M1 = (mass_MV[:, :-1] < top_p).sum(-1, keepdim=True)
    return descending_MV.gather(-1, last_M1)


def _row_edge(logp: NDArray[Any], top_p: float) -> float:
    """The same for one row, sorting no more tokens than it takes."""
    for floor in _FLOORS:
        descending = np.sort(logp[logp > floor])[::-1]
        mass = np.exp(descending, dtype=np.float64).cumsum()
        if mass.size and mass[-1] >= top_p:
            break
    return float(descending[min(int(mass.searchsorted(top_p)), mass.size - 1)])


def request_key(seed: int, request_id: str) -> int:
    """The 64-bit key of a request's random numbers."""
    digest = hashlib.blake2b(f"{seed}\0{request_id}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def position_key(request: int, position: int, purpose: str) -> int:
    """The 64-bit key of one draw: a request's key, the index of the token in its sequence, and
    what is drawn."""
    data = request.to_bytes(8, "little") + position.to_bytes(8, "little") + purpose.encode()
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


def uniform(keys: Sequence[int], ids_I: torch.Tensor) -> torch.Tensor:
    """Uniform numbers in (0, 1), float64 [len(keys), I]: a hash of key and id (SplitMix64, Steele
    et al. 2014)."""
    column = [[_signed(key + _GOLDEN)] for key in keys]
    if _on_cpu(ids_I):
        bits = _mix(_array(ids_I) * _signed(_GOLDEN) + np.array(column))
        return torch.from_numpy((bits + 0.5) * 2.0**-52)
    bits_MI = _mix(ids_I * _signed(_GOLDEN) + torch.tensor(column, device=ids_I.device))
    return (bits_MI.double() + 0.5) * 2.0**-52


def gumbel(keys: Sequence[int], ids_I: torch.Tensor) -> torch.Tensor:
    """Standard Gumbel noise, float64 [len(keys), I]."""
    noise_MI = uniform(keys, ids_I)
    for _ in range(2):
        if _on_cpu(noise_MI):
            np.log(_array(noise_MI), out=_array(noise_MI))
        else:
            noise_MI.log_()
        noise_MI.neg_()
    return noise_MI


def likeliest_token(logits_MV: torch.Tensor) -> torch.Tensor:
    """The index [M] of each row's largest value, of equal ones the first."""
    if not _on_cpu(logits_MV):
        return logits_MV.argmax(-1)
    # torch's own is ten times slower. NumPy knows no bfloat16.
    wide_MV = logits_MV if logits_MV.dtype == torch.float64 else logits_MV.float()
    return torch.from_numpy(_array(wide_MV).argmax(-1))


def draw(logp_V: torch.Tensor, key: int, num_draws: int = 1) -> torch.Tensor:
    """Ids drawn without replacement by Gumbel top-k (Kool et al. 2019), in drawing order; fewer if
    fewer have mass.

    Raises:
        ValueError: none has.

    The first of several draws is the one that a single draw with the same key gives.
    """
    if _on_cpu(logp_V):
        ids_I = torch.from_numpy(np.flatnonzero(_array(logp_V) > _LEAST_LOGP))
    else:
        ids_I = (logp_V > _LEAST_LOGP).nonzero().squeeze(-1)
    if not len(ids_I):
        raise ValueError("no token has any probability: the logits are no numbers")
    noisy_I = gumbel([key], ids_I)[0] + logp_V.index_select(0, ids_I)
    if num_draws > 1:
        return ids_I[noisy_I.topk(min(num_draws, len(ids_I))).indices]
    return ids_I[likeliest_token(noisy_I[None])]


def choose(logp_MV: torch.Tensor, keys: Sequence[int]) -> torch.Tensor:
    """One draw for each row, [M], without waiting for an accelerator: what `draw` gives with the
    row's key."""
    if _on_cpu(logp_MV):
        return torch.cat([draw(logp_V, key) for logp_V, key in zip(logp_MV, keys, strict=True)])
    ids_V = torch.arange(logp_MV.shape[-1], device=logp_MV.device)
    noisy_MV = logp_MV + gumbel(keys, ids_V)
    return likeliest_token(noisy_MV.masked_fill(logp_MV <= _LEAST_LOGP, -math.inf))


def _signed(value: int) -> int:
    """The int64 with the low 64 bits of ``value``."""
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >> 63 else value


def _mix(z: Array) -> Array:
    """The output function of SplitMix64, in place; of its 64 bits the upper 52, which float64
    holds with a half."""
    for bits, factor in _ROUNDS:
        z ^= _shift(z, bits)
        z *= _signed(factor)
    z ^= _shift(z, 31)
    return _shift(z, 12)


def _shift(z: Array, bits: int) -> Array:
    """Logical right shift of int64."""
    if isinstance(z, np.ndarray):
        return (z.view(np.uint64) >> bits).view(np.int64)
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def _on_cpu(values: torch.Tensor) -> bool:
    """Whether to work on NumPy arrays, which here takes a half to a tenth of the time. On an
    accelerator nothing may wait for a result, so rows are worked on whole and together."""
    return values.device.type == "cpu"


def _array(values: torch.Tensor) -> NDArray[Any]:
    return values.detach().numpy()
