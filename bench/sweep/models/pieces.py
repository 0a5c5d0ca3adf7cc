"""Sizes, inputs and the loop that all models share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Generator, Tensor, nn

from bench.sweep.device import moved
from bench.sweep.session import Session

Inputs = dict[str, Any]
Made = tuple[nn.Module, Callable[[Generator], Inputs]]
"""A model, and a function that draws a batch for it."""

NUM_WORDS = 99
SIZES: Mapping[str, int] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
TEXT: Mapping[str, int] = {**SIZES, "vocab_size": NUM_WORDS, "max_position_embeddings": 64, "pad_token_id": 0}
LANGUAGE: Mapping[str, int] = {**TEXT, "num_key_value_heads": 2, "head_dim": 8, "bos_token_id": 1, "eos_token_id": 2}
MEL: Mapping[str, int] = {"num_mel_bins": 16, "max_source_positions": 32}
VISION: Mapping[str, int] = {**SIZES, "image_size": 32, "patch_size": 8}


def words(drawn: Generator, rows: int = 4, length: int = 12, *, end: int = NUM_WORDS) -> Tensor:
    """Returns tokens that mean nothing special."""
    return torch.randint(10, end, (rows, length), generator=drawn)


def real(drawn: Generator, *shape: int) -> Tensor:
    """Returns normal numbers."""
    return torch.randn(*shape, generator=drawn)


def images(drawn: Generator, rows: int = 4, size: int = 32) -> Tensor:
    """Returns images of three channels."""
    return real(drawn, rows, 3, size, size)


def with_marks(tokens: Tensor, token: int, count: int, *, start: int = 1) -> Tensor:
    """Returns tokens of which ``count`` stand for an image or a sound."""
    tokens = tokens.clone()
    tokens[:, start : start + count] = token
    return tokens


def labelled(tokens: Tensor, **more: Any) -> Inputs:
    """Returns the inputs of a language model that predicts its tokens."""
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": tokens, **more}


def train_model(session: Session, made: Made, steps: int = 4) -> None:
    """Colocates a model and trains it for a few steps, each on a batch of its own."""
    model, draw = made
    model.train()
    session.colocate(model, moved(draw(Generator().manual_seed(0))))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    for step in range(steps):
        loss = _loss_of(model(**moved(draw(Generator().manual_seed(step)))))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        session.note(loss.item())


def _loss_of(made: Any) -> Tensor:
    """Returns the loss of a model; of one that has none, the mean squares of its results together."""
    if getattr(made, "loss", None) is not None:
        return made.loss
    return torch.stack([tensor.square().mean() for tensor in _trained_tensors(made)]).sum()


def _trained_tensors(made: Any) -> Iterator[Tensor]:
    if isinstance(made, Tensor):
        if made.requires_grad and made.is_floating_point():
            yield made
    elif isinstance(made, Mapping | list | tuple):
        for part in made.values() if isinstance(made, Mapping) else made:
            yield from _trained_tensors(part)
