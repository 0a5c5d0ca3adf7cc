"""Lanes on green-context streams, and the record of the SMs that they were given."""

from __future__ import annotations

from collections.abc import Callable

from mosaic.backends.cuda.driver import SmPlacement
from mosaic.backends.cuda.pool import StreamLoan
from mosaic.backends.cuda.records import PartitionRecord, Slots
from mosaic.backends.streams.api import StreamApi
from mosaic.backends.streams.lanes import StreamLanes


class GreenLanes(StreamLanes):
    """The lanes that are open on partitions of one GPU; made by ``CudaBackend.open_lanes``.

    Args:
        api: The runtime.
        loan: A stream for each partition; given back at the end.
        placement: How partitions got their SMs.

    Attributes:
        partitions: SMs requested and granted, and the ids that the probe saw.
    """

    def __init__(self, api: StreamApi, loan: StreamLoan, placement: SmPlacement) -> None:
        self.partitions: tuple[PartitionRecord, ...] = tuple(loan.records.values())
        try:
            streams = {
                slots: (api.external_stream(handle), loan.records[slots].granted_sms)
                for slots, handle in loan.streams.items()
            }
            conflict = _conflict_in(placement, loan.layout_of, loan.records)
            super().__init__(api, streams, loan.give_back, conflict=conflict)  # what gives back must not hold the lanes
        except BaseException:
            loan.give_back()
            raise


def _conflict_in(
    placement: SmPlacement, layout_of: dict[Slots, int], records: dict[Slots, PartitionRecord]
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
