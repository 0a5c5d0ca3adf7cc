"""Lanes on streams: what is ordered after what, and what is kept for how long. A fake runtime finds races."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fake_streams import FakeStreams, Launch, RaceError

from mosaic.backends.streams.lanes import StreamLane, StreamLanes, run_aside
from mosaic.errors import MosaicError


def open_on(runtime: FakeStreams, *partitions: tuple[int, ...], given_back: list[str] | None = None) -> StreamLanes:
    streams = {slots: (runtime.new_stream(), 8 * len(slots)) for slots in partitions}
    return StreamLanes(runtime, streams, lambda: (given_back if given_back is not None else []).append("back"))


def launched(runtime: FakeStreams, lane: StreamLane, work: Any = lambda: torch.ones(2), **options: Any) -> Launch:
    """Launches on a lane and returns the first operator of it."""
    before = len(runtime.launches)
    lane.launch(work, **options)
    return runtime.launches[before]


@pytest.mark.parametrize("behind_caller", [True, False])
def test_work_starts_after_what_the_caller_launched_before_unless_it_need_not(
    runtime: FakeStreams, behind_caller: bool
):
    with open_on(runtime, (0,)) as lanes:
        torch.ones(2)
        before = runtime.launches[-1]
        own = launched(runtime, lanes.lane((0,)), behind_caller=behind_caller)
        assert own.is_after(before) == behind_caller
        assert own.is_concurrent_with(before) != behind_caller


def test_a_result_can_be_used_once_it_was_waited_for_and_not_before(runtime: FakeStreams):
    with open_on(runtime, (0,)) as lanes:
        kept: list[torch.Tensor] = []
        ticket = lanes.lane((0,)).submit(lambda: kept.append(torch.ones(2)))
        with pytest.raises(RaceError):
            kept[0] + 1
        ticket.wait()
        kept[0] + 1


def test_tensors_of_a_result_may_be_let_go_while_the_caller_still_uses_them(runtime: FakeStreams):
    with open_on(runtime, (0,)) as lanes:
        lane = lanes.lane((0,))
        result = lane.submit(lambda: {"deep": [torch.ones(2)]}).wait()
        result["deep"][0] * 2
        del result
        launched(runtime, lane, behind_caller=False)  # checks what was let go


def test_joining_orders_the_callers_stream_after_all_lanes_without_blocking(runtime: FakeStreams):
    with open_on(runtime, (0,), (1,)) as lanes:
        work = [launched(runtime, lane) for lane in lanes]
        lanes.join()
        torch.ones(2)
        assert all(runtime.launches[-1].is_after(one) for one in work)


def test_closing_gives_back_once_after_the_work_has_ended(runtime: FakeStreams):
    given_back: list[str] = []
    lanes = open_on(runtime, (0,), given_back=given_back)
    lane = lanes.lane((0,))
    launched(runtime, lane)
    lanes.close()
    lanes.close()
    assert given_back == ["back"]
    assert runtime.host.get(lane.stream.handle) == 1
    with pytest.raises(MosaicError, match="closed"):
        lane.launch(lambda: None)


def test_what_cublas_keeps_for_lanes_is_given_back_when_they_close(runtime: FakeStreams):
    with open_on(runtime, (0,), (1,)) as lanes:
        for lane in lanes:
            lane.launch(lambda: torch.ones(2, 2) @ torch.ones(2, 2))
        assert runtime.reserved_bytes() > 0
    run_aside(runtime, lambda: torch.ones(2, 2) @ torch.ones(2, 2))
    assert runtime.reserved_bytes() == 0


def test_what_was_made_aside_may_be_let_go_while_the_caller_still_uses_it(
    runtime: FakeStreams, monkeypatch: pytest.MonkeyPatch
):
    side = runtime.new_stream()
    monkeypatch.setattr(runtime, "new_stream", lambda: side)
    made = run_aside(runtime, lambda: torch.ones(2) * 2)
    doubled = made * 2
    del made
    with runtime.use_stream(side):
        torch.ones(2)  # may be given that memory, and nothing orders it after the product
    assert doubled.tolist() == [4.0, 4.0]
