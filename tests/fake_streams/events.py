"""Streams and events of the fake runtime, and work that is held back."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from fake_streams.clocks import Clock, Launch, merge

if TYPE_CHECKING:
    from fake_streams.graphs import Recording
    from fake_streams.runtime import FakeStreams

HOLD_S = 60


class _Queue:
    def __init__(self, handle: int, priority: int) -> None:
        self.handle = handle
        self.priority = priority
        self.clock: Clock = {}
        self.capture: Recording | None = None


class FakeStream:
    """Names a queue of work, as ``torch.cuda.Stream`` does: streams of one queue are equal, and seldom identical.

    A weak reference to one is an error, and to an event: torch 2.11 frees both without clearing such references.
    """

    __slots__ = ("_queue",)

    def __init__(self, handle: int, priority: int = 0) -> None:
        self._queue = _Queue(handle, priority)

    def again(self) -> FakeStream:
        """Returns another name of the same queue."""
        other = object.__new__(FakeStream)
        other._queue = self._queue
        return other

    @property
    def cuda_stream(self) -> int:
        return self.handle

    @property
    def handle(self) -> int:
        return self._queue.handle

    @property
    def priority(self) -> int:
        return self._queue.priority

    @property
    def clock(self) -> Clock:
        return self._queue.clock

    @property
    def capture(self) -> Recording | None:
        return self._queue.capture

    @capture.setter
    def capture(self, recording: Recording | None) -> None:
        self._queue.capture = recording

    def __eq__(self, other: object) -> bool:
        return isinstance(other, FakeStream) and other._queue is self._queue

    def __hash__(self) -> int:
        return hash(self._queue)

    def __repr__(self) -> str:
        return f"FakeStream({self.handle})"


class FakeEvent:
    """An event; passed at once for the CPU, never before its recording for the clocks."""

    __slots__ = ("_capture", "_clock", "_recorded_ms", "_runtime", "_timing")

    def __init__(self, runtime: FakeStreams, timing: bool) -> None:
        self._runtime = runtime
        self._timing = timing
        self._clock: Clock | None = None
        self._recorded_ms = 0.0
        self._capture: Recording | None = None

    @property
    def _at_ms(self) -> float:
        holds = self._runtime.holds_before(self._clock)
        return max([self._recorded_ms, *(hold.opened_ms for hold in holds)])

    def record(self, stream: FakeStream) -> None:
        self._clock = dict(stream.clock)
        self._recorded_ms = time.perf_counter() * 1e3
        self._capture = stream.capture

    def wait(self, stream: FakeStream) -> None:
        if self._clock is None:
            return  # as CUDA: waiting for what was never recorded does nothing
        if self._capture is not None and self._capture.open:
            if stream == self._runtime.main:
                # "a disallowed implicit dependency on a current capture sequence from cudaStreamLegacy"
                raise RuntimeError("the default stream cannot wait for work that is being captured")
            self._capture.join(stream)
        elif self._capture is not None:
            self._refuse_captured()
        elif stream.capture is not None and stream.capture.open:
            raise RuntimeError("a capturing stream waits for an event from outside of the capture")
        merge(stream.clock, self._clock)

    def _refuse_captured(self) -> None:
        if self._capture is not None:  # cudaErrorCapturedEvent
            raise RuntimeError("the operation is not permitted on an event last recorded in a capturing stream")

    def query(self) -> bool:
        self._runtime.refuse_in_capture("query")
        self._refuse_captured()
        has_passed = all(hold.is_open for hold in self._runtime.holds_before(self._clock))
        if has_passed and self._clock is not None:
            merge(self._runtime.told, self._clock)
        return has_passed

    def synchronize(self) -> None:
        self._runtime.refuse_in_capture("synchronize")
        self._refuse_captured()
        for hold in self._runtime.holds_before(self._clock):
            hold.wait()
        if self._clock is not None:
            merge(self._runtime.host, self._clock)
            merge(self._runtime.told, self._clock)

    def elapsed_time(self, end_event: FakeEvent) -> float:
        """Milliseconds until another event.

        CUDA: "If cuEventRecord() has not been called on either event then CUDA_ERROR_INVALID_HANDLE is returned. If
        cuEventRecord() has been called on both events but one or both of them has not yet been completed (that is,
        cuEventQuery() would return CUDA_ERROR_NOT_READY on at least one of the events), CUDA_ERROR_NOT_READY is
        returned."
        """
        if not (self._timing and end_event._timing):
            raise ValueError("an event without timing has no time")
        for event in (self, end_event):
            if event._clock is None:
                raise ValueError("an event that was not recorded has no time")
            if any(self._runtime.told.get(stream, 0) < count for stream, count in event._clock.items()):
                raise RuntimeError("CUDA error: device not ready: the host has not waited for an event")
        return end_event._at_ms - self._at_ms


class Hold:
    """Work of one stream that does not end before it is told to, for a test of what waits for it."""

    def __init__(self, launch: Launch) -> None:
        self.launch = launch
        self.opened_ms = 0.0
        self._opened = threading.Event()

    @property
    def is_open(self) -> bool:
        return self._opened.is_set()

    def open(self) -> None:
        self.opened_ms = time.perf_counter() * 1e3
        self._opened.set()

    def wait(self) -> None:
        if not self._opened.wait(HOLD_S):
            raise RuntimeError(f"{self.launch} was held for {HOLD_S} s while a thread waited for it")
