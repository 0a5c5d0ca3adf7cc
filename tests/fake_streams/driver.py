"""A GPU's driver inside of this process, with a pool that lends made-up handles by the rules of ``_C.StreamPool``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from mosaic.backends.cuda.driver import CudaDevice, SlotDescription
from mosaic.errors import BackendUnavailableError


@dataclass
class FakePartition:
    slots: list[int]
    requested_sms: int
    granted_sms: int
    ids: list[int]
    stream: int
    num_borrowers: int = 0
    sm_ids: list[int] | None = None
    creation_ms: float = 37.0


@dataclass
class FakePool:
    driver: FakeGreenDriver
    layouts: list[list[FakePartition]] = field(default_factory=list)
    closed: bool = False
    known: dict[tuple[object, ...], FakePartition] = field(default_factory=dict)

    def add_layout(self, layout: Sequence[Sequence[int]]) -> None:
        flat = [slot for slots in layout for slot in slots]
        if len(set(flat)) != len(flat):
            raise ValueError(f"layout {layout} has a slot twice")
        self.layouts.append([])
        for slots in layout:
            if tuple(slots) not in self.known:
                self.known[tuple(slots)] = self.driver.partition(slots)
            self.layouts[-1].append(self.known[tuple(slots)])

    def lend(self, layout: int, partition: int) -> int:
        if self.closed:
            raise ValueError("this stream pool is closed; make a new one")
        found = self.layouts[layout][partition]
        found.num_borrowers += 1
        return found.stream

    def give_back(self, stream: int) -> None:
        (found,) = [one for one in self.known.values() if one.stream == stream]
        if not found.num_borrowers:
            raise ValueError(f"stream {stream} is not lent")
        found.num_borrowers -= 1

    def partitions(self, layout: int) -> list[FakePartition]:
        return self.layouts[layout]

    def verify(self, image: bytes) -> None:
        assert image == self.driver.image
        for found in self.known.values():
            found.sm_ids = found.ids

    def stats(self) -> FakePool:
        return self  # whose layouts can be counted

    def close(self) -> None:
        self.closed = True


class FakeGreenDriver:
    """One device; an instance is one machine, so that pools of different tests are apart."""

    image = b"the probe"

    def __init__(self, num_slots: int = 4) -> None:
        self.slots = SlotDescription(num_slots=num_slots, sms_per_slot=8, remainder_sms=4)
        self.pools: list[FakePool] = []
        self.no_nvrtc = False
        self._num_streams = 0

    @property
    def num_lent(self) -> int:
        """Streams that are lent now."""
        return sum(one.num_borrowers > 0 for pool in self.pools for one in pool.known.values())

    def describe(self) -> CudaDevice:
        slots = self.slots
        return CudaDevice(
            ordinal=0,
            name="a GPU that is not there",
            uuid="GPU-00000000-0000-0000-0000-000000000000",
            compute_capability="9.0",
            num_sms=slots.num_slots * slots.sms_per_slot + slots.remainder_sms,
            total_memory_bytes=80 << 30,
        )

    def describe_slots(self) -> SlotDescription:
        return self.slots

    def open_pool(self) -> FakePool:
        self.pools.append(FakePool(self))
        return self.pools[-1]

    def probe_image(self) -> bytes:
        if self.no_nvrtc:
            raise BackendUnavailableError("the SM probe cannot be compiled", found="nothing", needed="NVRTC")
        return self.image

    def probe_stream(self, stream: int) -> tuple[int, ...]:
        found = [one for pool in self.pools for one in pool.known.values() if one.stream == stream]
        return tuple(found[0].ids) if found else tuple(range(self.describe().num_sms))

    def partition(self, slots: Sequence[int]) -> FakePartition:
        size = self.slots.sms_per_slot
        ids = [slot * size + sm for slot in slots for sm in range(size)]
        return FakePartition(list(slots), len(ids), len(ids), ids, self._next_stream())

    HANDLES = range(1000, 1 << 40, 1000)
    """Of the streams of partitions."""

    def _next_stream(self) -> int:
        self._num_streams += 1
        return 1000 * self._num_streams
