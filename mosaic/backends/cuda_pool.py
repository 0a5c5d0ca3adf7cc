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
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from mosaic.backends.cuda.driver import CudaDevice, Placement, SlotDescription
from mosaic.backends.cuda.overlap import describe_excess, find_shared_sms
from mosaic.backends.cuda_records import Layout, LayoutRecord, PartitionRecord, Slots


class GreenDriver(Protocol):
    """What a pool needs of a device's driver; ``mosaic.backends.cuda.driver.CudaDriver`` is the product."""

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
        records: What the driver made of each partition.
        layout_of: Which layout each partition belongs to.
        layouts: What each layout took to add.
        remainder: The handle and the record of the partition of left-over SMs, if there is one.
        shared_sms: Ids of SMs that partitions share although they were given as disjoint.
        notes: What the user should know of that, in a sentence.
    """

    def __init__(self, pool: Any) -> None:
        self._pool = pool
        self._handles: list[int] = []
        self.streams: dict[Slots, int] = {}
        self.records: dict[Slots, PartitionRecord] = {}
        self.layout_of: dict[Slots, int] = {}
        self.layouts: tuple[LayoutRecord, ...] = ()
        self.remainder: tuple[int, PartitionRecord] | None = None
        self.shared_sms: tuple[int, ...] = ()
        self.notes: tuple[str, ...] = ()

    def keep(self, handle: int) -> int:
        """Notes a stream that has to be given back."""
        self._handles.append(handle)
        return handle

    def give_back(self) -> None:
        """Ends the loan; the streams must have ended their work. A second call does nothing.

        From any thread and at any moment: Python may let lanes go while this very thread borrows.
        """
        while self._handles:
            handle = self._handles.pop()
            if not self._pool.closed:
                self._pool.give_back(handle)


class GreenPool:
    """The streams of one device; safe from any thread.

    Which stream is lent, and to how many, the driver's pool keeps; here are layouts, records and the verdict on what
    the probe saw.

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
        self._compute_capability = driver.describe().compute_capability
        self._pool = driver.open_pool(fine=fine, placement=placement, priority=priority, remainder=remainder)
        self._lock = threading.Lock()
        self._indices: dict[Layout, int] = {}

    def borrow(self, layouts: Sequence[Layout], *, image: Callable[[], bytes | None]) -> Loan:
        """Lends a stream for each partition, and makes what is not there yet.

        A partition that is lent already is lent again, by the same stream: what two borrowers give to it runs in turn.

        Args:
            layouts: Partitions, none of them twice.
            image: Called for the compiled probe if a partition was not probed yet; None leaves it unprobed.

        Raises:
            CudaError: The driver failed, or partitions without a common slot were seen to share SMs.
        """
        loan = Loan(self._pool)
        with self._lock:
            loan.layouts = tuple(self._add(layout) for layout in layouts)
            self._probe(layouts, image)
            found = [
                [PartitionRecord.of(info) for info in self._pool.partitions(self._indices[layout])]
                for layout in layouts
            ]
            rest = [] if self._pool.remainder is None else [PartitionRecord.of(self._pool.remainder)]
            self._judge(loan, found, rest)
            try:
                for layout, records in zip(layouts, found, strict=True):
                    self._lend(loan, layout, records)
                for record in rest:
                    handle = self._pool.lend_remainder(priority=self._priority, shared=True)
                    loan.remainder = (loan.keep(handle), record)
            except BaseException:
                loan.give_back()
                raise
        return loan

    def close(self) -> None:
        """Ends streams and contexts; for when nothing is left that ran on them, tensors included."""
        self._pool.close()

    @property
    def stats(self) -> Any:
        """Returns the pool's own counts, a ``_C.PoolStats``."""
        return self._pool.stats()

    def _add(self, layout: Layout) -> LayoutRecord:
        if layout in self._indices:
            return LayoutRecord(partitions=layout, num_contexts=0, num_streams=0, creation_ms=0.0, driver_bytes=0)
        index = len(self._pool.stats().layouts)  # counted there: Ctrl-C may come between adding and noting it here
        cost = self._pool.add_layout(layout)
        self._indices[layout] = index
        return LayoutRecord(
            partitions=layout,
            num_contexts=cost.num_contexts,
            num_streams=cost.num_streams,
            creation_ms=cost.creation_ms,
            driver_bytes=cost.driver_bytes,
        )

    def _probe(self, layouts: Sequence[Layout], image: Callable[[], bytes | None]) -> None:
        found = [info for layout in layouts for info in self._pool.partitions(self._indices[layout])]
        if any(info.sm_ids is None for info in found) and (compiled := image()) is not None:
            self._pool.verify(compiled)

    def _judge(self, loan: Loan, found: list[list[PartitionRecord]], rest: list[PartitionRecord]) -> None:
        everything = [record for records in found for record in records] + rest
        # Where each layout was split anew the driver promises nothing between layouts; their lanes take turns instead.
        groups, call = (found, "cuDevSmResourceSplit")
        if self.placement == "merged":
            groups, call = ([everything], "cuDevSmResourceSplitByCount")
        capability = self._compute_capability
        loan.shared_sms = find_shared_sms(groups, compute_capability=capability, call=call)
        loan.notes = describe_excess(everything, loan.shared_sms, compute_capability=capability)

    def _lend(self, loan: Loan, layout: Layout, records: Sequence[PartitionRecord]) -> None:
        index = self._indices[layout]
        for number, (slots, record) in enumerate(zip(layout, records, strict=True)):
            handle = self._pool.lend(index, number, priority=self._priority, shared=True)
            loan.streams[slots] = loan.keep(handle)
            loan.records[slots] = record
            loan.layout_of[slots] = index


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
