"""Lanes on streams: work is launched by the caller's thread and ordered by events.

A lane is one stream: a green-context stream of a pool, or for comparison a plain or prioritised one.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

import torch
from torch.utils import _pytree as pytree

from mosaic.backends.base import Lane, Lanes, Ticket
from mosaic.backends.streams.api import StreamApi
from mosaic.backends.streams.clock import StreamClock, StreamMark
from mosaic.backends.streams.libraries import LibrarySettings, accumulation_warning
from mosaic.errors import MosaicError

if TYPE_CHECKING:
    from mosaic.backends.cuda.pool import PartitionRecord

T = TypeVar("T")


class StreamTicket(Generic[T]):
    """Work launched on a lane; created by ``StreamLane``."""

    def __init__(self, lane: StreamLane, end: Any, result: T) -> None:
        self.lane = lane
        self.end = end  # an event
        self.result = result
        self.error: BaseException | None = None

    @property
    def done(self) -> bool:
        passed: bool = self.end.query()
        return passed

    def order(self, stream: Any) -> None:
        """Makes later work of ``stream`` wait for this work."""
        self.end.wait(stream)

    def wait(self) -> T:
        """Orders the caller's current stream after the work and returns its result, without blocking the thread.

        Tensors in the result may be used on that stream and freed at any time.
        """
        if self.error is not None:
            raise self.error
        api = self.lane.api
        caller_stream = api.current_stream()
        self.order(caller_stream)
        _record_use(api, self.result, caller_stream)
        return self.result


class StreamLane(Lane):
    """Ordered work on one stream.

    Attributes:
        last: The event at the end of the latest work, or None.
        origin: The mark of the lanes' opening, on the clock of their marks.
        libraries: Library settings for its launches, if any.
    """

    def __init__(
        self,
        api: StreamApi,
        slots: tuple[int, ...],
        stream: Any,
        origin: StreamMark,
        *,
        num_sms: int | None,
        libraries: LibrarySettings | None = None,
    ) -> None:
        self.api = api
        self.slots = slots
        self.stream = stream
        self.num_sms = num_sms
        self.last: Any = None
        self.origin = origin
        self.libraries = libraries
        self.closed = False
        self._rivals: tuple[weakref.ref[StreamLane], ...] = ()
        self._turn = threading.RLock()
        self._process = os.getpid()

    def share_slots_with(self, lanes: Sequence[StreamLane], turn: threading.RLock) -> None:
        """Sets the other lanes that share its slots; threads lock ``turn`` while they launch."""
        self._rivals = tuple(weakref.ref(lane) for lane in lanes)
        self._turn = turn if lanes else self._turn

    def submit(self, work: Callable[[], T], *, after: Sequence[Ticket[object]] = ()) -> StreamTicket[T]:
        """Launches work behind the caller's stream; keeps its error for ``wait``.

        Tensors of other streams that the work reads must live until the caller has waited for it, or be passed to
        ``api.record_use``, because torch's allocator ignores this lane.
        """
        errors: list[BaseException] = []

        def caught() -> Any:
            try:
                return work()
            except BaseException as error:
                errors.append(error)

        ticket = self.launch(caught, after=after)
        ticket.error = errors.pop() if errors else None  # the error's frames hold the list
        return ticket

    def launch(
        self, work: Callable[[], T], *, after: Sequence[object] = (), behind_caller: bool = True
    ) -> StreamTicket[T]:
        """Launches work and raises its error.

        Args:
            work: Launches kernels on the current stream, which is the lane's.
            after: Earlier work of any lane of this device.
            behind_caller: Also start it behind the caller's stream.
        """
        self._check_open()
        with self._turn:
            if behind_caller:
                self.order_after_caller()
            self._order_after(after)
            try:
                result = self.run(work)
            finally:
                end = self.api.new_event()
                end.record(self.stream)
        return StreamTicket(self, end, result)

    def run(self, work: Callable[[], T]) -> T:
        """Runs work with the lane's stream current, behind lanes that share its slots, and raises its error."""
        self._check_open()
        with self._turn:
            self._order_after(())
            try:
                with self.api.use_stream(self.stream):
                    if self.libraries is None:
                        return work()
                    with self.under_settings():
                        return work()
            finally:
                if self._rivals:
                    self.last = self.api.new_event()
                    self.last.record(self.stream)

    def mark(self) -> StreamMark:
        return self.origin.clock.mark(self.stream)

    def under_settings(self) -> AbstractContextManager[None]:
        """Returns a context with the lane's library settings."""
        return nullcontext() if self.libraries is None else self.libraries.during(self.num_sms)

    def order_after_caller(self) -> None:
        """Orders the lane's next work behind the caller's stream."""
        caller_stream = self.api.current_stream()
        if caller_stream != self.stream:
            event = self.api.new_event()
            event.record(caller_stream)
            event.wait(self.stream)

    def _order_after(self, after: Sequence[object]) -> None:
        for ticket in after:
            if not isinstance(ticket, StreamTicket):
                raise TypeError(f"after={type(ticket).__name__}; a stream waits only for work of streams")
            if ticket.lane is not self:
                ticket.order(self.stream)
        for ref in self._rivals:
            rival = ref()
            if rival is not None and rival.last is not None:
                rival.last.wait(self.stream)

    def _check_open(self) -> None:
        if self.closed:
            raise MosaicError("this lane is closed; colocate the model again to open new ones")
        if os.getpid() != self._process:
            raise MosaicError("lanes do not survive a fork; colocate the model again in the child process")


class StreamLanes(Lanes):
    """The open lanes of one device.

    Args:
        api: The runtime.
        streams: By partition, its stream and the SMs that it may use (None: all).
        give_back: Called once, after all work has ended, to release the streams.
        libraries: Library settings for launches, if any.
        partitions: Requested, granted and probed SMs; none for plain streams.
    """

    def __init__(
        self,
        api: StreamApi,
        streams: Mapping[tuple[int, ...], tuple[Any, int | None]],
        give_back: Callable[[], object],
        *,
        libraries: LibrarySettings | None = None,
        partitions: Iterable[PartitionRecord] = (),
    ) -> None:
        self.api = api
        self.partitions = tuple(partitions)
        self.clock = StreamClock(api)
        origin, turn = self.clock.mark(api.current_stream()), threading.RLock()
        self._lanes = {
            slots: StreamLane(api, slots, stream, origin, num_sms=num_sms, libraries=libraries)
            for slots, (stream, num_sms) in streams.items()
        }
        for slots, lane in self._lanes.items():
            others = [other for key, other in self._lanes.items() if key != slots and not set(key).isdisjoint(slots)]
            lane.share_slots_with(others, turn)
        warn_again = accumulation_warning().begin(False)
        ends = (warn_again, self.clock.close, give_back)
        self._finalizer = weakref.finalize(self, _end, api, [*self], ends, os.getpid())

    @property
    def streams(self) -> Self:
        return self

    def lane(self, slots: tuple[int, ...]) -> StreamLane:
        return self._lanes[slots]

    def __iter__(self) -> Iterator[StreamLane]:
        return iter(tuple(self._lanes.values()))

    def drain(self) -> None:
        """Blocks the thread until all work of the streams has ended, including autograd's backward."""
        _drain(self.api, self)

    def join(self) -> None:
        """Orders the caller's current stream behind all streams, without blocking the thread."""
        caller_stream = self.api.current_stream()
        for lane in self:
            event = self.api.new_event()
            event.record(lane.stream)
            event.wait(caller_stream)

    def close(self) -> None:
        self._finalizer()


def run_aside(api: StreamApi, work: Callable[[], T]) -> T:
    """Runs work on a plain stream of the whole device, behind the caller's, and waits for its end."""
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


def _end(api: StreamApi, lanes: list[StreamLane], ends: Sequence[Callable[[], object]], process: int) -> None:
    if os.getpid() != process:  # a forked child has no driver
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
