"""Measuring modules, and knowing when a measurement means nothing."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from engine_cases import FAST, TwoTowers, pair_batch, tower
from foreign_load import others_use
from torch import nn

from mosaic.backends.host.backend import HostBackend
from mosaic.device import Device
from mosaic.engine import find_modules
from mosaic.errors import UnstableMeasurementError
from mosaic.find.restore import preserved
from mosaic.profile import Phase, Profile
from mosaic.profiler import ProfileSettings, Retries, Subject, profile_modules
from mosaic.profiler.measuring.beside import measure_pair
from mosaic.profiler.measuring.measure import StepTimes, measure

HOST = Device(name="cpu", kind="host", num_slots=2)
GPU = Device(name="gpu", kind="cuda", num_slots=16, sms_per_slot=8)


def times_of(number: int) -> StepTimes:
    return StepTimes((float(number),), (0.0,))


@pytest.mark.parametrize(
    ("shares", "kept", "tries"),
    [([0.0], 1, 1), ([None], 1, 1), ([0.3, 0.05], 2, 2), ([0.5, 0.3, 0.4], 2, 3), ([0.3, 0.5, 0.2], 3, 3)],
)
def test_a_busy_machine_is_measured_again_and_the_quietest_try_is_kept(
    shares: list[float | None], kept: int, tries: int, monkeypatch: pytest.MonkeyPatch
):
    others_use(monkeypatch, *shares)
    taken: list[int] = []

    def take() -> StepTimes:
        taken.append(len(taken) + 1)
        return times_of(taken[-1])

    retries = Retries(ProfileSettings(), HOST)
    times, share = retries.quietest(take)
    assert times == times_of(kept)
    assert share == retries.taken.share == shares[kept - 1]
    assert len(taken) == tries


@pytest.mark.parametrize(("settings", "device"), [({"retry_seconds": 0.0}, HOST), ({}, GPU)])
def test_nothing_is_measured_again_without_time_for_it_or_on_a_gpu(
    settings: dict[str, Any], device: Device, monkeypatch: pytest.MonkeyPatch
):
    others_use(monkeypatch, 0.5, 0.1)
    retries = Retries(ProfileSettings(**settings), device)
    assert retries.quietest(lambda: "first") == ("first", 0.5)
    assert retries.note.startswith("other processes used 50% of the CPU")
    assert ("not comparable" in retries.note) == (device is HOST)


def test_strict_settings_refuse_what_would_be_marked_but_for_a_gpus_own_times(monkeypatch: pytest.MonkeyPatch):
    others_use(monkeypatch, 0.75)
    host, gpu = (Retries(ProfileSettings(strict=True, retry_seconds=0.0), device) for device in (HOST, GPU))
    host.quietest(lambda: 1)
    gpu.quietest(lambda: 1)
    with pytest.raises(UnstableMeasurementError, match="used 75% of the CPU; times are not comparable: stop them"):
        host.note  # noqa: B018
    assert gpu.note == "other processes used 75% of the CPU"


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
        times = measure(frozen, lanes.lane((0,)), FAST)
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
