"""Hardware counters of a GPU through NVML: the utilization of its SMs and memory.

GPM (Hopper and newer) compares two samples of the whole device.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Self

from mosaic.backends.base import Backend
from mosaic.backends.cuda.driver import describe_devices

MIN_SECONDS = 0.5
"""Shortest window. NVML refreshes its counters about every 100 ms, and returns zero in between."""

_PROBE_SECONDS = 0.15


@dataclass(frozen=True, slots=True, kw_only=True)
class Utilisation:
    """Average utilization over a window, as shares of the whole device, 0 to 1; None without a value."""

    sm_util: float | None = None
    """Share of busy SMs."""
    sm_occupancy: float | None = None
    """Share of active warps of all SMs."""
    dram_bandwidth: float | None = None
    """Share of the memory's peak bandwidth."""


class Counters:
    """The counters of one GPU.

    Args:
        gpu: Its ``GPU-...`` UUID.
        nvml: The module ``pynvml``, or an object with its interface.

    Attributes:
        missing: Reason why utilization cannot be read; empty if it can.
    """

    def __init__(self, gpu: str, *, nvml: Any = None) -> None:
        self._device: Any = None
        self._is_open = False
        self.missing = ""
        try:
            self._nvml = nvml or importlib.import_module("pynvml")
        except ImportError as error:
            self.missing = f"NVML is unavailable: {error}; install nvidia-ml-py"
            return
        try:
            self._nvml.nvmlInit()
            self._is_open = True
            self._device = self._nvml.nvmlDeviceGetHandleByUUID(gpu)
            # a virtual GPU may announce counters that it lacks
            if not self._nvml.nvmlGpmQueryDeviceSupport(self._device).isSupportedDevice:
                self.missing = "this GPU has no GPM; it needs Hopper (H100, H200) or newer, not virtualized"
            elif self._between_samples(lambda: time.sleep(_PROBE_SECONDS)) == Utilisation():
                self.missing = "NVML took two samples but returned no metric, as on a virtual GPU"
        except self._nvml.NVMLError as error:
            self.missing = f"NVML raised: {error}"

    def during(self, work: Callable[[], object], seconds: float = MIN_SECONDS) -> Utilisation | None:
        """Repeats ``work``, which keeps the device busy, and returns the utilization; None if NVML fails.

        Takes ``seconds``, or the counters' minimum. Raises RuntimeError if they are ``missing``.
        """
        if self.missing:
            raise RuntimeError(f"counters are unavailable: {self.missing}")
        end = time.monotonic() + max(seconds, MIN_SECONDS)

        def repeat() -> None:
            while time.monotonic() < end:
                work()

        try:
            return self._between_samples(repeat)
        except self._nvml.NVMLError:  # only this reading is lost
            return None

    def close(self) -> None:
        """Releases NVML; idempotent."""
        self._device = None
        if self._is_open:
            self._is_open = False
            self.missing = self.missing or "they were closed"
            self._nvml.nvmlShutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _between_samples(self, work: Callable[[], object]) -> Utilisation:
        nvml = self._nvml
        numbers = (nvml.NVML_GPM_METRIC_SM_UTIL, nvml.NVML_GPM_METRIC_SM_OCCUPANCY, nvml.NVML_GPM_METRIC_DRAM_BW_UTIL)
        with ExitStack() as stack:
            request = nvml.c_nvmlGpmMetricsGet_t()
            request.version = nvml.NVML_GPM_METRICS_GET_VERSION
            request.numMetrics = len(numbers)
            for index, number in enumerate(numbers):
                request.metrics[index].metricId = number
            samples = []
            for _ in range(2):
                samples.append(nvml.nvmlGpmSampleAlloc())
                stack.callback(nvml.nvmlGpmSampleFree, samples[-1])
            request.sample1, request.sample2 = samples
            nvml.nvmlGpmSampleGet(self._device, samples[0])
            work()
            nvml.nvmlGpmSampleGet(self._device, samples[1])
            nvml.nvmlGpmMetricsGet(request)
        util, occupancy, bandwidth = (_share(request.metrics[index]) for index in range(len(numbers)))
        return Utilisation(sm_util=util, sm_occupancy=occupancy, dram_bandwidth=bandwidth)


def open_counters(backend: Backend) -> Counters | None:
    """Opens the counters of a backend's GPU, to be closed by the caller; None on the host."""
    if backend.torch_device.type != "cuda":
        return None
    return Counters(describe_devices()[backend.torch_device.index or 0].uuid)


def _share(metric: Any) -> float | None:
    """Converts percent to a share; None if the value is missing or out of range."""
    value = float(metric.value) / 100
    return min(1.0, value) if metric.nvmlReturn == 0 and 0 <= value < float("inf") else None
