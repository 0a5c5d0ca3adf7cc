"""Which SMs, or on the host which cores, work really runs on: read where it runs, not taken from what was asked."""

from __future__ import annotations

import os
from typing import Any

import torch

from mosaic.backends.base import Backend, Lane
from mosaic.backends.cuda.driver import driver as cuda
from mosaic.errors import BackendUnavailableError


def units_of(backend: Backend, lane: Lane) -> tuple[int, ...]:
    """Returns the sorted ids of the SMs or cores that a lane's work runs on.

    Raises:
        BackendUnavailableError: They cannot be read here.
    """
    return lane.submit(lambda: _units_here(backend)).wait()


def units_of_backward(backend: Backend, lane: Lane) -> tuple[int, ...]:
    """Returns the same of a backward whose forward ran on the lane and which is started on the lane."""
    seen: list[tuple[int, ...]] = []

    class _Look(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
            return value * 1.0

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
            seen.append(_units_here(backend))
            return gradients[0]

    def work() -> None:
        value = torch.ones(8, device=backend.torch_device, requires_grad=True)
        _Look.apply(value).sum().backward()

    lane.submit(work).wait()
    return seen[0]


def _units_here(backend: Backend) -> tuple[int, ...]:
    """Reads them for the current stream, or for the calling thread."""
    device = backend.torch_device
    if device.type == "cuda":
        handle = int(torch.cuda.current_stream(device).cuda_stream)
        return tuple(cuda.probe_stream(device.index or 0, handle))
    if backend.name == "host" and hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    raise BackendUnavailableError(
        "what work runs on cannot be read", found=f"the {backend.name} backend", needed="a GPU, or Linux"
    )
