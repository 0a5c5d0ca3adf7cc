"""Profiling that must end in time: what is measured all the same, and what is left out and said."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from engine_cases import FAST, TwoTowers, pair_batch, tower
from torch import nn

from mosaic.backends.host.backend import HostBackend
from mosaic.cost import CostModel
from mosaic.engine import find_modules
from mosaic.profile import Profile
from mosaic.profiler import ProfileCache, ProfileSettings, Ring, Subject, profile_modules
from mosaic.profiler import sweep as sweeping
from mosaic.profiler.measuring import points as pointing
from mosaic.profiler.measuring.measure import StepTimes
from mosaic.profiler.settings import Deadline
from mosaic.solver import solve


class Measured:
    """Stands for measuring: notes what is measured, and a point takes one second of a clock of its own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seconds = 0
        self.points: list[tuple[str, int]] = []
        self.failing: tuple[str, int] | None = None
        monkeypatch.setattr(pointing, "measure", self._measure)
        monkeypatch.setattr(sweeping, "Deadline", lambda seconds: Deadline(seconds, lambda: self.seconds))

    def _measure(self, subject: Subject, lane: Any, settings: ProfileSettings) -> StepTimes:
        quota = len(lane.slots)
        self.seconds += 1
        self.points.append((subject.name, quota))
        if self.points[-1] == self.failing:
            raise ValueError("too narrow")
        return StepTimes((1 / quota,) * 5, (2 / quota,) * 5)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Measured:
    return Measured(monkeypatch)


def profiled(max_seconds: float | None, *, model: nn.Module | None = None, **options: Any) -> Profile:
    model = model or TwoTowers(right=tower(8, 16, nn.Tanh()))
    finding = find_modules(model, pair_batch())
    settings = dataclasses.replace(FAST, max_seconds=max_seconds)
    return profile_modules(
        model, finding.subjects, finding.graph, HostBackend(num_slots=4), settings=settings, **options
    )


def test_modules_take_turns_and_each_begins_with_its_ends(measured: Measured):
    profile = profiled(None)
    assert measured.points == [(name, quota) for quota in (4, 1, 3, 2) for name in ("left", "right")]
    assert profile.left_out == ()
    assert len(profile.pairs) == 4


def test_where_time_is_up_from_the_start_two_quotas_of_each_module_are_measured_and_a_plan_can_be_made(
    measured: Measured, caplog: pytest.LogCaptureFixture
):
    profile = profiled(0.0)
    assert measured.points == [("left", 4), ("right", 4), ("left", 1), ("right", 1)]
    assert profile.pairs == ()
    assert profile.left_out == ("left at 3, 2 slots", "right at 3, 2 slots", "left beside right")
    assert "profiling was over after 0.0 s; not measured: left at 3, 2 slots; right" in caplog.text
    cost = CostModel.from_profile(profile)
    assert cost.quotas("left") == (1, 2, 3, 4)
    assert solve(profile.graph, cost, profile.device).stages
    assert {entry.module for entry in profile.memory} == {"left", "right"}


def test_a_deadline_on_the_way_leaves_out_as_much_of_each_module(measured: Measured):
    assert profiled(6.0).left_out == ("left at 2 slots", "right at 2 slots", "left beside right")
    assert measured.points[-2:] == [("left", 3), ("right", 3)]


def test_a_quota_at_which_a_module_fails_does_not_count_as_one_of_its_two(measured: Measured):
    measured.failing = ("right", 1)
    profile = profiled(0.0)
    assert CostModel.from_profile(profile).quotas("right") == (3, 4)
    assert profile.left_out[:2] == ("left at 3, 2 slots", "right at 2 slots")


def test_higher_degrees_end_at_the_deadline_too(measured: Measured):
    ring = Ring(latency_us=10.0, gb_per_s=1.0)
    profile = profiled(0.0, quotas=[2, 4], degrees=[2], network=ring)
    assert {(sample.degree, sample.quota) for sample in profile.samples} == {(1, 2), (1, 4)}
    assert profile.left_out[:2] == ("left at 4, 2 slots of 2", "right at 4, 2 slots of 2")


def test_what_is_known_from_before_takes_no_time_and_is_not_left_out(measured: Measured, tmp_path: Any):
    cache = ProfileCache(tmp_path)
    profiled(None, cache=cache, quotas=[2])
    part = profiled(0.0, cache=cache)
    assert {sample.quota for sample in part.samples} == {1, 2, 4}
    assert part.left_out == ("left at 3 slots", "right at 3 slots")  # the pair is known, too
    whole = profiled(None, cache=cache)
    measured.points.clear()
    again = profiled(0.0, cache=cache)
    assert measured.points == []
    assert again.left_out == ()
    assert [sample.times_ms for sample in again.samples] == [sample.times_ms for sample in whole.samples]
    assert again.pairs == whole.pairs


def test_a_deadline_before_the_start_is_refused():
    with pytest.raises(ValueError, match=r"max_seconds=-1.*None for no deadline"):
        ProfileSettings(max_seconds=-1)
