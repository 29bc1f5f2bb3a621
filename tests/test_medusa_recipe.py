"""How Medusa's heads are trained: which token each head learns, what its loss is, and what
calibration writes down."""

import json
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch

from specbench.conformance.decoding import make_request
from specbench.conformance.models import ASCII_VOCAB, looping_model, looping_target
from specbench.conformance.weights import own_outputs, save_tiny_drafter
from specbench.learned.medusa import load_heads
from specbench.target import FINAL, Target
from specbench.training.medusa import MedusaRecipe, guess_ranks, rank_accuracy
from specbench.training.recipe import Options, Sequences
from specbench_methods.medusa import Medusa, MedusaConfig
from tests.drafters import decode

VOCAB = 60


@cache
def target() -> Target:
    return looping_target(eos_token_id=None)


def data() -> Sequences:
    return own_outputs(target(), (FINAL,))


def recipe(vocab: int = VOCAB, num_heads: int = 0, seed: int | None = None) -> MedusaRecipe:
    counts = data().tokens_BT.flatten().bincount(minlength=ASCII_VOCAB)
    made = MedusaRecipe(target(), Options(vocab, counts, unroll=num_heads))
    if seed is not None:
        torch.manual_seed(seed)
        with torch.no_grad():
            for parameter in made.module.blocks.parameters():
                parameter.copy_(0.1 * torch.randn_like(parameter))
    return made


def head_of_target() -> torch.Tensor:
    return looping_model().get_parameter("lm_head.weight").detach()


def plain_loss(made: MedusaRecipe, batch: Sequences) -> tuple[float, list[float]]:
    """The loss and accuracies, token by token."""
    ids = made.module.ids_D
    assert ids is not None
    rows_Dh, hidden_BTh = head_of_target()[ids], batch.hidden[FINAL]
    weights = dict(made.module.blocks.named_parameters())
    total, norm, accuracies = 0.0, 0.0, []
    for k in range(made.module.num_heads):
        losses, hits = [], []
        for b, t in torch.cartesian_prod(*map(torch.arange, batch.tokens_BT.shape)).tolist():
            if t + 2 + k >= batch.tokens_BT.shape[1] or not batch.written_BT[b, t + 2 + k]:
                continue
            x, token = hidden_BTh[b, t], int(batch.tokens_BT[b, t + 2 + k])
            z = weights[f"{k}.0.linear.weight"] @ x + weights[f"{k}.0.linear.bias"]
            logq = (rows_Dh @ (x + z * z.sigmoid())).log_softmax(0)
            hits.append(int(ids[logq.argmax()]) == token)
            if token in ids.tolist():
                p = (rows_Dh @ hidden_BTh[b, t + 1 + k]).softmax(0)
                losses.append(-float((p * logq).sum()))
        total += 0.8**k * sum(losses) / len(losses)
        norm += 0.8**k
        accuracies.append(sum(hits) / len(hits))
    return total / norm, accuracies


def test_the_loss_compares_each_head_with_the_target_as_many_tokens_ahead() -> None:
    made, whole = recipe(vocab=20, seed=5), data()
    batch = Sequences(
        whole.tokens_BT[:3], whole.written_BT[:3].clone(), {FINAL: whole.hidden[FINAL][:3]}
    )
    batch.written_BT[1, 12:15] = False  # a second turn of the prompt
    assert 0.1 < float((made.targets.of(batch).best_M >= 0).float().mean()) < 0.9
    with torch.no_grad():
        loss, shown = made.loss(batch)
        expected, accuracies = plain_loss(made, batch)
    assert float(loss) == pytest.approx(expected, rel=1e-4)
    assert [float(shown[f"acc{k}"]) for k in (1, 2, 3, 4)] == pytest.approx(accuracies)
    assert len(set(accuracies)) > 1


def test_what_lies_behind_the_last_written_token_does_not_matter() -> None:
    made, whole = recipe(seed=5), data()
    padded = Sequences(
        torch.nn.functional.pad(whole.tokens_BT, (0, 3)),
        torch.nn.functional.pad(whole.written_BT, (0, 3)),
        {FINAL: torch.nn.functional.pad(whole.hidden[FINAL], (0, 0, 0, 3))},
    )
    assert made.loss(padded)[0].item() == pytest.approx(made.loss(whole)[0].item())


def test_a_batch_without_predictions_has_no_loss_and_no_gradient() -> None:
    made, whole = recipe(), data()
    loss, shown = made.loss(replace(whole, written_BT=torch.zeros_like(whole.written_BT)))
    loss.backward()  # type: ignore[no-untyped-call]
    assert loss.item() == 0 == sum(map(float, shown.values()))
    for parameter in made.module.blocks.parameters():
        assert parameter.grad is None or not parameter.grad.any()


def test_untrained_heads_are_the_targets_own_head_and_only_their_blocks_are_trained() -> None:
    made = recipe(num_heads=2)
    ids = made.module.ids_D
    assert ids is not None and len(ids) == VOCAB
    hidden = torch.randn(5, target().hidden_size)
    for logits in made.module(hidden).unbind(1):
        torch.testing.assert_close(logits, hidden @ head_of_target()[ids].T)
    trained = {name for name, p in made.module.named_parameters() if p.requires_grad}
    assert trained == {
        f"blocks.{k}.0.linear.{kind}" for k in range(2) for kind in ("weight", "bias")
    }
    assert {p.dtype for p in made.module.parameters()} == {torch.float32}


def test_bfloat16_hidden_states_train_float32_weights() -> None:
    made, whole = recipe(seed=5), data()
    narrow = replace(whole, hidden={FINAL: whole.hidden[FINAL].bfloat16()})
    loss, _ = made.loss(narrow)
    loss.backward()  # type: ignore[no-untyped-call]
    assert loss.item() == pytest.approx(made.loss(whole)[0].item(), rel=0.02)


def accepted(folder: Path) -> int:
    """Drafted tokens that the target takes, on prompts that were not trained on."""
    method = Medusa(target(), MedusaConfig(weights=str(folder), tree="1,1,1,1"))
    requests = [make_request((5 + i, 40, 12 + i), 20) for i in range(8)]
    rows = decode(target(), method, requests, max_rows=8)
    return sum(step.accepted for row in rows for step in row.steps)


def test_training_makes_more_drafts_right(tmp_path: Path) -> None:
    recipe(vocab=ASCII_VOCAB * 2 // 3).write(tmp_path)
    assert accepted(save_tiny_drafter(target(), MedusaRecipe)) > accepted(tmp_path) + 5


def plain_ranks(made: MedusaRecipe, batch: Sequences) -> list[list[int]]:
    ids = made.module.ids_D
    assert ids is not None
    found = []
    num_tokens = batch.tokens_BT.shape[1]
    for b in range(len(batch.tokens_BT)):
        for t in range(num_tokens - 2):
            if not batch.written_BT[b, t + 2]:
                continue
            logits_KD = made.module(batch.hidden[FINAL][b, t : t + 1])[0]
            ranks, is_running = [], True
            for k, logits_D in enumerate(logits_KD):
                place = t + 2 + k
                is_running &= place < num_tokens and bool(batch.written_BT[b, place])
                order = ids[logits_D.argsort(descending=True)].tolist()[:16]
                token = int(batch.tokens_BT[b, place]) if is_running else -1
                ranks.append(order.index(token) if token in order else 16 if is_running else -1)
            found.append(ranks)
    return found


def test_ranks_are_counted_where_a_step_could_begin() -> None:
    made, whole = recipe(seed=5), data()
    batch = Sequences(whole.tokens_BT, whole.written_BT.clone(), whole.hidden)
    batch.written_BT[1, 12:15] = False
    expected = plain_ranks(made, batch)
    assert guess_ranks(made.module, batch).tolist() == expected
    assert {rank for ranks in expected for rank in ranks} >= {-1, 0, 1, 16}


def test_rank_accuracy_is_the_share_of_the_places_that_were_written() -> None:
    ranks_MK = torch.tensor([[0, 2], [0, 16], [1, -1], [16, -1]])
    first, second = rank_accuracy(ranks_MK)
    assert (first[:3], second[:4]) == ([0.5, 0.25, 0.0], [0.0, 0.0, 0.5, 0.0])
    assert (len(first), sum(second)) == (16, 0.5)


def read_config(folder: Path) -> Mapping[str, object]:
    config: Mapping[str, object] = json.loads((folder / "config.json").read_text())
    return config


def test_calibration_is_written_and_drafted_by(tmp_path: Path) -> None:
    made = recipe(seed=5)
    made.write(tmp_path / "before")
    assert not {"tree", "rank_accuracy"} & read_config(tmp_path / "before").keys()
    made.calibrate([data(), data()])
    made.write(tmp_path / "after")
    config = read_config(tmp_path / "after")
    assert config["base_model_name_or_path"] == "looping"
    ranks = guess_ranks(made.module, data())
    assert config["rank_accuracy"] == rank_accuracy(ranks)
    tree = load_heads(tmp_path / "after", target()).tree
    counts = [int((ranks[:, : len(p)] == torch.tensor(p)).all(1).sum()) for p in tree.paths]
    assert counts == sorted(counts, reverse=True) and counts[-1] > 0
    assert tree.paths == Medusa(target(), MedusaConfig(weights=str(tmp_path / "after"))).tree.paths
    assert tree.depth > 1


def test_calibration_on_nothing_leaves_the_tree_to_the_published_accuracies(tmp_path: Path) -> None:
    made = recipe()
    made.calibrate([])
    made.write(tmp_path)
    assert not {"tree", "rank_accuracy"} & read_config(tmp_path).keys()
