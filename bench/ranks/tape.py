"""A step's communication by itself, and its compute by itself: collectives that are recorded, played, or left out.

While a tape records, the collectives of torch.distributed do what they do and leave what they were given. *Played*,
they are made again, in the same order and with nothing in between: communication alone. *Left out*, a step finds in
each call's tensors what it found there when it was recorded: compute alone, with the same numbers. The engine's modules
communicate from threads of their own, so only what went over one communicator has an order that all ranks share; what
is played has a thread for each communicator too.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

NAMES = ("all_to_all_single", "all_reduce", "all_gather", "broadcast")
"""Collectives that the engine makes."""


@dataclass(frozen=True, slots=True)
class Call:
    """One collective."""

    name: str
    """Function of torch.distributed."""
    group: Any
    """Its group."""
    given: tuple[Any, ...]
    """Copies of its positions, from before the call."""
    more: dict[str, Any]
    """Its keywords."""
    made: list[torch.Tensor]
    """Copies of what it wrote, in the order of ``outputs_of``."""


class Done:
    """Work that has ended."""

    def wait(self, *_: Any) -> bool:
        """Returns at once."""
        return True

    def is_completed(self) -> bool:
        """Always."""
        return True


class Taped:
    """Work whose outcome goes on the tape when it is waited for, and not before: who begins it may hold slots.

    Args:
        work: What was begun.
        call: Its place on the tape.
        outputs: What it writes.
    """

    def __init__(self, work: Any, call: Call, outputs: Sequence[torch.Tensor]) -> None:
        self._work = work
        self._call = call
        self._outputs = outputs

    def wait(self, *args: Any) -> Any:
        """Waits for it."""
        found = self._work.wait(*args)
        if not self._call.made:
            self._call.made.extend(tensor.detach().clone() for tensor in self._outputs)
        return found

    def is_completed(self) -> bool:
        """Whether it has ended."""
        return bool(self._work.is_completed())


class Tape:
    """What one step of this rank communicated."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self._lock = threading.Lock()

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Records the collectives inside the block."""

        def instead(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                noted, outputs = Call(name, kwargs.get("group"), _copied(args), kwargs, []), outputs_of(name, args)
                with self._lock:
                    self.calls.append(noted)
                work = real(*args, **kwargs)
                if kwargs.get("async_op"):
                    return Taped(work, noted, outputs)
                noted.made.extend(tensor.detach().clone() for tensor in outputs)
                return work

            return call

        with _patched(instead):
            yield

    @contextmanager
    def left_out(self) -> Iterator[None]:
        """Answers the collectives inside the block from the tape; nothing is sent."""
        answers: dict[tuple[str, int], deque[Call]] = defaultdict(deque)
        for call in self.calls:
            answers[call.name, id(call.group)].append(call)

        def instead(name: str, _real: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                known = answers[name, id(kwargs.get("group"))].popleft()
                for target, source in zip(outputs_of(name, args), known.made, strict=True):
                    target.detach().copy_(source)
                return Done() if kwargs.get("async_op") else None

            return call

        with _patched(instead):
            yield

    def play_ms(self) -> float:
        """Makes the collectives again and returns how long they took together, in milliseconds."""
        of_group: dict[int, list[Call]] = defaultdict(list)
        for call in self.calls:
            of_group[id(call.group)].append(call)
        start = time.perf_counter()
        with ThreadPoolExecutor(max(1, len(of_group))) as threads:
            for ended in [threads.submit(_play, calls) for calls in of_group.values()]:
                ended.result()
        return (time.perf_counter() - start) * 1e3


def _play(calls: Sequence[Call]) -> None:
    pending = [getattr(dist, call.name)(*call.given, **call.more) for call in calls]
    for work in pending:
        if work is not None:
            work.wait()


def outputs_of(name: str, args: tuple[Any, ...]) -> list[torch.Tensor]:
    """Returns the tensors that a collective writes."""
    return list(args[0]) if name == "all_gather" else [args[0]]


def _copied(args: tuple[Any, ...]) -> tuple[Any, ...]:
    def copy(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.detach().clone()
        return [copy(one) for one in value] if isinstance(value, list) else value

    return tuple(map(copy, args))


@contextmanager
def _patched(instead: Callable[[str, Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    before = {name: getattr(dist, name) for name in NAMES}
    try:
        for name, real in before.items():
            setattr(dist, name, instead(name, real))
        yield
    finally:
        for name, real in before.items():
            setattr(dist, name, real)
