"""Times of points on streams, accurate over days.

CUDA returns the time between two events in milliseconds as a 32-bit float: accurate to a microsecond over ten seconds,
to a quarter of a millisecond over an hour. A clock therefore records a base event at each step of the loop, and sums
the times between them in double precision. Base events have a stream of their own, so a delayed lane does not delay the
clock.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import Any

from mosaic.backends.streams.api import StreamApi


class _Base:
    """The base event of one step's marks, and its time once read."""

    def __init__(self, event: Any, at_ms: float | None = None) -> None:
        self.event = event
        self.at_ms = at_ms


class StreamMark:
    """A timed event on a stream, and its clock; created by ``StreamClock.mark``."""

    def __init__(self, event: Any, clock: StreamClock, base: _Base) -> None:
        self.event = event
        self.clock = clock
        self._base = base

    def ms_until(self, later: StreamMark) -> float:
        """Waits for both events; returns the milliseconds between them, by the device's clock."""
        if self._base is not later._base:
            return later.at_ms() - self.at_ms()
        return _elapsed_ms(self.event, later.event)

    def at_ms(self) -> float:
        """Waits for the event; returns milliseconds since the clock's creation."""
        return self.clock.read(self._base) + _elapsed_ms(self._base.event, self.event)


class StreamClock:
    """The clock of one device's marks; thread-safe. It does not query events before a reading."""

    def __init__(self, api: StreamApi) -> None:
        self._api = api
        self._stream = api.new_stream()
        self._lock = threading.Lock()
        self._base = self._last_read = _Base(self._timed_event(self._stream), 0.0)
        self._unread: deque[_Base] = deque()

    def close(self) -> None:
        """Releases its stream; marks can still be read."""
        self._api.give_back(self._stream)

    def start_step(self) -> None:
        """Records a new base event for later marks; does not wait."""
        base = _Base(self._timed_event(self._stream))
        self._unread.append(base)
        self._base = base

    def mark(self, stream: Any) -> StreamMark:
        """Marks the current end of a stream."""
        return StreamMark(self._timed_event(stream), self, self._base)

    def read(self, base: _Base) -> float:
        """Returns the time of a step's base event, in milliseconds since the clock's creation."""
        with self._lock:
            while base.at_ms is None:
                following = self._unread.popleft()
                assert self._last_read.at_ms is not None
                following.at_ms = self._last_read.at_ms + _elapsed_ms(self._last_read.event, following.event)
                self._last_read = following
            return base.at_ms

    def _timed_event(self, stream: Any) -> Any:
        event = self._api.new_event(timing=True)
        event.record(stream)
        return event


def _elapsed_ms(earlier: Any, later: Any) -> float:
    """Waits for two events and returns the time between them."""
    earlier.synchronize()
    later.synchronize()
    elapsed: float = earlier.elapsed_time(later)
    return elapsed
