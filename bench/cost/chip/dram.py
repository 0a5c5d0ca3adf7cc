"""One channel of DRAM: banks with open rows, a bus that serves what is ready, writes kept back and drained in bursts.

First ready, first come, first served (Rixner et al., "Memory Access Scheduling", ISCA 2000): a request whose row is
open goes ahead of older ones whose row is not, until `MAX_HITS` have passed. Writes wait until there are many or
nothing is read (as in DRAMsim3), for the bus loses time when it turns.
"""

from collections import deque
from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count

from bench.cost.chip.spec import REQUEST_BYTES, Chip

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
