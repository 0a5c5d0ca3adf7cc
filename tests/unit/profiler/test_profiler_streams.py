"""Profiling on lanes that launch inline: nothing blocks between launches, and what runs is ordered."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from itertools import pairwise

import pytest
import torch
from engine_cases import FAST, TwoTowers, pair_batch
from fake_streams import FakeGreenDriver, FakeStreams
from fake_streams.runtime import WORKSPACE_BYTES
from stream_cases import FakeBackend
from torch import nn

from mosaic.backends.cuda.backend import CudaBackend
from mosaic.engine import find_modules
from mosaic.find.restore import preserved
from mosaic.profile import Phase
from mosaic.profiler import Subject, profile_modules
from mosaic.profiler.measuring.beside import measure_pair
from mosaic.profiler.measuring.measure import measure
from mosaic.profiler.measuring.peaks import phase_peaks


@pytest.fixture
def backend() -> Iterator[FakeBackend]:
    made = FakeBackend()
    with made.api.watching():
        yield made


@pytest.fixture
def runtime(backend: FakeBackend) -> FakeStreams:
    return backend.api


def subject(name: str = "linear", *, trains: bool = True) -> Subject:
    return Subject(name, nn.Linear(8, 4, bias=False).requires_grad_(trains), (torch.randn(6, 8),), {})


def test_the_cuda_backend_itself_is_profiled_on_a_driver_in_process(runtime: FakeStreams):
    backend = CudaBackend(api=runtime, driver=FakeGreenDriver(num_slots=4))
    model = TwoTowers()
    finding = find_modules(model, pair_batch())
    profile = profile_modules(model, finding.subjects, finding.graph, backend, quotas=[1, 4], settings=FAST)
    assert profile.device == backend.device
    assert {sample.quota for sample in profile.samples} == {1, 4}
    assert {pair.quota for pair in profile.pairs} == {2}


def test_what_cublas_keeps_for_lanes_does_not_add_up_while_they_are_measured(runtime: FakeStreams):
    backend, model = CudaBackend(api=runtime, driver=FakeGreenDriver(num_slots=8)), TwoTowers()
    finding, kept = find_modules(model, pair_batch()), []
    profile_modules(
        model,
        finding.subjects,
        finding.graph,
        backend,
        quotas=range(1, 9),
        settings=dataclasses.replace(FAST, pairs=False),
        progress=lambda *_: kept.append(runtime.reserved_bytes()),
    )
    assert max(kept) <= 2 * WORKSPACE_BYTES  # of a lane, and of the stream on which libraries set themselves up
    assert runtime.reserved_bytes() == 0


@pytest.mark.parametrize("phase", list(Phase))
def test_a_pair_that_one_thread_launches_does_not_lock_up(backend: FakeBackend, phase: Phase):
    with backend.open_lanes([(0,), (1,)]) as lanes:
        both = (lanes.lane((0,)), lanes.lane((1,)))
        pair = measure_pair(
            [subject("one"), subject("two")], both, phase, FAST, inline=True, device=torch.device("cpu")
        )
        turns = [launch.stream for launch in backend.api.launches if launch.stream]
    assert [(sample.module, sample.beside) for sample in pair] == [("one", "two"), ("two", "one")]
    changes = sum(before != after for before, after in pairwise(turns))
    assert changes >= 2


def test_one_wait_for_the_device_is_enough_for_a_batch(backend: FakeBackend):
    with backend.open_lanes([(0,)]) as lanes:
        lane = lanes.lane((0,))
        times = measure(subject(), lane, FAST)
        frozen = measure(subject(trains=False), lane, FAST)
    assert all(time > 0 for time in (*times.forward_ms, *times.backward_ms, *frozen.forward_ms))
    assert all(time == 0 for time in frozen.backward_ms)


def test_a_gpus_random_numbers_are_given_back_as_they_were(monkeypatch: pytest.MonkeyPatch):
    generators = torch.Generator().manual_seed(1), torch.Generator().manual_seed(2)
    before = [generator.get_state() for generator in generators]
    monkeypatch.setattr(torch.cuda, "default_generators", generators)
    with preserved(torch.nn.Identity()):
        for generator in generators:
            torch.rand(3, generator=generator)
    assert all(torch.equal(now.get_state(), state) for now, state in zip(generators, before, strict=True))


def test_peaks_are_what_each_phase_took_above_what_was_there(monkeypatch: pytest.MonkeyPatch):
    allocated, peaks = iter([100, 140]), iter([190, 150])
    resets: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: next(allocated))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: next(peaks))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", resets.append)
    assert phase_peaks(subject(), torch.device("cuda")) == (90, 10)
    assert len(resets) == 2
