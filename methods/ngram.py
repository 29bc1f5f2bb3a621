"""N-gram drafting: copies what followed the last tokens where they stood before, in the prompt or
the output.

Prompt lookup decoding (Saxena 2023), with the longest match first and an index that grows with the
text, so the cost of a step does not depend on its length. Several continuations make a tree. A
continuation that reaches the end of the text goes on through its own draft, as in LZ77, which
follows loops and lists as far as the budget allows.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

import torch

from specbench.method import Batch, Budget, Method, MethodConfig, Proposal, Row, Verdict
from specbench.target import Target
from specbench.tree import Tree, merge_paths

# Matches to look at for each continuation wanted: many occurrences go on alike.
_TRIES = 8
# The index holds every suffix of every length.
_LONGEST_MATCH = 64


@dataclass(frozen=True, kw_only=True)
class NgramConfig(MethodConfig):
    """Knobs of n-gram drafting.

    Args:
        max_match: longest suffix that is looked up.
        min_match: shortest one.
        tokens_per_match: the most tokens to draft for each token that matched, so that a match by
            chance costs little (suffix decoding: Oliaro et al. 2025); 0 sets no limit.
        branches: continuations to draft; more than one makes a tree.
    """

    depth: int = 11
    max_match: int = 8
    min_match: int = 1
    tokens_per_match: int = 2
    branches: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.min_match <= self.max_match <= _LONGEST_MATCH:
            raise ValueError(
                f"min_match {self.min_match} and max_match {self.max_match} are out of range; "
                f"valid: 1 <= min_match <= max_match <= {_LONGEST_MATCH}"
            )
        if self.tokens_per_match < 0:
            raise ValueError(
                f"tokens_per_match {self.tokens_per_match} is out of range; valid: 0 or more"
            )
        if not 1 <= self.branches <= self.max_nodes:
            raise ValueError(
                f"branches {self.branches} is out of range; valid: 1..{self.max_nodes} (max_nodes)"
            )

    @property
    def drafts_trees(self) -> bool:
        """Of several continuations."""
        return self.branches > 1


class _Match(NamedTuple):
    """The position behind an earlier occurrence of the text's suffix, and the suffix's length."""

    position: int
    length: int


class _Continuation(NamedTuple):
    """Tokens that followed before, and how long the match in front of them was."""

    tokens: list[int]
    matched: int


class _Index:
    """Where each n-gram of a growing text stood: the positions of the tokens behind it, oldest
    first."""

    def __init__(self, min_match: int, max_match: int) -> None:
        self.lengths = range(max_match, min_match - 1, -1)
        self.tokens: list[int] = []
        self.behind: dict[tuple[int, ...], list[int]] = {}

    def extend(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            position = len(self.tokens)
            for n in self.lengths:
                if n <= position:
                    gram = tuple(self.tokens[position - n :])
                    self.behind.setdefault(gram, []).append(position)
            self.tokens.append(token)

    def matches(self) -> Iterator[_Match]:
        """Earlier occurrences of the text's suffix, long suffixes first, of equals the latest."""
        for n in self.lengths:
            if n <= len(self.tokens):
                for position in reversed(self.behind.get(tuple(self.tokens[-n:]), ())):
                    yield _Match(position, n)

    def continuation(self, position: int, length: int, ends: frozenset[int]) -> list[int]:
        """Up to ``length`` tokens from a position on; past the end of the text it reads itself;
        ends with an ``ends``."""
        out: list[int] = []
        while len(out) < length:
            at = position + len(out)
            token = self.tokens[at] if at < len(self.tokens) else out[at - len(self.tokens)]
            out.append(token)
            if token in ends:
                break
        return out


class Ngram(Method):
    """Looks drafts up in the text so far; nothing is trained or computed."""

    Config = NgramConfig
    config: NgramConfig

    def __init__(self, target: Target, config: NgramConfig) -> None:
        super().__init__(target, config)
        self.indices: list[_Index] = []

    def start(self, rows: Sequence[Row], taps: Sequence[Mapping[int, torch.Tensor]]) -> None:
        """Indexes the prompts."""
        for row in rows:
            index = _Index(self.config.min_match, self.config.max_match)
            index.extend(row.tokens)
            self.indices.append(index)

    def propose(self, batch: Batch, budgets: Sequence[Budget]) -> Proposal:
        """Continuations of the longest earlier match, merged into a tree."""
        trees, drafted, chances = list[Tree](), list[list[int]](), list[list[float]]()
        for index, budget in zip(self.indices, budgets, strict=True):
            found = list(self._continuations(index, budget.depth))
            tree, tokens = merge_paths((one.tokens for one in found), budget.nodes)
            trees.append(tree)
            drafted.append(tokens)
            chances.append(_chances(found, tree, tokens) if self.drawer.rates else [])
        rated = chances if self.drawer.rates else None
        return Proposal.from_rows(batch.rows, trees, drafted, chances=rated)

    def _continuations(self, index: _Index, depth: int) -> Iterator[_Continuation]:
        """Distinct continuations; those that another one begins with do not count."""
        if depth == 0:
            return
        found: list[list[int]] = []
        for match in islice(index.matches(), _TRIES * self.config.branches):
            length = min(depth, self.config.tokens_per_match * match.length or depth)
            path = index.continuation(match.position, length, self.target.eos_ids)
            if not any(path == other[: len(path)] for other in found):
                found.append(path)
                yield _Continuation(path, match.length)
                if len(found) == self.config.branches:
                    return

    def update(self, verdict: Verdict) -> None:
        """Indexes the committed tokens."""
        for index, tokens in zip(self.indices, verdict.committed, strict=True):
            index.extend(tokens)

    def keep(self, rows: Sequence[int]) -> None:
        """Keeps the rows' indices."""
        self.indices = [self.indices[b] for b in rows]

    def reset(self) -> None:
        """Forgets all texts."""
        self.indices = []


def _chances(found: Sequence[_Continuation], tree: Tree, tokens: Sequence[int]) -> list[float]:
    """Of each node, n / (n + 1) for the longest match of n tokens in front of it; a guess that
    calibration corrects."""
    chances: dict[int, float] = {}
    for continuation, matched in found:
        node = 0
        for token in continuation:
            children = [child for child in tree.children[node] if tokens[child - 1] == token]
            if not children:
                break
            (node,) = children
            chances.setdefault(node, matched / (matched + 1))
    return [chances[node] for node in range(1, len(tree))]
