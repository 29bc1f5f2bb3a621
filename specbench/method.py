"""The contract between a method and the loop: Method, Row, Budget, Proposal, Verdict.

A method drafts; it never decides what is accepted. It sees the committed tokens of its rows, and
after each step the hidden states that it asked for. It never sees a clock, a workload's name or
the target's logits before they are committed. Shapes: B rows, N nodes, V vocabulary, h hidden.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch

from specbench.costs import Cost
from specbench.drafter_costs import Draft
from specbench.sampling import Sampling, draw, likeliest_token, position_key, warp
from specbench.target import KVCache, Resume, Target
from specbench.tree import Tree

if TYPE_CHECKING:
    from specbench.training.recipe import Recipe


@dataclass(frozen=True, kw_only=True)
class Request:
    """One prompt to complete.

    Args:
        id: unique within a run; with the seed it keys the request's random numbers.
        prompt: its token ids, one at least.
        max_new_tokens: the token budget.
        stop: strings that end the output.
        key: the 64-bit key of its random numbers, see `specbench.sampling.request_key`.

    Raises:
        ValueError: an empty prompt, a budget below 1 or an empty stop string.
    """

    id: str
    prompt: tuple[int, ...]
    max_new_tokens: int
    stop: tuple[str, ...] = ()
    key: int = 0

    def __post_init__(self) -> None:
        if not self.prompt:
            raise ValueError(f"prompt {self.id!r} is empty; a prompt needs one token at least")
        if self.max_new_tokens < 1:
            raise ValueError(
                f"prompt {self.id!r}: max_new_tokens {self.max_new_tokens}; valid: 1 or more"
            )
        if "" in self.stop:
            raise ValueError(f"prompt {self.id!r} has an empty stop string")


class Step(NamedTuple):
    """One propose-verify-commit round of one row."""

    nodes: int
    """Drafted nodes, n."""
    depth: int
    """Depth offered, d."""
    accepted: int
    """Drafted tokens kept, a: after cutting at EOS, stop string and budget."""
    committed: int
    """Tokens kept, c: the accepted ones and, unless it was cut, the bonus."""
    matched: int
    """Drafted tokens that the acceptance rule took, before cutting."""


@dataclass(eq=False)
class Row:
    """One sequence that is being decoded: a request, its committed tokens and its steps."""

    request: Request
    tokens: list[int]
    steps: list[Step] = field(default_factory=list)
    finish: str | None = None
    """Why it ended: ``eos``, ``stop`` or ``length``; None while it runs."""
    drawn: bool = False
    """Whether any of its drafts was drawn from a distribution, so that only the law of its output
    is the target's."""

    @property
    def output(self) -> list[int]:
        """The committed tokens behind the prompt."""
        return self.tokens[len(self.request.prompt) :]

    @property
    def num_left(self) -> int:
        """Tokens that may still be committed."""
        return self.request.max_new_tokens - (len(self.tokens) - len(self.request.prompt))


class Budget(NamedTuple):
    """What one row may draft in one step."""

    depth: int
    nodes: int


@dataclass(frozen=True)
class Batch:
    """The rows of a step and the target's cache; row b of the batch is row b of the cache."""

    rows: Sequence[Row]
    cache: KVCache


class Draws(NamedTuple):
    """Children drawn at one node, in drawing order."""

    tokens: list[int]
    logq_V: torch.Tensor | None
    """What they were drawn from, float32 log-probabilities; None if each is a point mass (greedy
    or coupled)."""
    chances: Sequence[float] = ()
    """Of each to be the child that is taken, as the drafter sees it; only where that is asked for.
    They follow from the distribution, whatever was drawn from it."""


@dataclass(frozen=True)
class Drawer:
    """Draws draft tokens as the run's sampling demands; a method never handles temperature, top-k,
    top-p or seeds.

    Args:
        sampling: the run's.
        rates: whether draws come with their chances.
    """

    sampling: Sampling
    rates: bool = field(default=False, kw_only=True)

    def draw(self, logits_V: torch.Tensor, row: Row, position: int, num_children: int = 1) -> Draws:
        """Distinct children for the token at index ``position`` of the row's sequence, from the
        drafter's logits.

        Greedy: the largest logits. Sampling: without replacement from the warped distribution,
        with noise of its own (``rejection``) or with the noise that the target will use there
        (``coupled``).
        """
        if self.sampling.greedy:
            if num_children == 1:
                tokens = likeliest_token(logits_V[None]).tolist()
            else:
                tokens = logits_V.topk(min(num_children, len(logits_V))).indices.tolist()
            return Draws(tokens, None, self._rate(logits_V, len(tokens)))
        logq_V = warp(logits_V[None], self.sampling)[0]
        coupled = self.sampling.rule == "coupled"
        key = position_key(row.request.key, position, "target" if coupled else "draft")
        tokens = draw(logq_V, key, num_children).tolist()
        chances = self._rate(logq_V, len(tokens))
        return Draws(tokens, None if coupled else logq_V, chances)

    def _rate(self, logits_V: torch.Tensor, num_children: int) -> list[float]:
        """The largest probabilities."""
        if not self.rates:
            return []
        logits_V = logits_V.float()
        chances: list[float] = (
            (logits_V.topk(num_children).values - logits_V.logsumexp(-1)).exp().tolist()
        )
        return chances


def pad_rows(rows: Sequence[Sequence[int]]) -> torch.Tensor:
    """Rows of tokens as int64 [B, N]; the shorter ones are padded with token 0."""
    width = max(len(row) for row in rows)
    return torch.tensor([[*row, *[0] * (width - len(row))] for row in rows], dtype=torch.long)


@dataclass(frozen=True, kw_only=True)
class Proposal:
    """A token tree per row. Node 0 is the root: the last committed token, not yet in the cache.

    Args:
        tokens_BN: int64 [B, N]; rows with fewer nodes are padded with any token.
        trees: the shape of each row's tree.
        logq: for each row, by parent node: the float32 log-probabilities [V] that the node's
            children were drawn from, in order; it must be the very tensor they were drawn from. A
            node without an entry has point-mass children.
        replacement: whether siblings were drawn with replacement.
        resume: hidden states of all nodes at a layer up to which they already ran through the
            target.
        chances: for each row, by drafted node: the drafter's own estimate that it is the child
            that is taken if its parent was. It may depend on the tokens above the node; on that of
            the node itself only where that is a point mass.
    """

    tokens_BN: torch.Tensor
    trees: Sequence[Tree]
    logq: Sequence[Mapping[int, torch.Tensor]] | None = None
    replacement: bool = False
    resume: Resume | None = None
    chances: Sequence[Sequence[float]] | None = None

    @staticmethod
    def from_rows(
        rows: Sequence[Row],
        trees: Sequence[Tree],
        drafted: Sequence[Sequence[int]],
        logq: Sequence[Mapping[int, torch.Tensor]] | None = None,
        chances: Sequence[Sequence[float]] | None = None,
    ) -> "Proposal":
        """A proposal from each row's drafted tokens (nodes 1, 2, ... of its tree).

        Raises:
            ValueError: a row has more or fewer tokens than its tree has nodes.
        """
        for row, tree, nodes in zip(rows, trees, drafted, strict=True):
            if len(nodes) != tree.num_drafted:
                raise ValueError(
                    f"row {row.request.id!r} has {len(nodes)} drafted tokens for a tree of "
                    f"{tree.num_drafted}"
                )
        tokens = [[row.tokens[-1], *nodes] for row, nodes in zip(rows, drafted, strict=True)]
        return Proposal(tokens_BN=pad_rows(tokens), trees=list(trees), logq=logq, chances=chances)

    @staticmethod
    def nothing(rows: Sequence[Row]) -> "Proposal":
        """The proposal that drafts nothing: the roots alone."""
        return Proposal.from_rows(rows, [Tree.chain(0)] * len(rows), [()] * len(rows))

    def cut(self, num_nodes: Sequence[int]) -> "Proposal":
        """With only the first so many drafted nodes of each row: those are a tree."""
        trees = [
            Tree.of(tree.parents[: 1 + num])
            for tree, num in zip(self.trees, num_nodes, strict=True)
        ]
        width = max(map(len, trees))
        logq = self.logq and [
            {
                node: logq_V
                for node, logq_V in by_node.items()
                if node < len(tree) and tree.children[node]
            }
            for by_node, tree in zip(self.logq, trees, strict=True)
        ]
        resume = self.resume and Resume(self.resume.layer, self.resume.hidden_BNh[:, :width])
        chances = self.chances and [
            chances[:num] for chances, num in zip(self.chances, num_nodes, strict=True)
        ]
        return replace(
            self,
            tokens_BN=self.tokens_BN[:, :width],
            trees=trees,
            logq=logq,
            resume=resume,
            chances=chances,
        )


@dataclass(frozen=True)
class Verdict:
    """What became of a proposal, after cutting and before finished rows leave."""

    rows: Sequence[Row]
    proposal: Proposal
    paths: Sequence[Sequence[int]]
    """By row: the nodes whose keys and values the cache keeps, root first; as many as tokens were
    committed."""
    committed: Sequence[Sequence[int]]
    """By row: the tokens committed in this step."""
    taps: Mapping[int, torch.Tensor]
    """Hidden states [B, N, h] of all nodes, for the taps that the method asked for."""


@dataclass(frozen=True, kw_only=True)
class MethodConfig:
    """The knobs of a method; a subclass adds its own and checks them in ``__post_init__``.

    Args:
        depth: how deep to draft when the run does not say.
        max_nodes: the most nodes to draft in one step, where a method drafts trees.
        controller: how deep each row drafts, within these: the name of a depth controller, with
            its knobs, ``off_above_batch:off_at=4``.
    """

    depth: int = 4
    max_nodes: int = 64
    controller: str = "fixed"

    def __post_init__(self) -> None:
        if self.depth < 0:
            raise ValueError(f"depth {self.depth} is out of range; valid: 0 or more")
        if self.max_nodes < 1:
            raise ValueError(f"max_nodes {self.max_nodes} is out of range; valid: 1 or more")

    @property
    def drafts_trees(self) -> bool:
        """Whether it drafts trees, so that ``max_nodes`` may be more than the depth."""
        return False


@dataclass(frozen=True, kw_only=True)
class Typical:
    """Medusa's typical acceptance (Cai et al. 2024, section 3.3): a token x is taken iff p(x) >
    min(epsilon, delta e^-H(p)).

    It is lossy: the output does not follow the target's distribution.
    """

    epsilon: float = 0.09
    delta: float = 0.3


class Method(ABC):
    """A way of drafting. Its state is per row, and nothing survives from one prompt to the next.

    Args:
        target: the target; to read its tokenizer and shapes, and to run parts of it on the shared
            cache.
        config: an instance of the class's ``Config``.
    """

    Config: ClassVar[type[MethodConfig]] = MethodConfig
    Recipe: ClassVar["type[Recipe] | None"] = None
    """How it is trained, if it can be."""
    weights_knob: ClassVar[str] = "weights"
    """The knob that names what was trained."""
    trials: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    """Values that `specbench conform` tries, of knobs whose type and messages do not tell them."""
    remembers: ClassVar[bool] = False
    """Whether a row's drafts depend on more than its tokens and its budget: on what was accepted
    before, say."""
    taps: tuple[int, ...] = ()
    typical: Typical | None = None
    """Set by a method that asks for typical acceptance; its rows are then marked lossy."""
    fingerprint: str = ""
    """Of the weights that it drafts with, wherever they lie (`specbench.target.fingerprint`); set
    by a method that has some."""
    drawer: Drawer
    """Draws draft tokens from the method's logits; set by the loop, which knows the sampling."""

    def __init__(self, target: Target, config: MethodConfig) -> None:
        self.target, self.config = target, config

    @classmethod
    def lacks(cls, config: MethodConfig, target: str) -> str:
        """What is missing to draft for the target of this name, as far as can be told before
        anything is loaded; empty if nothing."""
        return ""

    @property
    def label(self) -> str:
        """What drafts, for the tables, where the method's name alone does not say it."""
        return ""

    @property
    def num_extra_bytes(self) -> int:
        """Bytes of weights that the method needs beside the target's."""
        return 0

    @property
    def resumed_layers(self) -> int:
        """The target's first layers that drafting runs, so that verification need not."""
        return 0

    def draft_cost(self, draft: Draft) -> Cost:
        """Arithmetic and memory traffic of a draft; of one that is looked up, nothing. A method
        with weights that does not say has no FLOPs in the tables."""
        return Cost()

    def start(self, rows: Sequence[Row], taps: Sequence[Mapping[int, torch.Tensor]]) -> None:  # noqa: B027 - an optional hook
        """Takes in rows that join behind the present ones.

        Args:
            rows: the new rows; all their tokens but the last are in the target's cache.
            taps: for each new row, the hidden states [1, prompt - 1, h] asked for; empty for a
                prompt of one token.
        """

    @abstractmethod
    def propose(self, batch: Batch, budgets: Sequence[Budget]) -> Proposal:
        """Drafts a token tree for each row, no deeper and with no more nodes than its budget."""

    def update(self, verdict: Verdict) -> None:  # noqa: B027 - an optional hook
        """Takes in what was committed."""

    def keep(self, rows: Sequence[int]) -> None:  # noqa: B027 - an optional hook
        """Keeps the rows with these indices, ascending, and forgets the others: the i-th kept row
        becomes row i."""

    def reset(self) -> None:  # noqa: B027 - an optional hook
        """Forgets all rows."""

    def describe(self) -> dict[str, Any]:
        """The effective settings, for the provenance."""
        return {
            "label": self.label,
            "extra_bytes": self.num_extra_bytes,
            "fingerprint": self.fingerprint,
            **vars(self.config),
        }
