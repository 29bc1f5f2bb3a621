"""A head is trained on just what it computes when it drafts."""

import pytest
import torch
import torch.nn.functional as F

from specbench.conformance.models import looping_target
from specbench.conformance.weights import own_outputs, save_tiny_drafter
from specbench.learned.eagle import EagleHead
from specbench.learned.eagle_files import load_eagle
from specbench.learned.layers import open_nodes
from specbench.target import FINAL, KVCache
from specbench.training.eagle import EagleRecipe
from specbench.training.recipe import Options, Sequences
from specbench.tree import Tree

UNROLL = 4


def new_recipe(**sizes: int) -> EagleRecipe:
    target = looping_target(**sizes)
    counts = torch.ones(target.vocab_size, dtype=torch.long)
    recipe = EagleRecipe(target, Options(vocab=70, token_counts=counts, unroll=UNROLL))
    recipe.stride = 1
    torch.manual_seed(5)
    for parameter in recipe.module.parameters():
        if parameter.requires_grad and parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.2)
    return recipe


def batch_of(recipe: EagleRecipe) -> Sequences:
    batch = own_outputs(recipe.target, recipe.needed_taps())
    return Sequences(
        batch.tokens_BT[:3],
        batch.written_BT[:3],
        {tap: states[:3] for tap, states in batch.hidden.items()},
    )


@torch.inference_mode()
def drafted_outputs(head: EagleHead, batch: Sequences, row: int, entry: int) -> list[torch.Tensor]:
    """The head's output at an entry, and at the entries behind it that it drafts on its own
    outputs; run one by one on a cache."""
    cache = KVCache(1)
    cache.add_row()
    tokens = batch.tokens_BT[row]
    true = head.fuse({tap: batch.hidden[tap][row : row + 1] for tap in head.shape.taps})
    outputs: list[torch.Tensor] = []
    for position in range(entry + UNROLL):
        feature = true[:, position : position + 1] if position <= entry else outputs[-1][None, None]
        nodes = open_nodes(cache, [Tree.chain(0)], [0], 1, torch.float32, torch.device("cpu"))
        out = head(tokens[position + 1].view(1, 1), feature, nodes, cache)[0, 0]
        cache.commit(0, [0])
        if position >= entry:
            outputs.append(out)
    return outputs


@pytest.mark.parametrize("head_dim", [8, 32])
@pytest.mark.parametrize("entry", [0, 1, 5])
def test_the_unrolled_head_computes_what_it_does_when_it_drafts(entry: int, head_dim: int) -> None:
    recipe = new_recipe(head_dim=head_dim)
    batch = batch_of(recipe)
    unrolled = [out.detach() for _, out in recipe.steps(batch)]
    assert len(unrolled) == UNROLL
    for row in range(3):
        expected = drafted_outputs(recipe.module, batch, row, entry)
        for step, out in enumerate(expected):
            torch.testing.assert_close(unrolled[step][row, entry], out, atol=1e-4, rtol=1e-4)


def test_later_steps_run_some_entries_as_if_all_ran() -> None:
    recipe = new_recipe()
    batch = batch_of(recipe)
    every = [out for _, out in recipe.steps(batch)]
    recipe.stride, seen = 3, set[int]()
    for padding in range(3):
        padded = Sequences(
            F.pad(batch.tokens_BT[:1], (0, padding)),
            F.pad(batch.written_BT[:1], (0, padding)),
            {tap: F.pad(states[:1], (0, 0, 0, padding)) for tap, states in batch.hidden.items()},
        )
        steps = list(recipe.steps(padded))
        for (entries, out), expected in zip(steps[1:], every[1:], strict=True):
            known = entries < expected.shape[1]
            found = out[0, known]
            torch.testing.assert_close(found, expected[0, entries[known]], atol=1e-5, rtol=1e-4)
        seen |= set(steps[-1][0].tolist())
    assert seen >= set(range(every[0].shape[1]))


def test_the_loss_asks_for_the_tokens_that_follow() -> None:
    """Of a head whose every guess is known, the accuracies are those counted by hand."""
    recipe = new_recipe()
    batch = batch_of(recipe)
    _, shown = recipe.loss(batch)
    ids = recipe.module.d2t + torch.arange(70)
    outs = [out for _, out in recipe.steps(batch)]
    for step, out in enumerate(outs):
        right = total = 0
        for row in range(3):
            for entry in range(out.shape[1]):
                place = entry + step + 2
                if place < batch.tokens_BT.shape[1] and batch.written_BT[row, place]:
                    guess = ids[recipe.module.logits(out[row, entry]).argmax()]
                    right += int(guess == batch.tokens_BT[row, place])
                    total += 1
        assert shown[f"acc{step + 1}"] == pytest.approx(right / total)


def test_soft_targets_are_the_targets_own_distributions() -> None:
    recipe = new_recipe()
    batch = batch_of(recipe)
    found = recipe.targets.of(batch).at(torch.arange(batch.tokens_BT.shape[1] - 1) + 3)
    head_Vh = recipe.target.model.get_output_embeddings().weight.float()
    ids = recipe.module.d2t + torch.arange(70)
    for m in range(0, len(found.row_M), 7):
        row, entry = int(found.row_M[m]), int(found.entry_M[m])
        logits = (head_Vh @ batch.hidden[FINAL][row, entry + 2])[ids]
        torch.testing.assert_close(found.p_MD[m], logits.softmax(-1), atol=1e-5, rtol=1e-4)
        token = int(batch.tokens_BT[row, entry + 3])
        assert batch.written_BT[row, entry + 3]
        index = int(found.best_M[m])
        assert (index < 0 and token not in ids) or int(ids[index]) == token


def test_training_lowers_the_loss_and_what_is_written_is_what_was_trained() -> None:
    recipe = new_recipe()
    batch = batch_of(recipe)
    parameters = [p for p in recipe.module.parameters() if p.requires_grad]
    frozen = recipe.module.lm_head.weight.clone()
    optimiser = torch.optim.Adam(parameters, lr=3e-3)
    losses = []
    for _ in range(25):
        loss, _ = recipe.loss(batch)
        optimiser.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimiser.step()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]
    assert torch.equal(recipe.module.lm_head.weight, frozen)


def test_a_written_head_is_read_back() -> None:
    target = looping_target()
    head = load_eagle(str(save_tiny_drafter(target, EagleRecipe)), target)
    assert head.reduced and head.num_draft_tokens == target.vocab_size * 2 // 3
    assert not head.shape.own_head and head.shape.fc_norm
