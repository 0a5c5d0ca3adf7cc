"""Memory of the simulated chip: an L2 cache that all SMs share, and channels of DRAM behind its slices.

L2 has exact tags, pushes out what was used least recently, and writes back. A channel has banks with open rows and a
bus that serves what is ready, and keeps writes back to drain them in bursts. First ready, first come, first served
(Rixner et al., "Memory Access Scheduling", ISCA 2000): a request whose row is open goes ahead of older ones whose row
is not, until `MAX_HITS` have passed. Writes wait until there are many or nothing is read (as in DRAMsim3), for the bus
loses time when it turns.
"""

from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count

from bench.cost.chip.spec import REQUEST_BYTES, ROW_REQUESTS, Chip

MIXER = 0x9E3779B97F4A7C15
"""Spreads rows over channels and banks (Fibonacci hashing), as a GPU's address hash does."""

MAX_HITS = 16
"""Requests that one opening of a row serves while others wait for the bank."""

WINDOW = 8
"""Requests of a bank that are looked through for the row that opens."""

MIN_WRITES, MAX_WRITES = 4, 16
"""A drain of writes starts at the more and ends below the fewer; when nothing is ready to be read, any is written."""

Served = Callable[[float], None]


class Events:
    """A clock and what is to happen."""

    def __init__(self) -> None:
        self.now = 0.0
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()
        self._stopped = False

    def at(self, time_ns: float, happen: Callable[[], None]) -> None:
        """Call `happen` at `time_ns`; at equal times in the order of the calls."""
        heappush(self._heap, (time_ns, next(self._order), happen))

    def stop(self) -> None:
        """End `run` after what happens now."""
        self._stopped = True

    def run(self) -> None:
        """Go from event to event until somebody stops it or nothing is left."""
        while self._heap and not self._stopped:
            self.now, _, happen = heappop(self._heap)
            happen()


class Bank:
    """The open row, and the requests that wait for another."""

    __slots__ = ("activated", "hits", "num_ready", "opening", "row", "waiting")

    def __init__(self) -> None:
        self.row = -1
        self.opening = False
        self.activated = -1e9
        self.hits = 0
        self.num_ready = 0
        self.waiting: deque[tuple[int, int, Served]] = deque()


class Channel:
    """Serves one request of 512 bytes at a time; `served` is called with the time at which its last byte has passed."""

    def __init__(self, chip: Chip, events: Events) -> None:
        self._chip, self._events = chip, events
        self.transfer_ns = REQUEST_BYTES * chip.num_channels / chip.dram_bytes_per_ns
        self._banks = tuple(Bank() for _ in range(chip.num_banks))
        self._ready: list[tuple[int, Bank, Served]] = []
        self._order = count()
        self._writes = 0
        self._draining = False
        self._turned = False
        self._busy = False
        self._next_activation = 0.0
        self.busy_ns = 0.0
        """Time in which the bus moved data."""

    def read(self, bank_index: int, row: int, served: Served) -> None:
        """Ask for one request of a row."""
        bank = self._banks[bank_index]
        order = next(self._order)
        if bank.row == row and not bank.opening and (bank.hits < MAX_HITS or not bank.waiting):
            self._make_ready(bank, order, served)
            self._wake()
            return
        bank.waiting.append((order, row, served))
        if not bank.opening and bank.num_ready == 0:
            self._open(bank)

    def write(self) -> None:
        """Give one request to be written when it suits the channel."""
        self._writes += 1
        self._wake()

    def _make_ready(self, bank: Bank, order: int, served: Served) -> None:
        bank.num_ready += 1
        bank.hits += 1
        heappush(self._ready, (order, bank, served))

    def _open(self, bank: Bank) -> None:
        chip = self._chip
        activated = max(self._events.now + chip.close_ns, bank.activated + chip.row_cycle_ns, self._next_activation)
        bank.activated = activated
        self._next_activation = activated + chip.activate_gap_ns
        bank.opening, bank.hits = True, 0
        bank.row = bank.waiting[0][1]
        self._events.at(activated + chip.open_ns, lambda: self._opened(bank))

    def _opened(self, bank: Bank) -> None:
        bank.opening = False
        kept = deque(entry for entry in list(bank.waiting)[:WINDOW] if entry[1] != bank.row)
        kept.extend(list(bank.waiting)[WINDOW:])
        for order, row, served in list(bank.waiting)[:WINDOW]:
            if row == bank.row:
                self._make_ready(bank, order, served)
        bank.waiting = kept
        self._wake()

    def _wake(self) -> None:
        if not self._busy:
            self._serve()

    def _serve(self) -> None:
        """Give the bus to the next request, or leave it idle."""
        self._draining = self._writes >= (MIN_WRITES if self._draining else MAX_WRITES)
        writes = self._writes > 0 and (self._draining or not self._ready)
        if not writes and not self._ready:
            self._busy = False
            return
        self._busy = True
        start = self._events.now + (self._chip.turn_ns if writes != self._turned else 0.0)
        self._turned = writes
        end = start + self.transfer_ns
        self.busy_ns += self.transfer_ns
        if writes:
            self._writes -= 1
        else:
            _, bank, served = heappop(self._ready)
            bank.num_ready -= 1
            served(end)
            if bank.num_ready == 0 and bank.waiting and not bank.opening:
                self._open(bank)
        self._events.at(end, self._serve)


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
