"""Hardware counters of a GPU through NVML: how busy its SMs and its memory are while something runs on it.

GPM (Hopper and later) compares two samples of the whole device, and the measured module runs alone meanwhile: what
the device did is what the module did. NVML is found by name at run time; nothing here needs a GPU to be imported.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Self

MIN_SECONDS = 0.5
"""Shortest window. NVML's counters are refreshed every 100 ms or so, and read zero in between."""

_PROBE_SECONDS = 0.15


@dataclass(frozen=True, slots=True, kw_only=True)
class Utilisation:
    """What a device did on average during a window; shares of the whole device, 0 to 1. None: that one has no value."""

    sm_util: float | None = None
    """Share of SMs that were busy."""
    sm_occupancy: float | None = None
    """Share of all SMs' warps that were active."""
    dram_bandwidth: float | None = None
    """Share of the memory's peak bandwidth."""

    def on_partition(self, granted_sms: int, total_sms: int) -> Utilisation:
        """Returns it as shares of a partition, which was all that ran; bandwidth stays a share of the device's."""
        scale = total_sms / granted_sms
        return Utilisation(
            sm_util=_scaled(self.sm_util, scale),
            sm_occupancy=_scaled(self.sm_occupancy, scale),
            dram_bandwidth=self.dram_bandwidth,
        )


class Window:
    """Two samples around a load; ``found`` is there once the window is closed."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds
        self.found: Utilisation | None = None

    @property
    def is_long_enough(self) -> bool:
        """Whether the load may stop."""
        return time.monotonic() >= self._end


class Counters:
    """The counters of one GPU.

    Attributes:
        missing: Why utilisation cannot be read here; empty where it can.
    """

    def __init__(self, gpu: int | str, *, nvml: Any = None) -> None:
        """Looks for the GPU and takes a first, short reading.

        Args:
            gpu: Its number, as NVML counts, or better its ``GPU-...`` UUID: CUDA may count otherwise.
            nvml: The module ``pynvml``, or something that behaves like it.
        """
        self._device: Any = None
        self._is_open = False
        self._nvml, self.missing = (nvml, "") if nvml is not None else _find_nvml()
        if self.missing:
            return
        try:
            self._nvml.nvmlInit()
            self._is_open = True
            self._device = (
                self._nvml.nvmlDeviceGetHandleByUUID(gpu)
                if isinstance(gpu, str)
                else self._nvml.nvmlDeviceGetHandleByIndex(gpu)
            )
            self.missing = self._probe()
        except self._nvml.NVMLError as error:
            self.missing = f"NVML refuses: {error}"

    @property
    def clocks_mhz(self) -> tuple[int, int]:
        """Clocks of SMs and memory at this moment, in MHz; 0 where NVML does not tell."""
        found = []
        for kind in ("NVML_CLOCK_SM", "NVML_CLOCK_MEM"):
            try:
                number = getattr(self._nvml, kind)
                found.append(int(self._nvml.nvmlDeviceGetClockInfo(self._device, number)) if self._device else 0)
            except (AttributeError, self._nvml.NVMLError):
                found.append(0)
        return found[0], found[1]

    @contextmanager
    def window(self, seconds: float = MIN_SECONDS) -> Iterator[Window]:
        """Samples on entering and on leaving; the caller keeps the device busy until ``is_long_enough``.

        ``found`` stays None where NVML fails at the end.

        Raises:
            ValueError: The window is shorter than the counters can tell.
            RuntimeError: They cannot be read here; see ``missing``.
        """
        if seconds < MIN_SECONDS:
            raise ValueError(f"a window of {seconds} s; counters need {MIN_SECONDS} s or more")
        if self.missing:
            raise RuntimeError(f"there are no counters: {self.missing}")
        window = Window(seconds)
        with self._samples() as (first, second):
            self._nvml.nvmlGpmSampleGet(self._device, first)
            yield window
            try:
                self._nvml.nvmlGpmSampleGet(self._device, second)
                window.found = self._compare(first, second)
            except self._nvml.NVMLError:  # one reading is lost, the load was not for nothing
                window.found = None

    def close(self) -> None:
        """Lets go of NVML. Calling it again does nothing."""
        self._device = None
        if self._is_open:
            self._is_open = False
            self.missing = self.missing or "they were closed"
            self._nvml.nvmlShutdown()

    def __enter__(self) -> Self:
        """Returns itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Closes it."""
        self.close()

    def _probe(self) -> str:
        """Why counters cannot be read; found out by reading, since a virtual GPU may promise and then not deliver."""
        if not self._nvml.nvmlGpmQueryDeviceSupport(self._device).isSupportedDevice:
            return "this GPU has no GPM; it takes Hopper (H100, H200) or later, not virtualised"
        with self._samples() as (first, second):
            self._nvml.nvmlGpmSampleGet(self._device, first)
            time.sleep(_PROBE_SECONDS)
            self._nvml.nvmlGpmSampleGet(self._device, second)
            if self._compare(first, second) == Utilisation():
                return "NVML took two samples and made no metric of them, as on a virtual GPU"
        return ""

    @contextmanager
    def _samples(self) -> Iterator[tuple[Any, Any]]:
        first = self._nvml.nvmlGpmSampleAlloc()
        try:
            second = self._nvml.nvmlGpmSampleAlloc()
            try:
                yield first, second
            finally:
                self._nvml.nvmlGpmSampleFree(second)
        finally:
            self._nvml.nvmlGpmSampleFree(first)

    def _compare(self, first: Any, second: Any) -> Utilisation:
        nvml = self._nvml
        numbers = (nvml.NVML_GPM_METRIC_SM_UTIL, nvml.NVML_GPM_METRIC_SM_OCCUPANCY, nvml.NVML_GPM_METRIC_DRAM_BW_UTIL)
        asked = nvml.c_nvmlGpmMetricsGet_t()
        asked.version = nvml.NVML_GPM_METRICS_GET_VERSION
        asked.numMetrics = len(numbers)
        asked.sample1, asked.sample2 = first, second
        for index, number in enumerate(numbers):
            asked.metrics[index].metricId = number
        nvml.nvmlGpmMetricsGet(asked)
        util, occupancy, bandwidth = (_share(asked.metrics[index]) for index in range(len(numbers)))
        return Utilisation(sm_util=util, sm_occupancy=occupancy, dram_bandwidth=bandwidth)


def _find_nvml() -> tuple[Any, str]:
    try:
        return importlib.import_module("pynvml"), ""
    except ImportError as error:
        return _NoNvml, f"NVML cannot be asked: {error}; install nvidia-ml-py"


class _NoNvml:
    """Stands for the package where it is not installed."""

    NVMLError = RuntimeError


def _share(metric: Any) -> float | None:
    """Percent to a share; None where NVML has no value or gives nonsense."""
    value = float(metric.value) / 100
    return min(1.0, value) if metric.nvmlReturn == 0 and 0 <= value < float("inf") else None


def _scaled(share: float | None, scale: float) -> float | None:
    return None if share is None else min(1.0, share * scale)
