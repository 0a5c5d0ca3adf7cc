"""Green-context streams of one device: one pool in a process, lent to lanes, never ended while the process lives.

Streams have to outlive the lanes that run on them. Autograd runs a backward on the streams of its forward, and torch's
allocator notes an event on each stream that used a tensor when that tensor is let go (pytorch#66936); both may happen
long after the lanes were closed, and on a stream that is gone both are undefined. A pool is therefore shared by all
backends of its kind and kept until the process ends, when the driver takes everything back. What it holds is bounded:
a context and a stream for each partition that was ever requested.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from mosaic.artifact import StrictFile
from mosaic.backends.cuda.driver import CudaDriver, described
from mosaic.errors import CudaError

Slots = tuple[int, ...]
SlotLayout = tuple[Slots, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionRecord(StrictFile):
    """The SMs of one partition: granted, and seen in use."""

    slots: Slots
    """Its slots."""
    requested_sms: int
    """SMs of its slots."""
    granted_sms: int
    """SMs that its green context has, read back from the driver."""
    sm_ids: tuple[int, ...] | None
    """Ids of the SMs that the probe saw it use, sorted; None where it was not probed."""
    creation_ms: float
    """Time that its context and stream took."""


def _record_of(info: Any) -> PartitionRecord:
    """Returns the record of a pool's ``_C.PartitionInfo``."""
    sm_ids = None if info.sm_ids is None else tuple(info.sm_ids)
    return described(PartitionRecord, info, slots=tuple(info.slots), sm_ids=sm_ids)


def pack_layouts(partitions: Iterable[Slots]) -> tuple[SlotLayout, ...]:
    """Groups partitions into few layouts whose partitions share no slot: each goes into the first that it fits."""
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
        records: The record of each partition.
    """

    def __init__(self, pool: Any) -> None:
        self._pool = pool
        self._handles: list[int] = []
        self.streams: dict[Slots, int] = {}
        self.records: dict[Slots, PartitionRecord] = {}

    def add(self, layout: int, partition: int, record: PartitionRecord) -> None:
        """Lends one more stream."""
        handle = self._pool.lend(layout, partition)
        self._handles.append(handle)
        self.streams[record.slots] = handle
        self.records[record.slots] = record

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

    The driver's pool knows which stream is lent, and to how many; here are layouts, records and the verdict on what
    the probe saw.
    """

    def __init__(self, driver: CudaDriver) -> None:
        self._compute_capability = driver.describe().compute_capability
        self._pool = driver.open_pool()
        self._lock = threading.Lock()
        self._indices: dict[SlotLayout, int] = {}

    def borrow(self, layouts: Sequence[SlotLayout], *, image: Callable[[], bytes | None]) -> StreamLoan:
        """Lends a stream for each partition, the same one to each borrower, and makes what is not there yet.

        Args:
            layouts: Partitions, none of them twice.
            image: Called for the compiled probe if a partition was not probed yet; None leaves it unprobed.

        Raises:
            CudaError: The driver failed, or partitions without a common slot were seen to share SMs.
        """
        with self._lock:
            for layout in layouts:
                if layout not in self._indices:
                    index = len(self._pool.stats().layouts)  # Ctrl-C may come between adding and noting it here
                    self._pool.add_layout(layout)
                    self._indices[layout] = index
            indices = [self._indices[layout] for layout in layouts]
            is_probed = all(info.sm_ids is not None for index in indices for info in self._pool.partitions(index))
            if not is_probed and (compiled := image()) is not None:
                self._pool.verify(compiled)
            partitions = [
                (index, number, _record_of(info))
                for index in indices
                for number, info in enumerate(self._pool.partitions(index))
            ]
            check_shared_sms([record for *_, record in partitions], compute_capability=self._compute_capability)
            loan = StreamLoan(self._pool)
            try:
                for index, number, record in partitions:
                    loan.add(index, number, record)
            except BaseException:
                loan.give_back()
                raise
        return loan

    def close(self) -> None:
        """Ends streams and contexts; for when nothing is left that ran on them, tensors included."""
        self._pool.close()


_MAKING = threading.Lock()


def pool_of(driver: CudaDriver) -> GreenPool:
    """Returns the pool of a device and kind in this process; see the top of this module for why it is never ended."""
    with _MAKING:  # or two threads would make two, which give out the same SMs
        return _make_pool(driver)


@functools.cache
def _make_pool(driver: CudaDriver) -> GreenPool:
    pool = GreenPool(driver)
    # At interpreter exit, too, tensors may be let go after their streams' pool; so it is never freed by Python.
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(pool))
    return pool


# The verdict on what the probe saw.

CDP_SMS = 2
"""SMs that partitions may share on compute capability 9.x: "When a module with dynamic parallelism (CDP) is loaded, all
future kernels running under green contexts may use and share an additional set of 2 SMs" (cuda.h, green contexts)."""


def check_shared_sms(records: Iterable[PartitionRecord], *, compute_capability: str) -> None:
    """Raises CudaError if partitions without a common slot share more SMs than dynamic parallelism accounts for.

    Partitions that were not probed are skipped.
    """
    shared: set[int] = set()
    first, call = "", "cuDevSmResourceSplitByCount"
    for record, other in combinations(records, 2):
        both = set(record.sm_ids or ()) & set(other.sm_ids or ())
        if both and set(record.slots).isdisjoint(other.slots):
            shared |= both
            names = f"the partition of slots {list(record.slots)} and the partition of slots {list(other.slots)}"
            first = first or f"{names} were seen to share SM {', '.join(map(str, sorted(both)))}"
    if len(shared) > (CDP_SMS if compute_capability.startswith("9.") else 0):
        raise CudaError(
            f"{first} ({len(shared)} shared in all), although {call} gave them as disjoint; MPS or a driver's error "
            "may cause it, and on compute capability 9.x a module with dynamic parallelism (CDP) "
            f"{CDP_SMS} of them: run `mosaic doctor`, and start the process anew without the cause",
            call=call,
            status="CUDA_SUCCESS",
        )
