"""A model whose step takes a while, for measurements: two encoders of transformer layers, and rows for them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset

from mosaic.train.program import Program

WIDTH, LENGTH, LAYERS = 256, 24, 3


class Rows(Dataset[dict[str, Any]]):
    """Rows that are drawn from their numbers, with noise that differs each time."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Any]:
        draw = torch.Generator().manual_seed(index)
        image, text = torch.randn(2, LENGTH, WIDTH, generator=draw)
        return {"image": image + 0.1 * torch.randn(LENGTH, WIDTH), "text": text, "label": index % 10}


class Encoders(nn.Module):
    """An image and a text tell a class."""

    def __init__(self) -> None:
        super().__init__()
        self.image, self.text, self.head = _encoder(), _encoder(), nn.Linear(2 * WIDTH, 10)

    def forward(self, image: Tensor, text: Tensor) -> Tensor:
        """Returns (batch, 10) logits from two tensors of (batch, LENGTH, WIDTH)."""
        logits: Tensor = self.head(torch.cat((self.image(image).mean(1), self.text(text).mean(1)), dim=1))
        return logits


def _encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.1, batch_first=True)
    return nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)


def _loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return functional.cross_entropy(model(batch["image"], batch["text"]), batch["label"])


def _score(model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return {"value": (model(batch["image"], batch["text"]).argmax(1) == batch["label"]).float()}


PROGRAM = Program(make_model=Encoders, make_dataset=lambda folder, train: Rows(1 << 16), loss=_loss, score=_score)
"""What a user's file would give; AdamW, whose rate rises and falls."""
