"""One measurement, alone or beside another module, and knowing when it means nothing."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from engine_cases import FAST
from foreign_load import others_use
from stream_cases import FakeBackend
from torch import nn

from mosaic.backends.host.backend import HostBackend
from mosaic.device import Device
from mosaic.errors import UnstableMeasurementError
from mosaic.profile import Phase
from mosaic.profiler import ProfileSettings, Retries, Subject
from mosaic.profiler.subject import split_batch
from mosaic.profiler.sweep import attempt
from mosaic.profiler.timing import measure_beside

HOST = Device(name="cpu", kind="host", num_slots=2)
GPU = Device(name="gpu", kind="cuda", num_slots=16, sms_per_slot=8)


def linear(name: str = "linear", *, trains: bool = True, **changes: Any) -> Subject:
    module = nn.Linear(8, 4, bias=False).requires_grad_(trains)
    return dataclasses.replace(Subject(name, module, (torch.randn(6, 8),), {}), **changes)


@pytest.mark.parametrize(
    ("shares", "kept", "tries"),
    [([0.0], 1, 1), ([None], 1, 1), ([0.3, 0.05], 2, 2), ([0.5, 0.3, 0.4], 2, 3), ([0.3, 0.5, 0.2], 3, 3)],
)
def test_a_busy_machine_is_measured_again_and_the_quietest_try_is_kept(
    shares: list[float | None], kept: int, tries: int, monkeypatch: pytest.MonkeyPatch
):
    others_use(monkeypatch, *shares)
    taken: list[int] = []

    def take() -> int:
        taken.append(len(taken) + 1)
        return taken[-1]

    retries = Retries(ProfileSettings(), HOST)
    number, share = retries.quietest(take)
    assert number == kept
    assert share == retries.taken.share == shares[kept - 1]
    assert len(taken) == tries


def test_strict_settings_refuse_what_would_be_marked_except_a_gpus_own_times(monkeypatch: pytest.MonkeyPatch):
    others_use(monkeypatch, 0.75)
    host, gpu = (Retries(ProfileSettings(strict=True, retry_seconds=0.0), device) for device in (HOST, GPU))
    host.quietest(lambda: 1)
    gpu.quietest(lambda: 1)
    with pytest.raises(UnstableMeasurementError, match="used 75% of the CPU: stop them"):
        host.note  # noqa: B018
    assert gpu.note == "other processes used 75% of the CPU"


@pytest.fixture(params=["host", "streams"])
def backend(request: pytest.FixtureRequest) -> Iterator[Any]:
    if request.param == "host":
        yield HostBackend(num_slots=3)
        return
    streams = FakeBackend()
    with streams.api.watching():
        yield streams


@pytest.mark.parametrize("phase", list(Phase))
def test_a_pair_is_timed_beside_each_other_and_alone(backend: Any, phase: Phase):
    inline = isinstance(backend, FakeBackend)
    patient = dataclasses.replace(FAST, sample_seconds=30.0)
    with backend.open_lanes([(0,), (1,)]) as lanes:
        both = [lanes.lane((0,)), lanes.lane((1,))]
        pair = measure_beside([linear("one"), linear("two")], both, phase, patient, inline=inline)
        frozen = measure_beside([linear(), linear(trains=False)], both, phase, FAST, inline=inline)
    assert len(pair) == 2
    assert all(len(times.alone_ms) >= FAST.min_repeats and times.beside_ms for times in pair)
    assert bool(frozen) == (phase is Phase.FORWARD)


def test_memory_that_ran_out_is_released_before_the_next_measurement():
    held: list[weakref.ref[torch.Tensor]] = []

    def exhaust() -> None:
        large = torch.zeros(1000)
        held.append(weakref.ref(large))
        raise torch.OutOfMemoryError("no more")

    with HostBackend(num_slots=1).open_lanes([(0,)]) as lanes:
        with attempt() as tried:
            lanes.lane((0,)).submit(exhaust).wait()
        assert held[0]() is None
    assert tried.reason == "out of memory: no more"


def test_a_replica_gets_its_share_of_every_tensor_rounded_up():
    x, mask = torch.randn(6, 8, requires_grad=True), torch.ones(6, 3, dtype=torch.bool)
    options = {"scale": torch.tensor(2.0), "positions": torch.arange(8)[None]}
    cut = split_batch(Subject("vision", nn.Linear(8, 4), (x, {"mask": [mask]}), options), 4)
    assert torch.equal(cut.args[0], x[:2])
    assert cut.args[0].requires_grad
    assert cut.args[0].is_leaf
    assert cut.args[1]["mask"][0].shape == (2, 3)
    assert cut.kwargs["scale"].dim() == 0
    assert cut.kwargs["positions"].shape == (1, 8)
