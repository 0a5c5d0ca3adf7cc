"""Times on streams are exact however long ago the lanes were opened, and nothing is asked of an event too early."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from mosaic.backends.streams.clock import StreamClock
from mosaic.engine.trial import LoopClock


class Event:
    """An event that tells times as CUDA does: as a 32-bit float, and not before it was passed."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self.at_ms = 0.0
        self.is_passed = False

    def record(self, stream: Any) -> None:
        self.at_ms = self._runtime.now_ms

    def query(self) -> bool:
        return self.is_passed

    def synchronize(self) -> None:
        self.is_passed = True

    def elapsed_time(self, later: Event) -> float:
        """cuda.h: where one or both "has not yet been completed [...] CUDA_ERROR_NOT_READY is returned"."""
        if not (self.is_passed and later.is_passed):
            raise RuntimeError("CUDA error: device not ready")
        return float(np.float32(later.at_ms - self.at_ms))


class Runtime:
    """A device whose time passes when the test says so."""

    new_stream = give_back = current_stream = Mock(return_value=None)

    def __init__(self) -> None:
        self.now_ms = 0.0
        self.events: list[Event] = []

    def new_event(self, *, timing: bool) -> Event:
        assert timing
        self.events.append(Event(self))
        return self.events[-1]


@pytest.fixture
def runtime() -> Any:
    return Runtime()


def test_marks_hours_apart_are_told_to_a_microsecond(runtime: Any):
    clock = StreamClock(runtime)
    origin = clock.mark(None)
    for _ in range(3600 * 5 + 1):
        runtime.now_ms += 1000.5
        clock.start_step()
    start = clock.mark(None)
    runtime.now_ms += 0.0125
    end = clock.mark(None)
    assert start.ms_until(end) == pytest.approx(0.0125, abs=1e-5)
    assert origin.ms_until(end) == pytest.approx(runtime.now_ms, abs=1e-5)
    assert end.at_ms() - start.at_ms() == pytest.approx(0.0125, abs=1e-5)


def test_marks_can_be_read_late_and_in_any_order(runtime: Any):
    clock = StreamClock(runtime)
    marks = []
    for _ in range(5):
        marks.append(clock.mark(None))
        runtime.now_ms += 200.0
        clock.start_step()
    assert not any(event.is_passed for event in runtime.events)
    assert [mark.at_ms() for mark in reversed(marks)] == [800.0, 600.0, 400.0, 200.0, 0.0]
    assert marks[1].ms_until(marks[4]) == 600.0


def test_the_clock_of_steps_waits_for_its_events_before_it_asks_them(runtime: Any):
    clock = LoopClock(runtime)
    before = clock.mark()
    runtime.now_ms += 7.0
    after = clock.mark()
    assert not clock.is_past(after)
    assert clock.ms_between(before, after) == 7.0
