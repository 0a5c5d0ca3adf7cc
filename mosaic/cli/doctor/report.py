"""The findings of ``mosaic doctor``, as plain data that goes into JSON by ``dataclasses.asdict``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mosaic.backends.cuda.driver import CudaDevice, DriverDescription, NvmlDescription, SlotDescription

Severity = Literal["error", "warning", "note"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """A finding with its remedy."""

    severity: Severity
    """``error``: Mosaic cannot run; ``warning``: a GPU's partitions suffer; ``note``: good to know."""
    what: str
    todo: str


@dataclass(frozen=True, slots=True, kw_only=True)
class HostReport:
    """The machine without its GPUs."""

    platform: str
    python: str
    num_cores: int
    """Cores that this process may use."""
    num_cores_installed: int
    omp_wait_policy: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchReport:
    """The installed torch, read from its files: torch itself is not imported."""

    version: str
    cuda: str | None
    """CUDA version of its build; None for a CPU build."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackageReport:
    """One Python package that Mosaic uses."""

    name: str
    version: str | None
    """None if it is not installed."""
    extra: str | None
    """The extra that installs it; None if Mosaic always needs it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceReport:
    """One GPU and its slots."""

    device: CudaDevice
    slots: SlotDescription | None
    fine_slots: SlotDescription | None


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheReport:
    """Cached measurements of earlier runs."""

    folder: str
    """Default folder of ``mosaic.colocate`` and ``mosaic profile``."""
    num_files: int
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorReport:
    """Report of ``mosaic doctor``; a missing part is None, with a finding."""

    mosaic_version: str
    host: HostReport
    torch: TorchReport | None
    packages: tuple[PackageReport, ...]
    extension_loads: bool
    driver: DriverDescription | None
    devices: tuple[DeviceReport, ...]
    nvml: NvmlDescription | None
    probe: str | None
    """Version of the NVRTC that compiles the SM probe; None without one."""
    cache: CacheReport | None
    """None if the user has no folder for it."""
    works: tuple[str, ...]
    """Functions that work on this machine."""
    findings: tuple[Diagnosis, ...]
