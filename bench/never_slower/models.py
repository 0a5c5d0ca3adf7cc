"""Eight models of one process: the paper's six, the demo's, and two towers that one core serves as well as two."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from bench.colocate.models import Workload
from mosaic.demo.model import TriModal, contrastive_loss
from mosaic.models import PAPER_MODELS, build, make_batch

RECURRENT = "two recurrent towers"


def _zoo(name: str) -> Workload:
    return Workload(model=build(name, "tiny"), batch=make_batch(name, "tiny"))


def _demo(rows: int = 48) -> Workload:
    torch.manual_seed(0)
    batch = {
        "image": torch.rand(rows, 1, 8, 24),
        "audio": torch.randn(rows, 40, 96),
        "text": torch.randint(1, 29, (rows, 20)),
    }
    return Workload(model=TriModal(), batch=batch, loss=contrastive_loss)


class Series(nn.Module):
    """A tower over a series; of one row each step is a product with a vector, which a second thread helps little."""

    def __init__(self, channels: int, hidden: int, classes: int) -> None:
        super().__init__()
        self.recurrent = nn.GRU(channels, hidden, batch_first=True)
        self.out = nn.Linear(hidden, classes)

    def forward(self, series: Tensor) -> Tensor:
        """Returns logits of ``series``, of shape (rows, steps, channels)."""
        logits: Tensor = self.out(self.recurrent(series)[0].mean(1))
        return logits


class Sensors(nn.Module):
    """Two series of one drive, each with a tower, told apart by the sum of their logits."""

    def __init__(self) -> None:
        super().__init__()
        self.lidar, self.radar = Series(16, 96, 8), Series(16, 96, 8)

    def forward(self, lidar: Tensor, radar: Tensor) -> Tensor:
        """Returns logits."""
        return self.lidar(lidar) + self.radar(radar)


def _towers(rows: int = 1, steps: int = 200) -> Workload:
    torch.manual_seed(0)
    batch: dict[str, Any] = {name: torch.randn(rows, steps, 16) for name in ("lidar", "radar")}
    target = torch.randint(0, 8, (rows,))
    return Workload(model=Sensors(), batch=batch, loss=lambda logits: nn.functional.cross_entropy(logits, target))


MODELS: Mapping[str, Callable[[], Workload]] = MappingProxyType(
    {
        **{f"{name}-tiny": partial(_zoo, name) for name in PAPER_MODELS},
        "mosaic demo's": _demo,
        RECURRENT: _towers,
    }
)
"""By name, each with its batch and its loss."""
