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

from mosaic.backends.cuda.driver import CudaDevice, SlotDescription, SmPlacement
from mosaic.backends.cuda.overlap import describe_excess, find_shared_sms
from mosaic.backends.cuda.records import PartitionRecord, SlotLayout, Slots


class GreenDriver(Protocol):
    """What a pool needs of a device's driver; ``mosaic.backends.cuda.driver.CudaDriver`` is the product."""

    def describe(self) -> CudaDevice:
        """Describes the device."""

    def describe_slots(self, *, fine: bool) -> SlotDescription:
        """Describes its slots."""

    def open_pool(self, *, fine: bool, placement: SmPlacement) -> Any:
        """Makes an empty ``_C.StreamPool``, or what does as it does."""

    def probe_image(self) -> bytes:
        """Compiles the probe for the device."""

    def probe_stream(self, stream: int) -> tuple[int, ...]:
        """Returns the sorted ids of the SMs that kernels of a stream run on."""

    def __hash__(self) -> int:
        """Equal drivers share a pool."""


def pack_layouts(partitions: Iterable[Slots]) -> tuple[SlotLayout, ...]:
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


class StreamLoan:
    """Streams that were lent; made by ``GreenPool.borrow``.

    Attributes:
        streams: The stream's handle, for each partition.
        records: What the driver made of each partition.
        layout_of: Which layout each partition belongs to.
        shared_sms: Ids of SMs that partitions share although they were given as disjoint.
        notes: What the user should know of that, in a sentence.
    """

    def __init__(self, pool: Any) -> None:
        self._pool = pool
        self._handles: list[int] = []
        self.streams: dict[Slots, int] = {}
        self.records: dict[Slots, PartitionRecord] = {}
        self.layout_of: dict[Slots, int] = {}
        self.shared_sms: tuple[int, ...] = ()
        self.notes: tuple[str, ...] = ()

    def add(self, handle: int, record: PartitionRecord, *, layout: int) -> None:
        """Notes a stream that has to be given back."""
        self._handles.append(handle)
        self.streams[record.slots] = handle
        self.records[record.slots] = record
        self.layout_of[record.slots] = layout

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
    """

    def __init__(self, driver: GreenDriver, *, fine: bool, placement: SmPlacement) -> None:
        self.placement: SmPlacement = placement
        self._compute_capability = driver.describe().compute_capability
        self._pool = driver.open_pool(fine=fine, placement=placement)
        self._lock = threading.Lock()
        self._indices: dict[SlotLayout, int] = {}

    def borrow(self, layouts: Sequence[SlotLayout], *, image: Callable[[], bytes | None]) -> StreamLoan:
        """Lends a stream for each partition, and makes what is not there yet.

        A partition that is lent already is lent again, by the same stream: what two borrowers give to it runs in turn.

        Args:
            layouts: Partitions, none of them twice.
            image: Called for the compiled probe if a partition was not probed yet; None leaves it unprobed.

        Raises:
            CudaError: The driver failed, or partitions without a common slot were seen to share SMs.
        """
        loan = StreamLoan(self._pool)
        with self._lock:
            for layout in layouts:
                self._add(layout)
            self._probe(layouts, image)
            found = [
                [PartitionRecord.of(info) for info in self._pool.partitions(self._indices[layout])]
                for layout in layouts
            ]
            self._judge(loan, found)
            try:
                for layout, records in zip(layouts, found, strict=True):
                    index = self._indices[layout]
                    for number, record in enumerate(records):
                        loan.add(self._pool.lend(index, number), record, layout=index)
            except BaseException:
                loan.give_back()
                raise
        return loan

    def close(self) -> None:
        """Ends streams and contexts; for when nothing is left that ran on them, tensors included."""
        self._pool.close()

    def _add(self, layout: SlotLayout) -> None:
        if layout not in self._indices:
            index = len(self._pool.stats().layouts)  # counted there: Ctrl-C may come between adding and noting it here
            self._pool.add_layout(layout)
            self._indices[layout] = index

    def _probe(self, layouts: Sequence[SlotLayout], image: Callable[[], bytes | None]) -> None:
        found = [info for layout in layouts for info in self._pool.partitions(self._indices[layout])]
        if any(info.sm_ids is None for info in found) and (compiled := image()) is not None:
            self._pool.verify(compiled)

    def _judge(self, loan: StreamLoan, found: list[list[PartitionRecord]]) -> None:
        everything = [record for records in found for record in records]
        # Where each layout was split anew the driver promises nothing between layouts; their lanes take turns instead.
        groups, call = (found, "cuDevSmResourceSplit")
        if self.placement == "merged":
            groups, call = ([everything], "cuDevSmResourceSplitByCount")
        capability = self._compute_capability
        loan.shared_sms = find_shared_sms(groups, compute_capability=capability, call=call)
        loan.notes = describe_excess(everything, loan.shared_sms, compute_capability=capability)


_MAKING = threading.Lock()


def pool_of(driver: GreenDriver, *, fine: bool, placement: SmPlacement) -> GreenPool:
    """Returns the pool of a device and kind in this process; see the top of this module for why it is never ended."""
    with _MAKING:  # or two threads would make two, which give out the same SMs
        return _make_pool(driver, fine, placement)


@functools.cache
def _make_pool(driver: GreenDriver, fine: bool, placement: SmPlacement) -> GreenPool:
    pool = GreenPool(driver, fine=fine, placement=placement)
    # At interpreter exit, too, tensors may be let go after their streams' pool; so it is never freed by Python.
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(pool))
    return pool
