# ruff: noqa: N999
"""The green-context runtime: CUDA's driver, its devices, their slots, and streams on them.

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

class PrimaryContext:
    """Keeps a device's primary context alive."""

    def __init__(self, device: Device) -> None: ...
    @property
    def held(self) -> bool: ...
    def close(self) -> None:
        """Releases the context now; a second call does nothing."""

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

class PartitionInfo:
    """A partition as the driver created it; plain values that outlive the pool."""

    @property
    def slots(self) -> list[int]:
        """Sorted."""
    @property
    def requested_sms(self) -> int:
        """Sum over the split's slots."""
    @property
    def granted_sms(self) -> int:
        """Read back from the green context."""
    @property
    def sm_ids(self) -> list[int] | None:
        """Ids that the probe saw at the last ``verify``, sorted; None before."""
    @property
    def creation_ms(self) -> float:
        """Time that the context and its stream took."""

class LayoutCost:
    """Cost of adding a layout; zeros if every partition existed."""

    @property
    def num_contexts(self) -> int: ...
    @property
    def creation_ms(self) -> float: ...
    @property
    def driver_bytes(self) -> int:
        """Growth of the memory in use on the device; wrong by what others took or gave meanwhile."""

class PoolStats:
    """Content of a pool (nothing after ``close``), and the cost of making it."""

    @property
    def num_contexts(self) -> int: ...
    @property
    def num_lent(self) -> int: ...
    @property
    def creation_ms(self) -> float:
        """Sum over the layouts."""
    @property
    def driver_bytes(self) -> int:
        """Sum over the layouts."""
    @property
    def layouts(self) -> list[LayoutCost]:
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
        """Returns the partition's CUstream, to each who asks; no driver call."""
    def give_back(self, stream: int) -> None:
        """Ends one loan, without waiting for the stream; ValueError for a stream that is not lent."""
    def partitions(self, layout: int) -> list[PartitionInfo]: ...
    def verify(self, image: bytes) -> None:
        """Runs the probe (a cubin or PTX of ``PROBE_SOURCE``) on every partition and keeps the SM ids seen.

        Streams that are lent are left alone: each partition is probed on a stream made for that. What the ids say
        about a layout is for ``mosaic.backends.cuda.overlap`` to judge.
        """
    def stats(self) -> PoolStats: ...
    @property
    def device(self) -> Device: ...
    @property
    def split(self) -> SlotSplit: ...
    @property
    def placement(self) -> str: ...
    @property
    def closed(self) -> bool: ...
    def close(self) -> None:
        """Waits for the streams, then ends streams, contexts and the hold on the primary context.

        What fails does not keep the rest from ending; the first failure is raised. A second call does nothing.
        """

PROBE_SOURCE: str
"""CUDA C++ of the probe's kernel, ``mosaic_smid``."""

def probe_stream(device: Device, stream: int, image: bytes) -> list[int]:
    """Sorted ids of the SMs that a stream's kernels run on, whoever made it; 0 is the default stream."""
