"""Training random graphs under the plans of every planner: what the ranks of a gloo group do."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from engine_cases import FAST
from planning_cases import profile_of
from torch import nn

from mosaic.backends.host.backend import HostBackend
from mosaic.cost import CostModel
from mosaic.engine import find_modules
from mosaic.engine.options import Options
from mosaic.plan import SearchRecord
from mosaic.profile import Profile
from mosaic.ranks.colocate import colocate_ranks
from mosaic.ranks.compare import Rounds, compare_plans
from mosaic.solver.methods import compared_methods
from mosaic.solver.runnable import plan_to_run

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


def plain_training(model: Graph, batches: list[torch.Tensor], size: int) -> list[float]:
    """Data-parallel training in one process; returns the losses of all ranks, step after step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for whole in batches:
        for part in whole.chunk(size):
            loss = model(part)
            (loss / size).backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def all_planners(rank: int, size: int) -> dict[str, list[list[int]]]:
    """Trains two graphs under every planner's plan; returns the devices of the modules by planner and graph."""
    _by_name(rank, size)
    devices = {}
    for seed in range(2):
        generator = torch.Generator().manual_seed(seed)
        batches = [torch.randn(2 * size, WIDTH, generator=generator) for _ in range(STEPS)]
        twin = Graph(seed)
        expected = plain_training(twin, batches, size)[rank::size]
        profile = made_up_profile(twin, size, seed)
        graph = find_modules(Graph(seed), batches[0][:2], include=twin.names).graph
        trained = set()
        for method in compared_methods():
            model = Graph(seed)
            plan = plan_to_run(method, graph, CostModel.from_profile(profile), HostBackend(2).device, num_devices=size)
            assert plan.search.method == method
            plan = replace(plan, search=SearchRecord(method=method))  # without its time, the same on every rank
            devices[f"{method} {seed}"] = [list(placed.devices) for placed in plan.placements]
            layout = tuple((stage.names, tuple(placed.cells for placed in stage.placements)) for stage in plan.stages)
            if layout in trained:
                continue
            trained.add(layout)
            handle = colocate_ranks(
                model, sample=batches[0][:2], modules=model.names, plan=plan, backend=HostBackend(2)
            )
            losses = train(model, [whole.chunk(size)[rank] for whole in batches])
            assert torch.allclose(torch.tensor(losses), torch.tensor(expected), rtol=1e-4), (seed, method)
            found = handle.full_state_dict()
            for name, tensor in twin.state_dict().items():
                assert torch.allclose(found[name], tensor, atol=1e-5, rtol=1e-4), (seed, method, name)
            handle.remove()
    return devices


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


def _by_name(rank: int, size: int) -> None:
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
    assert handle.plan.search.method == "distmm"
    assert train(model, [torch.ones(2, WIDTH)]) == pytest.approx([twin(torch.ones(2, WIDTH)).item()], rel=1e-4)
    handle.remove()


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
