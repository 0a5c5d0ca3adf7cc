# ruff: noqa: N999
"""The green-context runtime: CUDA's driver, its devices, their slots, and streams on them.

Every call may raise ``mosaic.errors.CudaError`` (a driver call failed) or
``mosaic.errors.BackendUnavailableError`` (no driver, no device, or a driver without the function needed).
Importing the module touches no driver; the first call looks for it. Attributes are read-only.
"""

from collections.abc import Sequence

class DriverFunction:
    """A function of the CUDA driver that Mosaic calls."""

    name: str
    since: int
    """1000 * major + 10 * minor of the CUDA that brought it."""
    use: str
    """'base', 'slots', 'streams' or 'placement': what is lost without it."""

def driver_version() -> int:
    """CUDA version of the driver, 1000 * major + 10 * minor."""

def missing_functions() -> list[DriverFunction]:
    """Functions that Mosaic calls and this driver does not have."""

def device_count() -> int: ...

class Device:
    """One CUDA device, as the driver describes it. ValueError for an ordinal that is not there."""

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
    """One split of a device into equal slots and a remainder, without a promise of alignment or clusters."""

    def __init__(self, device: Device, fine: bool = False) -> None: ...
    fine: bool
    num_slots: int
    sms_per_slot: int
    remainder_sms: int

class PartitionInfo:
    """A partition as the driver created it; plain values that outlive the pool."""

    slots: list[int]
    """Sorted."""
    requested_sms: int
    """Sum over the split's slots."""
    granted_sms: int
    """Read back from the green context."""
    sm_ids: list[int] | None
    """Ids that the probe saw at the last ``verify``, sorted; None before."""
    creation_ms: float
    """Time that the context and its stream took."""

class LayoutCost:
    """Cost of adding a layout; zeros if every partition existed."""

    num_contexts: int
    creation_ms: float
    driver_bytes: int
    """Growth of the memory in use on the device, other processes' included."""

class PoolStats:
    """Content of a pool (nothing after ``close``), and the sums of its layouts' costs."""

    num_contexts: int
    num_lent: int
    creation_ms: float
    driver_bytes: int
    layouts: list[LayoutCost]
    """One cost a layout, in the order of adding."""

class StreamPool:
    """Streams made beforehand for the partitions of layouts, one for each, and lent by table look-up.

    Safe from any thread. In a forked child every method raises ``BackendUnavailableError``; after ``close`` those
    that lend, add or verify raise ValueError.

    Args:
        device: The device to be split.
        layouts: Partitions as slots of the one split, by layout; more can be added later.
        fine: Use the driver's smallest slots, without large clusters.
        placement: ``"merged"``, slots of one split; or ``"split"``, one ``cuDevSmResourceSplit`` a layout with the
            slots' sizes (a driver of CUDA 13.1 or newer; partitions of different layouts may then share SMs).
    """

    def __init__(
        self,
        device: Device,
        layouts: Sequence[Sequence[Sequence[int]]] = (),
        *,
        fine: bool = False,
        placement: str = "merged",
    ) -> None: ...
    def add_layout(self, layout: Sequence[Sequence[int]]) -> LayoutCost:
        """Makes the partitions that the pool does not have; the layout's index is the number added before.

        Raises ValueError for a slot in two partitions. A failure leaves the pool as it was.
        """
    def lend(self, layout: int, partition: int) -> int:
        """Returns the partition's CUstream; no driver call. Every caller gets the same one."""
    def give_back(self, stream: int) -> None:
        """Ends one loan, without waiting for the stream; ValueError for a stream that is not lent."""
    def partitions(self, layout: int) -> list[PartitionInfo]: ...
    def verify(self, image: bytes) -> None:
        """Runs the probe (a cubin or PTX of ``PROBE_SOURCE``) on every partition and keeps the SM ids seen.

        Each partition is probed on a stream made for that. ``mosaic.backends.cuda.overlap`` judges the ids.
        """
    def stats(self) -> PoolStats: ...
    device: Device
    split: SlotSplit
    placement: str
    closed: bool
    def close(self) -> None:
        """Waits for the streams, then ends streams, contexts and the hold on the primary context.

        A failure does not keep the rest from ending; the first one is raised. A second call does nothing.
        """

PROBE_SOURCE: str
"""CUDA C++ of the probe's kernel, ``mosaic_smid``."""

def probe_stream(device: Device, stream: int, image: bytes) -> list[int]:
    """Sorted ids of the SMs that a stream's kernels run on; 0 is the default stream."""
