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
    """Runs a first small backward, which makes a context current in autograd's thread of a device.

    A first backward that begins with a product makes torch warn: "Attempting to run cuBLAS, but there was no current
    CUDA context!"
    """
    with torch.inference_mode(False), torch.enable_grad():
        (torch.ones(1, device=device, requires_grad=True) * 1).backward()


class StreamApi:
    """The part of ``torch.cuda`` that lanes and their graphs use, for one device.

    Tests put a runtime in its place that runs operators on the CPU and checks that each one is ordered after what it
    reads. Its streams, events and graphs have the methods of torch's that Mosaic uses.
    """

    def __init__(self, ordinal: int) -> None:
        self.device = torch.device("cuda", ordinal)
        self._ordinal = ordinal
        self._streams: dict[tuple[int, int, int], torch.cuda.Stream] = {}  # by torch's ids: making one takes longer
        self._lent: set[int] = set()  # by handle: torch 2.11 frees streams and events that weak references still name

    def external_stream(self, handle: int) -> torch.cuda.ExternalStream:
        """Returns a stream for a driver's handle, which it does not own; on this device, not on the current one."""
        return torch.cuda.ExternalStream(handle, device=self.device)

    def new_stream(self, priority: int = 0) -> torch.cuda.Stream:
        """Lends a stream of torch's own pool, other than the current one and those that are lent already.

        torch hands out 32 of a priority "round-robin" (c10/cuda/CUDAStream.h), so this requests until one is free.
        Streams that others took from the pool, the current one apart, are not known here.

        Raises:
            BackendUnavailableError: All of them are in use.
        """
        for _ in range(POOL_STREAMS):
            stream = torch.cuda.Stream(device=self.device, priority=priority)
            if stream.cuda_stream not in self._lent and stream != torch.cuda.current_stream(self.device):
                self._lent.add(stream.cuda_stream)
                return stream
        raise BackendUnavailableError(
            f"no stream of priority {priority} is free on {self.device}; open fewer plain lanes at once",
            found=f"{len(self._lent)} streams in use",
            needed=f"one of the {POOL_STREAMS} that torch has for each priority",
        )

    def give_back(self, stream: torch.cuda.Stream) -> None:
        """Ends the loan of a stream of ``new_stream``."""
        self._lent.discard(stream.cuda_stream)

    def current_stream(self) -> torch.cuda.Stream:
        """Returns the calling thread's current stream.

        ``torch.cuda.current_stream`` looks up the devices at each call, which takes longer than a launch.
        """
        ids = torch._C._cuda_getCurrentStream(self._ordinal)
        stream = self._streams.get(ids)
        if stream is None:
            stream = self._streams[ids] = torch.cuda.current_stream(self.device)
        return stream

    def use_stream(self, stream: torch.cuda.Stream) -> AbstractContextManager[Any]:
        """Makes a stream current inside a block, and its device; quicker than ``torch.cuda.stream``."""
        return stream

    def new_event(self, *, timing: bool = False) -> torch.cuda.Event:
        """Returns an event without the Python calls of ``torch.cuda.Event`` around those of its base."""
        return torch._C._CudaEventBase(enable_timing=timing)  # type: ignore[return-value]

    def order(self, stream: torch.cuda.Stream, *, before: torch.cuda.Stream) -> None:
        """Makes what ``before`` is given from now on start after all that ``stream`` was given so far."""
        torch.Stream.wait_stream(before, stream)  # that of torch.cuda's class makes the event in Python

    def record_use(self, tensor: torch.Tensor, stream: torch.cuda.Stream) -> None:
        """Tells the allocator that ``stream`` uses a tensor's memory, if it is on this device."""
        if tensor.device == self.device:
            tensor.record_stream(stream)

    def synchronize(self) -> None:
        """Waits for the primary context, and with it for all green contexts."""
        torch.cuda.synchronize(self.device)

    def is_capturing(self) -> bool:
        """Returns True if the current stream is being captured; torch looks at that of the current device."""
        if torch._C._cuda_getDevice() == self._ordinal:
            return torch._C._cuda_isCurrentStreamCapturing()
        with torch.cuda.device(self.device):
            return torch.cuda.is_current_stream_capturing()

    def new_graph(self) -> torch.cuda.CUDAGraph:
        return torch.cuda.CUDAGraph()

    def new_graph_pool(self) -> Any:
        """Makes a memory pool that graphs can share."""
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
        """Captures what is launched inside the block, from ``stream`` and streams that its events fork to.

        Other threads, such as one that pins batches, may go on calling CUDA. The current stream is the caller's again
        afterwards, also after a failure, where ``torch.cuda.graph`` leaves its own.
        """
        try:
            with (
                torch.cuda.stream(torch.cuda.current_stream(self.device)),
                torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"),
            ):
                yield
        except BaseException:
            with suppress(RuntimeError):  # torch's answer where the capture came to its end all the same
                self._clean_up_lost_capture(pool)
            raise

    def _clean_up_lost_capture(self, pool: Any) -> None:
        """Does what torch leaves undone where the driver gave a capture up.

        Until then its allocator frees nothing that ``record_stream`` was called for, and before 2.13 the generator
        refuses to draw ("Offset increment outside graph capture") until the end of a next capture.
        """
        torch._C._cuda_endAllocateToPool(self.device.index, pool)
        torch._C._cuda_releasePool(self.device.index, pool)
        with torch.cuda.stream(torch.cuda.current_stream(self.device)), torch.cuda.graph(torch.cuda.CUDAGraph()):
            torch.zeros(1, device=self.device)

    def free_bytes(self) -> int:
        """Bytes that are free on the device, by the driver."""
        return int(torch.cuda.mem_get_info(self.device)[0])

    def release_workspaces(self) -> None:
        """Releases what cuBLAS keeps for each pair of handle and stream; its next call makes it anew."""
        torch._C._cuda_clearCublasWorkspaces()

    def empty_cache(self) -> None:
        """Returns the unused memory of torch's allocator, which has one cache for all devices, to the driver."""
        torch.cuda.empty_cache()
