"""The tiny targets that methods are checked on; each is made once."""

from functools import cache

import torch

from specbench.conformance import law
from specbench.conformance.models import (
    ASCII_VOCAB,
    looping_model,
    looping_target,
    tiny_model,
    tiny_target,
    tiny_tokenizer,
)
from specbench.target import Target

SHORT_CONTEXT = 40


@cache
def main_target() -> Target:
    """The target of most cases."""
    return looping_target()


@cache
def short_target() -> Target:
    """The same with a short context."""
    return looping_target(max_position_embeddings=SHORT_CONTEXT)


@cache
def half_target() -> Target:
    """The same in half precision."""
    return Target(looping_model().bfloat16(), tiny_tokenizer(), name="looping")


@cache
def rut_target() -> Target:
    """What follows depends on the last token alone, so a copy of it is always right."""
    model = looping_model()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "o_proj" in name or "down_proj" in name:
                weight.zero_()
    return Target(model, tiny_tokenizer(), name="in a rut")


@cache
def wild_target() -> Target:
    """Its layers outweigh the embedding, so drafts are hardly ever right."""
    return tiny_target(vocab_size=ASCII_VOCAB, initializer_range=0.6, name="wild")


@cache
def law_target() -> Target:
    """A target of few tokens, none of which ends an output, that drafters do not follow too
    well."""
    model = tiny_model(vocab_size=law.VOCAB, seed=1, initializer_range=0.15, eos_token_id=None)
    return Target(model, tiny_tokenizer(), name="law")


def trained_on(target: Target) -> Target:
    """The target whose weights it has, so that a drafter is trained once for them."""
    return main_target() if target in (short_target(), half_target()) else target
