"""Trials on the host and on streams compute what the plain loop does; graphs and SM targets are further candidates."""

from __future__ import annotations

import copy
import sys
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from engine_cases import Record, TwoTowers, assert_same, pair_batch
from stream_cases import FakeBackend
from trial_cases import BESIDE, IN_TURN, PLAIN, profile_for, running, steps, times, trying

import mosaic


@pytest.mark.parametrize("on", ["host", "streams"])
def test_a_loop_whose_plans_are_tried_computes_what_the_plain_loop_computes(model: TwoTowers, on: str):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    twin, backend, records = copy.deepcopy(model), FakeBackend(), (Record(), Record())
    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.05) for each in (twin, model)]
    for each, optimizer, record in zip((twin, model), optimizers, records, strict=True):
        optimizer.register_step_post_hook(lambda used, *_, each=each, record=record: record.note_model(each, used))
    for step in range(80):
        twin(*pair_batch(step)).square().mean().backward()
        optimizers[0].step()
        optimizers[0].zero_grad()
    options: Any = {"backend": backend, "graphs": True} if on == "streams" else {}
    with backend.api.watching() if options else nullcontext(), trying(model, **options) as (handle, clock):
        took = times(plain=10, beside=5)
        ran = steps(model, handle, clock, took, 80, optimizer=optimizers[1], until_decided=False)
        assert {PLAIN, BESIDE, IN_TURN} <= set(ran)
        assert running(handle) == BESIDE
        assert ("as CUDA graphs: measured 5.00 ms" in handle.describe()) is (on == "streams")
    torch.set_num_threads(threads)
    assert_same(*records)


def test_a_loop_without_memory_for_lanes_runs_as_it_was_unless_it_was_given_a_plan(
    model: TwoTowers, monkeypatch: pytest.MonkeyPatch
):
    def exhaust(*_: Any) -> float:
        raise torch.OutOfMemoryError("no more")

    monkeypatch.setattr(sys.modules["mosaic.engine.session"], "warm_up", exhaust)
    backend: Any = FakeBackend()
    with backend.api.watching():
        profile = profile_for(model, pair_batch(), backend)
        handle = mosaic.colocate(model, sample=pair_batch(), options=mosaic.Options(profile=profile), backend=backend)
        assert "there was no memory to run modules on lanes, so the model runs as it was" in handle.describe()
        handle.remove()
        with pytest.raises(torch.OutOfMemoryError, match="no more"):
            mosaic.colocate(model, sample=pair_batch(), plan=handle.plan, backend=backend)


@pytest.mark.parametrize("pays", [True, False])
def test_graphs_are_tried_and_sm_targets_where_they_were_measured_to_pay(model: TwoTowers, pays: bool):
    backend: Any = FakeBackend()
    backend.sm_target_pays = lambda: pays
    with backend.api.watching(), trying(model, backend=backend, graphs="auto") as (handle, _):
        variants = [candidate.name for candidate in handle._trial._candidates if candidate.is_variant]
        captured, targeted = f"{BESIDE}, as CUDA graphs", f"{BESIDE}, with SM targets"
        assert variants == [captured] + [targeted] * pays
