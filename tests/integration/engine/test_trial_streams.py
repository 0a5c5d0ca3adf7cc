"""Trials on streams: events tell the time, partitions are there before the loop, CUDA graphs are one more way."""

from __future__ import annotations

import copy
import itertools
import sys
from collections.abc import Callable
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


CAPTURED = f"{BESIDE}, as CUDA graphs"


@pytest.fixture
def try_graphs(towers: TwoTowers, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[list[str], str]]:
    """Trains by ``graphs="auto"``, with the share of launching and the times of steps that a test says."""

    def try_them(step_ms: dict[str, Any], *, share: float = 0.31, **bounds: Any) -> tuple[list[str], str]:
        monkeypatch.setattr(sys.modules["mosaic.engine.session"], "warm_up", lambda *_: share)
        ran: list[str] = []
        backend: Any = FakeBackend()
        with backend.api.watching(), trying(towers, backend=backend, graphs="auto", **bounds) as (handle, clock):

            def took(name: str) -> float:
                executor: Any = handle._executor
                ran.append(f"{name}, as CUDA graphs" if executor is not None and executor.graphs is not None else name)
                found = step_ms.get(ran[-1], 20.0 if ran.count(ran[-1]) > 1 else 100.0)
                return next(found) if isinstance(found, itertools.cycle) else found

            steps(towers, handle, clock, took, 80, until_decided=False)
            assert not handle.is_trying
            return ran, handle.describe()

    return try_them


def test_graphs_win_where_every_plan_without_them_is_slower_than_the_plain_loop(try_graphs: Any):
    ran, _ = try_graphs({PLAIN: 10, BESIDE: 16, IN_TURN: 19, CAPTURED: 5})
    assert ran[-1] == CAPTURED
    assert not any(name == f"{IN_TURN}, as CUDA graphs" for name in ran)


TARGETED = f"{BESIDE}, with SM targets"


@pytest.mark.parametrize("pays", [True, False])
def test_an_sm_target_is_tried_on_the_best_plan_where_it_was_measured_to_pay(towers: TwoTowers, pays: bool):
    backend: Any = FakeBackend()
    backend.sm_target_pays = lambda: pays
    with backend.api.watching(), trying(towers, backend=backend) as (handle, _):
        targeted = [candidate.name for candidate in handle._trial._candidates if candidate.sm_target]
        assert targeted == [TARGETED] * pays
