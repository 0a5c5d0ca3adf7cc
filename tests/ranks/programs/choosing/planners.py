"""Training random graphs under the plans of every planner: what the ranks of a gloo group do."""

from __future__ import annotations

import random

import pytest
import torch
from engine_cases import FAST
from planning_cases import profile_of
from torch import nn

from mosaic.backends.host.backend import HostBackend
from mosaic.engine.options import Options
from mosaic.profile import Profile
from mosaic.ranks.colocate import colocate_ranks
from mosaic.ranks.compare import Rounds, compare_plans

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


def made_up_profile(model: Graph, size: int, seed: int) -> Profile:
    """Times that scale well, badly or not at all with devices and slots, as it comes."""
    draw = random.Random(seed + 100)

    def time() -> object:
        fixed, shared, each = draw.uniform(0.1, 3), draw.uniform(0, 20), draw.choice([0.0, 0.0, 0.8])
        return lambda degree, quota: fixed + shared / (degree * quota) + each * (degree - 1)

    edges = [(source, name) for name, sources in model.feeds.items() for source in sources]
    return profile_of(
        {name: time() for name in model.names}, num_slots=2, degrees=tuple(range(1, size + 1)), edges=edges
    )


def train(model: nn.Module, parts: list[torch.Tensor]) -> list[float]:
    """Takes a step for each part of a batch; returns their losses."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if not p.is_meta], lr=0.1)
    losses = []
    for part in parts:
        loss = model(part)
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def by_name(rank: int, size: int) -> str:
    """Has rank 0 plan by a planner that is named, and takes a step under its plan."""
    model = Graph(1)
    twin = Graph(1)
    handle = colocate_ranks(
        model,
        sample=torch.ones(2, WIDTH),
        modules=model.names,
        options=Options(method="distmm", profile=made_up_profile(model, size, 1) if rank == 0 else None),
        backend=HostBackend(2),
    )
    assert train(model, [torch.ones(2, WIDTH)]) == pytest.approx([twin(torch.ones(2, WIDTH)).item()], rel=1e-4)
    handle.remove()
    return handle.plan.search.method


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
        rounds=Rounds(rounds=2, steps=2, warm_steps=1),
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
