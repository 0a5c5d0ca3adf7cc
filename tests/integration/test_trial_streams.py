"""Trials on streams: events tell the time, partitions are there before the loop, CUDA graphs are one more way."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from engine_cases import Record, Trap, TwoTowers, assert_same, pair_batch
from stream_cases import FakeBackend
from trial_cases import BESIDE, IN_TURN, PLAIN, profile_for, running, steps, times, trying

import mosaic
from mosaic.engine import TrialSettings


@pytest.fixture
def towers() -> TwoTowers:
    torch.manual_seed(0)
    return TwoTowers(Trap(), Trap())


@pytest.mark.parametrize("graphs", [False, True])
def test_a_trial_on_streams_has_no_race_and_computes_what_the_plain_loop_computes(towers: TwoTowers, graphs: bool):
    twin, backend = copy.deepcopy(towers), FakeBackend()
    plain, ours = Record(), Record()
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.01)
    for step in range(70):
        twin(*pair_batch(step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    plain.note_model(twin)
    with backend.api.watching(), trying(towers, backend=backend, graphs=graphs) as (handle, clock):
        ran = steps(towers, handle, clock, times(plain=10, beside=6), 70, until_decided=False)
        assert {PLAIN, BESIDE, IN_TURN} <= set(ran)
        assert running(handle) == BESIDE
        ours.note_model(towers)
        if graphs:
            assert f"tried {BESIDE}, as CUDA graphs: measured 6.00 ms" in handle.describe()
    assert_same(plain, ours)


def test_lanes_of_all_plans_are_opened_before_the_loop(towers: TwoTowers):
    backend = FakeBackend()
    opened: list[Any] = []
    plain_open = backend.open_lanes
    backend.open_lanes = lambda partitions: opened.append(1) or plain_open(partitions)  # type: ignore[method-assign,func-returns-value,assignment]
    with backend.api.watching(), trying(towers, backend=backend) as (handle, clock):
        assert len(opened) == 2
        steps(towers, handle, clock, times(plain=10, beside=6))
        assert len(opened) == 2


def test_without_a_clock_of_the_test_s_events_tell_the_time(towers: TwoTowers):
    backend = FakeBackend()
    with backend.api.watching():
        handle = mosaic.colocate(
            towers,
            sample=pair_batch(),
            profile=profile_for(towers, pair_batch(), backend),
            backend=backend,  # type: ignore[arg-type]
            trial=TrialSettings(max_steps=30, max_lost_steps=1000),
        )
        optimizer = torch.optim.SGD(towers.parameters(), lr=0.01)
        for step in range(40):
            towers(*pair_batch(step)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert not handle.is_trying
        assert handle.metrics()["trial_ms/the plain loop"] > 0
        handle.remove()


def test_another_process_on_the_device_begins_a_new_trial(towers: TwoTowers, monkeypatch: pytest.MonkeyPatch):
    backend: Any = FakeBackend()
    processes: list[frozenset[int]] = [frozenset()]
    backend.other_processes = lambda: processes[0]
    monkeypatch.setattr("mosaic.engine.trial_run._TENANT_STEPS", 10)
    with backend.api.watching(), trying(towers, backend=backend, retrial_steps=1) as (handle, clock):
        steps(towers, handle, clock, times(plain=10, beside=6))
        steps(towers, handle, clock, times(plain=10, beside=6), 25, until_decided=False)
        assert handle.metrics()["trials"] == 1
        processes[0] = frozenset({4711})
        steps(towers, handle, clock, times(plain=10, beside=12), 60, until_decided=False)
        assert handle.metrics()["trials"] == 2
        assert "another process uses the device now (id 4711)" in handle.describe()
        assert running(handle) == PLAIN
