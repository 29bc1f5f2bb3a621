"""Does the output of the whole loop follow the target's law?

Hundreds of outputs of three tokens over a tiny vocabulary are counted and compared with the
target's exact joint law by Pearson's test. Shapes: B prefixes, N tokens, V vocabulary.
"""

from collections.abc import Sequence

import numpy as np
import scipy.stats
import torch
from numpy.typing import NDArray

from specbench.conformance.decoding import make_request
from specbench.method import Request, Row
from specbench.sampling import Sampling, warp
from specbench.target import Target
from specbench.tree import Tree

PROMPT = (5,)
VOCAB, LENGTH = 6, 3
NUM_OUTPUTS = 400
LEAST_EXPECTED = 5
"""Outputs that are expected less often are counted together."""

Law = NDArray[np.float64]


def requests() -> list[Request]:
    """The requests whose outputs are counted; only their random numbers differ."""
    return [make_request(PROMPT, LENGTH, name=str(i)) for i in range(NUM_OUTPUTS)]


def exact_law(target: Target, sampling: Sampling) -> Law:
    """The chance of every output, [V, V, V]."""
    prefixes = torch.cartesian_prod(*[torch.arange(VOCAB)] * (LENGTH - 1))
    tokens_BN = torch.cat([torch.tensor(PROMPT).expand(len(prefixes), -1), prefixes], dim=1)
    cache = target.new_cache(len(prefixes))
    for _ in prefixes:
        cache.add_row()
    trees = [Tree.chain(tokens_BN.shape[1] - 1)] * len(prefixes)
    logits_BNV = target.forward(tokens_BN, trees, cache).logits_BMV[:, -LENGTH:].double()
    p_BNV = warp(logits_BNV.flatten(0, 1), sampling).exp().view(-1, LENGTH, VOCAB)
    chance_B1 = torch.ones(len(prefixes), 1, dtype=torch.float64)
    for i in range(LENGTH - 1):
        chance_B1 = chance_B1 * p_BNV[:, i].gather(1, prefixes[:, i : i + 1])
    return (chance_B1 * p_BNV[:, -1]).reshape(VOCAB, VOCAB, VOCAB).numpy()


def count(rows: Sequence[Row]) -> Law:
    """How often each output comes, [V, V, V]."""
    counts = np.zeros([VOCAB] * LENGTH)
    np.add.at(counts, tuple(np.array([row.output for row in rows]).T), 1)
    return counts


def pooled(values: Law, law: Law) -> Law:
    """By output, those that are rare under the law summed up in one."""
    is_common = law * NUM_OUTPUTS >= LEAST_EXPECTED
    return np.append(values[is_common], values[~is_common].sum())


def p_value(counts: Law, law: Law) -> float:
    """The chance of counts as far from the law as these, or farther."""
    if counts[law == 0].any():
        return 0.0
    expected = NUM_OUTPUTS * pooled(law, law)
    return float(scipy.stats.chisquare(pooled(counts, law), expected).pvalue)
