"""The ways to run one training loop: as it is, as one CUDA graph, and under a plan on any kind of lanes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

import mosaic
from bench.gpu.bench import Bench
from mosaic import models
from mosaic.backends.base import Backend, Lanes
from mosaic.backends.cuda.backend import CudaBackend
from mosaic.engine import Handle
from mosaic.errors import BackendUnavailableError, MosaicError
from mosaic.plan import Plan

EQUALITY_STEPS = 3
MAX_BATCH = 8
"""Samples of a step where memory holds them."""
GPU_BYTES = 78 << 30
"""Memory that ``Row.gpu_batch`` is counted for."""

Step = Callable[[], torch.Tensor]


def samples_that_fit(name: str, memory_bytes: int, batch: int = MAX_BATCH) -> int:
    """Returns how many samples of at most ``batch`` a device's memory holds.

    Raises:
        MosaicError: It does not hold one.
    """
    most = models.find_model(name).gpu_batch * memory_bytes // GPU_BYTES
    if most < 1:
        raise MosaicError(
            f"{name}-gpu with one sample does not fit in {memory_bytes / 2**30:.0f} GiB; take a larger device"
        )
    return min(batch, most)


class Workload:
    """A model, a batch, and the loop that trains it: the same for every variant, from the same weights.

    Attributes:
        batch: Samples of a step: as many as were asked for, or fewer where the device's memory does not hold them.
        note: Which model and size it is.
    """

    def __init__(self, name: str, batch: int, bench: Bench) -> None:
        size = "tiny" if bench.dry_run else "gpu"
        self.batch = batch if bench.dry_run else samples_that_fit(name, bench.device.memory_bytes, batch)
        self.note = f"{name}-{size} of the zoo"
        self.device = bench.torch_device
        self.modules = models.find_model(name).modules
        self.model = models.build(name, size, device=self.device)
        self.inputs = models.make_batch(name, size, batch=self.batch, device=self.device)
        on_gpu = {"fused": True, "capturable": True} if bench.on_gpu else {}
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, **on_gpu)
        self._first = [parameter.detach().clone() for parameter in self.model.parameters()]

    def loss(self) -> torch.Tensor:
        with torch.autocast(self.device.type, torch.bfloat16):
            return models.loss_of(self.model(**self.inputs))

    def step(self) -> torch.Tensor:
        """Takes one training step, as anybody's loop does."""
        loss = self.loss()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def restart(self) -> None:
        """Brings weights and optimizer back to where they began, in place."""
        with torch.no_grad():
            for parameter, first in zip(self.model.parameters(), self._first, strict=True):
                parameter.copy_(first)
            for state in self.optimizer.state.values():
                for value in state.values():
                    if isinstance(value, torch.Tensor):
                        value.zero_()

    def losses(self, step: Step, count: int = EQUALITY_STEPS) -> list[float]:
        """Returns the losses of the first steps from the beginning."""
        self.restart()
        return [float(step()) for _ in range(count)]


@contextmanager
def whole_step_graph(work: Workload, bench: Bench) -> Iterator[tuple[Step, Step]]:
    """The plain step, optimizer included, as one CUDA graph."""
    if not bench.on_gpu:
        raise BackendUnavailableError("a step cannot be captured", found="the host backend", needed="a GPU")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            work.step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    work.optimizer.zero_grad(set_to_none=True)
    with torch.cuda.stream(torch.cuda.current_stream()), torch.cuda.graph(graph):  # a failing one may leave its stream
        loss = work.loss()
        loss.backward()
        work.optimizer.step()
    loss = loss.detach()  # or the nodes of its graph would add the plain loop's gradients on the stream of the capture
    work.optimizer.zero_grad(set_to_none=True)  # the graph has gradients of its own

    def replay() -> torch.Tensor:
        graph.replay()
        return loss

    try:
        yield work.step, replay
    finally:
        torch.cuda.synchronize()
        graph.reset()


@contextmanager
def colocated(work: Workload, plan: Plan, backend: Backend, *, graphs: bool = False) -> Iterator[tuple[Step, Step]]:
    """The same loop under a plan, on a backend's lanes."""
    if graphs and backend.device.kind == "host":
        raise BackendUnavailableError("stages cannot be captured", found="the host backend", needed="a GPU")
    with ExitStack() as stack:
        handle: Handle = mosaic.colocate(
            work.model,
            sample=work.loss,
            plan=plan,
            backend=backend,
            modules=work.modules,
            options=mosaic.Options(cuda_graphs=graphs),
        )
        stack.callback(handle.remove)

        def plain() -> torch.Tensor:
            with handle.disabled():
                return work.step()

        yield plain, work.step


class PlainStreams:
    """A backend whose lanes are plain streams with every SM, so that only quotas are missing."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def open_lanes(self, partitions: Any) -> Lanes:
        """Opens lanes that nothing confines."""
        return self._backend.open_plain_lanes(partitions)


def lanes_of(bench: Bench, *, sm_target: bool) -> Backend:
    """Returns the device with lanes that tell libraries how many SMs they have, or with lanes that do not.

    Raises:
        BackendUnavailableError: SM targets cannot be set here.
    """
    if bench.device.kind != "host":
        return CudaBackend(bench.torch_device.index or 0, sm_target=sm_target, cudnn=bench.cudnn)
    if sm_target:
        raise BackendUnavailableError("SM targets cannot be set", found="the host backend", needed="a GPU")
    return bench.backend
