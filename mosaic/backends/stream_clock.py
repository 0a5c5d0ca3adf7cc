"""Times of points on streams, exact over days.

CUDA tells the time between two events in milliseconds as a 32-bit float: exact to a microsecond over ten seconds, to a
quarter of a millisecond over an hour. A clock therefore measures each point from one that lies shortly before it, and
adds up in double precision. The points that it measures from lie on a stream of its own, on which nothing else
runs: a lane that is held up holds up nobody's clock.
"""

from __future__ import annotations

import threading
import time
from typing import Any

from mosaic.backends.stream_api import StreamApi

ANCHOR_S = 0.1
"""Seconds after which a new point is taken to measure from."""


class StreamMark:
    """A timed event on a stream.

    Args:
        api: The runtime that the stream belongs to.
        stream: The stream, whose present end is marked.
        clock: The clock by which the mark can be compared with marks that lie far from it.
    """

    def __init__(self, api: StreamApi, stream: Any, clock: StreamClock | None = None) -> None:
        self.event = api.new_event(timing=True)
        self.event.record(stream)
        self.clock = clock
        self._anchor = None if clock is None else clock.anchor()

    def ms_until(self, later: StreamMark) -> float:
        """Waits for both events; returns the milliseconds between them, by the device's clock."""
        self.event.synchronize()
        later.event.synchronize()
        if self._anchor is None or later._anchor is None or self._anchor is later._anchor:
            elapsed: float = self.event.elapsed_time(later.event)
            return elapsed
        return later.at_ms() - self.at_ms()

    def at_ms(self) -> float:
        """Waits for the event; returns milliseconds since the clock was made."""
        if self._anchor is None:
            raise ValueError("this mark was made without a clock")
        return self._anchor.at_ms(self.event)


class StreamClock:
    """What the marks of one device are measured from; safe from any thread.

    Args:
        api: The runtime of the device.
    """

    def __init__(self, api: StreamApi) -> None:
        self._api = api
        self._stream = api.new_stream()
        self._lock = threading.RLock()
        self._made_s = 0.0
        self._latest = self._new_anchor(None)

    def anchor(self) -> _Anchor:
        """Returns a point shortly before now."""
        if time.monotonic() - self._made_s > ANCHOR_S:
            with self._lock:
                latest = self._latest
                if not self._api.is_capturing() and latest.event.query():  # neither is allowed in a capture
                    latest.offset_ms()  # now, so that no chain of events piles up
                self._latest = self._new_anchor(latest)
        return self._latest

    def _new_anchor(self, before: _Anchor | None) -> _Anchor:
        self._made_s = time.monotonic()
        event = self._api.new_event(timing=True)
        event.record(self._stream)
        return _Anchor(event, before, self._lock)


class _Anchor:
    """A point on the clock's stream, and how long after the clock's first one it was passed."""

    def __init__(self, event: Any, before: _Anchor | None, lock: threading.RLock) -> None:
        self.event = event
        self._before = before
        self._offset_ms: float | None = 0.0 if before is None else None
        self._lock = lock

    def at_ms(self, event: Any) -> float:
        event.synchronize()
        self.event.synchronize()
        return self.offset_ms() + float(self.event.elapsed_time(event))

    def offset_ms(self) -> float:
        with self._lock:
            chain = [self]
            while (last := chain[-1])._offset_ms is None and last._before is not None:
                chain.append(last._before)
            self.event.synchronize()  # and with it all before, on the same stream
            total = last._offset_ms or 0.0
            for before, anchor in zip(chain[:0:-1], chain[-2::-1], strict=True):
                total += float(before.event.elapsed_time(anchor.event))
                anchor._offset_ms, anchor._before = total, None
            return total
