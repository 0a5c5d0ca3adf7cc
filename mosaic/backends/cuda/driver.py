"""CUDA devices, their slots and pools of streams; the only module that loads the extension ``mosaic._C``.

Importing this module loads neither the extension, the driver nor torch. Functions raise ``BackendUnavailableError`` if
something is missing and ``CudaError`` if the driver fails.
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
    """A driver function that the installed driver lacks."""

    name: str
    since: str
    """CUDA version that introduced it, such as ``12.4``."""
    use: str
    """The feature that needs it: ``base``, ``slots``, ``streams`` or ``placement`` (optional)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DriverDescription:
    """The driver's CUDA version, such as ``13.0``, and the functions that it lacks."""

    version: str
    missing: tuple[MissingFunction, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CudaDevice:
    """A GPU, as described by its driver."""

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
    """SMs outside every slot."""


def require_extension() -> Any:
    """Loads and returns ``mosaic._C``."""
    try:
        return importlib.import_module("mosaic._C")
    except ImportError as error:
        raise BackendUnavailableError(
            "the extension mosaic._C does not load; build it with `pip install .`",
            found=str(error),
            needed="Linux, g++ with C++17 and Python's headers",
        ) from error


def is_available() -> bool:
    """Returns True if a GPU supports streams on partitions; ``mosaic doctor`` gives the reason if not."""
    try:
        driver = describe_driver()
        return not lost_uses(driver) and len(describe_devices()) > 0
    except (BackendUnavailableError, CudaError):
        return False


def require_streams() -> None:
    """Raises BackendUnavailableError if the driver is too old for streams on partitions."""
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
    """Returns the features that this driver lacks, in the order ``base``, ``slots``, ``streams``."""
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
    """Returns every device of the driver, in its order."""
    extension = require_extension()
    devices = [extension.Device(ordinal) for ordinal in range(extension.device_count())]
    return tuple(described(CudaDevice, device, compute_capability=_capability(device)) for device in devices)


def described(kind: type[T], value: Any, **changes: Any) -> T:
    """Converts an object of the extension to the dataclass ``kind``, with ``changes``."""
    names = [entry.name for entry in fields(kind) if entry.name not in changes]  # type: ignore[arg-type]
    return kind(**{name: getattr(value, name) for name in names}, **changes)


def _capability(device: Any) -> str:
    return ".".join(map(str, device.compute_capability))


def probe_source() -> str:
    """Returns the CUDA C++ source of the kernel that records the SM of each of its blocks."""
    source: str = require_extension().PROBE_SOURCE
    return source


@dataclass(frozen=True, slots=True)
class CudaDriver:
    """One device, by its number, through the installed driver. Equal instances share a pool."""

    ordinal: int

    def describe(self) -> CudaDevice:
        """Describes the device; raises BackendUnavailableError without the device or its driver."""
        require_streams()
        needed = "an NVIDIA GPU, Volta or newer"
        try:
            devices = describe_devices()
        except CudaError as error:
            raise BackendUnavailableError("the CUDA driver does not answer", found=str(error), needed=needed) from error
        if not 0 <= self.ordinal < len(devices):
            raise BackendUnavailableError(
                f"GPU {self.ordinal} does not exist; check CUDA_VISIBLE_DEVICES",
                found=f"{len(devices)} GPUs",
                needed=needed,
            )
        return devices[self.ordinal]

    def describe_slots(self) -> SlotDescription:
        """Describes the slots of a split of the device; nothing is reserved."""
        return described(SlotDescription, require_extension().SlotSplit(self._device()))

    def open_pool(self, layouts: Sequence[Sequence[Sequence[int]]] = ()) -> _C.StreamPool:
        """Creates a pool of green-context streams, by layout; the caller closes it.

        Two pools of one device would use the same SMs, so ``CudaBackend`` shares one per process.
        """
        pool: _C.StreamPool = require_extension().StreamPool(self._device(), layouts)
        return pool

    def probe_image(self) -> bytes:
        """Returns the probe, compiled for this device."""
        return compile_probe(_capability(self._device()), probe_source())

    def probe_stream(self, stream: int, image: bytes | None = None) -> tuple[int, ...]:
        """Returns the sorted ids of the SMs of a stream's kernels; blocks until the probe has run.

        Args:
            stream: The handle of a stream; 0 is the default stream.
            image: The compiled probe; by default the device's.
        """
        return tuple(require_extension().probe_stream(self._device(), stream, image or self.probe_image()))

    def _device(self) -> _C.Device:
        device: _C.Device = require_extension().Device(self.ordinal)
        return device
