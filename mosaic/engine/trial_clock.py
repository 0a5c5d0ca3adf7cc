"""Clocks for the steps of a loop: the processor's, and events on a stream where launching runs ahead of the work."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mosaic.backends.streams.api import StreamApi


class HostClock:
    """The processor's clock: what is launched is done."""

    def mark(self) -> int:
        """Reads it, in nanoseconds."""
        return time.perf_counter_ns()

    def is_past(self, mark: int) -> bool:
        """Always true."""
        return True

    def ms_between(self, earlier: int, later: int) -> float:
        """Returns the milliseconds between two readings."""
        return (later - earlier) / 1e6

    def settle(self) -> None:
        """Nothing to wait for: the lanes are at rest where marks are made."""


class EventClock:
    """Timed events on the caller's stream.

    One event a step: the time between two is what the device took, or what launching took where that is slower, and
    reading it later makes no step wait.

    Args:
        api: The runtime.
    """

    def __init__(self, api: StreamApi) -> None:
        self._api = api

    def mark(self) -> Any:
        """Records an event behind all that the caller's stream was given so far."""
        event = self._api.new_event(timing=True)
        event.record(self._api.current_stream())
        return event

    def is_past(self, mark: Any) -> bool:
        """Whether the device has come to it."""
        passed: bool = mark.query()
        return passed

    def ms_between(self, earlier: Any, later: Any) -> float:
        """Waits for both, since CUDA has no answer before, and returns the milliseconds from one event to another."""
        earlier.synchronize()
        later.synchronize()
        took: float = earlier.elapsed_time(later)
        return took

    def settle(self) -> None:
        """Blocks the thread until the device is idle."""
        self._api.synchronize()
