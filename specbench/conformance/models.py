"""Tiny random models and a byte-level tokenizer, made here: the real classes of transformers,
small enough to check a method in seconds."""

from functools import cache
from pathlib import Path
from typing import Any, cast

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from specbench.target import Target
from specbench.target.attention import NAME as ATTENTION

CHAT_TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)

ASCII_VOCAB = 97
"""<unk>, <s>, </s>, and the 94 printable characters of ASCII, which come first in the tokenizer."""


@cache
def tiny_tokenizer() -> PreTrainedTokenizerBase:
    """One token for each byte (ids 3..258), and <unk> 0, <s> 1, </s> 2."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: index for index, token in enumerate(["<unk>", "<s>", "</s>", *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        chat_template=CHAT_TEMPLATE,
    )


def tiny_model(*, vocab_size: int = 259, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """A random float32 llama of four layers with grouped key-value heads, peaked enough to repeat
    itself at times."""
    settings: dict[str, Any] = {
        "vocab_size": vocab_size,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "initializer_range": 0.3,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    torch.manual_seed(seed)
    config = LlamaConfig(**(settings | overrides))
    config._attn_implementation = ATTENTION
    model: PreTrainedModel = LlamaForCausalLM(config).eval()
    return model


def tiny_target(*, pack: bool = True, name: str = "tiny", **settings: Any) -> Target:
    """A target around a tiny model, with the byte tokenizer."""
    return Target(tiny_model(**settings), tiny_tokenizer(), name=name, pack=pack)


def save_tiny_model(folder: Path, **settings: Any) -> Path:
    """Saves a tiny model and its tokenizer as a folder that `load_target` and transformers load."""
    tiny_model(**settings).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def looping_model(**settings: Any) -> PreTrainedModel:
    """A tiny model on which every method has some of its drafts accepted: the embedding outweighs
    the layers, so the next token depends mostly on the last one."""
    model = tiny_model(**({"vocab_size": ASCII_VOCAB} | settings))
    with torch.no_grad():
        cast(nn.Embedding, model.get_input_embeddings()).weight.mul_(20)
    return model


def looping_target(**settings: Any) -> Target:
    """A target around a looping model, with the byte tokenizer."""
    return Target(looping_model(**settings), tiny_tokenizer(), name="looping")
