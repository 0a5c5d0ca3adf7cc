"""Tiny models and loops of the stories, as users write them: torch alone."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

ROWS = 8


class TwoTowers(nn.Module):
    """Two encoders and a head that reads both."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.image = nn.Sequential(nn.Linear(12, width), nn.GELU(), nn.Dropout(0.1), nn.Linear(width, width))
        self.text = nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, width))
        self.head = nn.Linear(width, 3)

    def forward(self, pixels: Tensor, words: Tensor) -> Tensor:
        return self.head(self.image(pixels) * self.text(words))


def make_model(seed: int = 0, **sizes: int) -> TwoTowers:
    torch.manual_seed(seed)
    return TwoTowers(**sizes)


def make_batch(step: int, rows: int = ROWS) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(100 + step)
    return {"pixels": torch.randn(rows, 12, generator=draw), "words": torch.randn(rows, 6, generator=draw)}


def make_target(step: int, rows: int = ROWS) -> Tensor:
    return torch.randint(0, 3, (rows,), generator=torch.Generator().manual_seed(500 + step))


def train(model: nn.Module, steps: range = range(6), device: str = "cpu") -> list[Tensor]:
    """The plain loop of README; returns the losses of its steps."""
    torch.manual_seed(1)
    optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=0.01)
    losses = []
    for step in steps:
        batch = {name: value.to(device) for name, value in make_batch(step).items()}
        loss = nn.functional.cross_entropy(model(**batch), make_target(step).to(device))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach().cpu())
    return losses


def train_twin(model: nn.Module, loop: Callable[[nn.Module], Any] = train) -> tuple[Any, dict[str, Tensor]]:
    """Trains a copy of a model without Mosaic; returns what the loop returns, and the weights."""
    twin = copy.deepcopy(model)
    return loop(twin), twin.state_dict()


def assert_same_bits(model: nn.Module, weights: dict[str, Tensor]) -> None:
    own = model.state_dict()
    assert own.keys() == weights.keys()
    assert [name for name, value in own.items() if not torch.equal(value, weights[name])] == []
