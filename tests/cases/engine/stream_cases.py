"""A backend of fake streams, and the ways in which the tests of the stream engine use it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import engine_cases
import torch
from engine_cases import Stages, pair_batch, tower
from fake_streams import FakeStreams, Launch
from torch import nn

import mosaic
from mosaic.backends.base import Backend
from mosaic.backends.streams.lanes import StreamLanes
from mosaic.device import Device
from mosaic.engine import Handle, find_modules
from mosaic.plan import plan_from_quotas


class FakeBackend(Backend):
    """A device whose partitions are fake streams."""

    name = "cuda"
    api: FakeStreams = None  # type: ignore[assignment]  # each has its own; these stand for the protocol's properties
    device: Device = None  # type: ignore[assignment]
    torch_device: torch.device = None  # type: ignore[assignment]

    def __init__(self, num_slots: int = 2) -> None:
        self.api = FakeStreams()
        self.device = Device(name="a fake device", kind="cuda", num_slots=num_slots, sms_per_slot=8)
        self.torch_device = self.api.device

    def open_lanes(self, partitions: Iterable[tuple[int, ...]]) -> StreamLanes:
        wanted = sorted(set(partitions))
        streams = {slots: (self.api.external_stream(10 + index), 8 * len(slots)) for index, slots in enumerate(wanted)}
        return StreamLanes(self.api, streams, lambda: None)

    def launches_of(self, handle: Handle, module: str) -> list[Launch]:
        """Returns the launches on the lane of a module."""
        assert handle._executor is not None
        lane: Any = handle._executor.lanes.lane(handle.plan.placement(module).slots)
        return self.api.on(lane.stream)


@contextmanager
def colocated(
    model: nn.Module,
    sample: Any,
    stages: Stages,
    *,
    num_slots: int = 2,
    graphs: bool = False,
    backend: Backend | None = None,
    **choice: Any,
) -> Iterator[tuple[Handle, Any]]:
    """Colocates by a plan given by hand: on a GPU, or on fake streams, where it watches every operator for races."""
    backend = backend or FakeBackend(num_slots)
    plan = plan_from_quotas(stages, graph=find_modules(model, sample, **choice).graph, device=backend.device)
    named = {"modules": choice.get("include"), "exclude": choice.get("exclude", ())}
    with backend.api.watching() if isinstance(backend, FakeBackend) else nullcontext():
        handle = mosaic.colocate(
            model, sample=sample, plan=plan, backend=backend, options=mosaic.Options(cuda_graphs=graphs), **named
        )
        try:
            yield handle, backend
        finally:
            handle.remove()


run_both = partial(engine_cases.run_both, colocated=colocated)


class Projected(nn.Module):
    """Towers with a stem before them, glue with weights behind each, and a head that two of them feed."""

    def __init__(self, num_towers: int = 3) -> None:
        super().__init__()
        self.stem = nn.Parameter(torch.ones(8))
        self.towers = nn.ModuleList(tower() for _ in range(num_towers))
        self.weight = nn.Parameter(torch.randn(16, 16))
        self.head = tower(16, 16)

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        found = []
        for one, x in zip(self.towers, inputs, strict=True):
            hidden = one(x[:, :8])
            found.append(nn.functional.normalize(hidden @ self.weight, dim=-1) * self.stem.sum())
        return self.head(torch.stack(found[:2]).sum(0)) + found[-1]


def steps(model: nn.Module, *, num_steps: int = 3) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(num_steps):
        model(*pair_batch(step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
