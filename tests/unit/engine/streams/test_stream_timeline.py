"""When modules ran on streams: on which streams the marks lie, and where a step begins for the clock."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from engine_cases import tower
from fake_streams import FakeStreams
from fake_streams.runtime import FakeStream

from mosaic.backends.streams.lanes import StreamLanes
from mosaic.engine.calls.placed_module import PlacedModule
from mosaic.engine.streams.timeline import StreamTimeline


@pytest.fixture
def runtime() -> Iterator[FakeStreams]:
    made = FakeStreams()
    with made.watching():
        yield made


@pytest.fixture
def lanes(runtime: FakeStreams) -> Iterator[StreamLanes]:
    with StreamLanes(runtime, {(0,): (runtime.external_stream(10), 8)}, lambda: None) as made:
        yield made


def test_a_backward_is_timed_on_the_stream_that_autograd_runs_it_on(
    runtime: FakeStreams, lanes: StreamLanes, monkeypatch: pytest.MonkeyPatch
):
    marked: list[FakeStream] = []
    mark = lanes.clock.mark
    monkeypatch.setattr(lanes.clock, "mark", lambda stream: (marked.append(stream), mark(stream))[1])
    lane, timeline = lanes.lane((0,)), StreamTimeline(runtime, lanes.clock)
    with runtime.use_stream(lane.stream):  # which autograd makes current for a node of this stream
        module, x = tower(), torch.ones(2, 8)
        result = module(x)
        timeline.watch_backward(PlacedModule("tower", module, lane), result, [x])
        result.sum().backward()
    assert marked == [lane.stream, lane.stream]
    assert [span.phase for span in timeline.spans(0)] == ["backward"]


def test_a_step_of_the_clock_begins_when_work_comes_again(
    runtime: FakeStreams, lanes: StreamLanes, monkeypatch: pytest.MonkeyPatch
):
    begun: list[int] = []
    timeline = StreamTimeline(runtime, lanes.clock)
    one, other = (PlacedModule(name, None, lanes.lane((0,))) for name in ("one", "other"))
    monkeypatch.setattr(lanes.clock, "start_step", lambda: begun.append(len(noted)))
    noted: list[str] = []
    for site, phase in [(one, "forward"), (other, "forward"), (other, "backward"), (one, "backward")] * 3:
        timeline.note_work(site, phase, 0, timeline.mark())
        noted.append(phase)
    assert begun == [4, 8]


def test_timelines_that_are_cleared_and_never_read_keep_nothing(runtime: FakeStreams, lanes: StreamLanes):
    timeline = StreamTimeline(runtime, lanes.clock)
    site = PlacedModule("module", None, lanes.lane((0,)))
    for step in range(100):
        timeline.note_work(site, "forward", step, timeline.mark())
        timeline.note_work(site, "forward", step, timeline.mark())
        timeline.clear()
    assert len(lanes.clock._unread) <= 2
