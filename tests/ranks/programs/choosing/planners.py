"""Training a small graph under the plans of every planner: what the ranks of a gloo group do."""

from __future__ import annotations

import torch
from engine_cases import FAST
from torch import nn

from mosaic.backends.host.backend import HostBackend
from mosaic.ranks.compare import compare_plans

WIDTH = 4


class Chains(nn.Module):
    """Two nodes on the batch, and one on what both return."""

    names = ("left", "right", "last")

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        for name in self.names:
            setattr(self, name, nn.Sequential(nn.Linear(WIDTH, 6), nn.Tanh(), nn.Linear(6, WIDTH)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.left(x) + self.right(x)).square().mean()


class Small:
    """A model with its batch and loss."""

    def __init__(self) -> None:
        self.model = Chains()
        self.sample = torch.ones(2, WIDTH)

    def loss(self, output: torch.Tensor) -> torch.Tensor:
        return output


def compared(rank: int, size: int) -> list[tuple[str, str, int, int, list[int], list[int], float]]:
    """Measures the plans of three planners; returns what does not depend on time."""
    found = compare_plans(
        Small,
        ("sequential", "data-parallel", "exact"),
        rounds=2,
        steps=2,
        settings=FAST,
        backend=HostBackend(1),
    )
    return [
        (
            one.method,
            one.reason,
            len(one.step_ms),
            len(one.ratios),
            list(one.held_bytes),
            list(one.ddp_held_bytes),
            one.sent_bytes.get("reduce", 0.0),
        )
        for one in found
    ]
