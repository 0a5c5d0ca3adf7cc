"""The part of a CUDA runtime that lanes and their graphs use: streams, events, graphs. ``torch.cuda`` is the product.

The protocol exists so that everything above it can be run on machines without a GPU: tests put a runtime in its
place that runs operators on the CPU and checks that each one is ordered after what it reads.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any, Protocol

import torch
from torch.torch_version import TorchVersion

from mosaic.errors import BackendUnavailableError

POOL_STREAMS = 32
"""Streams of one priority in torch's pool for a device."""


class StreamApi(Protocol):
    """The part of a CUDA runtime that Mosaic uses, for one device.

    Its streams, events and graphs have the methods of torch's: ``event.record(stream)``, ``wait(stream)``, ``query()``,
    ``synchronize()``, ``elapsed_time(later)``; ``graph.replay()``, whose kernels run in the contexts in which they were
    captured, and ``reset()``.
    """

    @property
    def device(self) -> torch.device:
        """Where the tensors live."""

    def external_stream(self, handle: int) -> Any:
        """Returns a stream for a driver's handle; it does not own it."""

    def new_stream(self, priority: int = 0) -> Any:
        """Lends a stream on the whole device, other than the current one and those that are lent already."""

    def give_back(self, stream: Any) -> None:
        """Ends the loan of a stream of ``new_stream``."""

    def current_stream(self) -> Any:
        """Returns the calling thread's current stream."""

    def use_stream(self, stream: Any) -> AbstractContextManager[Any]:
        """Makes ``stream`` the thread's current one inside the block."""

    def new_event(self, *, timing: bool = False) -> Any:
        """Makes an event."""

    def record_use(self, tensor: torch.Tensor, stream: Any) -> None:
        """Tells the allocator that ``stream`` uses a tensor's memory, so that it is not given out too early."""

    def synchronize(self) -> None:
        """Blocks the thread until the device is idle."""

    def is_capturing(self) -> bool:
        """Whether the current stream is being captured."""

    def new_graph(self) -> Any:
        """Makes an empty graph."""

    def new_graph_pool(self) -> Any:
        """Makes a memory pool that graphs can share."""

    @property
    def draws_apart(self) -> bool:
        """Whether graphs that draw random numbers may be replayed in no order."""

    def capture(self, graph: Any, *, stream: Any, pool: Any) -> AbstractContextManager[Any]:
        """Captures what is launched inside the block, from ``stream`` and streams that its events fork to.

        The current stream is the caller's again afterwards, also where the capture fails.
        """

    def reserved_bytes(self) -> int:
        """Bytes that torch's allocator holds on the device now."""

    def free_bytes(self) -> int:
        """Bytes that nobody holds on the device now, by the driver."""

    def release_workspaces(self) -> None:
        """Gives back what cuBLAS keeps for each pair of handle and stream."""

    def empty_cache(self) -> None:
        """Gives the driver back what torch's allocator holds without need."""


def start_autograd(device: torch.device) -> None:
    """Runs a first small backward, which makes a context current in autograd's thread of a device.

    A first backward that begins with a product makes torch warn: "Attempting to run cuBLAS, but there was no current
    CUDA context!"
    """
    with torch.inference_mode(False), torch.enable_grad():
        (torch.ones(1, device=device, requires_grad=True) * 1).backward()


class _CurrentStream:
    """A block in which a stream is the current one of its device, and its device the current one."""

    __slots__ = ("_before", "_device", "_ordinal", "_stream")

    def __init__(self, ordinal: int, stream: torch.cuda.Stream) -> None:
        self._ordinal = ordinal
        self._stream = stream
        self._before: tuple[int, int, int] = (0, 0, 0)
        self._device = 0

    def __enter__(self) -> None:
        self._device = torch._C._cuda_getDevice()
        self._before = torch._C._cuda_getCurrentStream(self._ordinal)
        stream_id, device_index, device_type = _ids(self._stream)
        torch._C._cuda_setStream(stream_id=stream_id, device_index=device_index, device_type=device_type)

    def __exit__(self, *_: object) -> None:
        stream_id, device_index, device_type = self._before
        torch._C._cuda_setStream(stream_id=stream_id, device_index=device_index, device_type=device_type)
        if self._device != self._ordinal:
            torch._C._cuda_setDevice(self._device)


def _ids(stream: torch.cuda.Stream) -> tuple[int, int, int]:
    return stream.stream_id, stream.device_index, stream.device_type


class TorchStreams:
    """``torch.cuda`` for one device.

    Args:
        ordinal: The device's number.
    """

    def __init__(self, ordinal: int) -> None:
        self._device = torch.device("cuda", ordinal)
        self._ordinal = ordinal
        self._streams: dict[tuple[int, int, int], torch.cuda.Stream] = {}  # by torch's ids: making one takes longer
        self._lent: set[int] = set()  # by handle: torch 2.11 frees streams and events that weak references still name

    @property
    def device(self) -> torch.device:
        """``cuda:ordinal``."""
        return self._device

    def external_stream(self, handle: int) -> torch.cuda.ExternalStream:
        """Wraps a handle; the device is given, since torch would take the current one."""
        return torch.cuda.ExternalStream(handle, device=self._device)

    def new_stream(self, priority: int = 0) -> torch.cuda.Stream:
        """Takes a stream from torch's own pool.

        torch hands out 32 of a priority "round-robin", so that "if 33 low priority streams are requested, the first and
        last streams requested are actually the same stream" (c10/cuda/CUDAStream.h): it is asked on until it gives one
        that is free. Streams that others took from the pool, the current one apart, are not known here.

        Raises:
            BackendUnavailableError: All of them are in use.
        """
        for _ in range(POOL_STREAMS):
            stream = torch.cuda.Stream(device=self._device, priority=priority)
            if stream.cuda_stream not in self._lent and stream != torch.cuda.current_stream(self._device):
                self._lent.add(stream.cuda_stream)
                return stream
        raise BackendUnavailableError(
            f"no stream of priority {priority} is free on {self._device}; open fewer plain lanes at once",
            found=f"{len(self._lent)} streams in use",
            needed=f"one of the {POOL_STREAMS} that torch has for each priority",
        )

    def give_back(self, stream: torch.cuda.Stream) -> None:
        """Lets ``new_stream`` lend the stream again."""
        self._lent.discard(stream.cuda_stream)

    def current_stream(self) -> torch.cuda.Stream:
        """Returns the calling thread's current stream.

        ``torch.cuda.current_stream`` looks up what devices there are at each call, which takes longer than a launch.
        """
        ids = torch._C._cuda_getCurrentStream(self._ordinal)
        stream = self._streams.get(ids)
        if stream is None:
            stream = self._streams[ids] = torch.cuda.current_stream(self._device)
        return stream

    def use_stream(self, stream: torch.cuda.Stream) -> AbstractContextManager[Any]:
        """Makes ``stream`` current inside the block, and its device; quicker than ``torch.cuda.stream``."""
        return _CurrentStream(self._ordinal, stream)

    def new_event(self, *, timing: bool = False) -> torch.cuda.Event:
        """Makes an event."""
        return torch.cuda.Event(enable_timing=timing)

    def record_use(self, tensor: torch.Tensor, stream: torch.cuda.Stream) -> None:
        """Calls ``record_stream``; tensors elsewhere than on this device have no memory there."""
        if tensor.device == self._device:
            tensor.record_stream(stream)

    def synchronize(self) -> None:
        """Waits for the primary context, and with it for all green contexts."""
        torch.cuda.synchronize(self._device)

    def is_capturing(self) -> bool:
        """Asks torch, which looks at the stream of the current device."""
        if torch._C._cuda_getDevice() == self._ordinal:
            return torch.cuda.is_current_stream_capturing()
        with torch.cuda.device(self._device):
            return torch.cuda.is_current_stream_capturing()

    def new_graph(self) -> torch.cuda.CUDAGraph:
        """Makes an empty graph."""
        return torch.cuda.CUDAGraph()

    def new_graph_pool(self) -> Any:
        """Makes a memory pool that graphs can share."""
        return torch.cuda.graph_pool_handle()

    @property
    def draws_apart(self) -> bool:
        """Asks for torch's version.

        A replay fills the generator's seed and offset on the device before its kernels read them: one pair of tensors
        for each generator up to torch 2.12, one for each generator and capture since 2.13
        (ATen/cuda/CUDAGeneratorImpl.h; pytorch#172390, #176752).
        """
        return TorchVersion(torch.__version__) >= TorchVersion("2.13")

    @contextmanager
    def capture(self, graph: torch.cuda.CUDAGraph, *, stream: torch.cuda.Stream, pool: Any) -> Iterator[None]:
        """Captures in torch's way, which also registers the generators that are used inside.

        Other threads, such as one that pins batches, may go on calling CUDA meanwhile. The stream that was current is
        so again afterwards: ``torch.cuda.graph`` leaves its own where a capture cannot be begun or ended.
        """
        try:
            with (
                torch.cuda.stream(torch.cuda.current_stream(self._device)),
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
        torch._C._cuda_endAllocateToPool(self._device.index, pool)
        torch._C._cuda_releasePool(self._device.index, pool)
        with torch.cuda.stream(torch.cuda.current_stream(self._device)), torch.cuda.graph(torch.cuda.CUDAGraph()):
            torch.zeros(1, device=self._device)

    def reserved_bytes(self) -> int:
        """Asks the caching allocator."""
        return torch.cuda.memory_reserved(self._device)

    def free_bytes(self) -> int:
        """Asks the driver."""
        return int(torch.cuda.mem_get_info(self._device)[0])

    def release_workspaces(self) -> None:
        """Clears torch's table of workspaces; they are made anew at the next call of cuBLAS."""
        torch._C._cuda_clearCublasWorkspaces()

    def empty_cache(self) -> None:
        """Asks the caching allocator, which has one cache for all devices."""
        torch.cuda.empty_cache()
