"""The machine and software that a profile is measured with."""

from __future__ import annotations

import dataclasses
import os
import platform
import statistics
from collections.abc import Sequence
from datetime import UTC, datetime

import torch

from mosaic.backends.base import Backend
from mosaic.backends.cuda.driver import describe_devices, describe_driver, describe_nvml
from mosaic.backends.host.backend import available_cores
from mosaic.errors import BackendUnavailableError
from mosaic.profile import Environment
from mosaic.profiler.machine.counters import Counters
from mosaic.profiler.records import ModuleKey
from mosaic.profiler.structure import digest_of, inputs_of
from mosaic.profiler.subject import Subject


def now_utc() -> str:
    """Returns the date and time for a sample or a profile: ISO 8601, UTC, to the millisecond, so texts sort by time."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def environment_of(
    backend: Backend,
    *,
    foreign_cpu_share: float = 0.0,
    clocks_mhz: Sequence[tuple[int, int]] = (),
    began: str = "",
) -> Environment:
    """Returns the software, the date and the clocks, for a profile and to compare one with.

    Args:
        backend: Where.
        foreign_cpu_share: Share of the machine's CPU time that other processes took.
        clocks_mhz: SM and memory clocks, each time that they were read; the medians are kept.
        began: When measuring began, as ``now_utc`` says it.
    """
    on_gpu = backend.torch_device.type == "cuda"
    sm_clock, memory_clock = zip(*clocks_mhz, strict=True) if clocks_mhz else ((0,), (0,))
    return Environment(
        torch_version=torch.__version__,
        python_version=platform.python_version(),
        driver_version=describe_driver().version if on_gpu else "",
        driver=_driver_release() if on_gpu else "",
        sm_clock_mhz=round(statistics.median(sm_clock)),
        memory_clock_mhz=round(statistics.median(memory_clock)),
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        began=began,
        foreign_cpu_share=round(foreign_cpu_share, 4),
    )


def key_of(subject: Subject, backend: Backend, environment: Environment) -> ModuleKey:
    """Returns under what a module's measurements are kept."""
    return ModuleKey(
        structure=digest_of(subject.module),
        inputs=inputs_of(subject),
        device=dataclasses.replace(backend.device, memory_bytes=0),  # a kernel's count of memory may grow after boot
        torch_version=environment.torch_version,
        driver=" ".join(filter(None, (environment.driver, environment.driver_version, backend.sm_settings))),
        threads=_threads_of(backend),
    )


def open_counters(backend: Backend) -> Counters | None:
    """Opens the counters of a backend's GPU, which the caller closes; None on the host, which has none."""
    if backend.torch_device.type != "cuda":
        return None
    return Counters(describe_devices()[backend.torch_device.index or 0].uuid)


def _threads_of(backend: Backend) -> str:
    """A lane has a thread for each of its slots; these are what may share its cores, or spin there."""
    if backend.torch_device.type == "cuda":
        return ""
    waiting = os.environ.get("OMP_WAIT_POLICY", "").lower() or "default"
    return f"{len(available_cores())} cores, {torch.get_num_interop_threads()} inter-op, waiting {waiting}"


def _driver_release() -> str:
    """Returns the kernel driver's release; empty where NVML does not answer."""
    try:
        return describe_nvml().driver_version
    except BackendUnavailableError:
        return ""
