# ruff: noqa: N999
"""The green-context runtime: CUDA's driver, its devices, their slots, and streams on them.

Every call may raise ``mosaic.errors.CudaError`` (a driver call failed) or
``mosaic.errors.BackendUnavailableError`` (no driver, no device, or a driver without the function needed).
Importing the module touches no driver; the first call looks for it. Attributes are read-only.
"""

from collections.abc import Sequence

class DriverFunction:
    name: str
    since: int
    """1000 * major + 10 * minor of the CUDA that brought it."""
    use: str
    """'base', 'slots', 'streams' or 'placement': what is lost without it."""

def driver_version() -> int: ...
def missing_functions() -> list[DriverFunction]: ...
def device_count() -> int: ...

class Device:
    """ValueError for an ordinal that is not there."""

    def __init__(self, ordinal: int) -> None: ...
    ordinal: int
    name: str
    uuid: str
    """As nvidia-smi prints it, "GPU-" included."""
    compute_capability: tuple[int, int]
    num_sms: int
    total_memory_bytes: int

class PrimaryContext:
    """Keeps a device's primary context alive, until ``close``."""

    def __init__(self, device: Device) -> None: ...
    held: bool
    def close(self) -> None: ...

class SlotSplit:
    """One split of a device into equal slots and a remainder, which no partition gets."""

    def __init__(self, device: Device) -> None: ...
    num_slots: int
    sms_per_slot: int
    remainder_sms: int

class PartitionInfo:
    slots: list[int]
    """Sorted."""
    requested_sms: int
    granted_sms: int
    sm_ids: list[int] | None
    """Ids that the probe saw at the last ``verify``, sorted; None before."""
    creation_ms: float

class LayoutCost:
    num_contexts: int
    creation_ms: float
    driver_bytes: int
    """Growth of the memory in use on the device, other processes' included."""

class PoolStats:
    num_contexts: int
    num_lent: int
    creation_ms: float
    driver_bytes: int
    layouts: list[LayoutCost]

class StreamPool:
    """Safe from any thread. In a forked child every method raises ``BackendUnavailableError``; after ``close`` those
    that lend, add or verify raise ValueError.

    Args:
        device: The device to be split.
        layouts: Partitions as slots of the one split, by layout; more can be added later.
    """

    def __init__(self, device: Device, layouts: Sequence[Sequence[Sequence[int]]] = ()) -> None: ...
    def add_layout(self, layout: Sequence[Sequence[int]]) -> LayoutCost:
        """Makes the partitions that the pool does not have; the layout's index is the number added before.

        Raises ValueError for a slot in two partitions. A failure leaves the pool as it was.
        """
    def lend(self, layout: int, partition: int) -> int:
        """Returns the partition's CUstream, the same for each caller; no driver call."""
    def give_back(self, stream: int) -> None:
        """Ends one loan, without waiting for the stream; ValueError for a stream that is not lent."""
    def partitions(self, layout: int) -> list[PartitionInfo]: ...
    def verify(self, image: bytes) -> None:
        """Runs the probe (a cubin or PTX of ``PROBE_SOURCE``) on every partition and keeps the SM ids seen."""
    def stats(self) -> PoolStats: ...
    device: Device
    split: SlotSplit
    closed: bool
    def close(self) -> None:
        """Waits for the streams, and ends all that it holds, even after a failure, of which the first is raised."""

PROBE_SOURCE: str
"""CUDA C++ of the probe's kernel, ``mosaic_smid``."""

def probe_stream(device: Device, stream: int, image: bytes) -> list[int]:
    """Sorted ids of the SMs that a stream's kernels run on; 0 is the default stream."""
