"""Tiny models of the classes that people train, each with a microbatch and cuts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from torch import nn

VOCABULARY, WIDTH = 48, 16
IMAGE = 7
"""Token in whose place an image's features go."""

_SMALL = {
    "hidden_size": WIDTH,
    "intermediate_size": 24,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "vocab_size": VOCABULARY,
    "num_hidden_layers": 3,
    "use_cache": False,
    "pad_token_id": 0,
}
_VISION = {
    "hidden_size": WIDTH,
    "intermediate_size": 24,
    "num_attention_heads": 2,
    "num_hidden_layers": 3,
    "image_size": 8,
    "patch_size": 4,
}


@dataclass(frozen=True, kw_only=True)
class PartedCase:
    """A model, a microbatch, and ways to cut it."""

    make: Callable[[], nn.Module]
    """Makes the model."""
    batch: Callable[[], dict[str, Any]]
    """Makes a microbatch; random numbers are seeded."""
    cuts: tuple[tuple[str, ...], ...]
    """Each a partition, as ``chunks_of`` reads it."""
    modules: Mapping[str, str] | None = None
    """Lists by hand."""
    feeds: tuple[tuple[str, str], ...] = ()
    """What is found."""
    loss: Callable[[Any], torch.Tensor] = field(default=lambda output: output.loss)
    """Of the model's output."""
    sizes: Mapping[str, int] = field(default_factory=dict)
    """Pieces into which modules are cut, for partitions without mixed chunks."""


def tokens(rows: int = 2, length: int = 6) -> torch.Tensor:
    return torch.randint(8, VOCABULARY, (rows, length))


def text_batch() -> dict[str, Any]:
    ids = tokens()
    mask = torch.ones_like(ids)
    mask[0, -2:] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids}


def decoder(config: type, model: type, **more: Any) -> PartedCase:
    return PartedCase(
        make=lambda: model(config(**{**_SMALL, **more})),
        batch=text_batch,
        cuts=(
            ("model[0:3/3]",),
            ("model[0:1/3]", "model[1:2/3]", "model[2:3/3]"),
        ),
    )


DECODERS = {
    "llama": decoder(transformers.LlamaConfig, transformers.LlamaForCausalLM),
    "llama, tied": decoder(transformers.LlamaConfig, transformers.LlamaForCausalLM, tie_word_embeddings=True),
    "llama, dropout": decoder(transformers.LlamaConfig, transformers.LlamaForCausalLM, attention_dropout=0.3),
    "qwen3": decoder(transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
    "gemma": decoder(transformers.GemmaConfig, transformers.GemmaForCausalLM),
    "mistral": decoder(transformers.MistralConfig, transformers.MistralForCausalLM, sliding_window=4),
}
