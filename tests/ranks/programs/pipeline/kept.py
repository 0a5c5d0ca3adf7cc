"""Ways kept for a later start, and a user's loss around a model; each function is one rank's program."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mosaic.artifact import load, save
from mosaic.errors import MosaicError
from mosaic.pipelining.plan import PipelinePlan
from mosaic.retrain.worker.pipelined import PipelinedModel
from ranks.begun import in_turn

TOO_LITTLE = 1200
"""Bytes; for all layers on each rank."""


def layer() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.2))


class Layered(nn.Module):
    """A tower and a backbone, with dropout."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__()
        self.tower, self.backbone = (nn.ModuleList(layer() for _ in range(2)) for _ in range(2))

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        for layer in self.tower:
            left = layer(left).tanh()
        x = left + right
        for layer in self.backbone:
            x = layer(x).tanh()
        return x


def batch_of(rows: int) -> dict[str, Any]:
    inputs = {"left": torch.randn(rows, 4), "right": torch.randn(rows, 4)}
    return {"inputs": inputs, "label": torch.arange(rows) % 4, "names": ["row"] * rows}


def loss(model: nn.Module, batch: Any) -> Tensor:
    return nn.functional.cross_entropy(model(**batch["inputs"]), batch["label"])


def around(rank: int, size: int, place: Path) -> None:
    """Random numbers that ranks would draw otherwise than one device are refused."""
    torch.manual_seed(3)
    batches = [batch_of(rows) for rows in (3, 3, 2)]
    own = Layered()
    own.noise = torch.Generator()  # type: ignore[assignment]
    with pytest.raises(MosaicError, match="has random generators of its own"):
        PipelinedModel(own, loss, batches, plan=None, memory_bytes=0)
    drawing = PipelinedModel(Layered(), drawn_loss, batches, plan=None, memory_bytes=0)
    with pytest.raises(MosaicError, match="draws random numbers from Python or NumPy"):
        drawing.add_gradients(batches, None)
    drawing.remove()


def again(rank: int, size: int, place: Path) -> None:
    """A trial's plan, and its rival, give the same bits after a file."""
    torch.manual_seed(3)
    steps = [[batch_of(rows) for rows in step] for step in ((3, 3, 2), (1, 4, 4))]

    def begun(way: PipelinePlan | None) -> PipelinedModel:
        return PipelinedModel(Layered(), loss, steps[0], plan=way, memory_bytes=TOO_LITTLE)

    tried = begun(None)
    first, way = gradients_of(tried, steps), tried.plan
    path = place / f"kept{rank}.json"
    save(way, path)
    assert load(PipelinePlan, path) == way
    assert way.degrees.pipeline == size
    check_equal(first, gradients_of(begun(load(PipelinePlan, path)), steps))
    rival = replace(way, baseline="" if way.baseline else "1f1b")
    check_equal(*(gradients_of(begun(rival), steps) for _ in range(2)))


def gradients_of(model: PipelinedModel, steps: Any) -> list[Tensor]:
    """Runs steps of shapes of their own."""
    for step in steps:
        torch.manual_seed(7)
        model.add_gradients(step, None)
    model.remove()
    return [one.grad for one in model.model.parameters() if one.grad is not None]


def check_equal(one: list[Tensor], other: list[Tensor]) -> None:
    assert len(one) > 0
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def drawn_loss(model: nn.Module, batch: Any) -> Tensor:
    return loss(model, batch) * random.random()


on_two_ranks = in_turn(again, around)
