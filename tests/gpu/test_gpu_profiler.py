"""Profiling on a real GPU: counters, memory at each phase, and what running out of memory leaves behind."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from torch import nn

from mosaic.backends.base import Backend
from mosaic.backends.cuda.backend import CudaBackend
from mosaic.cost import CostModel
from mosaic.engine import find_modules
from mosaic.hardware import Link
from mosaic.profile import Profile
from mosaic.profiler import Counters, ProfileCache, ProfileSettings, open_counters, profile_modules

pytestmark = pytest.mark.gpu

QUICK = ProfileSettings(warmup=1, min_repeats=3, max_repeats=5, sample_seconds=0.2, foreign_share=2.0)
WIDTH, ROWS = 1024, 512


@pytest.fixture
def backend(cuda_backend: CudaBackend) -> CudaBackend:
    return cuda_backend


class Block(nn.Module):
    def __init__(self, depth: int = 2) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(depth)))
        self.wants_bytes = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.wants_bytes:
            torch.empty(self.wants_bytes, dtype=torch.uint8, device=x.device)
        return self.layers(x)


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = Block(), Block(4)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.left(x) + self.right(y)


def two_on(backend: Backend) -> tuple[Two, tuple[torch.Tensor, torch.Tensor]]:
    device = backend.torch_device
    return Two().to(device), (torch.randn(ROWS, WIDTH, device=device), torch.randn(ROWS, WIDTH, device=device))


def profiled(backend: Backend, **options: object) -> Profile:
    model, batch = two_on(backend)
    finding = find_modules(model, batch)
    return profile_modules(model, finding.subjects, finding.graph, backend, **{"settings": QUICK, **options})


@pytest.fixture
def counters(backend: Backend):
    with open_counters(backend) as opened:
        yield opened


def test_counters_read_a_load_or_say_why_not(counters: Counters, backend: Backend):
    if counters.missing:
        pytest.skip(counters.missing)
    a = torch.randn(4096, 4096, device=backend.torch_device)
    seen = counters.during(lambda: (a @ a, torch.cuda.synchronize(backend.torch_device)))
    assert seen is not None
    assert seen.sm_util is not None
    assert seen.sm_util > 0.2
    assert seen.dram_bandwidth is not None


def test_a_profile_has_driver_and_memory(backend: Backend):
    slots = backend.device.num_slots
    settings = dataclasses.replace(QUICK, pairs=False)
    profile = profiled(backend, quotas=[max(1, slots // 4), slots], settings=settings)
    assert profile.environment.driver
    assert all(sample.peak_bytes > 0 for sample in profile.samples)


def test_quotas_degrees_and_a_cache(backend: Backend, tmp_path: Path):
    cache = ProfileCache(tmp_path)
    quotas = [1, backend.device.num_slots]
    choice = {"quotas": quotas, "degrees": [1, 2], "network": Link(latency_us=5.0, gb_per_s=400.0)}
    first = profiled(backend, cache=cache, **choice)
    assert {sample.quota for sample in first.samples} == set(quotas)
    assert {sample.degree for sample in first.samples} == {1, 2}
    again = profiled(backend, cache=cache, **choice)
    assert (again.samples, again.pairs) == (first.samples, first.pairs)


def test_memory_that_runs_out_at_one_quota_leaves_the_others_and_no_garbage(backend: Backend):
    model, batch = two_on(backend)
    finding = find_modules(model, batch)
    before = torch.cuda.memory_allocated(backend.torch_device)

    def tell(what: str, done: int, total: int) -> None:
        model.right.wants_bytes = 1 << 50 if what.startswith("right at 1 slot") else 0

    slots = backend.device.num_slots
    settings = dataclasses.replace(QUICK, pairs=False)
    profile = profile_modules(
        model, finding.subjects, finding.graph, backend, quotas=[1, slots], settings=settings, progress=tell
    )
    failed = {(s.module, s.quota) for s in profile.samples if s.infeasible is not None}
    assert failed == {("right", 1)}
    assert all(s.infeasible.startswith("out of memory") for s in profile.samples if s.infeasible is not None)
    assert CostModel.from_profile(profile).quotas("right") == (slots,)
    torch.cuda.synchronize(backend.torch_device)
    # cuBLAS keeps a workspace for each stream.
    assert torch.cuda.memory_allocated(backend.torch_device) - before < 512 << 20
