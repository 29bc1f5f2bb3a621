"""Medusa against the package medusa-llm 0.1: the same buffers for the same choices, the same logits
for the same weights, and checkpoints of either load in the other."""

from functools import cache
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn
from transformers import LlamaForCausalLM

from specbench.conformance.decoding import GREEDY, make_request
from specbench.conformance.models import ASCII_VOCAB, looping_model, tiny_tokenizer
from specbench.decode import Decoder
from specbench.depth import Fixed
from specbench.learned.medusa import MedusaHeads, ResBlock, load_heads, numbered, save_heads
from specbench.method import Batch, Budget
from specbench.ranks import RankTree
from specbench.target import Target
from specbench_methods.medusa import Medusa, MedusaConfig

reference: Any = pytest.importorskip(
    "medusa.model.medusa_model", reason="needs medusa-llm (pip install --no-deps medusa-llm==0.1)"
)

CHOICES = [[1, 7, 6], [1, 3, 2, 2], [1, 1, 1], [1, 4]]
HIDDEN, NUM_HEADS = 32, 3


@cache
def target() -> Target:
    return Target(looping_model(eos_token_id=None), tiny_tokenizer(), name="looping")


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The target's weights as a folder, and a reference that loads them with transformers' own
    Llama: its copy of the modeling code is for an older transformers."""
    looping_model(eos_token_id=None).save_pretrained(tmp_path / "base")
    tiny_tokenizer().save_pretrained(tmp_path / "base")
    monkeypatch.setattr(reference, "KVLlamaForCausalLM", LlamaForCausalLM)
    return tmp_path / "base"


def randomised(module: nn.Module) -> nn.Module:
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_((0.3 * torch.randn_like(parameter)).bfloat16())
    return module


def reference_model(base: Path, num_layers: int) -> Any:
    """medusa-llm's model with random heads, as its trainer makes it."""
    model = reference.MedusaModel(
        LlamaForCausalLM.from_pretrained(base), NUM_HEADS, num_layers, str(base)
    )
    randomised(model.medusa_head)
    return model


def save_like_its_trainer(model: Any, folder: Path, num_heads: int) -> Path:
    reference.MedusaConfig(
        medusa_num_heads=num_heads,
        medusa_num_layers=model.medusa_num_layers,
        base_model_name_or_path=model.base_model_name_or_path,
    ).save_pretrained(folder)
    torch.save(model.medusa_head.state_dict(), folder / "medusa_lm_head.pt")
    return folder


def its_logits(model: Any, tokens: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """The last hidden states [T, h], and the heads' logits on them [T, K, V]."""
    with torch.no_grad():
        out = model.base_model.model(input_ids=torch.tensor([tokens])).last_hidden_state
        return out[0], torch.stack([head(out)[0] for head in model.medusa_head], dim=1)


@pytest.mark.parametrize("choices", CHOICES, ids=str)
def test_buffers_are_the_same_for_the_same_choices(choices: list[int]) -> None:
    expected = reference.generate_medusa_buffers(choices, device="cpu")
    rank_tree = RankTree.dense(choices)
    tree, ranks = rank_tree.within(rank_tree.depth, len(rank_tree.paths), by_level=True)
    assert torch.equal(expected["medusa_attn_mask"][0, 0].bool(), tree.ancestors_NN)
    assert expected["medusa_position_ids"].tolist() == list(tree.depths)
    # Its list of candidates holds the root, then the guesses of each head.
    firsts = [sum(choices[:depth]) for depth in range(len(choices))]
    indices = [firsts[depth] + rank for depth, rank in zip(tree.depths, (0, *ranks), strict=True)]
    assert expected["tree_indices"].tolist() == indices
    leaves = [node for node, children in enumerate(tree.children) if not children]
    assert expected["retrieve_indices"].tolist() == [tree.path_to(leaf) for leaf in leaves]


def test_blocks_are_the_same() -> None:
    theirs = randomised(reference.ResBlock(HIDDEN))
    ours = ResBlock(HIDDEN)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(5, HIDDEN)
    torch.testing.assert_close(ours(x), theirs(x), rtol=0, atol=0)


@pytest.mark.parametrize("num_layers", [1, 2])
def test_its_checkpoint_gives_the_same_logits_here(
    num_layers: int, base: Path, tmp_path: Path
) -> None:
    """With two layers it repeats one block, and saves it twice; and its configs lie about the
    number of heads."""
    model = reference_model(base, num_layers)
    folder = save_like_its_trainer(model, tmp_path / "heads", num_heads=2)
    heads = load_heads(folder, target()).heads
    assert (heads.num_heads, heads.num_layers) == (NUM_HEADS, num_layers)
    hidden_Th, expected = its_logits(model, [5, 40, 12, 77, 31])
    torch.testing.assert_close(heads(hidden_Th), expected, rtol=1e-5, atol=1e-5)


def test_our_checkpoint_gives_the_same_logits_there(base: Path, tmp_path: Path) -> None:
    heads = cast(MedusaHeads, randomised(MedusaHeads(HIDDEN, NUM_HEADS, 1, own_vocab=ASCII_VOCAB)))
    save_heads(heads, tmp_path / "heads", {"base_model_name_or_path": str(base)})
    torch.save(numbered(heads).state_dict(), tmp_path / "heads" / "medusa_lm_head.pt")
    model = reference.MedusaModel.from_pretrained(str(tmp_path / "heads"))
    assert model.medusa == NUM_HEADS
    hidden_Th, found = its_logits(model, [5, 40, 12, 77, 31])
    torch.testing.assert_close(found, heads(hidden_Th), rtol=1e-5, atol=1e-5)
    loaded = load_heads(tmp_path / "heads", target()).heads
    torch.testing.assert_close(loaded(hidden_Th), found, rtol=1e-5, atol=1e-5)


def test_heads_on_the_targets_own_head_are_its_heads_with_that_head(
    base: Path, tmp_path: Path
) -> None:
    """ "Version 2" files hold the blocks alone."""
    model = reference_model(base, 1)
    with torch.no_grad():
        for head in model.medusa_head:
            head[-1].weight.copy_(model.base_model.lm_head.weight)
    save_like_its_trainer(model, tmp_path / "whole", NUM_HEADS)
    heads = load_heads(tmp_path / "whole", target()).heads
    heads.lm_heads = nn.ModuleList()
    save_heads(heads, tmp_path / "blocks", {})
    assert not (tmp_path / "blocks" / "medusa_lm_head.pt").exists()
    hidden_Th, expected = its_logits(model, [5, 40, 12, 77, 31])
    found = load_heads(tmp_path / "blocks", target()).heads(hidden_Th)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("choices", CHOICES[:2], ids=str)
def test_the_first_step_drafts_what_it_would(
    choices: list[int], base: Path, tmp_path: Path
) -> None:
    """Its candidates for a prompt, but with our root: the prompt's last token, where it would
    already have the target's next one."""
    model = reference_model(base, 1)
    folder = save_like_its_trainer(model, tmp_path / "heads", NUM_HEADS)
    prompt = [5, 40, 12, 77, 31, 9]
    _, logits_TKV = its_logits(model, prompt[:-1])
    root = torch.zeros(1, 1, ASCII_VOCAB)
    root[0, 0, prompt[-1]] = 1
    buffers = reference.generate_medusa_buffers(choices, device="cpu")
    _, candidates = reference.generate_candidates(
        logits_TKV.transpose(0, 1)[: len(choices) - 1, None],
        root,
        choices[1:],
        buffers["tree_indices"],
        temperature=0.0,
    )
    knobs = MedusaConfig(weights=str(folder), tree=",".join(map(str, choices)))
    method = Medusa(target(), knobs)
    decoder = Decoder(target(), method, Fixed(9, 99), GREEDY)
    decoder.join([make_request(prompt, 4)])
    proposal = method.propose(Batch(decoder.rows, decoder.cache), [Budget(9, 99)])
    by_path = {tuple(candidates[0, path].tolist()) for path in buffers["retrieve_indices"]}
    tree = proposal.trees[0]
    leaves = [node for node, children in enumerate(tree.children) if not children]
    assert {tuple(proposal.tokens_BN[0, tree.path_to(leaf)].tolist()) for leaf in leaves} == by_path
