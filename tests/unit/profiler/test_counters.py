"""Counters are read over a window, rescaled to the partition, and say why where they cannot be read."""

from __future__ import annotations

import dataclasses
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from engine_cases import FAST, TwoTowers, pair_batch
from fake_streams import FakeGreenDriver, FakeStreams

from mosaic.backends.cuda.backend import CudaBackend
from mosaic.engine import find_modules
from mosaic.profile import Phase, Profile
from mosaic.profiler import Counters, ProfileCache, Utilisation, profile_modules
from mosaic.profiler import counters as counting


class FakeError(Exception):
    pass


class FakeNvml:
    """Stands for pynvml and an H100: counters that read ``percent``, by number."""

    NVMLError = FakeError
    NVML_GPM_METRIC_SM_UTIL, NVML_GPM_METRIC_SM_OCCUPANCY, NVML_GPM_METRIC_DRAM_BW_UTIL = 2, 3, 10
    NVML_GPM_METRICS_GET_VERSION = NVML_CLOCK_SM = 1
    NVML_CLOCK_MEM = 2

    def __init__(self, *, supported: bool = True, percent: dict[int, float] | None = None) -> None:
        self.percent = {2: 24.0, 3: 6.0, 10: 30.0} if percent is None else percent
        self.fails: set[str] = set()
        self.counts = Counter[str]()
        self.answers: dict[str, Any] = {
            "nvmlDeviceGetHandleByIndex": "gpu",
            "nvmlDeviceGetHandleByUUID": "gpu",
            "nvmlGpmQueryDeviceSupport": SimpleNamespace(isSupportedDevice=int(supported)),
            "c_nvmlGpmMetricsGet_t": SimpleNamespace(metrics=[SimpleNamespace() for _ in range(3)]),
        }

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any) -> Any:
            if name in self.fails:
                raise FakeError(f"{name}: insufficient permissions")
            self.counts[name] += 1
            if name == "nvmlDeviceGetClockInfo":
                return {1: 1980, 2: 2619}[args[1]]
            if name == "nvmlGpmSampleAlloc":
                return object()
            if name == "nvmlGpmMetricsGet":
                assert args[0].sample1 is not args[0].sample2
                for metric in args[0].metrics[: args[0].numMetrics]:
                    metric.nvmlReturn = 0 if metric.metricId in self.percent else 3
                    metric.value = self.percent.get(metric.metricId, 0.0)
            return self.answers.get(name)

        return call


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch: pytest.MonkeyPatch):
    """Time passes by itself, a tenth of a second each time that somebody looks."""
    now = [0.0]

    def tick() -> float:
        now[0] += 0.1
        return now[0]

    monkeypatch.setattr(counting, "time", SimpleNamespace(sleep=lambda seconds: None, monotonic=tick))


def test_shares_of_sms_are_rescaled_to_the_partition_and_bandwidth_is_not():
    seen = Utilisation(sm_util=0.24, sm_occupancy=0.06, dram_bandwidth=0.3).on_partition(32, 132)
    assert seen.sm_util == pytest.approx(0.24 * 132 / 32)
    assert seen.sm_occupancy == pytest.approx(0.06 * 132 / 32)
    assert seen.dram_bandwidth == 0.3
    assert Utilisation(sm_util=0.5).on_partition(8, 132) == Utilisation(sm_util=1.0)


@pytest.mark.parametrize(
    ("nvml", "fails", "reason"),
    [
        (FakeNvml(supported=False), "", "no GPM; it takes Hopper"),
        (FakeNvml(percent={}), "", "made no metric of them, as on a virtual GPU"),
        *(
            (FakeNvml(), call, f"NVML refuses: {call}: insufficient permissions")
            for call in ("nvmlInit", "nvmlGpmSampleGet")
        ),
    ],
)
def test_a_gpu_without_counters_or_rights_says_why_and_is_no_error(nvml: FakeNvml, fails: str, reason: str):
    nvml.fails = {fails}
    with Counters(0, nvml=nvml) as counters:
        assert reason in counters.missing
        assert fails or counters.clocks_mhz == (1980, 2619)
        with pytest.raises(RuntimeError, match="there are no counters"):
            counters.during(lambda: None)
    assert nvml.counts["nvmlGpmSampleAlloc"] == nvml.counts["nvmlGpmSampleFree"]
    assert nvml.counts["nvmlInit"] == nvml.counts["nvmlShutdown"]


def test_a_profile_keeps_counters_and_clocks_and_looks_again_for_what_a_cache_lacks(tmp_path: Path):
    runtime = FakeStreams()
    backend = CudaBackend(api=runtime, driver=FakeGreenDriver(num_slots=4))
    settings = dataclasses.replace(FAST, pairs=False)

    def profiled(counters: Counters | None) -> Profile:
        model = TwoTowers()
        finding = find_modules(model, pair_batch())
        return profile_modules(
            model,
            finding.subjects,
            finding.graph,
            backend,
            quotas=[1, 4],
            settings=settings,
            cache=ProfileCache(tmp_path),
            counters=counters,
        )

    with runtime.watching():
        blind = profiled(None)
        with Counters(0, nvml=FakeNvml(supported=False)) as refused:
            assert profiled(refused).samples == blind.samples
        with Counters(0, nvml=FakeNvml()) as counters:
            seen = profiled(counters)
            again = profiled(counters)
    assert {sample.bandwidth_utilisation for sample in blind.samples} == {None}
    assert {sample.bandwidth_utilisation for sample in seen.samples} == {0.3}
    narrow, wide = (sample.sm_occupancy for sample in seen.samples_of("left", Phase.FORWARD))
    assert narrow is not None
    assert wide is not None
    assert narrow > wide
    assert (seen.environment.sm_clock_mhz, seen.environment.memory_clock_mhz) == (1980, 2619)
    assert again.samples == seen.samples
