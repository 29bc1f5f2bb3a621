"""A small draft model with the target's tokenizer drafts a chain or a tree (Leviathan et al. 2023,
Chen et al. 2023).

The drafter keeps its own cache. It never runs the last level of its own draft, so after full
acceptance it lags behind by more than the bonus token: every step first feeds it all committed
tokens that it has not seen.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from specbench.costs import Cost
from specbench.drafter_costs import Draft, model_cost
from specbench.drafting import BranchingConfig, draft_tree
from specbench.learned.distilled import Distilled, is_distilled, load_distilled
from specbench.learned.shipped import shipped_weights
from specbench.method import Batch, Budget, Method, Proposal, Row, Verdict, pad_rows
from specbench.target import Target, load_target
from specbench.target.copies import int8_copy, layers_copy
from specbench.training.distilled import DistilledRecipe
from specbench.tree import Tree


@dataclass(frozen=True, kw_only=True)
class DraftModelConfig(BranchingConfig):
    """Knobs of the draft model.

    Args:
        model: Hub name, folder or GGUF file of the drafter, or the folder of a distilled one;
            ``int8``: a copy of the target with 8-bit linear layers; ``layers``: a copy with only
            some of its layers; ``copy``: the former on a CPU, the latter elsewhere, where there are
            no 8-bit kernels. Empty for the distilled one that comes with the project for this
            target, if there is one, else ``copy``.
        layers: how many layers a copy keeps; 0 for a quarter of them.
    """

    depth: int = 2
    branching: tuple[int, ...] = (3,)
    model: str = ""
    layers: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.layers < 0:
            raise ValueError(f"layers {self.layers} is out of range; valid: 0 or more")


class DraftModel(Method):
    """A causal language model drafts for the target."""

    Config = DraftModelConfig
    weights_knob = "model"
    trials: ClassVar = {"model": ("layers",)}
    Recipe = DistilledRecipe
    config: DraftModelConfig

    def __init__(self, target: Target, config: DraftModelConfig) -> None:
        super().__init__(target, config)
        self.model = config.model or shipped_weights("draft_model", target.name) or "copy"
        if self.model == "copy":
            self.model = default_copy(target.device)
        self.distilled = is_distilled(self.model)
        loaded = _load_drafter(target, self.model, config.layers)
        self.drafter, self.vocabulary = loaded.model, loaded.vocabulary
        check_vocabulary(self.drafter, target)
        self.fingerprint = self.drafter.fingerprint
        self.cache = self.drafter.new_cache(1)
        self.num_run: list[int] = []
        """By row, the nodes of this step's tree that the drafter ran."""

    @property
    def label(self) -> str:
        """What the drafter is."""
        if self.model == "int8":
            return "int8 copy of the target"
        if self.model == "layers":
            return f"{self.drafter.num_layers} of the target's {self.target.num_layers} layers"
        if self.distilled:
            return f"distilled, {self.drafter.num_layers} layers"
        return self.model

    @property
    def num_extra_bytes(self) -> int:
        """The drafter's weights."""
        return self.drafter.num_weight_bytes

    def draft_cost(self, draft: Draft) -> Cost:
        """The drafter's forwards."""
        shape = self.drafter.shape
        if self.vocabulary:
            shape = replace(shape, vocab=len(self.vocabulary))
        if self.model == "int8":
            draft = replace(draft, width=1)
        return model_cost(shape, draft)

    def start(self, rows: Sequence[Row], taps: Sequence[Mapping[int, torch.Tensor]]) -> None:
        """Runs the drafter over the prompts that leave room in its context."""
        for row in rows:
            index = self.cache.add_row()
            if len(row.tokens) < self.drafter.max_context:
                self.drafter.prefill(self._known(row.tokens[:-1]), self.cache, index)

    def propose(self, batch: Batch, budgets: Sequence[Budget]) -> Proposal:
        """A chain or tree from the drafter's logits."""
        budgets = [
            self._within_context(row, budget)
            for row, budget in zip(batch.rows, budgets, strict=True)
        ]
        self.num_run = [min(budget.depth, 1) for budget in budgets]
        if not any(self.num_run):
            return Proposal.nothing(batch.rows)
        root_logits_B1V = self._catch_up(batch.rows)
        drawer = self.vocabulary.drawer(self.drawer) if self.vocabulary else self.drawer
        return draft_tree(
            batch.rows, budgets, self.config.branching, drawer, root_logits_B1V, self._expand
        )

    def _within_context(self, row: Row, budget: Budget) -> Budget:
        """Nothing is drafted beyond the drafter's own context."""
        depth = max(0, min(budget.depth, self.drafter.max_context - len(row.tokens)))
        return Budget(depth, budget.nodes if depth else 0)

    def _catch_up(self, rows: Sequence[Row]) -> torch.Tensor:
        """Feeds the committed tokens that the drafter has not seen, the root last; to a row that
        does not draft now, nothing but a padding root.

        Returns:
            The drafter's logits [B, 1, V] at the roots; the roots themselves are node 0, not yet
            committed.
        """
        unseen = [
            self._known(row.tokens[length:]) if num_run else [0]
            for row, length, num_run in zip(rows, self.cache.lengths, self.num_run, strict=True)
        ]
        roots_B1 = torch.tensor([[len(tokens) - 1] for tokens in unseen])
        trees = [Tree.chain(len(tokens) - 1) for tokens in unseen]
        logits_B1V = self._logits(pad_rows(unseen), trees, [0] * len(rows), roots_B1)
        for index, tokens in enumerate(unseen):
            self.cache.extend(index, len(tokens) - 1)
        return logits_B1V

    def _known(self, tokens: Sequence[int]) -> list[int]:
        """The tokens, with the drafter's last one for those that its vocabulary has not."""
        last = self.drafter.vocab_size - 1
        return [min(token, last) for token in tokens]

    def _expand(
        self, tokens_BM: torch.Tensor, trees: list[Tree], starts: list[int]
    ) -> torch.Tensor:
        for row, (tree, start) in enumerate(zip(trees, starts, strict=True)):
            if start < len(tree):
                self.num_run[row] = len(tree)
        known_BM = tokens_BM.clamp_max(self.drafter.vocab_size - 1)
        return self._logits(known_BM, trees, starts, slice(None))

    def _logits(
        self,
        tokens_BN: torch.Tensor,
        trees: list[Tree],
        starts: list[int],
        at: slice | torch.Tensor,
    ) -> torch.Tensor:
        """The drafter's logits over its reduced vocabulary or, if it has none, the target's;
        padding of either's vocabulary has no mass."""
        forward = self.drafter.forward(tokens_BN, trees, self.cache, start=starts, logits_at=at)
        if self.vocabulary:
            return forward.logits_BMV
        return fit_vocabulary(forward.logits_BMV, self.target)

    def update(self, verdict: Verdict) -> None:
        """Keeps the accepted nodes that the drafter ran."""
        for row, path in enumerate(verdict.paths):
            self.cache.commit(row, [node for node in path if node < self.num_run[row]])

    def keep(self, rows: Sequence[int]) -> None:
        """Keeps the rows' cache."""
        self.cache.keep(rows)

    def reset(self) -> None:
        """Forgets all rows; the allocated cache is used again."""
        self.cache.keep([])

    def describe(self) -> dict[str, Any]:
        """The settings, and which drafter they come to."""
        return super().describe() | {
            "num_parameters": self.drafter.num_parameters,
        }


def default_copy(device: torch.device) -> str:
    """What kind of copy drafts for a target: only a CPU has 8-bit kernels here."""
    return "int8" if device.type == "cpu" else "layers"


def _load_drafter(target: Target, model: str, num_layers: int) -> Distilled:
    if model == "int8":
        return Distilled(int8_copy(target), None)
    if model == "layers":
        return Distilled(layers_copy(target, num_layers or max(1, target.num_layers // 4)), None)
    try:
        if is_distilled(model):
            return load_distilled(model, target)
        dtype = str(target.dtype).removeprefix("torch.")
        return Distilled(load_target(model, dtype=dtype, device=target.device), None)
    except ValueError as error:
        raise ValueError(f"draft_model.model={model}: {error}") from error


def check_vocabulary(drafter: Target, target: Target) -> None:
    """Refuses a drafter whose tokens mean something else than the target's.

    Raises:
        ValueError: names the first difference. Rows of padding behind the tokenizer's vocabulary
        do not count.
    """
    if drafter.tokenizer is None or target.tokenizer is None:
        if drafter.vocab_size != target.vocab_size:
            raise ValueError(
                f"draft model {drafter.name!r} has {drafter.vocab_size} tokens, "
                f"target {target.name!r} {target.vocab_size}"
            )
        return
    ours, theirs = target.tokenizer.get_vocab(), drafter.tokenizer.get_vocab()
    if ours == theirs:
        return
    if len(ours) != len(theirs):
        problem = f"{len(theirs)} tokens instead of {len(ours)}"
    else:
        index, token = min((i, token) for token, i in ours.items() if theirs.get(token) != i)
        problem = f"token {token!r} has id {theirs.get(token)} instead of {index}"
    raise ValueError(
        f"draft model {drafter.name!r} has another tokenizer than target {target.name!r}: "
        f"{problem}; valid: a model with the same tokenizer"
    )


def fit_vocabulary(logits_BMV: torch.Tensor, target: Target) -> torch.Tensor:
    """Logits over exactly the target's vocabulary: cut, or filled up with the lowest finite
    value."""
    width = logits_BMV.shape[-1]
    if width > target.vocab_size:
        return logits_BMV[..., : target.vocab_size]
    if width < target.vocab_size:
        lowest = torch.finfo(logits_BMV.dtype).min
        return torch.nn.functional.pad(logits_BMV, (0, target.vocab_size - width), value=lowest)
    return logits_BMV
