"""The L2 cache that all SMs share, with DRAM behind it: exact tags, least recently used, written back."""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from bench.cost.chip.dram import Channel, Events
from bench.cost.chip.spec import REQUEST_BYTES, ROW_REQUESTS, Chip

MIXER = 0x9E3779B97F4A7C15
"""Spreads rows over channels and banks (Fibonacci hashing), as a GPU's address hash does."""


@dataclass(slots=True)
class Traffic:
    """Requests of one module since it began: what reached L2, DRAM, and what DRAM wrote."""

    asked: int = 0
    read: int = 0
    written: int = 0

    @property
    def dram_bytes(self) -> int:
        """Bytes that crossed the channels."""
        return (self.read + self.written) * REQUEST_BYTES


class Line:
    """One request's worth of L2: whose it is, whether it must be written back, who waits for it to come from DRAM."""

    __slots__ = ("dirty", "owner", "waiting")

    def __init__(self, owner: Traffic, waiting: "list[Load] | None") -> None:
        self.owner = owner
        self.dirty = False
        self.waiting = waiting


class Load:
    """The loads of one step: counts what has not come and remembers when the last came."""

    __slots__ = ("events", "latest_ns", "num_left", "ready")

    def __init__(self, events: Events, ready: Callable[[], None]) -> None:
        self.events, self.ready = events, ready
        self.num_left, self.latest_ns = 1, 0.0

    def come(self, time_ns: float) -> None:
        """Note that one load comes at `time_ns`; the last one calls `ready` then."""
        self.latest_ns = max(self.latest_ns, time_ns)
        self.num_left -= 1
        if self.num_left == 0:
            self.events.at(self.latest_ns, self.ready)


class L2:
    """Slices that each serve one request at a time, over one table of lines."""

    def __init__(self, chip: Chip, events: Events) -> None:
        self._chip, self._events = chip, events
        self.channels = tuple(Channel(chip, events) for _ in range(chip.num_channels))
        self._slice_ns = REQUEST_BYTES * chip.num_channels / chip.l2_bytes_per_ns
        self._free = [0.0] * chip.num_channels
        self._lines: OrderedDict[int, Line] = OrderedDict()
        self._capacity = chip.l2_bytes // REQUEST_BYTES

    def _place(self, address: int) -> tuple[int, int, int]:
        """Return channel, bank and row of an address (counted in requests)."""
        row = address // ROW_REQUESTS
        mixed = (row * MIXER >> 24) & 0xFFFFFFFF
        return mixed % self._chip.num_channels, mixed // self._chip.num_channels % self._chip.num_banks, row

    def _wait(self, channel: int, time_ns: float) -> float:
        """Take a turn at a slice; returns when it is done."""
        done = max(self._free[channel], time_ns) + self._slice_ns
        self._free[channel] = done
        return done

    def load(self, address: int, time_ns: float, owner: Traffic, load: Load) -> None:
        """Read one request; `load` hears when it comes."""
        channel, bank, row = self._place(address)
        owner.asked += 1
        load.num_left += 1
        come = self._wait(channel, time_ns) + self._chip.l2_ns
        line = self._lines.get(address)
        if line is None:
            waiting = [load]
            self._keep(address, Line(owner, waiting))
            late = come - self._events.now + self._chip.dram_ns
            owner.read += 1
            self.channels[channel].read(bank, row, lambda end: self._fill(address, waiting, end + late))
            return
        self._lines.move_to_end(address)
        if line.waiting is None:
            load.come(come)
        else:
            line.waiting.append(load)

    def _fill(self, address: int, waiting: list[Load], time_ns: float) -> None:
        line = self._lines.get(address)
        if line is not None and line.waiting is waiting:
            line.waiting = None
        for load in waiting:
            load.come(time_ns)

    def store(self, address: int, time_ns: float, owner: Traffic) -> None:
        """Write one request into L2; nobody waits for it."""
        owner.asked += 1
        self._wait(self._place(address)[0], time_ns)
        line = self._lines.get(address)
        if line is None:
            line = Line(owner, None)
            self._keep(address, line)
        else:
            self._lines.move_to_end(address)
        line.dirty = True

    def _keep(self, address: int, line: Line) -> None:
        self._lines[address] = line
        if len(self._lines) > self._capacity:
            gone, old = self._lines.popitem(last=False)
            if old.dirty:
                old.owner.written += 1
                self.channels[self._place(gone)[0]].write()
