"""The protocol of a backend: what a device is, and lanes that run work on partitions of it.

A *lane* is ordered work on one partition: a pinned thread on the host, a green-context stream on CUDA. Work is
handed over with ``submit`` and answered by a *ticket*. ``tests/contract`` holds every backend to these promises.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import Protocol, Self, TypeVar, runtime_checkable

import torch

from mosaic.device import Device

T = TypeVar("T")
Result = TypeVar("Result", covariant=True)


class Ticket(Protocol[Result]):
    """The promise of one piece of submitted work."""

    @property
    def done(self) -> bool:
        """Whether the work has ended, well or not."""

    @property
    def interval_ns(self) -> tuple[int, int]:
        """Start and end of the work on its lane, in nanoseconds of one clock.

        Waits for the end on CUDA; elsewhere it is to be asked for once the work is done.
        """

    def wait(self) -> Result:
        """Orders the caller after the work and returns its result.

        On the host this blocks until the work has ended. On CUDA it makes the caller's stream wait, not the thread.

        Raises:
            BaseException: Whatever the work raised, each time.
        """


class Mark(Protocol):
    """A point in the order of a lane's work."""

    def ms_until(self, later: Self) -> float:
        """Waits until both points have been passed; returns the milliseconds from this one to the later one."""


class Lane(Protocol):
    """Ordered work on one partition."""

    @property
    def slots(self) -> tuple[int, ...]:
        """The slots that its work holds while it runs."""

    def submit(self, work: Callable[[], T], *, after: Sequence[Ticket[object]] = ()) -> Ticket[T]:
        """Hands over work that starts when all earlier work of this lane and all of ``after`` has ended.

        It also waits until no other lane holds one of its slots. It never waits for work submitted later, so
        that submission order rules out deadlock. Work in ``after`` that failed does not stop it from starting.

        On CUDA (``Lanes.launches_inline``) the work launches kernels, and *ends* when these have ended; it is launched
        by the calling thread before ``submit`` returns, behind what the caller's own stream was given so far. Two
        things follow that threads do better. Work that blocks its thread blocks the caller. And work on lanes
        with a slot in common runs in the order of submission, even if the earlier one still waits for its inputs: what
        a stream was told to wait for cannot be taken back. A backward that autograd launches on a lane's stream
        later on is ordered by autograd; it takes no turns with lanes that share its slots.
        """

    def mark(self) -> Mark:
        """Notes the point that the lane has come to; to be called from work that runs on it."""


@runtime_checkable
class Lanes(Protocol):
    """The lanes that are open on one device, one for each distinct partition."""

    @property
    def launches_inline(self) -> bool:
        """Whether the caller's thread launches the work, so that lanes overlap only while no work blocks it."""

    def lane(self, slots: tuple[int, ...]) -> Lane:
        """Returns the lane of a partition; raises KeyError if it was not opened."""

    def drain(self) -> None:
        """Waits until everything submitted so far has ended; raises nothing that the work raised."""

    def close(self) -> None:
        """Drains, then gives threads, streams and contexts back. Calling it again does nothing."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...


class Backend(Protocol):
    """A way to run modules on partitions of a device."""

    @property
    def name(self) -> str:
        """``host`` or ``cuda``."""

    @property
    def device(self) -> Device:
        """What it runs on."""

    @property
    def torch_device(self) -> torch.device:
        """Where the tensors of its modules live."""

    @property
    def notes(self) -> tuple[str, ...]:
        """What the user should know about it here, one sentence each; empty when all is well."""

    def open_lanes(self, partitions: Iterable[tuple[int, ...]]) -> Lanes:
        """Opens one lane for each distinct partition, beforehand, so that a step never creates one.

        Raises:
            InvalidPlanError: A partition is empty or asks for a slot that the device does not have.
        """
