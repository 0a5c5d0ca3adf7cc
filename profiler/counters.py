"""Hardware counters of a GPU through NVML: how busy its SMs and its memory are while something runs on it.

GPM (Hopper and later) compares two samples of the whole device.
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
"""Shortest window. NVML's counters are refreshed every 100 ms or so, and read zero in between."""

_PROBE_SECONDS = 0.15


@dataclass(frozen=True, slots=True, kw_only=True)
class Utilisation:
    """The average use of a device over a time, as shares of the whole device, 0 to 1; None without a value."""

    sm_util: float | None = None
    """Share of SMs that were busy."""
    sm_occupancy: float | None = None
    """Share of all SMs' warps that were active."""
    dram_bandwidth: float | None = None
    """Share of the memory's peak bandwidth."""


class Counters:
    """The counters of one GPU.

    Args:
        gpu: Its ``GPU-...`` UUID.
        nvml: The module ``pynvml``, or something that behaves like it.

    Attributes:
        missing: Why utilisation cannot be read here; empty where it can.
    """

    def __init__(self, gpu: str, *, nvml: Any = None) -> None:
        self._device: Any = None
        self._is_open = False
        self.missing = ""
        try:
            self._nvml = nvml or importlib.import_module("pynvml")
        except ImportError as error:
            self.missing = f"NVML cannot be asked: {error}; install nvidia-ml-py"
            return
        try:
            self._nvml.nvmlInit()
            self._is_open = True
            self._device = self._nvml.nvmlDeviceGetHandleByUUID(gpu)
            # A virtual GPU may announce counters that it lacks.
            if not self._nvml.nvmlGpmQueryDeviceSupport(self._device).isSupportedDevice:
                self.missing = "this GPU has no GPM; it takes Hopper (H100, H200) or later, not virtualised"
            elif self._between_samples(lambda: time.sleep(_PROBE_SECONDS)) == Utilisation():
                self.missing = "NVML took two samples and made no metric of them, as on a virtual GPU"
        except self._nvml.NVMLError as error:
            self.missing = f"NVML refuses: {error}"

    def during(self, work: Callable[[], object], seconds: float = MIN_SECONDS) -> Utilisation | None:
        """Repeats ``work``, which keeps the device busy, and returns the use of the device; None where NVML fails.

        It takes ``seconds``, or the least that counters need; RuntimeError where they are ``missing``.
        """
        if self.missing:
            raise RuntimeError(f"there are no counters: {self.missing}")
        end = time.monotonic() + max(seconds, MIN_SECONDS)

        def repeat() -> None:
            while time.monotonic() < end:
                work()

        try:
            return self._between_samples(repeat)
        except self._nvml.NVMLError:  # only this reading is lost
            return None

    def close(self) -> None:
        """Releases NVML; a second call does nothing."""
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
    """Opens the counters of a backend's GPU, which the caller closes; None on the host, which has none."""
    if backend.torch_device.type != "cuda":
        return None
    return Counters(describe_devices()[backend.torch_device.index or 0].uuid)


def _share(metric: Any) -> float | None:
    """Percent to a share; None where NVML has no value or one out of range."""
    value = float(metric.value) / 100
    return min(1.0, value) if metric.nvmlReturn == 0 and 0 <= value < float("inf") else None
