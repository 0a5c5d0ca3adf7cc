"""The stream engine on a real GPU: backward on the forward's stream, flat memory, spans in the device's time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

import mosaic
from mosaic.backends.base import Backend
from mosaic.backends.cuda.backend import CudaBackend
from mosaic.engine import Handle, find_modules
from mosaic.engine.streams.tensor import StreamTensor
from mosaic.plan import plan_from_quotas

pytestmark = [
    pytest.mark.gpu,
    # A weight between modules that two lanes use gets gradients from both streams; autograd orders them, and says so.
    pytest.mark.filterwarnings("ignore:The AccumulateGrad node"),
]

WIDTH = 512
ROWS = 256


@pytest.fixture(scope="module")
def backend(cuda_backend: CudaBackend) -> Backend:
    return cuda_backend


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.layers = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.layers(self.norm(x))


class Three(nn.Module):
    """Two encoders, glue with a shared weight, and a backbone over both."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Sequential(*[Block() for _ in range(4)])
        self.right = nn.Sequential(*[Block() for _ in range(2)])
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH**0.5)
        self.backbone = nn.Sequential(*[Block() for _ in range(2)])

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        left = nn.functional.normalize(self.left(x) @ self.weight, dim=-1)
        right = nn.functional.normalize(self.right(y) @ self.weight, dim=-1)
        return self.backbone(torch.cat([left, right]))


def batch(device: torch.device, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return tuple(torch.randn(ROWS, WIDTH, generator=generator).to(device) for _ in range(2))  # type: ignore[return-value]


@contextmanager
def colocated(model: nn.Module, backend: Backend) -> Iterator[Handle]:
    sample = batch(backend.torch_device, 0)
    slots = backend.device.num_slots
    stages = [{"left": slots - slots // 3, "right": slots // 3}, {"backbone": slots}]
    plan = plan_from_quotas(stages, graph=find_modules(model, sample).graph, device=backend.device)
    handle = mosaic.colocate(model, sample=sample, plan=plan, backend=backend)
    try:
        yield handle
    finally:
        handle.remove()


def train(model: nn.Module, device: torch.device, steps: int) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for step in range(steps):
        loss = model(*batch(device, step)).square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def derivatives(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
    """Returns gradients of several results at once, and gradients of a gradient."""
    made = model(x.requires_grad_(), y).square().mean(1)
    three = torch.eye(3, device=x.device)
    (several,) = torch.autograd.grad(made[:3], x, three, is_grads_batched=True, retain_graph=True)
    (gradient,) = torch.autograd.grad(made.sum(), x, create_graph=True)
    return [several, *torch.autograd.grad(made.sum() + gradient.square().sum(), list(model.parameters()))]


def test_other_derivatives_are_the_plain_model_s(backend: Backend):
    model = Three().to(backend.torch_device)
    x, y = batch(backend.torch_device, 0)
    with colocated(model, backend) as handle:
        ours = derivatives(model, x, y)
        with handle.disabled():
            torch.testing.assert_close(ours, derivatives(model, x, y), rtol=1e-3, atol=1e-5)


def test_forward_glue_and_backward_run_on_the_lane_s_stream(backend: Backend):
    model = Three().to(backend.torch_device)
    seen: dict[str, set[int]] = {"forward": set(), "backward": set(), "glue": set()}

    def note(phase: str) -> None:
        seen[phase].add(torch.cuda.current_stream(backend.torch_device).cuda_stream)

    def look(_: nn.Module, __: Any, result: torch.Tensor) -> None:
        note("forward")
        if result.requires_grad:
            result.register_hook(lambda _: note("backward"))

    model.left[0].register_forward_hook(look)
    with colocated(model, backend) as handle:
        assert handle._executor is not None
        lane: Any = handle._executor.lanes.lane(handle.plan.placement("left").slots)
        seen["forward"].clear()  # finding ran it on the default stream
        train(model, backend.torch_device, 2)
        x, y = batch(backend.torch_device, 0)
        glue = model.left(x) * 2
        assert isinstance(glue, StreamTensor)
        glue.register_hook(lambda _: note("glue"))
        (glue.sum() + model.right(y).sum()).backward()
    assert seen == {phase: {lane.stream.cuda_stream} for phase in seen}


def test_memory_stays_flat_over_fifty_steps(backend: Backend):
    model = Three().to(backend.torch_device)
    with colocated(model, backend):
        train(model, backend.torch_device, 10)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
        train(model, backend.torch_device, 50)
        torch.cuda.synchronize()
        assert torch.cuda.memory_allocated() <= before[0] * 1.01
        assert torch.cuda.memory_reserved() <= before[1] * 1.25


def test_spans_of_forward_and_backward_are_in_the_device_s_time(backend: Backend):
    model = Three().to(backend.torch_device)
    with colocated(model, backend) as handle:
        train(model, backend.torch_device, 5)
        handle.clear_timeline()
        train(model, backend.torch_device, 5)
        spans = handle.timeline().spans
        assert {(s.module, s.phase) for s in spans} == {
            (name, phase) for name in ("left", "right", "backbone") for phase in ("forward", "backward")
        }
        assert all(span.end_ms > span.start_ms for span in spans)
        assert "SMs)" in handle.describe()
