"""Green-context streams of one device: one pool in a process, lent to lanes, never ended while the process lives.

Streams have to outlive the lanes that run on them. Autograd runs a backward on the streams of its forward, and torch's
allocator notes an event on each stream that used a tensor when that tensor is let go (pytorch#66936); both may happen
long after the lanes were closed, and on a stream that is gone both are undefined. A pool is therefore shared by all
backends of its kind and kept until the process ends, when the driver takes everything back. What it holds is bounded:
a context and a stream for each partition that was ever asked for.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any, ClassVar, Protocol

from mosaic.backends.cuda import CudaDevice, Placement, SlotDescription
from mosaic.device import FORBID_EXTRA
from mosaic.errors import CudaError

Slots = tuple[int, ...]
Layout = tuple[Slots, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionRecord:
    """What the driver made of one partition."""

    __pydantic_config__: ClassVar[dict[str, str]] = FORBID_EXTRA

    slots: Slots
    """Its slots; empty for the SMs that the split left over."""
    requested_sms: int
    """SMs of its slots."""
    granted_sms: int
    """SMs that its green context has, read back from the driver."""
    sm_ids: tuple[int, ...] | None
    """Ids of the SMs that the probe saw it use, sorted; None where it was not probed."""
    creation_ms: float
    """Time that its context and stream took."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutRecord:
    """What adding one layout to the pool took; zeros where everything was there already."""

    __pydantic_config__: ClassVar[dict[str, str]] = FORBID_EXTRA

    partitions: Layout
    """Its partitions."""
    num_contexts: int
    """Green contexts that were made."""
    num_streams: int
    """Streams that were made."""
    creation_ms: float
    """Time that it took."""
    driver_bytes: int
    """Device memory that went, by the driver; wrong by what others took or gave meanwhile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolReport:
    """Partitions in use, and what making them took."""

    __pydantic_config__: ClassVar[dict[str, str]] = FORBID_EXTRA

    fine: bool
    """Whether slots are the driver's smallest ones, without large clusters."""
    placement: Placement
    """How partitions got their SMs."""
    partitions: tuple[PartitionRecord, ...]
    """In the order in which they were asked for."""
    remainder: PartitionRecord | None
    """The partition of left-over SMs, if it was asked for."""
    layouts: tuple[LayoutRecord, ...]
    """In the order in which they were added."""
    lane_overhead_bytes: int | None = None
    """Device memory that the first products on a lane leave behind; None where it was not measured."""

    @property
    def creation_ms(self) -> float:
        """Time that all layouts took."""
        return sum(layout.creation_ms for layout in self.layouts)

    @property
    def driver_bytes(self) -> int:
        """Device memory that all layouts took."""
        return sum(layout.driver_bytes for layout in self.layouts)


class GreenDriver(Protocol):
    """What a pool needs of a device's driver; ``mosaic.backends.cuda.CudaDriver`` is the product."""

    def describe(self) -> CudaDevice:
        """Describes the device."""

    def describe_slots(self, *, fine: bool) -> SlotDescription:
        """Describes its slots."""

    def open_pool(self, *, fine: bool, placement: Placement, priority: int, remainder: bool) -> Any:
        """Makes an empty ``_C.StreamPool``, or what does as it does."""

    def probe_image(self) -> bytes:
        """Compiles the probe for the device."""

    def __hash__(self) -> int:
        """Equal drivers share a pool."""


def pack_layouts(partitions: Iterable[Slots]) -> tuple[Layout, ...]:
    """Groups partitions into few layouts whose partitions share no slot: each goes into the first that it fits.

    A plan names the partitions of a stage together, so that a stage's layout stays whole.
    """
    groups: list[list[Slots]] = []
    for slots in dict.fromkeys(partitions):
        for group in groups:
            if all(set(slots).isdisjoint(other) for other in group):
                group.append(slots)
                break
        else:
            groups.append([slots])
    return tuple(tuple(group) for group in groups)


class Loan:
    """Streams that were lent; made by ``GreenPool.borrow``.

    Attributes:
        streams: The stream's handle, for each partition.
        layout_of: Which layout each partition belongs to.
        layouts: What each layout took to add.
    """

    def __init__(self, pool: GreenPool) -> None:
        self._pool = pool
        self._keys: list[object] = []
        self.streams: dict[Slots, int] = {}
        self.layout_of: dict[Slots, int] = {}
        self.layouts: tuple[LayoutRecord, ...] = ()
        self.remainder: int | None = None

    def records(self) -> tuple[PartitionRecord, ...]:
        """Describes its partitions."""
        return tuple(self._pool.record(self.layout_of[slots], slots) for slots in self.streams)

    def give_back(self) -> None:
        """Ends the loan; the streams must have ended their work. A second call does nothing."""
        while self._keys:
            self._pool.release(self._keys.pop())


class GreenPool:
    """The streams of one device; safe from any thread.

    Args:
        driver: The device.
        fine: Use the driver's smallest slots.
        placement: How partitions get their SMs.
        priority: Of all streams.
        remainder: Make a partition of the SMs that the split leaves over, too.
    """

    def __init__(
        self, driver: GreenDriver, *, fine: bool, placement: Placement, priority: int, remainder: bool
    ) -> None:
        self.placement: Placement = placement
        self.fine = fine
        self._priority = priority
        self._has_remainder = remainder
        self._pool = driver.open_pool(fine=fine, placement=placement, priority=priority, remainder=remainder)
        self._lock = threading.Lock()
        self._released: deque[object] = deque()
        self._indices: dict[Layout, int] = {}
        self._layouts: list[Layout] = []
        self._loans: dict[object, tuple[int, int]] = {}

    def borrow(self, layouts: Sequence[Layout], *, image: Callable[[], bytes | None]) -> Loan:
        """Lends a stream for each partition, and makes what is not there yet.

        A partition that is lent already is lent again, by the same stream: what two borrowers give to it runs in turn.

        Args:
            layouts: Partitions, none of them twice.
            image: Called for the compiled probe if a partition was not probed yet; None leaves it unprobed.

        Raises:
            CudaError: The driver failed, or partitions without a common slot were seen to share an SM.
        """
        loan = Loan(self)
        try:
            with self._lock:
                loan.layouts = tuple(self._add(layout) for layout in layouts)
                self._verify(layouts, image)
                for layout in layouts:
                    for number, slots in enumerate(layout):
                        index = self._indices[layout]
                        loan.streams[slots] = self._lend(loan, self._key(layout, slots), index, number)
                        loan.layout_of[slots] = index
                if self._has_remainder:
                    loan.remainder = self._lend(loan, "remainder", -1, 0)
        except BaseException:
            loan.give_back()
            raise
        finally:
            self._end_released()
        return loan

    def release(self, key: object) -> None:
        """Ends one loan of a stream; its last borrower gives it back to the driver's pool.

        Python may let lanes go at any moment, also while this very thread borrows: then it is done afterwards.
        """
        self._released.append(key)
        self._end_released()

    def record(self, index: int, slots: Slots) -> PartitionRecord:
        """Describes a partition."""
        return _record(self._pool.partitions(index)[self._layouts[index].index(slots)])

    @property
    def remainder(self) -> PartitionRecord | None:
        """Describes the partition of left-over SMs."""
        return None if self._pool.remainder is None else _record(self._pool.remainder)

    def close(self) -> None:
        """Ends streams and contexts; for when nothing is left that ran on them, tensors included."""
        with self._lock:
            self._pool.close()

    @property
    def stats(self) -> Any:
        """Returns the pool's own counts, a ``_C.PoolStats``."""
        return self._pool.stats()

    def _end_released(self) -> None:
        while self._released and self._lock.acquire(blocking=False):
            try:
                while self._released:
                    key = self._released.popleft()
                    handle, borrowers = self._loans.pop(key)
                    if borrowers > 1:
                        self._loans[key] = (handle, borrowers - 1)
                    elif not self._pool.closed:
                        self._pool.give_back(handle)
            finally:
                self._lock.release()

    def _key(self, layout: Layout, slots: Slots) -> object:
        return slots if self.placement == "merged" else (layout, slots)

    def _add(self, layout: Layout) -> LayoutRecord:
        if layout in self._indices:
            return LayoutRecord(partitions=layout, num_contexts=0, num_streams=0, creation_ms=0.0, driver_bytes=0)
        cost = self._pool.add_layout(layout)
        self._indices[layout] = len(self._layouts)
        self._layouts.append(layout)
        return LayoutRecord(
            partitions=layout,
            num_contexts=cost.num_contexts,
            num_streams=cost.num_streams,
            creation_ms=cost.creation_ms,
            driver_bytes=cost.driver_bytes,
        )

    def _lend(self, loan: Loan, key: object, index: int, number: int) -> int:
        handle, borrowers = self._loans.get(key, (0, 0))
        if not borrowers:
            lend = self._pool.lend_remainder if index < 0 else functools.partial(self._pool.lend, index, number)
            handle = lend(priority=self._priority)
        self._loans[key] = (handle, borrowers + 1)
        loan._keys.append(key)
        return handle

    def _verify(self, layouts: Sequence[Layout], image: Callable[[], bytes | None]) -> None:
        found = [info for layout in layouts for info in self._pool.partitions(self._indices[layout])]
        if any(info.sm_ids is None for info in found):
            compiled = image()
            if compiled is None:
                return
            self._pool.verify(compiled)
        self._check_between_layouts(layouts)

    def _check_between_layouts(self, layouts: Sequence[Layout]) -> None:
        """Looks at partitions of different layouts, which the driver's pool does not compare."""
        if self.placement == "split":  # the driver promises nothing there; lanes exclude each other instead
            return
        records = [(layout, self.record(self._indices[layout], slots)) for layout in layouts for slots in layout]
        for (here, one), (there, other) in combinations(records, 2):
            if here == there:
                continue
            shared = set(one.sm_ids or ()) & set(other.sm_ids or ())
            if shared and set(one.slots).isdisjoint(other.slots):
                raise CudaError(
                    f"slots {list(one.slots)} and slots {list(other.slots)} were seen to share SM "
                    f"{', '.join(map(str, sorted(shared)))}, though they have no slot in common; `mosaic doctor` "
                    "looks for what can cause it (MPS, modules with dynamic parallelism)",
                    call="cuDevSmResourceSplitByCount",
                    status="CUDA_SUCCESS",
                )


_MAKING = threading.Lock()


def pool_of(driver: GreenDriver, *, fine: bool, placement: Placement, priority: int, remainder: bool) -> GreenPool:
    """Returns the pool of a device and kind in this process; see the top of this module for why it is never ended."""
    with _MAKING:  # or two threads would make two, which give out the same SMs
        return _make_pool(driver, fine=fine, placement=placement, priority=priority, remainder=remainder)


@functools.cache
def _make_pool(driver: GreenDriver, **kind: Any) -> GreenPool:
    pool = GreenPool(driver, **kind)
    # At interpreter exit, too, tensors may be let go after their streams' pool; so it is never freed by Python.
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(pool))
    return pool


def _record(info: Any) -> PartitionRecord:
    return PartitionRecord(
        slots=tuple(info.slots),
        requested_sms=info.requested_sms,
        granted_sms=info.granted_sms,
        sm_ids=None if info.sm_ids is None else tuple(info.sm_ids),
        creation_ms=info.creation_ms,
    )
