"""Batches of the sweep's models: each is a function of a generator, described by its parts."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Generator, Tensor

Inputs = dict[str, Any]
Draw = Callable[[Generator], Inputs]
NUM_WORDS = 99


def words(drawn: Generator, rows: int = 4, length: int = 12, *, end: int = NUM_WORDS) -> Tensor:
    """Returns tokens without the special ones."""
    return torch.randint(10, end, (rows, length), generator=drawn)


def ones(*shape: int) -> Tensor:
    return torch.ones(shape, dtype=torch.long)


def with_marks(tokens: Tensor, token: int, count: int, *, start: int = 1) -> Tensor:
    """Returns tokens of which ``count`` stand for an image or a sound."""
    tokens = tokens.clone()
    tokens[:, start : start + count] = token
    return tokens


def labelled(tokens: Tensor, **more: Any) -> Inputs:
    """Returns the inputs of a language model that predicts its tokens."""
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": tokens, **more}


def batch(**parts: Any) -> Draw:
    """Returns a batch of parts: a tuple is the shape of normal numbers, a function draws, all else is a constant."""
    return lambda drawn: _drawn(parts, drawn)


def sentences(*, length: int = 12, marks: int = 0, **parts: Any) -> Draw:
    """Returns a language model's batch, of whose tokens ``marks`` stand for an image or a sound."""
    return lambda drawn: labelled(with_marks(words(drawn, length=length), 3, marks), **_drawn(parts, drawn))


def _drawn(parts: Inputs, drawn: Generator) -> Inputs:
    def value(part: Any) -> Any:
        if isinstance(part, tuple):
            return torch.randn(*part, generator=drawn)
        if callable(part):
            return part(drawn)
        return part.clone() if isinstance(part, Tensor) else part

    return {name: value(part) for name, part in parts.items()}


def chosen(*shape: int) -> Callable[[Generator], Tensor]:
    """Returns a function that draws which elements are masked."""
    return lambda drawn: torch.rand(*shape, generator=drawn) > 0.5


IMAGES, LARGE = (4, 3, 32, 32), (2, 3, 64, 64)
CLASSES, PIXELS = torch.tensor([0, 1, 0, 1]), partial(torch.randint, 0, 3, (2, 64, 64))
ANSWER = partial(words, length=6)

pair = batch(input_ids=words, pixel_values=IMAGES, return_loss=True)
both = batch(input_ids=words, pixel_values=IMAGES)
classified = batch(pixel_values=IMAGES, labels=CLASSES)
classified_large = batch(pixel_values=(4, 3, 64, 64), labels=CLASSES)
segmented = batch(pixel_values=LARGE, labels=lambda drawn: PIXELS(generator=drawn))
translated = batch(input_ids=words, labels=partial(words, length=8))
predicted = sentences(length=16)
waves = batch(input_values=(4, 512), labels=partial(words, length=5))


def boxes(drawn: Generator) -> Inputs:
    labels = [
        {"class_labels": torch.tensor([0, 1]), "boxes": torch.rand(2, 4, generator=drawn) * 0.4 + 0.1} for _ in range(2)
    ]
    return {"pixel_values": torch.randn(*LARGE, generator=drawn), "labels": labels}


def masks(drawn: Generator) -> Inputs:
    return {
        "pixel_values": torch.randn(*LARGE, generator=drawn),
        "mask_labels": [(torch.rand(2, 64, 64, generator=drawn) > 0.5).float() for _ in range(2)],
        "class_labels": [torch.tensor([0, 1]) for _ in range(2)],
    }


def ragged(drawn: Generator) -> Inputs:
    """Returns rows of other lengths, of which the last is padded."""
    inputs = predicted(drawn)
    inputs["attention_mask"][-1, 10:] = 0
    return inputs


def tiles(drawn: Generator) -> Inputs:
    """Returns images of LLaVA-NeXT: 4 tokens of the whole, 4 of its only tile, and 2 ends of rows."""
    tokens = words(drawn, length=24)
    tokens[:, 1:11] = 3
    return labelled(tokens, pixel_values=torch.randn(4, 2, 3, 16, 16, generator=drawn), image_sizes=ones(4, 2) * 16)


def qwen(drawn: Generator) -> Inputs:
    """Returns four images of 4 x 4 patches, each of which becomes 4 tokens."""
    tokens = with_marks(words(drawn, length=16), 3, 4, start=2)
    return labelled(
        with_marks(tokens, 5, 1),
        pixel_values=torch.randn(4 * 16, 3 * 2 * 8 * 8, generator=drawn),
        image_grid_thw=torch.tensor([[1, 4, 4]] * 4),
        mm_token_type_ids=(tokens == 3).long(),
    )


def omni(drawn: Generator) -> Inputs:
    """Returns images, and sounds of 16 frames that become 4 tokens each."""
    inputs = qwen(drawn)
    tokens = with_marks(with_marks(inputs["input_ids"], 7, 4, start=10), 8, 1, start=9)
    sounds = {"input_features": torch.randn(4, 16, 16, generator=drawn), "feature_attention_mask": ones(4, 16)}
    return {**inputs, "input_ids": tokens, "labels": tokens, **sounds}


def omni_of_other_lengths(drawn: Generator) -> Inputs:
    """Returns the same, with sounds of other lengths in tensors of the same shapes in each step."""
    inputs = omni(drawn)
    shorter = int(torch.randint(0, 2, (), generator=drawn))
    for row, length in enumerate((16 - 2 * shorter, 12 + 2 * shorter)):  # 4 + 3 tokens, or 3 + 3
        inputs["feature_attention_mask"][row, length:] = 0
        inputs["input_ids"][row, 10 + length // 4 : 14] = 20
    return {**inputs, "labels": inputs["input_ids"]}


def omni_of_two_tokens(drawn: Generator) -> Inputs:
    """Returns the same for a model in which 16 frames become 2 tokens."""
    inputs = omni(drawn)
    inputs["input_ids"][:, 12:14] = 20
    return {**inputs, "labels": inputs["input_ids"]}
