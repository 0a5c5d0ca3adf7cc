"""CUDA devices, their slots and pools of streams; the only module that loads the extension ``mosaic._C``.

Importing this module loads neither the extension nor the driver nor torch. Each function raises
``BackendUnavailableError`` where something is not there and ``CudaError`` where the driver fails; there is no silent
fallback.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, TypeVar

from mosaic.backends.cuda.probe import compile_probe
from mosaic.errors import BackendUnavailableError, CudaError

if TYPE_CHECKING:
    from mosaic import _C

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class MissingFunction:
    """A driver function that Mosaic uses and the installed driver does not have."""

    name: str
    since: str
    """CUDA version that brought it, such as ``12.4``."""
    use: str
    """The lost use: ``base``, ``slots``, ``streams`` or ``placement`` (which Mosaic does without)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DriverDescription:
    """The CUDA version that the driver serves, such as ``13.0``, and the functions that it lacks."""

    version: str
    missing: tuple[MissingFunction, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CudaDevice:
    """One GPU, as its driver describes it."""

    ordinal: int
    name: str
    uuid: str
    compute_capability: str
    num_sms: int
    total_memory_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotDescription:
    """The slots of a device's SMs."""

    num_slots: int
    sms_per_slot: int
    remainder_sms: int
    """SMs left over, outside every slot."""


def require_extension() -> Any:
    """Loads and returns ``mosaic._C``."""
    try:
        return importlib.import_module("mosaic._C")
    except ImportError as error:
        raise BackendUnavailableError(
            "the extension mosaic._C does not load; build it with `pip install -e .` or `pip install .`",
            found=str(error),
            needed="Linux, g++ with C++17 and Python's headers",
        ) from error


def is_available() -> bool:
    """Returns True if there is a GPU whose SMs can be split and given streams; ``mosaic doctor`` explains why not."""
    try:
        driver = describe_driver()
        return not lost_uses(driver) and len(describe_devices()) > 0
    except (BackendUnavailableError, CudaError):
        return False


def require_streams() -> None:
    """Raises BackendUnavailableError if the driver is too old to give slots streams."""
    driver = describe_driver()
    lost = lost_uses(driver)
    if lost:
        missing = [function.name for function in driver.missing if function.use in lost]
        raise BackendUnavailableError(
            "the CUDA driver is too old for green-context streams",
            found=f"CUDA {driver.version}, without {', '.join(missing)}",
            needed="CUDA 12.5",
        )


def lost_uses(driver: DriverDescription) -> tuple[str, ...]:
    """Returns the uses that this driver lacks, in the order ``base``, ``slots``, ``streams``."""
    missing = {function.use for function in driver.missing}
    return tuple(use for use in ("base", "slots", "streams") if use in missing)


def _version_text(version: int) -> str:
    """Formats CUDA's version number: 12040 is ``12.4``."""
    return f"{version // 1000}.{version % 1000 // 10}"


def describe_driver() -> DriverDescription:
    """Returns the driver's version and the functions it lacks."""
    extension = require_extension()
    missing = [
        described(MissingFunction, entry, since=_version_text(entry.since)) for entry in extension.missing_functions()
    ]
    return DriverDescription(version=_version_text(extension.driver_version()), missing=tuple(missing))


def describe_devices() -> tuple[CudaDevice, ...]:
    """Returns every device that the driver offers, in the driver's order."""
    extension = require_extension()
    devices = [extension.Device(ordinal) for ordinal in range(extension.device_count())]
    return tuple(described(CudaDevice, device, compute_capability=_capability(device)) for device in devices)


def described(kind: type[T], value: Any, **changes: Any) -> T:
    """Returns the fields of the dataclass ``kind`` that an object of the extension has, apart from ``changes``."""
    names = [entry.name for entry in fields(kind) if entry.name not in changes]  # type: ignore[arg-type]
    return kind(**{name: getattr(value, name) for name in names}, **changes)


def _capability(device: Any) -> str:
    return ".".join(map(str, device.compute_capability))


def probe_source() -> str:
    """Returns the CUDA C++ of the kernel that notes the SM of each of its blocks."""
    source: str = require_extension().PROBE_SOURCE
    return source


@dataclass(frozen=True, slots=True)
class CudaDriver:
    """One device, by its number, through the installed driver. Equal ones share a pool."""

    ordinal: int

    def describe(self) -> CudaDevice:
        """Describes the device; raises BackendUnavailableError without one, or without a driver that serves it."""
        require_streams()
        needed = "an NVIDIA GPU, Volta or newer"
        try:
            devices = describe_devices()
        except CudaError as error:
            raise BackendUnavailableError("the CUDA driver does not answer", found=str(error), needed=needed) from error
        if not 0 <= self.ordinal < len(devices):
            raise BackendUnavailableError(
                f"there is no GPU number {self.ordinal}; look at CUDA_VISIBLE_DEVICES",
                found=f"{len(devices)} GPUs",
                needed=needed,
            )
        return devices[self.ordinal]

    def describe_slots(self) -> SlotDescription:
        """Splits the device on trial and describes the slots; nothing is reserved."""
        return described(SlotDescription, require_extension().SlotSplit(self._device()))

    def open_pool(self, layouts: Sequence[Sequence[Sequence[int]]] = ()) -> _C.StreamPool:
        """Makes a pool of green-context streams of partitions, by layout; the caller closes it.

        Two pools on one device have two splits and give out the same SMs, so ``CudaBackend`` shares one in a process.
        """
        pool: _C.StreamPool = require_extension().StreamPool(self._device(), layouts)
        return pool

    def probe_image(self) -> bytes:
        """Returns the probe, compiled for this device."""
        return compile_probe(_capability(self._device()), probe_source())

    def probe_stream(self, stream: int, image: bytes | None = None) -> tuple[int, ...]:
        """Returns the sorted ids of the SMs that kernels of a stream run on; blocks until the probe has run.

        Args:
            stream: The handle of any stream; 0 is the default stream.
            image: The compiled probe; by default that of the device.
        """
        return tuple(require_extension().probe_stream(self._device(), stream, image or self.probe_image()))

    def _device(self) -> _C.Device:
        device: _C.Device = require_extension().Device(self.ordinal)
        return device
