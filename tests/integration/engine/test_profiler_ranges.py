"""Profilers see placed modules: a range for each forward and each backward, on the host and on streams."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import engine_cases
import pytest
import stream_cases
from engine_cases import SIDE_BY_SIDE, TwoTowers, pair_batch, tower
from torch._C._profiler import _ExperimentalConfig
from torch.autograd import profiler
from torch.profiler import ProfilerActivity, profile

from mosaic.engine.calls import ranges

EXPECTED = {f"mosaic::{module}.{phase}": 2 for module in ("left", "right") for phase in ("forward", "backward")}
IN_TURN = ({"left": 2}, {"right": 2})


def two_steps(model: TwoTowers) -> None:
    for step in range(2):
        model(*pair_batch(step)).square().mean().backward()


@pytest.mark.filterwarnings("ignore:.*Profiler clears events")  # torch 2.11's own
@pytest.mark.parametrize("stages", [SIDE_BY_SIDE, IN_TURN], ids=["side by side", "in turn"])
@pytest.mark.parametrize("cases", [engine_cases, stream_cases], ids=["host", "streams"])
def test_torch_s_profiler_has_a_range_for_each_placed_forward_and_backward(cases: Any, stages: Any):
    model, every_thread = TwoTowers(tower(), tower()), _ExperimentalConfig(profile_all_threads=True)
    with cases.colocated(model, pair_batch(), stages):
        two_steps(model)
        with profile(activities=[ProfilerActivity.CPU], experimental_config=every_thread) as recorded:
            two_steps(model)
    named = Counter(event.name for event in recorded.events() if event.name.startswith("mosaic::"))
    assert {name: count for name, count in named.items() if not name.endswith(".glue")} == EXPECTED


@pytest.mark.parametrize("cases", [engine_cases, stream_cases], ids=["host", "streams"])
def test_nvtx_has_the_ranges_without_a_profiler_of_torch_s(cases: Any, monkeypatch: pytest.MonkeyPatch):
    begun: list[str] = []
    ended: list[int] = []

    def begin(name: str) -> int:
        begun.append(name)
        return len(begun)

    monkeypatch.setattr(ranges, "_HAS_TOOL", True)
    monkeypatch.setattr(ranges, "_NVTX", SimpleNamespace(rangeStartA=begin, rangeEnd=ended.append))
    monkeypatch.delattr(profiler, "record_function")
    model = TwoTowers(tower(), tower())
    with cases.colocated(model, pair_batch(), SIDE_BY_SIDE):
        two_steps(model)
        begun.clear()
        ended.clear()
        two_steps(model)
    named = Counter(name for name in begun if not name.endswith(".glue"))
    assert named == EXPECTED
    assert sorted(ended) == list(range(1, len(begun) + 1))
