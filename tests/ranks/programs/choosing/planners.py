"""Training random graphs under the plans of every planner: what the ranks of a gloo group do."""

from __future__ import annotations

import random

import torch
from engine_cases import FAST
from torch import nn

from mosaic.backends.host.backend import HostBackend
from mosaic.ranks.compare import compare_plans

STEPS = 3
WIDTH = 4


class Graph(nn.Module):
    """Nodes that each take the sum of what some earlier ones made, or the batch."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        draw = random.Random(seed)
        self.names = [f"node{index}" for index in range(draw.randint(3, 5))]
        self.feeds = {
            name: [other for other in self.names[:index] if draw.random() < 0.4]
            for index, name in enumerate(self.names)
        }
        torch.manual_seed(seed)
        for name in self.names:
            setattr(self, name, nn.Sequential(nn.Linear(WIDTH, 6), nn.Tanh(), nn.Linear(6, WIDTH)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: dict[str, torch.Tensor] = {}
        for name in self.names:
            given = sum((made[other] for other in self.feeds[name]), torch.zeros(())) if self.feeds[name] else x
            made[name] = getattr(self, name)(given)
        return torch.stack([out.square().mean() for out in made.values()]).sum()


class Small:
    """A model with its batch and loss."""

    def __init__(self) -> None:
        self.model = Graph(0)
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
