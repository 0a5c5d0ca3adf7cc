# ruff: noqa: N999
"""The green-context runtime: CUDA's driver, its devices and their slots.

Every call may raise ``mosaic.errors.CudaError`` (a driver call failed) or
``mosaic.errors.BackendUnavailableError`` (no driver, no device, or a driver without the function needed).
Importing the module touches no driver; the first call looks for it.
"""

from collections.abc import Sequence

class DriverFunction:
    """A function of the CUDA driver that Mosaic calls."""

    @property
    def name(self) -> str: ...
    @property
    def since(self) -> int:
        """1000 * major + 10 * minor of the CUDA that brought it."""
    @property
    def use(self) -> str:
        """'base', 'slots', 'streams' or 'placement': what is lost without it."""

def driver_version() -> int:
    """CUDA version of the driver, 1000 * major + 10 * minor."""

def missing_functions() -> list[DriverFunction]:
    """Functions that Mosaic calls and this driver does not have."""

def device_count() -> int:
    """Number of devices that the driver offers."""

class Device:
    """One CUDA device, as the driver describes it. ValueError for an ordinal that is not there."""

    def __init__(self, ordinal: int) -> None: ...
    @property
    def ordinal(self) -> int: ...
    @property
    def name(self) -> str: ...
    @property
    def uuid(self) -> str:
        """As nvidia-smi prints it, "GPU-" included."""
    @property
    def compute_capability(self) -> tuple[int, int]: ...
    @property
    def num_sms(self) -> int: ...
    @property
    def total_memory_bytes(self) -> int: ...
    @property
    def min_sm_partition_size(self) -> int | None:
        """Smallest partition in SMs; None on drivers before CUDA 13.0, which do not tell."""
    @property
    def sm_coscheduled_alignment(self) -> int | None:
        """Partitions are multiples of this many SMs; None on drivers before CUDA 13.0."""

class PrimaryContext:
    """Keeps a device's primary context alive."""

    def __init__(self, device: Device) -> None: ...
    @property
    def held(self) -> bool: ...
    def close(self) -> None:
        """Releases the context now; a second call does nothing."""

class SlotSet:
    """Slots of one split: what a partition is made of."""

    @property
    def slots(self) -> list[int]: ...
    @property
    def num_sms(self) -> int: ...

class SlotSplit:
    """One split of a device into equal slots and a remainder."""

    def __init__(self, device: Device, fine: bool = False) -> None: ...
    @property
    def fine(self) -> bool: ...
    @property
    def num_slots(self) -> int: ...
    @property
    def sms_per_slot(self) -> int: ...
    @property
    def remainder_sms(self) -> int:
        """SMs left over by the split, without a promise of alignment or clusters."""
    @property
    def granted_sms(self) -> list[int]:
        """SMs of each slot, read back from the driver."""
    def select(self, slots: Sequence[int]) -> SlotSet:
        """Sorts and checks slots; ValueError if empty, repeated or out of range."""
