"""The part of the CUDA runtime that lanes and their graphs use: streams, events, graphs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any

import torch
from torch.torch_version import TorchVersion

from mosaic.errors import BackendUnavailableError

POOL_STREAMS = 32
"""Streams of one priority in torch's pool for a device."""


def start_autograd(device: torch.device) -> None:
    """Runs a small backward, which makes a context current in autograd's thread of a device.

    Without it a first backward that starts with a product warns: "Attempting to run cuBLAS, but there was no current
    CUDA context!"
    """
    with torch.inference_mode(False), torch.enable_grad():
        (torch.ones(1, device=device, requires_grad=True) * 1).backward()


class StreamApi:
    """The part of ``torch.cuda`` used by lanes and their graphs, for one device.

    Tests replace it by a runtime that runs operators on the CPU and checks that each one is ordered after its inputs.
    """

    def __init__(self, ordinal: int) -> None:
        self.device = torch.device("cuda", ordinal)
        self._ordinal = ordinal
        self._streams: dict[tuple[int, int, int], torch.cuda.Stream] = {}  # by torch's ids: creating one takes longer
        self._borrowed: set[int] = set()  # by handle: torch 2.11 frees streams and events with weak references

    def external_stream(self, handle: int) -> torch.cuda.ExternalStream:
        """Returns a non-owning stream for a driver's handle, on this device rather than the current one."""
        return torch.cuda.ExternalStream(handle, device=self.device)

    def new_stream(self, priority: int = 0) -> torch.cuda.Stream:
        """Borrows a stream of torch's pool that is neither current nor borrowed.

        torch returns 32 streams per priority "round-robin" (c10/cuda/CUDAStream.h), so this requests until one is free.
        Other users of the pool are unknown.

        Raises:
            BackendUnavailableError: All are in use.
        """
        for _ in range(POOL_STREAMS):
            stream = torch.cuda.Stream(device=self.device, priority=priority)
            if stream.cuda_stream not in self._borrowed and stream != torch.cuda.current_stream(self.device):
                self._borrowed.add(stream.cuda_stream)
                return stream
        raise BackendUnavailableError(
            f"no stream of priority {priority} is free on {self.device}; open fewer plain lanes",
            found=f"{len(self._borrowed)} streams in use",
            needed=f"one of torch's {POOL_STREAMS} per priority",
        )

    def give_back(self, stream: torch.cuda.Stream) -> None:
        """Returns a stream of ``new_stream``."""
        self._borrowed.discard(stream.cuda_stream)

    def current_stream(self) -> torch.cuda.Stream:
        """Returns the calling thread's current stream.

        ``torch.cuda.current_stream`` takes longer than a launch, because it looks up the devices.
        """
        ids = torch._C._cuda_getCurrentStream(self._ordinal)
        stream = self._streams.get(ids)
        if stream is None:
            stream = self._streams[ids] = torch.cuda.current_stream(self.device)
        return stream

    def use_stream(self, stream: torch.cuda.Stream) -> AbstractContextManager[Any]:
        """Makes a stream and its device current in a context; faster than ``torch.cuda.stream``."""
        return stream

    def new_event(self, *, timing: bool = False) -> torch.cuda.Event:
        """Returns an event without the Python overhead of ``torch.cuda.Event``."""
        return torch._C._CudaEventBase(enable_timing=timing)  # type: ignore[return-value]

    def order(self, stream: torch.cuda.Stream, *, before: torch.cuda.Stream) -> None:
        """Makes later work of ``before`` wait for all earlier work of ``stream``."""
        if stream.cuda_stream != before.cuda_stream:
            torch.Stream.wait_stream(before, stream)  # torch.cuda's class creates the event in Python

    def record_use(self, tensor: torch.Tensor, stream: torch.cuda.Stream) -> None:
        """Records in the allocator that ``stream`` uses a tensor's memory, if it is on this device."""
        if tensor.device == self.device:
            tensor.record_stream(stream)

    def synchronize(self) -> None:
        """Synchronizes the primary context and all green contexts."""
        torch.cuda.synchronize(self.device)

    def is_capturing(self) -> bool:
        """Returns True if the current stream of this device is being captured."""
        if torch._C._cuda_getDevice() == self._ordinal:
            return torch._C._cuda_isCurrentStreamCapturing()
        with torch.cuda.device(self.device):
            return torch.cuda.is_current_stream_capturing()

    def new_graph(self) -> torch.cuda.CUDAGraph:
        return torch.cuda.CUDAGraph()

    def new_graph_pool(self) -> Any:
        """Creates a memory pool for graphs."""
        return torch.cuda.graph_pool_handle()

    @property
    def draws_apart(self) -> bool:
        """True if graphs that draw random numbers may be replayed in any order.

        A replay fills the generator's seed and offset on the device before its kernels read them: one pair of tensors
        for each generator up to torch 2.12, one for each generator and capture since 2.13 (pytorch#172390, #176752).
        """
        return TorchVersion(torch.__version__) >= TorchVersion("2.13")

    @contextmanager
    def capture(self, graph: torch.cuda.CUDAGraph, *, stream: torch.cuda.Stream, pool: Any) -> Iterator[None]:
        """Captures the launches of the context on ``stream`` and on streams that its events fork to.

        Other threads, such as one that pins batches, may call CUDA meanwhile. The caller's current stream is restored,
        also after a failure, unlike with ``torch.cuda.graph``.
        """
        try:
            with (
                torch.cuda.stream(torch.cuda.current_stream(self.device)),
                torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"),
            ):
                yield
        except BaseException:
            with suppress(RuntimeError):  # torch raises it although the capture ended
                self._clean_up_lost_capture(pool)
            raise

    def _clean_up_lost_capture(self, pool: Any) -> None:
        """Cleans up in torch after the driver invalidated a capture.

        Otherwise its allocator does not free tensors with ``record_stream``, and before 2.13 the generator fails
        ("Offset increment outside graph capture") until the end of the next capture.
        """
        torch._C._cuda_endAllocateToPool(self.device.index, pool)
        torch._C._cuda_releasePool(self.device.index, pool)
        with torch.cuda.stream(torch.cuda.current_stream(self.device)), torch.cuda.graph(torch.cuda.CUDAGraph()):
            torch.zeros(1, device=self.device)

    def free_bytes(self) -> int:
        """Returns the free bytes of the device, by the driver."""
        return int(torch.cuda.mem_get_info(self.device)[0])

    def release_workspaces(self) -> None:
        """Releases cuBLAS's workspaces per pair of handle and stream; its next call recreates them."""
        torch._C._cuda_clearCublasWorkspaces()

    def empty_cache(self) -> None:
        """Returns unused memory of torch's allocator to the driver, on all devices."""
        torch.cuda.empty_cache()
