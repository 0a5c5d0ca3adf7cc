"""The findings of ``mosaic doctor``, as plain data that goes into JSON by ``dataclasses.asdict``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mosaic.backends.cuda.driver import CudaDevice, DriverDescription, NvmlDescription, SlotDescription

Severity = Literal["error", "warning", "note"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """One thing that a person should know, and what to do about it."""

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
    """CUDA version it was built with; none for a CPU build."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackageReport:
    """One Python package that Mosaic uses."""

    name: str
    version: str | None
    """None where it is not installed."""
    extra: str | None
    """The extra that brings it; none if Mosaic always needs it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceReport:
    """One GPU and the slots that its driver makes of it."""

    device: CudaDevice
    slots: SlotDescription | None
    fine_slots: SlotDescription | None


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheReport:
    """Measurements that earlier runs left for later ones."""

    folder: str
    """Where ``mosaic.colocate`` and ``mosaic profile`` keep them by default."""
    num_files: int
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorReport:
    """Everything that ``mosaic doctor`` looks at; a part that is not there is none, and a finding says why."""

    mosaic_version: str
    host: HostReport
    torch: TorchReport | None
    packages: tuple[PackageReport, ...]
    extension_loads: bool
    driver: DriverDescription | None
    devices: tuple[DeviceReport, ...]
    nvml: NvmlDescription | None
    probe: str | None
    """Version of the NVRTC that compiles the SM probe; none where there is none."""
    cache: CacheReport | None
    """None where the user has no folder for it."""
    works: tuple[str, ...]
    """What can be done on this machine as it is."""
    findings: tuple[Diagnosis, ...]
