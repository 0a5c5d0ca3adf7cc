"""Ranks as threads of one process: runs a pipeline of any number of ranks on at most one GPU.

A sender's tensors are copied on its stream when they are posted, and the receiver's stream waits for the copy. Both
ends of a message complete once both are posted.
"""

from __future__ import annotations

import itertools
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch

from mosaic.errors import InvalidScheduleError, RankFailedError
from mosaic.ranks.pipeline.transport import LanePair, Message, Tensors
from mosaic.ranks.world.progress import THE_LOOP, RankProgress

_Result = TypeVar("_Result")
_Key = tuple[int, int, bool, LanePair, int]
"""Source and target rank, direction, lanes, and number of a message."""


class InProcess:
    """The ranks.

    Attributes:
        transports: Of each rank.
    """

    def __init__(self, size: int) -> None:
        self.transports = tuple(InProcessTransport(self, rank, size) for rank in range(size))
        self.posted: dict[tuple[_Key, bool], _Posted] = {}
        self.gathered: defaultdict[int, dict[int, Any]] = defaultdict(dict)
        self._changed = threading.Condition()
        self._failure: tuple[str, int] | None = None
        self._finished: set[int] = set()

    def run(self, program: Callable[[InProcessTransport], _Result]) -> tuple[_Result, ...]:
        """Runs a program on each rank in its own thread, and returns the results.

        Raises:
            BaseException: The first that a rank raised.
        """
        results: dict[int, _Result] = {}
        errors: list[BaseException] = []

        def go(transport: InProcessTransport) -> None:
            try:
                results[transport.rank] = program(transport)
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
        return tuple(results[rank] for rank in range(len(threads)))

    def change(self, change: Callable[[], object]) -> None:
        with self._changed:
            change()
            self._changed.notify_all()

    def fail(self, rank: int, why: str) -> None:
        self._failure = self._failure or (f"rank {rank} {why}", rank)

    def leave(self, rank: int) -> None:
        self._finished.add(rank)

    def check(self) -> None:
        """Raises RankFailedError if a rank has failed."""
        if self._failure is not None:
            raise RankFailedError(self._failure[0], ranks=(self._failure[1],))

    def wait_for(self, missing: Callable[[], set[int]], what: str) -> None:
        """Waits until no rank is missing.

        Raises:
            RankFailedError: A rank has failed, or one that is missing has left.
        """
        with self._changed:
            while missing():
                self.check()
                if gone := sorted(missing() & self._finished):
                    raise RankFailedError(f"rank {gone[0]} has left, and others wait for {what}", ranks=(gone[0],))
                self._changed.wait()


class InProcessTransport:
    """The transport of a rank; replaces ``mosaic.ranks.pipeline.transport.Transport``."""

    def __init__(self, ranks: InProcess, rank: int, size: int) -> None:
        self.rank, self.size, self.line = rank, size, tuple(range(size))
        self.progress = RankProgress()
        self._ranks = ranks
        self._numbers: defaultdict[Any, itertools.count[int]] = defaultdict(itertools.count)

    def open_lanes(self, pairs: Iterable[LanePair]) -> None:
        """Does nothing, because each channel has its own numbers."""

    def post(self, messages: Sequence[Message], tensors: Sequence[Tensors | None]) -> list[_Posted]:
        posted = []
        for message, own in zip(messages, tensors, strict=True):
            if own is None:
                posted.append(self._post(message, (message.peer, self.rank), (), is_send=False))
                continue
            message.check(own)
            copies = tuple(tensor.detach().clone(memory_format=torch.contiguous_format) for tensor in own)
            posted.append(self._post(message, (self.rank, message.peer), copies, is_send=True))
        return posted

    def _post(self, message: Message, ends: tuple[int, int], tensors: Tensors, *, is_send: bool) -> _Posted:
        self._ranks.check()
        channel = (*ends, message.is_forward, message.lanes)
        key = (*channel, next(self._numbers[channel, is_send]))
        posted = _Posted(self._ranks, message, key, tensors, is_send=is_send)
        self._ranks.change(lambda: self._ranks.posted.update({(key, is_send): posted}))
        return posted

    def all_gather(self, value: Any) -> list[Any]:
        """Returns the value of each rank."""
        number, everyone = next(self._numbers["gathered"]), set(self.line)
        self._ranks.change(lambda: self._ranks.gathered[number].update({self.rank: value}))
        values = self._ranks.gathered[number]
        with self.progress.waiting(THE_LOOP, "agreement"):
            self._ranks.wait_for(lambda: everyone - values.keys(), "its value")
        return [values[rank] for rank in self.line]

    def abort(self, why: str) -> None:
        """Ends the others' waits."""
        self._ranks.change(lambda: self._ranks.fail(self.rank, why))

    def close(self) -> None:
        self._ranks.change(lambda: self._ranks.leave(self.rank))


class _Posted:
    """One end of a message."""

    def __init__(self, ranks: InProcess, message: Message, key: _Key, tensors: Tensors, *, is_send: bool) -> None:
        self._ranks, self._key, self._is_send = ranks, key, is_send
        self.message, self.tensors = message, tensors
        self.event = torch.cuda.Event() if any(tensor.is_cuda for tensor in tensors) else None
        if self.event is not None:
            self.event.record()

    def wait(self) -> Tensors:
        """Returns received tensors; of a sender nothing."""
        other, peer = (self._key, not self._is_send), {self.message.peer}
        self._ranks.wait_for(lambda: set() if other in self._ranks.posted else peer, f"its end of {self.message.name}")
        if self._is_send:
            return ()
        sent = self._ranks.posted[other]
        if sent.message.name != self.message.name:
            raise InvalidScheduleError(
                f"rank {self.message.peer} sends {sent.message.name} where rank {sent.message.peer} receives "
                f"{self.message.name}; post both ends of a channel in one order"
            )
        self.message.check(sent.tensors)
        if sent.event is not None:
            torch.cuda.current_stream().wait_event(sent.event)
            for tensor in sent.tensors:
                tensor.record_stream(torch.cuda.current_stream())
        tensors, sent.tensors = sent.tensors, ()
        return tensors
