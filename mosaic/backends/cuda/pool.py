"""The pool of green-context streams of one device, one per process, which lives as long as the process.

Streams must outlive their lanes. Autograd runs a backward on the streams of its forward, and when a tensor is freed
torch's allocator records an event on each stream that used it (pytorch#66936). Both may happen long after lanes are
closed, and are undefined on a destroyed stream. A pool is therefore shared by all backends of its kind and lives until
the process ends. Its size is bounded: a context and a stream per requested partition.
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
    """The SMs of one partition: granted and probed."""

    slots: Slots
    """Its slots."""
    requested_sms: int
    """SMs of its slots."""
    granted_sms: int
    """SMs of its green context, read back from the driver."""
    sm_ids: tuple[int, ...] | None
    """Sorted ids of its SMs by the probe; None if it was not probed."""
    creation_ms: float
    """Time to create its context and stream."""


def _record_of(info: Any) -> PartitionRecord:
    """Converts a pool's ``_C.PartitionInfo``."""
    sm_ids = None if info.sm_ids is None else tuple(info.sm_ids)
    return described(PartitionRecord, info, slots=tuple(info.slots), sm_ids=sm_ids)


def pack_layouts(partitions: Iterable[Slots]) -> tuple[SlotLayout, ...]:
    """Groups partitions into layouts of disjoint partitions, first fit."""
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
    """Borrowed streams; created by ``GreenPool.borrow``.

    Attributes:
        streams: The stream's handle by partition.
        records: The record by partition.
    """

    def __init__(self, pool: Any) -> None:
        self._pool = pool
        self._handles: list[int] = []
        self.streams: dict[Slots, int] = {}
        self.records: dict[Slots, PartitionRecord] = {}

    def add(self, layout: int, partition: int, record: PartitionRecord) -> None:
        """Borrows one more stream."""
        handle = self._pool.lend(layout, partition)
        self._handles.append(handle)
        self.streams[record.slots] = handle
        self.records[record.slots] = record

    def give_back(self) -> None:
        """Returns the streams, whose work must have ended; idempotent.

        Reentrant and thread-safe: Python may free lanes while this thread borrows.
        """
        while self._handles:
            handle = self._handles.pop()
            if not self._pool.closed:
                self._pool.give_back(handle)


class GreenPool:
    """The streams of one device; thread-safe.

    The driver's pool counts the borrowers of a stream. This class has layouts, records and the check of the probe's
    results.
    """

    def __init__(self, driver: CudaDriver) -> None:
        self._compute_capability = driver.describe().compute_capability
        self._pool = driver.open_pool()
        self._lock = threading.Lock()
        self._indices: dict[SlotLayout, int] = {}

    def borrow(self, layouts: Sequence[SlotLayout], *, image: Callable[[], bytes | None]) -> StreamLoan:
        """Borrows a stream per partition, shared between borrowers; creates missing ones.

        Args:
            layouts: Distinct partitions.
            image: Returns the compiled probe, for partitions not yet probed; None: no probe.

        Raises:
            CudaError: The driver failed, or the probe found disjoint partitions that share SMs.
        """
        with self._lock:
            for layout in layouts:
                if layout not in self._indices:
                    index = len(self._pool.stats().layouts)  # Ctrl-C may come between adding and recording it
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
        """Destroys streams and contexts, after the last tensor that used them."""
        self._pool.close()


_MAKING = threading.Lock()


def pool_of(driver: CudaDriver) -> GreenPool:
    """Returns this process's pool of a device and kind, which is never destroyed (see the module docstring)."""
    with _MAKING:  # two threads would create two pools of the same SMs
        return _make_pool(driver)


@functools.cache
def _make_pool(driver: CudaDriver) -> GreenPool:
    pool = GreenPool(driver)
    # at interpreter exit tensors may outlive their streams' pool, so Python never frees it
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(pool))
    return pool


CDP_SMS = 2
"""SMs that partitions may share on compute capability 9.x: "When a module with dynamic parallelism (CDP) is loaded, all
future kernels running under green contexts may use and share an additional set of 2 SMs" (cuda.h, green contexts)."""


def check_shared_sms(records: Iterable[PartitionRecord], *, compute_capability: str) -> None:
    """Raises CudaError if disjoint partitions share more SMs than dynamic parallelism may add.

    Partitions that were not probed are skipped.
    """
    shared: set[int] = set()
    first, call = "", "cuDevSmResourceSplitByCount"
    for record, other in combinations(records, 2):
        both = set(record.sm_ids or ()) & set(other.sm_ids or ())
        if both and set(record.slots).isdisjoint(other.slots):
            shared |= both
            names = f"the partition of slots {list(record.slots)} and the partition of slots {list(other.slots)}"
            first = first or f"{names} share SM {', '.join(map(str, sorted(both)))}"
    if len(shared) > (CDP_SMS if compute_capability.startswith("9.") else 0):
        raise CudaError(
            f"{first} ({len(shared)} shared in total), although {call} split them; MPS or a driver's error "
            "may be the cause, or on compute capability 9.x a module with dynamic parallelism (CDP) "
            f"{CDP_SMS} of them: run `mosaic doctor`, and restart the process without the cause",
            call=call,
            status="CUDA_SUCCESS",
        )
