"""Lanes on streams: work is launched by the caller's thread and ordered by events.

A lane is one stream, as a rule a green-context stream of a pool. Nothing here asks which kind of stream it is, so
plain and prioritised streams make lanes too: for comparison, under names of their own.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

import torch
from torch.utils import _pytree as pytree

from mosaic.backends.streams.api import StreamApi
from mosaic.backends.streams.clock import StreamClock, StreamMark
from mosaic.backends.streams.libraries import LibrarySettings, accumulation_warning
from mosaic.backends.streams.memory import LaneMemory, run_first_products
from mosaic.errors import BackendUnavailableError, MosaicError

T = TypeVar("T")


class StreamTicket(Generic[T]):
    """Work that was launched on a lane; made by ``StreamLane`` alone."""

    def __init__(self, lane: StreamLane, start: StreamMark | None, end: Any) -> None:
        self._lane = lane
        self._start = start
        self.end = end  # an event
        self._result: T | None = None
        self._error: BaseException | None = None

    @property
    def done(self) -> bool:
        """Whether the kernels of the work have ended."""
        passed: bool = self.end.query()
        return passed

    @property
    def interval_ns(self) -> tuple[int, int]:
        """Start and end since the lanes were opened, by the device's clock; waits for the end."""
        if self._start is None:
            raise MosaicError("this work was launched without times")
        self.end.synchronize()
        start_ms = self._start.at_ms()
        return round(start_ms * 1e6), round((start_ms + self._start.event.elapsed_time(self.end)) * 1e6)

    def order(self, stream: Any) -> None:
        """Makes everything given to ``stream`` from now on start after the work."""
        self.end.wait(stream)

    def wait(self) -> T:
        """Orders the caller's current stream after the work and returns its result, without blocking the thread.

        Tensors in the result may be used on that stream, and let go at any time.
        """
        if self._error is not None:
            raise self._error
        api = self._lane.api
        here = api.current_stream()
        self.order(here)
        _record_use(api, self._result, here)
        return self._result  # type: ignore[return-value]  # set whenever there is no error


class StreamLane:
    """Ordered work on one stream.

    Attributes:
        api: The runtime that the stream belongs to.
        stream: The stream.
        num_sms: SMs that its work may use; None where nobody confines it.
        last: The latest work, or None.
        origin: When the lanes were opened; its clock is the one of their marks.
        libraries: What libraries are told while its work is launched; None leaves them alone.
    """

    def __init__(
        self, api: StreamApi, slots: tuple[int, ...], stream: Any, origin: StreamMark, *, num_sms: int | None
    ) -> None:
        self.api = api
        self.stream = stream
        self.num_sms = num_sms
        self.last: StreamTicket[Any] | None = None
        self.origin = origin
        self.libraries: LibrarySettings | None = None
        self.closed = False
        self._slots = slots
        self._rivals: tuple[weakref.ref[StreamLane], ...] = ()
        self._turn: AbstractContextManager[object] = nullcontext()
        self._process = os.getpid()

    @property
    def slots(self) -> tuple[int, ...]:
        """Indices of the slots that its kernels run on."""
        return self._slots

    @property
    def num_threads(self) -> None:
        """None: the caller's thread launches."""
        return None

    def alone(self) -> AbstractContextManager[None]:
        """Does nothing: the caller launches one piece of work at a time."""
        return nullcontext()

    def share_slots_with(self, lanes: Sequence[StreamLane], turn: AbstractContextManager[object]) -> None:
        """Names the other lanes that have a slot in common with this one: their work excludes its own.

        Args:
            lanes: The other lanes.
            turn: A lock that threads hold while they launch on one of them, so that one waits for the other.
        """
        self._rivals = tuple(weakref.ref(lane) for lane in lanes)
        self._turn = turn if lanes else nullcontext()

    def submit(self, work: Callable[[], T], *, after: Sequence[object] = ()) -> StreamTicket[T]:
        """Launches work behind what the caller's stream was given so far; keeps what it raises for ``wait``.

        Tensors of other streams that the work reads must live until the caller has waited for it, or be declared with
        ``api.record_use``: torch's allocator does not know of this lane.
        """
        ticket, error = self._launch(work, after, behind_caller=True, timed=True)
        ticket._error = error
        try:
            return ticket
        finally:  # an error holds the frames that it passed, and they must not hold its ticket
            del ticket, error

    def launch(
        self,
        work: Callable[[], T],
        *,
        after: Sequence[object] = (),
        behind_caller: bool = True,
        timed: bool = True,
    ) -> StreamTicket[T]:
        """Launches work at once; what it raises comes out here.

        Args:
            work: Launches kernels on the current stream, which is the lane's.
            after: Work that it starts after, of any lane of this device.
            behind_caller: Whether it also starts after all that the caller's stream was given so far.
            timed: Whether its ticket can tell when it ran.
        """
        ticket, error = self._launch(work, after, behind_caller=behind_caller, timed=timed)
        if error is not None:
            raise error
        return ticket

    def mark(self) -> StreamMark:
        """Notes the point that the stream has come to."""
        return self.origin.clock.mark(self.stream)

    def under_settings(self) -> AbstractContextManager[None]:
        """A block in which libraries are told what they are to know of the lane."""
        return nullcontext() if self.libraries is None else self.libraries.during(self.num_sms)

    def order_after_caller(self) -> None:
        """Starts whatever comes next after all that the caller's stream was given so far."""
        here = self.api.current_stream()
        if here != self.stream:
            event = self.api.new_event()
            event.record(here)
            event.wait(self.stream)

    def _launch(
        self, work: Callable[[], T], after: Sequence[object], *, behind_caller: bool, timed: bool
    ) -> tuple[StreamTicket[T], BaseException | None]:
        self._check_open()
        result: T | None = None
        error: BaseException | None = None
        with self._turn:
            if behind_caller:
                self.order_after_caller()
            self._order_after(after)
            start = self.mark() if timed else None
            with self.api.use_stream(self.stream), self.under_settings():
                try:
                    result = work()
                except BaseException as raised:
                    error = raised
            end = self.api.new_event(timing=timed)
            end.record(self.stream)
            self.last = StreamTicket(self, None, end)  # without the result, which lives as long as its own ticket
        ticket: StreamTicket[T] = StreamTicket(self, start, end)
        ticket._result = result
        try:
            return ticket, error
        finally:
            del ticket, error, result

    def _order_after(self, after: Sequence[object]) -> None:
        for ticket in after:
            if not isinstance(ticket, StreamTicket):
                raise TypeError(f"after={type(ticket).__name__}: a stream can only wait for work of a stream")
            if ticket._lane is not self:
                ticket.order(self.stream)
        for ref in self._rivals:
            rival = ref()
            if rival is not None and rival.last is not None:
                rival.last.order(self.stream)

    def _check_open(self) -> None:
        if self.closed:
            raise MosaicError("this lane is closed; colocate the model again to open new ones")
        if os.getpid() != self._process:
            raise MosaicError("lanes do not survive a fork; colocate the model again in the child process")


class StreamLanes:
    """The lanes that are open on one device.

    Args:
        api: The runtime.
        streams: For each partition, its stream and the SMs that the stream may use (None: all).
        give_back: Called once, after all work has ended, to end what the streams belong to.
        conflict: Whether work on two partitions excludes each other; by default where they have a slot in common.

    Attributes:
        api: The runtime.
        clock: What the marks of all lanes are measured by.
    """

    def __init__(
        self,
        api: StreamApi,
        streams: Mapping[tuple[int, ...], tuple[Any, int | None]],
        give_back: Callable[[], object],
        *,
        conflict: Callable[[tuple[int, ...], tuple[int, ...]], bool] | None = None,
    ) -> None:
        self.api = api
        self.clock = StreamClock(api)
        self._origin = self.clock.mark(api.current_stream())
        turn = threading.RLock()
        self._lanes: dict[tuple[int, ...], StreamLane] = {}
        for slots, (stream, num_sms) in streams.items():
            self._lanes[slots] = StreamLane(api, slots, stream, self._origin, num_sms=num_sms)
        self._all = list(self._lanes.values())
        excludes = conflict or _share_a_slot
        for slots, lane in self._lanes.items():
            rivals = [other for key, other in self._lanes.items() if key != slots and excludes(key, slots)]
            lane.share_slots_with(rivals, turn)
        warn_again = accumulation_warning().begin(False)
        ends = (warn_again, self.clock.close, give_back)
        self._finalizer = weakref.finalize(self, _end, api, self._all, ends, os.getpid())

    @property
    def launches_inline(self) -> bool:
        """True: the caller's thread launches everything."""
        return True

    @property
    def streams(self) -> Self:
        """Themselves."""
        return self

    def lane(self, slots: tuple[int, ...]) -> StreamLane:
        """Returns the lane of a partition; raises KeyError if it was not opened."""
        return self._lanes[slots]

    def has(self, lane: object) -> bool:
        """Whether a lane is one of these."""
        return any(lane is own for own in self._all)

    def aside(self, name: str) -> StreamLane:
        """Raises BackendUnavailableError: a stream has no thread that could wait for other processes."""
        raise BackendUnavailableError(
            f"no lane without slots can be opened for {name!r}", found="streams", needed="lanes with threads"
        )

    def measure_memory(self) -> tuple[LaneMemory, ...]:
        """Runs small products forward and backward on each lane and measures what stays behind.

        Gives all cached memory and all workspaces back before each, so it is not for a loop; they are made anew when
        needed. No work of anybody may be on the lanes.
        """
        api = self.api
        api.synchronize()
        found = []
        for lane in self:
            api.release_workspaces()
            api.empty_cache()
            reserved, free = api.reserved_bytes(), api.free_bytes()
            lane.launch(lambda: run_first_products(api.device), timed=False)
            api.synchronize()
            found.append(
                LaneMemory(
                    slots=lane.slots,
                    reserved_bytes=max(0, api.reserved_bytes() - reserved),
                    device_bytes=max(0, free - api.free_bytes()),
                )
            )
        return tuple(found)

    def __iter__(self) -> Iterator[StreamLane]:
        """Goes through the lanes of partitions, in the order in which they were opened."""
        return iter(tuple(self._lanes.values()))

    def set_libraries(self, libraries: LibrarySettings | None) -> None:
        """Launches the work of all lanes under settings of libraries, if any."""
        for lane in self._all:
            lane.libraries = libraries

    def drain(self) -> None:
        """Blocks the thread until the streams have done all they were given, autograd's backward included."""
        _drain(self.api, self._all)

    def join(self) -> None:
        """Orders the caller's current stream after all that the streams were given, without blocking the thread."""
        here = self.api.current_stream()
        for lane in self._all:
            event = self.api.new_event()
            event.record(lane.stream)
            event.wait(here)

    def close(self) -> None:
        """Drains, and gives back the streams and what cuBLAS keeps for them."""
        self._finalizer()

    def __enter__(self) -> Self:
        """Returns itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Closes the lanes."""
        self.close()


def run_aside(api: StreamApi, work: Callable[[], T]) -> T:
    """Runs work on a plain stream of the whole device, behind the caller's, and waits until it has ended."""
    side = api.new_stream()
    event = api.new_event()
    event.record(api.current_stream())
    event.wait(side)
    try:
        with api.use_stream(side):
            result = work()
    finally:
        api.synchronize()
        api.release_workspaces()
        api.give_back(side)
    _record_use(api, result, api.current_stream())
    return result


def _record_use(api: StreamApi, value: object, stream: Any) -> None:
    for leaf in pytree.tree_leaves(value):
        if isinstance(leaf, torch.Tensor):
            api.record_use(leaf, stream)


def _share_a_slot(one: tuple[int, ...], other: tuple[int, ...]) -> bool:
    return not set(one).isdisjoint(other)


def _end(api: StreamApi, lanes: list[StreamLane], ends: Sequence[Callable[[], object]], process: int) -> None:
    if os.getpid() != process:  # the child of a fork has no driver
        return
    for lane in lanes:
        lane.closed = True
    try:
        _drain(api, lanes)
        api.release_workspaces()
    finally:
        for end in ends:
            end()


def _drain(api: StreamApi, lanes: Iterable[StreamLane]) -> None:
    for lane in lanes:
        event = api.new_event()
        event.record(lane.stream)
        event.synchronize()
