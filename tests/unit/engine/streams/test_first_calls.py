"""First calls on a device: libraries get ready on a plain stream, and launching is measured once they are."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from engine_cases import TwoTowers, pair_batch
from fake_streams.events import FakeEvent
from stream_cases import FakeBackend

from mosaic.engine import find_modules
from mosaic.engine.streams.first_calls import warm_up


def test_the_share_of_launching_is_that_of_the_second_calls_of_all_modules(monkeypatch: pytest.MonkeyPatch):
    model, backend = TwoTowers(), FakeBackend()
    subjects = find_modules(model, pair_batch()).subjects
    device_ms, seconds = iter([1000, 1000, 8, 12]), iter([0, 0.9, 1, 1.9, 2, 2.003, 3, 3.001])
    monkeypatch.setattr(FakeEvent, "elapsed_time", lambda *_: next(device_ms))
    monkeypatch.setattr("mosaic.engine.streams.first_calls.time", SimpleNamespace(perf_counter=lambda: next(seconds)))
    with backend.api.watching(), backend.open_lanes([(0,), (1,)]) as lanes:
        assert warm_up(model, subjects, lanes.api) == pytest.approx(4 / 20)
        for stream in (backend.api.main, *(lane.stream for lane in lanes)):
            assert not any("mm" in launch.name for launch in backend.api.on(stream))
    assert all(parameter.grad is None for parameter in model.parameters())
