"""Counters say why where they cannot be read."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from mosaic.profiler import Counters


class FakeError(Exception):
    pass


class FakeNvml:
    """Stands for pynvml and a GPU that has no value for any counter."""

    NVMLError = FakeError
    NVML_GPM_METRIC_SM_UTIL, NVML_GPM_METRIC_SM_OCCUPANCY, NVML_GPM_METRIC_DRAM_BW_UTIL = 2, 3, 10
    NVML_GPM_METRICS_GET_VERSION = 1

    def __init__(self, fails: str = "", *, supported: bool = True) -> None:
        self.fails = fails
        self.counts = Counter[str]()
        self.answers: dict[str, Any] = {
            "nvmlDeviceGetHandleByIndex": "gpu",
            "nvmlDeviceGetHandleByUUID": "gpu",
            "nvmlGpmQueryDeviceSupport": SimpleNamespace(isSupportedDevice=int(supported)),
            "c_nvmlGpmMetricsGet_t": SimpleNamespace(metrics=[SimpleNamespace() for _ in range(3)]),
        }

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any) -> Any:
            if name == self.fails:
                raise FakeError(f"{name}: insufficient permissions")
            self.counts[name] += 1
            if name == "nvmlGpmSampleAlloc":
                return object()
            if name == "nvmlGpmMetricsGet":
                assert args[0].sample1 is not args[0].sample2
                for metric in args[0].metrics[: args[0].numMetrics]:
                    metric.nvmlReturn, metric.value = 3, 0.0
            return self.answers.get(name)

        return call


@pytest.mark.parametrize(
    ("nvml", "reason"),
    [
        (FakeNvml(supported=False), "no GPM; it needs Hopper"),
        (FakeNvml(), "returned no metric, as on a virtual GPU"),
        *((FakeNvml(call), f"NVML raised: {call}: insuff") for call in ("nvmlInit", "nvmlGpmSampleGet")),
    ],
)
def test_a_gpu_without_counters_or_rights_says_why_and_is_no_error(nvml: FakeNvml, reason: str):
    with Counters("GPU-0", nvml=nvml) as counters:
        assert reason in counters.missing
        with pytest.raises(RuntimeError, match="counters are unavailable"):
            counters.during(lambda: None)
    assert nvml.counts["nvmlGpmSampleAlloc"] == nvml.counts["nvmlGpmSampleFree"]
    assert nvml.counts["nvmlInit"] == nvml.counts["nvmlShutdown"]
