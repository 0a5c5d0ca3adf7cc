"""Sizes and batches that tiny models have in common, in the words of their configurations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Batch = dict[str, Any]

ROWS, WORDS, VOCABULARY, IMAGE, PATCH, MARK = 2, 12, 40, 16, 8, 39
PATCHES = (IMAGE // PATCH) ** 2


def tower(**others: Any) -> dict[str, Any]:
    """A transformer of four layers, in the words of most configurations."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 2}
    return {**sizes, **others}


def language(kind: str, **others: Any) -> dict[str, Any]:
    """A causal language model."""
    return tower(model_type=kind, vocab_size=VOCABULARY, num_key_value_heads=2, max_position_embeddings=64, **others)


def reader(**others: Any) -> dict[str, Any]:
    """A text encoder."""
    named = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    return tower(vocab_size=VOCABULARY, max_position_embeddings=24, **named, **others)


def seer(**others: Any) -> dict[str, Any]:
    """An image encoder."""
    return tower(**{"image_size": IMAGE, "patch_size": PATCH, "num_channels": 3, **others})


def sequences(**others: Any) -> dict[str, Any]:
    """An encoder and a decoder, in the words of BART."""
    sides = {
        f"{side}_{what}": n
        for side in ("encoder", "decoder")
        for what, n in (("layers", 4), ("attention_heads", 2), ("ffn_dim", 64))
    }
    named = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2}
    return {"d_model": 32, "vocab_size": VOCABULARY, "max_position_embeddings": 64, **named, **sides, **others}


def speech(**others: Any) -> dict[str, Any]:
    """A speech encoder, in the words of wav2vec 2."""
    convolutions = {"conv_dim": (16, 16), "conv_kernel": (10, 3), "conv_stride": (5, 2)}
    position = {"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2}
    masks = {"mask_time_prob": 0.0, "apply_spec_augment": False, "vocab_size": VOCABULARY, "layerdrop": 0.0}
    return tower(**{**convolutions, **position, **masks, **others})


def words(length: int = WORDS, top: int = VOCABULARY - 4) -> torch.Tensor:
    return torch.randint(3, top, (ROWS, length))


def marked(count: int, mark: int = MARK, length: int = WORDS) -> torch.Tensor:
    """Words, and places in which a language model finds features of another modality."""
    tokens = words(length + count)
    tokens[:, 1 : 1 + count] = mark
    return tokens


def pixels(size: int = IMAGE, *, channels: int = 3) -> torch.Tensor:
    return torch.randn(ROWS, channels, size, size)


def sound(samples: int = 400) -> torch.Tensor:
    return torch.randn(ROWS, samples)


Recipe = tuple[Any, Batch]
"""What a model's configuration is made from, or it, and a batch."""

MODELS: dict[str, Callable[[], Recipe]] = {}
"""By the name of the model's class."""


def entry(name: str) -> Callable[[Callable[[], Recipe]], Callable[[], Recipe]]:
    def add(make: Callable[[], Recipe]) -> Callable[[], Recipe]:
        MODELS[name] = make
        return make

    return add


def text_and_image(size: int = IMAGE) -> Batch:
    tokens = words()
    tokens[:, -1] = 2
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "pixel_values": pixels(size)}


def taught(batch: Batch) -> Batch:
    """The same batch with labels."""
    return {**batch, "labels": batch["input_ids"].clamp(max=VOCABULARY - 5)}


def seen(count: int = PATCHES, **images: Any) -> Batch:
    """A batch of a language model that sees or hears."""
    tokens = marked(count)
    return taught({"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "use_cache": False, **images})
