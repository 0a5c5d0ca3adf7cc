"""Measuring modules, and knowing when a measurement means nothing."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_cases import FAST, TwoTowers, pair_batch, tower
from torch import nn

from mosaic.backends.host.backend import HostBackend
from mosaic.engine import find_modules
from mosaic.errors import UnstableMeasurementError
from mosaic.profile import Phase, Profile
from mosaic.profiler import ForeignLoad, ProfileSettings, Subject, preserved, profile_modules
from mosaic.profiler.machine import noise as noises
from mosaic.profiler.measuring import measure as measuring
from mosaic.profiler.measuring.beside import measure_pair
from mosaic.profiler.measuring.measure import StepTimes, measure_quietly, quietest


def stat_file(path: Path, ticks: int) -> Path:
    path.write_text(f"cpu  {ticks} 0 0 999 0 0 0 0 0 0\ncpu0 1 2 3\n")
    return path


class Clock:
    """Stands for the time and the machine's own counters."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self.own = 0.0
        monkeypatch.setattr(noises.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(noises.os, "cpu_count", lambda: 4)
        monkeypatch.setattr(noises.os, "times", lambda: type("T", (), self._times())())

    def _times(self) -> dict[str, float]:
        return {"user": self.own, "system": 0.0, "children_user": 0.0, "children_system": 0.0, "elapsed": 0.0}


def test_the_share_of_others_is_what_is_left_after_one_s_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    clock = Clock(monkeypatch)
    hertz = noises.os.sysconf("SC_CLK_TCK")
    stat = stat_file(tmp_path / "stat", 1000 * hertz)
    load = ForeignLoad(stat)
    clock.now, clock.own = 10.0, 6.0
    stat_file(stat, 1016 * hertz)
    assert load.share == pytest.approx((16 - 6) / 40)
    load.reset()
    assert load.share == 0.0
    clock.now = 11.0
    stat_file(stat, 2000 * hertz)
    assert load.share == 1.0


@pytest.mark.parametrize("content", [None, "", "cpu  1 2", "cpu  a b c d e f g h"])
def test_a_system_that_does_not_tell_has_no_share(tmp_path: Path, content: str | None):
    path = tmp_path / "stat"
    if content is not None:
        path.write_text(content)
    assert ForeignLoad(path).share is None


class FakeLoad:
    """Says what it is told, try by try."""

    shares: list[float | None]

    def __init__(self) -> None:
        self.share = self.shares.pop(0)


def times_of(number: int) -> StepTimes:
    return StepTimes((float(number),), (0.0,))


@pytest.mark.parametrize(
    ("shares", "kept", "tries"),
    [([0.0], 1, 1), ([None], 1, 1), ([0.3, 0.05], 2, 2), ([0.5, 0.3, 0.4], 2, 3), ([0.3, 0.5, 0.2], 3, 3)],
)
def test_a_busy_machine_is_measured_again_and_the_quietest_try_is_kept(
    shares: list[float | None], kept: int, tries: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(FakeLoad, "shares", list(shares), raising=False)
    monkeypatch.setattr(measuring, "ForeignLoad", FakeLoad)
    taken: list[int] = []

    def take() -> StepTimes:
        taken.append(len(taken) + 1)
        return times_of(taken[-1])

    times, share = quietest(take, ProfileSettings(), what="vision")
    assert times == times_of(kept)
    assert share == shares[kept - 1]
    assert len(taken) == tries


def test_a_machine_that_stays_busy_is_refused_with_the_number(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(FakeLoad, "shares", [0.9, 0.75, 0.8], raising=False)
    monkeypatch.setattr(measuring, "ForeignLoad", FakeLoad)
    with pytest.raises(UnstableMeasurementError, match=r"took 75% .* while 'vision' .* above 60%"):
        quietest(lambda: times_of(1), ProfileSettings(), what="vision")


@pytest.mark.parametrize(
    "wrong", [{"warmup": -1}, {"min_repeats": 0}, {"min_repeats": 50}, {"spread": 0.0}, {"sample_seconds": -1.0}]
)
def test_settings_that_cannot_be_are_refused(wrong: dict[str, Any]):
    with pytest.raises(ValueError, match=r"warm-up|positive"):
        ProfileSettings(**wrong)


def test_what_runs_inside_preserved_leaves_no_trace():
    model = TwoTowers(tower(8, 16, nn.BatchNorm1d(16)))
    model(*pair_batch()).sum().backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    values = [gradient.clone() for gradient in gradients]
    buffers = [buffer.clone() for buffer in model.buffers()]
    state = torch.get_rng_state()
    with pytest.raises(KeyError), preserved(model):  # noqa: PT012
        assert all(parameter.grad is None for parameter in model.parameters())
        torch.rand(3)
        model(*pair_batch(1)).sum().backward()
        raise KeyError
    assert all(p.grad is gradient for p, gradient in zip(model.parameters(), gradients, strict=True))
    assert all(map(torch.equal, values, gradients))
    assert all(map(torch.equal, buffers, model.buffers()))
    assert torch.equal(state, torch.get_rng_state())


def linear(**changes: Any) -> Subject:
    subject = Subject("linear", nn.Linear(8, 4, bias=False), (torch.randn(6, 8),), {})
    return dataclasses.replace(subject, **changes)


def test_activation_bytes_are_what_backward_needs_without_parameters():
    # The input alone: 6 x 8 numbers of 4 bytes; the weight is the module's own.
    assert linear().activation_bytes() == 6 * 8 * 4
    frozen = linear()
    frozen.module.requires_grad_(False)
    assert frozen.activation_bytes() == 0
    assert linear().resident_bytes == 2 * 8 * 4 * 4
    assert frozen.resident_bytes == 8 * 4 * 4


def test_a_module_without_gradients_has_no_backward():
    frozen = linear()
    frozen.module.requires_grad_(False)
    with HostBackend(num_slots=1).open_lanes([(0,)]) as lanes:
        times, _ = measure_quietly(frozen, lanes.lane((0,)), FAST)
    assert all(time == 0 for time in times.backward_ms)
    assert all(time > 0 for time in times.forward_ms)
    assert FAST.min_repeats <= len(times.forward_ms) <= FAST.max_repeats


@pytest.mark.parametrize("phase", list(Phase))
def test_a_pair_is_timed_beside_each_other_and_alone(phase: Phase):
    second = linear(name="second")
    with HostBackend(num_slots=2).open_lanes([(0,), (1,)]) as lanes:
        pair = measure_pair([linear(), second], (lanes.lane((0,)), lanes.lane((1,))), phase, FAST)
    assert [(sample.module, sample.beside, sample.phase) for sample in pair] == [
        ("linear", "second", phase),
        ("second", "linear", phase),
    ]
    assert all(len(sample.alone_ms) >= FAST.min_repeats and sample.times_ms for sample in pair)


def test_a_pair_with_a_frozen_module_has_no_backward_sample():
    frozen = linear(name="frozen")
    frozen.module.requires_grad_(False)
    with HostBackend(num_slots=2).open_lanes([(0,), (1,)]) as lanes:
        assert measure_pair([linear(), frozen], (lanes.lane((0,)), lanes.lane((1,))), Phase.BACKWARD, FAST) == ()


def test_an_error_in_one_of_a_pair_ends_both():
    broken = linear(name="broken", args=(torch.randn(6, 3),))
    with HostBackend(num_slots=2).open_lanes([(0,), (1,)]) as lanes, pytest.raises(RuntimeError, match="shapes"):
        measure_pair([linear(), broken], (lanes.lane((0,)), lanes.lane((1,))), Phase.FORWARD, FAST)


def profiled(model: nn.Module, **options: Any) -> Profile:
    finding = find_modules(model, pair_batch())
    return profile_modules(model, finding.subjects, finding.graph, HostBackend(num_slots=2), settings=FAST, **options)


def test_every_module_is_measured_at_every_quota_and_phase_and_pair():
    told: list[tuple[str, int, int]] = []
    profile = profiled(TwoTowers(), progress=lambda *what: told.append(what))
    found = {(sample.module, sample.phase, sample.quota) for sample in profile.samples}
    assert found == {(name, phase, quota) for name in ("left", "right") for phase in Phase for quota in (1, 2)}
    assert {(pair.module, pair.beside) for pair in profile.pairs} == {("left", "right"), ("right", "left")}
    assert {memory.module for memory in profile.memory} == {"left", "right"}
    assert [done for _, done, _ in told] == list(range(5))
    assert {total for *_, total in told} == {5}


@dataclasses.dataclass
class Wrapped:
    inner: list[torch.Tensor]


def test_dataclasses_are_seen_through_and_inputs_are_cut_from_their_graph():
    class Unwraps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(16, 16)

        def forward(self, value: Wrapped) -> tuple[Wrapped, int]:
            return Wrapped([self.layer(value.inner[0])]), 3

    class Wraps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = tower(), Unwraps()

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return self.right(Wrapped([self.left(x)]))[0].inner[0]

    model = Wraps()
    finding = find_modules(model, pair_batch())
    right = finding.subjects[1]
    for _ in range(2):
        outputs = right.forward()
        assert len(outputs) == 1
        right.backward(outputs)
    assert all(parameter.grad is None for parameter in model.left.parameters())
