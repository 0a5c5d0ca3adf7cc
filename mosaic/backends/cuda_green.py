"""Lanes on green-context streams, and the record of what they were given."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from mosaic.backends.cuda.driver import Placement
from mosaic.backends.cuda.pool import GreenPool, Loan
from mosaic.backends.cuda_records import LayoutRecord, PartitionRecord, PoolReport, Slots
from mosaic.backends.streams.api import StreamApi
from mosaic.backends.streams.lanes import StreamLane, StreamLanes
from mosaic.backends.streams.memory import LaneMemory, measure_lane_memory

Borrow = Callable[[Iterable[Slots]], Loan]


class GreenLanes(StreamLanes):
    """The lanes that are open on partitions of one GPU; made by ``CudaBackend.open_lanes``.

    Args:
        api: The runtime.
        pool: Where the streams come from.
        borrow: Checks partitions and borrows a stream for each.
        partitions: What to open.

    Attributes:
        remainder: The lane on the SMs that the split leaves over, for communication; None unless asked for.
    """

    def __init__(self, api: StreamApi, pool: GreenPool, borrow: Borrow, partitions: Iterable[Slots]) -> None:
        self._pool = pool
        self._borrow = borrow
        self._loans = [borrow(partitions)]
        self._records = dict(self._loans[0].records)
        self._layout_of = dict(self._loans[0].layout_of)
        self._overhead_bytes: int | None = None
        self.remainder: StreamLane | None = None
        loans = self._loans  # what gives back must not hold the lanes
        try:
            super().__init__(
                api,
                self._streams(api, self._loans[0]),
                lambda: _give_back(loans),
                conflict=_conflict_in(pool.placement, self._layout_of, self._records),
            )
            self._open_remainder(self._loans[0])
        except BaseException:
            _give_back(loans)
            raise

    @property
    def partitions(self) -> tuple[PartitionRecord, ...]:
        """Describes the partitions: SMs requested and granted, and the ids that the probe saw."""
        return tuple(self._records.values())

    @property
    def report(self) -> PoolReport:
        """Describes the partitions and what making them took, for the record of a run."""
        return PoolReport(
            fine=self._pool.fine,
            placement=self._pool.placement,
            partitions=self.partitions,
            remainder=None if self._loans[0].remainder is None else self._loans[0].remainder[1],
            layouts=tuple(layout for loan in self._loans for layout in loan.layouts),
            shared_sms=tuple(sorted({sm for loan in self._loans for sm in loan.shared_sms})),
            lane_overhead_bytes=self._overhead_bytes,
        )

    def measure_memory(self) -> tuple[LaneMemory, ...]:
        """Measures what each lane costs before any module runs on it; the report has the largest from then on."""
        found = measure_lane_memory(self)
        self._overhead_bytes = max((lane.reserved_bytes for lane in found), default=None)
        return found

    def add_layout(self, partitions: Iterable[Slots]) -> tuple[LayoutRecord, ...]:
        """Opens lanes for more partitions, while work runs on the others; returns what it took.

        Partitions that are open already stay as they are. Not for the loop of a training step: making a context takes
        tens of milliseconds.

        Raises:
            InvalidPlanError: A partition is empty or names a slot that the device does not have.
            CudaError: The driver failed; the lanes are as before.
        """
        wanted = [slots for slots in (tuple(sorted(slots)) for slots in partitions) if slots not in self._lanes]
        loan = self._borrow(wanted)
        self._loans.append(loan)
        self._records.update(loan.records)
        self._layout_of.update(loan.layout_of)
        self._add(self._streams(self.api, loan))
        return loan.layouts

    def _streams(self, api: StreamApi, loan: Loan) -> dict[Slots, tuple[Any, int]]:
        return {
            slots: (api.external_stream(handle), loan.records[slots].granted_sms)
            for slots, handle in loan.streams.items()
        }

    def _open_remainder(self, loan: Loan) -> None:
        if loan.remainder is not None:
            handle, record = loan.remainder
            stream = self.api.external_stream(handle)
            self.remainder = StreamLane(self.api, (), stream, self._origin, num_sms=record.granted_sms)
            self._all.append(self.remainder)


def _give_back(loans: list[Loan]) -> None:
    for loan in loans:
        loan.give_back()


def _conflict_in(
    placement: Placement, layout_of: dict[Slots, int], records: dict[Slots, PartitionRecord]
) -> Callable[[Slots, Slots], bool]:
    """Returns whether work on two partitions has to take turns.

    Merged slots say it by themselves. Where each layout was split anew, slots of different layouts say nothing about
    SMs: what the probe saw decides, and without it partitions of different layouts take turns.
    """

    def conflict(one: Slots, other: Slots) -> bool:
        if not set(one).isdisjoint(other):
            return True
        if placement == "merged" or layout_of[one] == layout_of[other]:
            return False
        seen = [records[slots].sm_ids for slots in (one, other)]
        return seen[0] is None or seen[1] is None or not set(seen[0]).isdisjoint(seen[1])

    return conflict
