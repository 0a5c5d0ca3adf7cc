"""``pool`` and SM ids on what looks like a GPU: the driver's answers are given, the counting is ours."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mosaic.backends.cuda import driver as cuda
from mosaic.device import Device
from mosaic.microbench import BenchSettings
from mosaic.microbench.pool import measure_pool

TINY = BenchSettings.tiny()
MIB = 1 << 20


class Driver:
    """Counts contexts; each takes two MiB, of which ending it gives one back."""

    def __init__(self) -> None:
        self.used_bytes = 0
        self.open_pools = 0
        self.lent = 0

    def open_pool(self, ordinal: int, layouts: Any, **options: Any) -> Pool:
        return Pool(self, layouts)

    def free_bytes(self) -> int:
        return 100 * MIB - self.used_bytes


class Pool:
    def __init__(self, driver: Driver, layouts: Any) -> None:
        self.driver = driver
        self.contexts = 0
        driver.open_pools += 1
        for layout in layouts:
            self.add_layout(layout)

    def add_layout(self, layout: Any) -> None:
        self.contexts += len(layout)
        self.driver.used_bytes += 2 * MIB * len(layout)

    def lend(self, layout: int, partition: int) -> int:
        self.driver.lent += 1
        return 7

    def give_back(self, stream: int) -> None:
        assert stream == 7
        self.driver.lent -= 1

    def stats(self) -> Any:
        return SimpleNamespace(num_contexts=self.contexts, driver_bytes=2 * MIB * self.contexts)

    def close(self) -> None:
        self.driver.open_pools -= 1
        self.driver.used_bytes -= MIB * self.contexts


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    def make(driver: Driver) -> Any:
        monkeypatch.setattr(cuda, "open_pool", driver.open_pool)
        monkeypatch.setattr(cuda, "describe_driver", lambda: SimpleNamespace(version="13.0"))
        return SimpleNamespace(
            name="cuda",
            notes=(),
            api=driver,
            torch_device=torch.device("cuda", 0),
            device=Device(name="a GPU", kind="cuda", num_slots=4, sms_per_slot=8),
        )

    return make


@pytest.mark.filterwarnings("ignore:Error while querying CUDA driver version")  # torch 2.14, without a driver
def test_contexts_have_a_price_and_what_is_not_given_back_is_counted(gpu: Any):
    driver = Driver()
    result = measure_pool(gpu(driver), TINY)
    assert [creation.quota for creation in result.creations] == [2, 4]
    for creation in result.creations:
        assert creation.way == "context and stream"
        assert creation.held_bytes is not None
        assert creation.held_bytes.median == 2 * MIB
        assert creation.kept_bytes == TINY.repeats * MIB
    assert (driver.open_pools, driver.lent) == (0, 0)
    assert result.origin.driver_version == "13.0"
    assert any(absent.what.startswith("torch.cuda.green_contexts") for absent in result.absent)
