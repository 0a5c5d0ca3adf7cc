"""Trials on streams: events tell the time, partitions are there before the loop, CUDA graphs are another candidate."""

from __future__ import annotations

import copy
import sys
from typing import Any

import pytest
import torch
from engine_cases import Record, Trap, TwoTowers, assert_same, pair_batch
from stream_cases import FakeBackend
from trial_cases import BESIDE, IN_TURN, PLAIN, profile_for, running, steps, times, trying

import mosaic


@pytest.fixture
def towers() -> TwoTowers:
    torch.manual_seed(0)
    return TwoTowers(Trap(), Trap())


def test_a_trial_on_streams_has_no_race_and_computes_what_the_plain_loop_computes(towers: TwoTowers):
    twin, backend = copy.deepcopy(towers), FakeBackend()
    plain, ours = Record(), Record()
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.01)
    for step in range(70):
        twin(*pair_batch(step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    plain.note_model(twin)
    with backend.api.watching(), trying(towers, backend=backend, graphs=True) as (handle, clock):
        ran = steps(towers, handle, clock, times(plain=10, beside=6), 70, until_decided=False)
        assert {PLAIN, BESIDE, IN_TURN} <= set(ran)
        assert running(handle) == BESIDE
        ours.note_model(towers)
        assert f"tried {BESIDE}, as CUDA graphs: measured 6.00 ms" in handle.describe()
    assert_same(plain, ours)


def test_a_loop_without_memory_for_lanes_runs_as_it_was_unless_it_was_given_a_plan(
    towers: TwoTowers, monkeypatch: pytest.MonkeyPatch
):
    def exhaust(*_: Any) -> float:
        raise torch.OutOfMemoryError("no more")

    monkeypatch.setattr(sys.modules["mosaic.engine.session"], "warm_up", exhaust)
    backend: Any = FakeBackend()
    with backend.api.watching():
        profile = profile_for(towers, pair_batch(), backend)
        handle = mosaic.colocate(towers, sample=pair_batch(), options=mosaic.Options(profile=profile), backend=backend)
        assert "there was no memory to run modules on lanes, so the model runs as it was" in handle.describe()
        handle.remove()
        with pytest.raises(torch.OutOfMemoryError, match="no more"):
            mosaic.colocate(towers, sample=pair_batch(), plan=handle.plan, backend=backend)


@pytest.mark.parametrize(("share", "pays"), [(0.31, True), (0.31, False), (0.2, True), (0.2, False)])
def test_graphs_are_tried_where_launches_take_long_and_sm_targets_where_they_were_measured_to_pay(
    towers: TwoTowers, share: float, pays: bool, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(sys.modules["mosaic.engine.session"], "warm_up", lambda *_: share)
    backend: Any = FakeBackend()
    backend.sm_target_pays = lambda: pays
    with backend.api.watching(), trying(towers, backend=backend, graphs="auto") as (handle, clock):
        variants = [candidate.name for candidate in handle._trial._candidates if candidate.is_variant]
        captured, targeted = f"{BESIDE}, as CUDA graphs", f"{BESIDE}, with SM targets"
        assert variants == [captured] * (share > 0.3) + [targeted] * pays
        steps(towers, handle, clock, lambda _: 10.0, 80, until_decided=False)
        assert not handle.is_trying
