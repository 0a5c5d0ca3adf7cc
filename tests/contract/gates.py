"""Work that does not end before it is told to, for each kind of backend: so that tests need no time to pass."""

from __future__ import annotations

import ctypes
import threading
from typing import Protocol

from fake_streams import FakeStreams, Hold

from mosaic.backends.base import Backend

WAIT_S = 60


class Gate(Protocol):
    """Holds the lane on which ``hold`` is called."""

    def hold(self) -> None:
        """To be called by submitted work, which does not end from then on."""

    def open(self) -> None:
        """Lets the work end."""


class ThreadGate:
    """For lanes with threads: the thread waits."""

    def __init__(self) -> None:
        self._event = threading.Event()

    def hold(self) -> None:
        assert self._event.wait(WAIT_S)

    def open(self) -> None:
        self._event.set()


class FakeStreamGate:
    """For fake streams: the stream is given work that is held."""

    def __init__(self, runtime: FakeStreams) -> None:
        self._runtime = runtime
        self._hold: Hold | None = None

    def hold(self) -> None:
        self._hold = self._runtime.hold()

    def open(self) -> None:
        assert self._hold is not None
        self._hold.open()


class CudaGate:
    """For real streams: the device waits for a word of the host's memory (``cuStreamWaitValue32``)."""

    def __init__(self, backend: Backend) -> None:
        from cuda.bindings import driver

        self._driver = driver
        self._device = backend.torch_device
        status, pointer = driver.cuMemHostAlloc(4, driver.CU_MEMHOSTALLOC_DEVICEMAP)
        assert status == driver.CUresult.CUDA_SUCCESS, status
        self._word = ctypes.c_uint32.from_address(int(pointer))
        self._word.value = 0
        status, self._address = driver.cuMemHostGetDevicePointer(pointer, 0)
        assert status == driver.CUresult.CUDA_SUCCESS, status

    def hold(self) -> None:
        import torch

        stream = torch.cuda.current_stream(self._device).cuda_stream
        (status,) = self._driver.cuStreamWaitValue32(
            stream, self._address, 1, self._driver.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_GEQ
        )
        assert status == self._driver.CUresult.CUDA_SUCCESS, status

    def open(self) -> None:
        self._word.value = 1  # the word itself is left to the process: the stream may not have read it yet
