"""The target model: loading, forward over a token tree, key-value cache, hidden-state taps,
partial stack."""

from specbench.target.cache import KVCache
from specbench.target.loading import DEFAULT_TARGET, DTYPES, load_target
from specbench.target.model import FINAL, Forward, Resume, Target, ending, fingerprint

__all__ = [
    "DEFAULT_TARGET",
    "DTYPES",
    "FINAL",
    "Forward",
    "KVCache",
    "Resume",
    "Target",
    "ending",
    "fingerprint",
    "load_target",
]
