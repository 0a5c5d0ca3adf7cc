"""Ranks that are threads of one process: one GPU, or none, runs a pipeline of any number of ranks.

Tensors are copied into buffers that the receiver made, on the stream of whoever comes second; streams wait for each
other by events. Not tried on GPUs.
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch

from mosaic.errors import InvalidScheduleError, RankFailedError
from mosaic.ranks.pipeline.transport import LanePair, Message, Tensors
from mosaic.ranks.world.progress import THE_LOOP, RankProgress

_Made = TypeVar("_Made")
_Channel = tuple[int, int, bool, LanePair]
"""From which rank to which, whether forward, and between which lanes."""


class InProcess:
    """The ranks.

    Args:
        size: How many.
        device: Where receivers make their buffers; by default the CPU.

    Attributes:
        transports: For each rank its own.
    """

    def __init__(self, size: int, *, device: torch.device | None = None) -> None:
        self.device = device or torch.device("cpu")
        self.transports = tuple(InProcessTransport(self, rank, size) for rank in range(size))
        self._changed = threading.Condition()
        self._unmatched: defaultdict[_Channel, deque[_Posted]] = defaultdict(deque)
        self._failed: tuple[str, int] | None = None
        self._left: set[int] = set()
        self._gathered: dict[int, dict[int, Any]] = {}

    def run(self, program: Callable[[InProcessTransport], _Made]) -> tuple[_Made, ...]:
        """Runs a program on each rank, in a thread of its own, and returns what they made.

        Raises:
            BaseException: The first that a rank raised.
        """
        made: dict[int, _Made] = {}
        errors: list[BaseException] = []

        def go(transport: InProcessTransport) -> None:
            try:
                made[transport.rank] = program(transport)
            except BaseException as error:  # raised by the caller's thread
                errors.append(error)
                transport.abort(f"failed: {type(error).__name__}: {error}")
            transport.close()

        threads = [
            threading.Thread(target=go, args=(transport,), name=f"mosaic-rank-{transport.rank}", daemon=True)
            for transport in self.transports
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        return tuple(made[rank] for rank in range(len(threads)))

    def post(self, channel: _Channel, posted: _Posted) -> None:
        with self._changed:
            self.check()
            waiting = self._unmatched[channel]
            if not waiting or waiting[0].is_send == posted.is_send:
                waiting.append(posted)
                return
            other = waiting.popleft()
        posted.copy(other)
        with self._changed:
            posted.is_done = other.is_done = True
            self._changed.notify_all()

    def await_done(self, posted: _Posted) -> None:
        with self._changed:
            while not posted.is_done:
                self.check()
                self._check_there(posted.message)
                self._changed.wait()

    def all_gather(self, rank: int, number: int, value: Any) -> list[Any]:
        """Returns the values of all ranks in their collective of this number."""
        size = len(self.transports)
        with self._changed:
            values = self._gathered.setdefault(number, {})
            values[rank] = value
            self._changed.notify_all()
            while len(values) < size:
                self.check()
                gone = next((other for other in sorted(self._left) if other not in values), None)
                if gone is not None:
                    raise RankFailedError(f"rank {gone} has left, and others wait for its value", ranks=(gone,))
                self._changed.wait()
            return [values[other] for other in range(size)]

    def fail(self, rank: int, why: str) -> None:
        with self._changed:
            if self._failed is None:
                self._failed = f"rank {rank} {why}", rank
            self._changed.notify_all()

    def leave(self, rank: int) -> None:
        """Ends the waits for what a rank has not posted."""
        with self._changed:
            self._left.add(rank)
            self._changed.notify_all()

    def check(self) -> None:
        if self._failed is not None:
            text, rank = self._failed
            raise RankFailedError(text, ranks=(rank,))

    def _check_there(self, message: Message) -> None:
        if message.peer in self._left:
            raise RankFailedError(
                f"rank {message.peer} has left, and others wait for its end of {message.name}", ranks=(message.peer,)
            )


class InProcessTransport:
    """One rank's, in the place of ``mosaic.ranks.pipeline.transport.Transport``."""

    def __init__(self, ranks: InProcess, rank: int, size: int) -> None:
        self.rank, self.size, self.line = rank, size, tuple(range(size))
        self.progress = RankProgress()
        self._ranks = ranks
        self._num_gathered = 0

    def open_lanes(self, pairs: Iterable[LanePair]) -> None:
        """Does nothing: each channel has a queue of its own."""

    def post_send(self, message: Message, tensors: Tensors) -> _Posted:
        """Hands tensors to the receiver, if that one is ready for them, and lets it fetch them otherwise."""
        message.check(tensors)
        posted = _Posted(self._ranks, message, tensors, is_send=True)
        self._ranks.post((self.rank, message.peer, message.is_forward, message.lanes), posted)
        return posted

    def post_receive(self, message: Message) -> _Posted:
        buffers = tuple(torch.empty(spec.shape, dtype=spec.dtype, device=self._ranks.device) for spec in message.specs)
        posted = _Posted(self._ranks, message, buffers, is_send=False)
        self._ranks.post((message.peer, self.rank, message.is_forward, message.lanes), posted)
        return posted

    def all_gather(self, value: Any) -> list[Any]:
        self._num_gathered += 1
        with self.progress.waiting(THE_LOOP, "agreement"):
            return self._ranks.all_gather(self.rank, self._num_gathered, value)

    def abort(self, why: str) -> None:
        self._ranks.fail(self.rank, why)

    def close(self) -> None:
        self._ranks.leave(self.rank)


class _Posted:
    """One end of a message."""

    __slots__ = ("_ranks", "event", "is_done", "is_send", "message", "tensors")

    def __init__(self, ranks: InProcess, message: Message, tensors: Tensors, *, is_send: bool) -> None:
        self._ranks = ranks
        self.message = message
        self.tensors = tensors
        self.is_send = is_send
        self.is_done = False
        self.event = _noted(tensors)

    def wait(self) -> Tensors:
        if not self.is_done:
            self._ranks.await_done(self)
        if self.event is not None:
            torch.cuda.current_stream().wait_event(self.event)
        tensors, self.tensors = self.tensors, ()
        return () if self.is_send else tensors

    def copy(self, other: _Posted) -> None:
        """Copies from whichever end sends to the other; this end came second, and its thread is the one that runs."""
        source, target = (self, other) if self.is_send else (other, self)
        if source.message.name != target.message.name:
            raise InvalidScheduleError(
                f"rank {target.message.peer} sends {source.message.name} where rank {source.message.peer} receives "
                f"{target.message.name}; post both ends of a channel in one order"
            )
        target.message.check(source.tensors)
        if other.event is not None:
            torch.cuda.current_stream().wait_event(other.event)
        for to, tensor in zip(target.tensors, source.tensors, strict=True):
            to.copy_(tensor.detach(), non_blocking=True)
        self.event = other.event = _noted(target.tensors)


def _noted(tensors: Tensors) -> torch.cuda.Event | None:
    if not any(tensor.is_cuda for tensor in tensors):
        return None
    event = torch.cuda.Event()
    event.record()
    return event
