"""Lanes of the host backend: pinned threads, and the arbiter that schedules them."""

from __future__ import annotations

import itertools
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch

from mosaic.backends.base import Lane, Lanes, Ticket
from mosaic.errors import MosaicError

T = TypeVar("T")
_LOOK_AGAIN_S = 1.0
"""Interval at which sleepers check again: a signal handler's exception may have skipped their wake-up."""
Key = tuple[int, ...] | str
"""The key of a lane: its slots, or its name without slots."""


class HostTicket(Generic[T]):
    """A piece of work on a host lane; created by ``HostLane.submit``."""

    def __init__(
        self, work: Callable[[], T], slots: tuple[int, ...], after: Sequence[Ticket[object]], order: int
    ) -> None:
        self._work: Callable[[], T] | None = work
        self.slots = slots
        self.after: tuple[Ticket[object], ...] = tuple(after)
        self.order = order
        self.done = False  # ended, with or without an error
        self._running = threading.Lock()  # locked until then
        self._running.acquire()
        self._result: T | None = None
        self._error: BaseException | None = None

    @property
    def ready(self) -> bool:
        """True once all of its dependencies have ended."""
        if self.after:
            self.after = tuple([ticket for ticket in self.after if not ticket.done])
        return not self.after

    def join(self) -> None:
        """Waits for the end of the work, with or without an error."""
        with self._running:  # one statement, so that an interrupt cannot leave it locked
            pass

    def wait(self) -> T:
        if not self.done:
            self.join()
        if self._error is not None:
            raise self._error
        return self._result  # type: ignore[return-value]  # set whenever there is no error

    def run(self) -> None:
        """Runs the work on the calling thread and keeps its error for ``wait``."""
        work, self._work = self._work, None
        try:
            assert work is not None, "a ticket ran twice"
            self._result = work()
        except BaseException as error:
            self._error = error

    def wake(self) -> None:
        """Wakes the waiters."""
        self._running.release()


class _Arbiter:
    """Schedules lanes; one lock guards all of its state.

    A lane runs its oldest ticket once its inputs are ready and its slots are free. Of two ready tickets that need the
    same slot, the one submitted first runs first. No ticket waits for a later one, so the ticket with the lowest order
    can always run: deadlock is impossible. A lane's thread is woken only when its next ticket may run, because a
    spurious wake-up takes the interpreter lock from a busy thread.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.asleep: dict[Key, threading.Lock] = {}  # locked while a lane's thread is idle
        self.queues: dict[Key, deque[HostTicket[Any]]] = {}
        self.held: set[int] = set()
        self.num_submitted = 0
        self.running: dict[Key, HostTicket[Any]] = {}
        self.closing = False

    def open(self, key: Key) -> None:
        """Adds a lane."""
        with self.lock:
            self.queues[key] = deque()
            self.asleep[key] = threading.Lock()
            self.asleep[key].acquire()

    def submit(self, lane: HostLane, work: Callable[[], T], after: Sequence[Ticket[object]]) -> HostTicket[T]:
        with self.lock:
            if self.closing:
                raise MosaicError("this lane is closed; colocate the model again to open new ones")
            ticket = HostTicket(work, lane.slots, after, self.num_submitted)
            self.num_submitted += 1
            queue = self.queues[lane.key]
            queue.append(ticket)
            if queue[0] is ticket and self._may_run(ticket):  # it frees no other ticket
                self._wake(lane.key)
        return ticket

    def serve(self, key: Key) -> None:
        """Runs a lane's tickets on the calling thread until the lane is closed."""
        queue, asleep = self.queues[key], self.asleep[key]
        ticket: HostTicket[Any] | None = None
        while True:
            with self.lock:
                if ticket is not None:
                    self.held.difference_update(ticket.slots)
                    del self.running[key]
                    ticket.done = True
                    self._wake_ready(besides=key)
                    ticket.wake()  # late, because a waiter needs the interpreter lock
                    ticket = None  # otherwise its tensors live until the next ticket
                if queue and self._may_run(queue[0]):
                    ticket = self.running[key] = queue.popleft()
                    self.held.update(ticket.slots)
                elif self.closing and not queue:
                    return
            if ticket is None:
                asleep.acquire(timeout=_LOOK_AGAIN_S)
            else:
                ticket.run()

    def drain(self) -> None:
        while True:
            with self.lock:
                pending = [*self.running.values(), *itertools.chain(*self.queues.values())]
                if pending:  # a signal handler may have raised between queueing a ticket and waking its lane
                    self._wake_ready()
            if not pending:
                return
            for ticket in pending:
                ticket.join()

    def close(self) -> None:
        with self.lock:
            self.closing = True
            for key in self.asleep:
                self._wake(key)

    def _wake(self, key: Key) -> None:
        if self.asleep[key].locked():
            self.asleep[key].release()

    def _wake_ready(self, besides: Key | None = None) -> None:
        for key, queue in self.queues.items():
            if queue and key != besides and self._may_run(queue[0]):
                self._wake(key)

    def _may_run(self, ticket: HostTicket[Any]) -> bool:
        if (ticket.after and not ticket.ready) or not self.held.isdisjoint(ticket.slots):
            return False
        for queue in self.queues.values():
            first = queue[0] if queue else ticket
            if first.order < ticket.order and not set(first.slots).isdisjoint(ticket.slots) and first.ready:
                return False
        return True


def _serve(arbiter: _Arbiter, lane: HostLane, cores: frozenset[int] | None, started: threading.Semaphore) -> None:
    """Body of a lane's thread."""
    if cores is not None:
        os.sched_setaffinity(0, cores)
    torch.get_num_threads()  # a thread's first use of torch adopts the latest setting of any thread
    torch.set_num_threads(lane.num_threads)  # per thread
    started.release()
    arbiter.serve(lane.key)


@dataclass(frozen=True, slots=True)
class HostMark:
    """A clock reading on a lane's thread."""

    at_ns: int
    """``time.perf_counter_ns``."""

    def ms_until(self, later: HostMark) -> float:
        """Returns the milliseconds between two readings."""
        return (later.at_ns - self.at_ns) / 1e6


class HostLane(Lane):
    """Ordered work on a set of cores, or without slots (see ``HostLanes.aside``)."""

    num_threads: int

    def __init__(self, arbiter: _Arbiter, key: Key, slots: tuple[int, ...], num_threads: int) -> None:
        self._arbiter = arbiter
        self.key = key
        self.slots = slots
        self.num_threads = num_threads

    def submit(self, work: Callable[[], T], *, after: Sequence[Ticket[object]] = ()) -> HostTicket[T]:
        return self._arbiter.submit(self, work, after)

    def mark(self) -> HostMark:
        return HostMark(time.perf_counter_ns())


class HostLanes(Lanes):
    """The open lanes of the host: one pinned thread per partition."""

    def __init__(
        self, partitions: Iterable[tuple[int, ...]], cores: dict[int, int] | None, num_threads: int | None = None
    ) -> None:
        self._arbiter = _Arbiter()
        self._process = os.getpid()
        self._cores = cores
        self._lanes: dict[Key, HostLane] = {}
        self._threads: list[threading.Thread] = []
        self._start({slots: HostLane(self._arbiter, slots, slots, num_threads or len(slots)) for slots in partitions})
        # threads reference the arbiter, not this object, so unreferenced lanes end
        self._finalizer = weakref.finalize(self, _shut, self._arbiter, self._threads, self._process)

    def aside(self, name: str) -> HostLane:
        """Returns a lane without slots; its thread may use all cores of these lanes, with one intra-op thread."""
        if name not in self._lanes:
            self._start({name: HostLane(self._arbiter, name, (), 1)})
        return self._lanes[name]

    def _start(self, lanes: Mapping[Any, HostLane]) -> None:
        """Adds lanes and starts their threads."""
        self._lanes |= lanes
        started = threading.Semaphore(0)
        own_threads = torch.get_num_threads()
        # after a fork torch recreates its thread pool at the first use, which two threads must not do at once
        torch.set_num_threads(own_threads)
        for key, lane in lanes.items():
            self._arbiter.open(key)
            pinned = None
            if self._cores is not None:
                pinned = frozenset(self._cores[slot] for slot in lane.slots or self._cores)
            name = f"mosaic-lane-{key if isinstance(key, str) else '-'.join(map(str, key))}"
            work = (self._arbiter, lane, pinned, started)
            self._threads.append(threading.Thread(target=_serve, args=work, name=name, daemon=True))
            self._threads[-1].start()
        for _ in lanes:
            started.acquire()
        torch.set_num_threads(own_threads)  # threads that the user starts later adopt the latest setting

    def lane(self, slots: tuple[int, ...]) -> HostLane:
        if os.getpid() != self._process:
            raise MosaicError("lanes do not survive a fork; colocate the model again in the child process")
        return self._lanes[slots]

    def drain(self) -> None:
        self._arbiter.drain()

    def close(self) -> None:
        self._finalizer()


def _shut(arbiter: _Arbiter, threads: list[threading.Thread], process: int) -> None:
    if os.getpid() != process:  # a forked child has none of these threads
        return
    arbiter.close()
    for thread in threads:
        if thread is not threading.current_thread():
            thread.join()
