"""Profiling whole graphs: which points are measured, what is composed of them, what fails, and when time is up."""

from __future__ import annotations

import dataclasses
from queue import SimpleQueue
from typing import Any

import pytest
import torch
from engine_cases import FAST, TwoTowers, pair_batch, tower
from torch import nn

from mosaic.backends.host.backend import HostBackend
from mosaic.cost import CostModel
from mosaic.engine import find_modules
from mosaic.errors import UnstableMeasurementError, UnsupportedModelError
from mosaic.hardware import Link
from mosaic.profile import Phase, Profile
from mosaic.profiler import ProfileSettings, Subject, profile_modules, sweep
from mosaic.solver import solve

ALONE = dataclasses.replace(FAST, pairs=False)
RING = Link(latency_us=10.0, gb_per_s=1.0)


def profiled(model: Any = None, *, slots: int = 2, settings: ProfileSettings = ALONE, **options: Any) -> Profile:
    model = model or TwoTowers(right=tower(8, 16, nn.Tanh()))
    finding = find_modules(model, pair_batch())
    if isinstance(model.right, Fails):
        model.right.armed = True  # fails where it is profiled, not where it is found
    backend = options.pop("backend", HostBackend(num_slots=slots))
    return profile_modules(model, finding.subjects, finding.graph, backend, settings=settings, **options)


def test_every_module_is_measured_at_every_quota_and_phase_and_pair():
    reports: list[tuple[str, int, int]] = []
    profile = profiled(settings=FAST, progress=lambda *what: reports.append(what))
    points = {(sample.module, sample.phase, sample.quota) for sample in profile.samples}
    assert points == {(name, phase, quota) for name in ("left", "right") for phase in Phase for quota in (1, 2)}
    assert {(pair.module, pair.beside) for pair in profile.pairs} == {("left", "right"), ("right", "left")}
    assert {memory.module for memory in profile.memory} == {"left", "right"}
    assert [done for _, done, _ in reports] == list(range(5))
    assert {total for *_, total in reports} == {5}


class Fails(nn.Module):
    """Fails on lanes of some widths: a lane's thread has as many threads for operators as it has slots."""

    def __init__(self, error: Exception, *widths: int) -> None:
        super().__init__()
        self.inner = tower()
        self.error, self.widths, self.armed = error, widths, False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.armed and torch.get_num_threads() in self.widths:
            raise self.error
        return self.inner(x)


def test_a_module_that_runs_out_of_memory_at_one_quota_is_infeasible_there_and_the_rest_goes_on():
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate\n20 GiB")
    profile = profiled(TwoTowers(right=Fails(error, 1)), slots=3)
    failed = [sample for sample in profile.samples if sample.infeasible is not None]
    assert {(s.module, s.phase, s.quota) for s in failed} == {("right", phase, 1) for phase in Phase}
    assert {s.infeasible for s in failed} == {"out of memory: CUDA out of memory. Tried to allocate"}
    assert len(profile.samples) == 2 * 2 * 3
    cost = CostModel.from_profile(profile)
    assert (cost.quotas("right"), cost.quotas("left")) == ((2, 3), (1, 2, 3))


@pytest.mark.parametrize(
    ("error", "kind", "said"),
    [
        (ValueError("odd length"), UnsupportedModelError, "ValueError: odd length; fix it"),
        (torch.OutOfMemoryError("no more"), UnstableMeasurementError, "out of memory: no more"),
    ],
)
def test_a_module_that_fails_everywhere_is_an_error_with_its_name_and_text(
    error: Exception, kind: type[Exception], said: str
):
    with pytest.raises(kind, match=f"'right' failed at every quota with {said}"):
        profiled(TwoTowers(right=Fails(error, 1, 2, 3)), slots=3)


def test_degrees_are_composed_of_a_share_of_the_batch_and_communication():
    with pytest.raises(ValueError, match=r"degrees=\(1, 2\) need a network"):
        profiled(degrees=[2])
    rows: SimpleQueue[int] = SimpleQueue()  # which is not restored, though a hook encloses it
    model = TwoTowers()
    model.left.register_forward_pre_hook(lambda _, args: rows.put(len(args[0])))
    profile = profiled(model, degrees=[1, 2, 8], network=RING)
    assert {rows.get() for _ in range(rows.qsize())} == {6, 3}
    assert {(s.degree, s.infeasible is None) for s in profile.samples} == {(1, True), (2, True), (8, False)}
    reduce_ms = RING.all_reduce_ms(sum(parameter.nbytes for parameter in model.left.parameters()), 2)
    point = ("left", Phase.BACKWARD, 2, 1)
    (backward,) = [s for s in profile.samples if (s.module, s.phase, s.degree, s.quota) == point]
    assert min(backward.times_ms) > reduce_ms > 0.02
    assert CostModel.from_profile(profile).degrees("left") == (1, 2)


class Measured:
    """Stands for measuring: notes what is measured, and a point takes one second of a clock of its own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seconds = 0
        self.points: list[tuple[str, int]] = []
        monkeypatch.setattr(sweep, "measure", self._measure)
        monkeypatch.setattr(sweep, "monotonic", lambda: self.seconds)

    def _measure(self, subject: Subject, lane: Any, settings: ProfileSettings) -> dict[Phase, tuple[float, ...]]:
        quota = len(lane.slots)
        self.seconds += 1
        self.points.append((subject.name, quota))
        return {Phase.FORWARD: (1 / quota,) * 5, Phase.BACKWARD: (2 / quota,) * 5}


def test_where_time_is_up_from_the_start_two_quotas_of_each_module_are_measured_and_a_plan_can_be_made(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    measured = Measured(monkeypatch)
    profile = profiled(slots=4, settings=dataclasses.replace(FAST, max_seconds=0.0))
    assert measured.points == [("left", 4), ("right", 4), ("left", 1), ("right", 1)]
    assert profile.pairs == ()
    assert profile.left_out == ("left at 3, 2 slots", "right at 3, 2 slots", "left beside right")
    assert "profiling reached its limit of 0.0 s; not measured: left at 3, 2 slots; right" in caplog.text
    cost = CostModel.from_profile(profile)
    assert cost.quotas("left") == (1, 2, 3, 4)
    assert solve(profile.graph, cost, profile.device).stages
    assert {entry.module for entry in profile.memory} == {"left", "right"}
