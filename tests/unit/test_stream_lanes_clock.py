"""Times on streams are exact however long ago the lanes were opened."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mosaic.backends import stream_clock
from mosaic.backends.stream_clock import StreamClock, StreamMark


class Event:
    """An event that tells times as CUDA does: as a 32-bit float."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self.at_ms = 0.0
        self.is_passed = True

    def record(self, stream: Any) -> None:
        self.at_ms = self._runtime.now_ms

    def query(self) -> bool:
        return self.is_passed

    def synchronize(self) -> None:
        self.is_passed = True

    def elapsed_time(self, later: Event) -> float:
        assert self.is_passed
        assert later.is_passed
        return float(np.float32(later.at_ms - self.at_ms))


class Runtime:
    """A device whose time passes when the test says so, and the host's with it."""

    def __init__(self) -> None:
        self.now_ms = 0.0

    def new_stream(self) -> None:
        return None

    def is_capturing(self) -> bool:
        return False

    def new_event(self, *, timing: bool) -> Event:
        return Event(self)

    def monotonic(self) -> float:
        return self.now_ms / 1e3


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Any:
    made = Runtime()
    monkeypatch.setattr(stream_clock, "time", made)
    return made


def test_marks_hours_apart_are_told_to_a_microsecond(runtime: Any):
    clock = StreamClock(runtime)
    origin = StreamMark(runtime, None, clock)
    for _ in range(3600 * 5):
        runtime.now_ms += 999.9999
        StreamMark(runtime, None, clock)
    start = StreamMark(runtime, None, clock)
    runtime.now_ms += 0.0125
    end = StreamMark(runtime, None, clock)
    assert start.ms_until(end) == pytest.approx(0.0125, abs=1e-5)
    assert origin.ms_until(end) == pytest.approx(runtime.now_ms, rel=1e-7)
    assert end.at_ms() - start.at_ms() == pytest.approx(0.0125, abs=1e-5)


def test_a_long_wait_between_two_marks_does_not_blur_what_follows(runtime: Any):
    clock = StreamClock(runtime)
    StreamMark(runtime, None, clock)
    runtime.now_ms += 36e6  # ten hours
    start = StreamMark(runtime, None, clock)
    runtime.now_ms += 0.003
    end = StreamMark(runtime, None, clock)
    assert end.at_ms() - start.at_ms() == pytest.approx(0.003, abs=1e-6)


def test_events_do_not_pile_up(runtime: Any):
    clock = StreamClock(runtime)
    for _ in range(1000):
        runtime.now_ms += 200.0
        StreamMark(runtime, None, clock)
    before = clock._latest._before
    assert before is None or before._before is None


def test_a_mark_that_the_device_has_not_come_to_is_measured_later(runtime: Any):
    clock = StreamClock(runtime)
    marks = []
    for _ in range(5):
        marks.append(StreamMark(runtime, None, clock))
        marks[-1].event.is_passed = False
        runtime.now_ms += 200.0
    assert not any(mark.event.is_passed for mark in marks)
    assert [mark.at_ms() for mark in reversed(marks)] == [800.0, 600.0, 400.0, 200.0, 0.0]


def test_marks_without_a_clock_are_compared_directly(runtime: Any):
    first = StreamMark(runtime, None)
    runtime.now_ms += 5.0
    second = StreamMark(runtime, None, StreamClock(runtime))
    assert first.ms_until(second) == 5.0
    with pytest.raises(ValueError, match="without a clock"):
        first.at_ms()
