"""Communication models, and the devices whose description is known."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from ranks.cases import run_ranks

from mosaic.device import Device
from mosaic.errors import BackendUnavailableError
from mosaic.hardware import hardware_of
from mosaic.profiler import AllReduce, Ring, fit_ring, measure_ring
from mosaic.profiler.machine import communication


@pytest.mark.parametrize(("degree", "expected"), [(1, 0.0), (2, 0.02 + 1.0), (4, 0.06 + 1.5)])
def test_a_ring_takes_its_steps_and_its_bytes(degree: int, expected: float):
    ring = Ring(latency_us=10.0, gb_per_s=1.0)
    assert ring.all_reduce_ms(1_000_000, degree) == pytest.approx(expected)
    assert ring.all_reduce_ms(0, degree) == 0.0


def test_a_ring_that_cannot_be_is_refused():
    for latency, bandwidth in ((-1.0, 1.0), (0.0, 0.0), (0.0, float("nan"))):
        with pytest.raises(ValueError, match="a bandwidth above 0"):
            Ring(latency_us=latency, gb_per_s=bandwidth)


def measured(ring: Ring, *points: tuple[int, int]) -> list[AllReduce]:
    return [AllReduce(num_bytes=b, degree=d, time_ms=ring.all_reduce_ms(b, d)) for b, d in points]


def test_a_fit_finds_the_ring_that_was_measured():
    ring = Ring(latency_us=12.0, gb_per_s=40.0)
    found = fit_ring(measured(ring, (1024, 2), (65536, 2), (1 << 22, 4), (1 << 26, 8)))
    assert found.latency_us == pytest.approx(12.0)
    assert found.gb_per_s == pytest.approx(40.0)


def test_a_fit_without_latency_keeps_it_at_zero():
    points = measured(Ring(latency_us=0.0, gb_per_s=2.0), (1024, 2), (1 << 20, 2))
    slower = AllReduce(num_bytes=1 << 24, degree=2, time_ms=20.0)  # a larger one is slower still
    found = fit_ring([*points, slower])
    assert found.latency_us == 0.0
    assert 0.8 < found.gb_per_s < 2.0


def test_too_few_all_reduces_tell_nothing():
    with pytest.raises(ValueError, match="two different sizes"):
        fit_ring(measured(Ring(latency_us=1.0, gb_per_s=1.0), (1024, 1), (1024, 2), (1024, 2)))
    flat = [AllReduce(num_bytes=size, degree=2, time_ms=time) for size, time in ((1024, 2.0), (1 << 20, 1e-3))]
    with pytest.raises(ValueError, match=r"measure larger ones|bandwidth"):
        fit_ring(flat[:1] * 2)


def test_one_rank_has_no_communication_to_measure():
    with pytest.raises(BackendUnavailableError, match=r"a torch\.distributed group of 2 or more"):
        measure_ring(torch.device("cpu"))


def test_two_ranks_measure_the_same_links(tmp_path: Path):
    first, second = run_ranks("ranks.programs.meeting.ring:measured", 2, tmp_path)
    assert first == second
    latency, bandwidth, to_one, to_one_bandwidth, agreement_ms = first
    assert min(latency, to_one) >= 0
    assert min(bandwidth, to_one_bandwidth, agreement_ms) > 0


@pytest.mark.parametrize(
    ("product", "name"),
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA H100 80GB HBM3", "h100-80g"),
        ("NVIDIA A100-SXM4-80GB", "a100-80g"),
        ("NVIDIA GeForce RTX 4090", None),
    ],
)
def test_a_gpu_is_found_by_its_product_name(product: str, name: str | None):
    found = hardware_of(Device(name=product, kind="cuda", num_slots=16))
    assert (found.name if found is not None else None) == name


def test_links_that_noise_hides_are_measured_again(monkeypatch: pytest.MonkeyPatch):
    calls = []

    def time_ms(work: partial[object], device: torch.device) -> float:
        (data,) = work.args
        calls.append(data.numel())
        noisy = len(calls) <= len(communication._SIZES) * communication._REPEATS
        return 1e6 / data.numel() if noisy else 1.0 + 1e-3 * data.numel()

    monkeypatch.setattr(communication, "_time_ms", time_ms)
    monkeypatch.setattr(communication.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(communication.dist, "get_world_size", lambda group: 2)
    monkeypatch.setattr(communication.dist, "all_reduce", lambda *given, **options: None)
    assert measure_ring(torch.device("cpu")).gb_per_s > 0
    assert len(calls) == 2 * len(communication._SIZES) * communication._REPEATS
