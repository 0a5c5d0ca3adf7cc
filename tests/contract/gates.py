"""Work that does not end before it is told to, for each kind of backend: so that tests need no time to pass.

Submitted work that calls ``hold`` does not end from then on; ``open`` lets it end.
"""

from __future__ import annotations

import ctypes
import threading

from fake_streams import FakeStreams, Hold

from mosaic.backends.cuda.backend import CudaBackend

WAIT_S = 60


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

    def __init__(self, backend: CudaBackend) -> None:
        self._api = backend.api
        self._api.synchronize()  # the primary context is current from here on
        self._driver = ctypes.CDLL("libcuda.so.1")
        pointer, address = ctypes.c_void_p(), ctypes.c_uint64()
        device_map = 2
        self._check(self._driver.cuMemHostAlloc(ctypes.byref(pointer), ctypes.c_size_t(4), device_map))
        self._check(self._driver.cuMemHostGetDevicePointer_v2(ctypes.byref(address), pointer, 0))
        self._address = address
        self._word = ctypes.c_uint32.from_address(pointer.value or 0)
        self._word.value = 0

    def hold(self) -> None:
        stream = ctypes.c_void_p(self._api.current_stream().cuda_stream)
        at_least = 0
        timer = threading.Timer(WAIT_S, self.open)  # for tests that fail while the device waits
        timer.daemon = True
        timer.start()
        self._check(self._driver.cuStreamWaitValue32_v2(stream, self._address, ctypes.c_uint32(1), at_least))

    def open(self) -> None:
        self._word.value = 1  # the word itself is left to the process: the stream may not have read it yet

    @staticmethod
    def _check(status: int) -> None:
        assert status == 0, f"the driver returned {status}"


Gate = ThreadGate | FakeStreamGate | CudaGate
