"""The protocols of a backend: a device, and lanes that run work on its partitions.

A *lane* is ordered work on one partition: a pinned thread on the host, a green-context stream on CUDA. Submitted work
is represented by a *ticket*. ``tests/contract`` holds every backend of the table to these promises. A new backend
derives from the protocols and overrides what it can do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, Self, TypeVar, runtime_checkable

import torch

from mosaic.device import Device
from mosaic.errors import BackendUnavailableError, InvalidPlanError

if TYPE_CHECKING:
    from mosaic.backends.streams.api import StreamApi

T = TypeVar("T")
Result = TypeVar("Result", covariant=True)


class Ticket(Protocol[Result]):
    """A piece of submitted work."""

    @property
    def done(self) -> bool:
        """True once the work has ended, with a result or an error."""

    def wait(self) -> Result:
        """Orders the caller after the work and returns its result.

        On the host this blocks the thread. On CUDA it makes the caller's stream wait, not the thread.

        Raises:
            BaseException: The error of the work, at each call.
        """


class Mark(Protocol):
    """A point in the order of a lane's work."""

    def ms_until(self, later: Self) -> float:
        """Waits for both points; returns the milliseconds from this one to the later one."""


class Lane(Protocol):
    """Ordered work on one partition."""

    slots: tuple[int, ...]
    """The slots that its work occupies."""
    num_sms: int | None = None
    """Number of SMs that its work may use; None if it is unconfined or unknown."""
    num_threads: int | None = None
    """Intra-op threads of its thread; None if the caller's thread launches."""

    def submit(self, work: Callable[[], T], *, after: Sequence[Ticket[object]] = ()) -> Ticket[T]:
        """Submits work that starts after all earlier work of this lane and all of ``after``.

        It also waits until its slots are free on other lanes. It never waits for work submitted later, so deadlock is
        impossible. It starts even if work in ``after`` failed.

        Lanes without streams have a thread each, and ``submit`` returns before the end.

        On CUDA (``Lanes.launches_inline``) the calling thread launches the work before ``submit`` returns, behind the
        work queued on the caller's stream; the work *ends* with its kernels. Work on lanes with common slots runs in
        the order of submission, even if the earlier one still waits for its inputs. A backward launched later by
        autograd is not ordered against lanes that share its slots.
        """

    def mark(self) -> Mark:
        """Marks the current point of the lane; call it from its work."""


@runtime_checkable
class Lanes(Protocol):
    """The open lanes of one device, one per distinct partition."""

    @property
    def streams(self) -> Any:
        """Itself (``StreamLanes``) if the lanes are streams; otherwise None."""
        return None

    @property
    def launches_inline(self) -> bool:
        """True if the caller's thread launches the work; lanes then overlap only while no work blocks it."""
        return self.streams is not None

    def lane(self, slots: tuple[int, ...]) -> Lane:
        """Returns the lane of a partition; raises KeyError if it is not open."""

    def aside(self, name: str) -> Lane:
        """Returns a lane without slots, opened at the first call, for work that waits for other processes.

        Raises:
            BackendUnavailableError: Lanes have no threads.
        """
        raise BackendUnavailableError(
            f"a lane without slots is unavailable for {name!r}", found="streams", needed="lanes with threads"
        )

    def drain(self) -> None:
        """Waits for all submitted work; raises none of its errors."""

    def close(self) -> None:
        """Drains, then releases threads, streams and contexts; idempotent."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class Backend(Protocol):
    """Runs modules on partitions of a device."""

    @property
    def name(self) -> str:
        """Name in the table of backends."""

    @property
    def device(self) -> Device:
        """The device and its slots."""

    @property
    def torch_device(self) -> torch.device:
        """The torch device of its modules."""

    @property
    def notes(self) -> tuple[str, ...]:
        """Problems that the user should know, one sentence each."""
        return ()

    @property
    def api(self) -> StreamApi | None:
        """The runtime of its lanes' streams; None if they are not streams, so nothing can be captured."""
        return None

    def open_lanes(self, partitions: Iterable[tuple[int, ...]]) -> Lanes:
        """Opens one lane per distinct partition, before the steps.

        Raises:
            InvalidPlanError: A partition is empty or has a slot outside the device.
        """

    def open_plain_lanes(self, partitions: Iterable[tuple[int, ...]], priorities: Sequence[int] | None = None) -> Lanes:
        """Opens unconfined lanes under the names of partitions, for comparisons.

        Raises:
            BackendUnavailableError: Its lanes are confined.
        """
        raise BackendUnavailableError(
            "plain streams are unavailable", found=f"the {self.name} backend, whose lanes are confined", needed="a GPU"
        )

    @property
    def sm_settings(self) -> str:
        """Description of SM settings that affect times; empty by default."""
        return ""

    def with_sm_target(self) -> Backend:
        """Returns a backend of the same device whose lanes set SM targets in libraries.

        Raises:
            BackendUnavailableError: Its lanes have no SMs.
        """
        raise BackendUnavailableError(
            f"the {self.name} backend has no sm_target; leave it out of Options",
            found=self.device.name,
            needed="SMs of a GPU (the cuda backend)",
        )

    def sm_target_pays(self) -> bool:
        """Returns True if a measurement on this device showed a gain by SM targets."""
        return False

    def read_units(self) -> tuple[int, ...]:
        """Returns the sorted ids of the SMs or cores of the calling work's lane.

        Raises:
            BackendUnavailableError: They cannot be read.
        """
        raise BackendUnavailableError(
            "the SMs or cores of work cannot be read", found=f"the {self.name} backend", needed="a GPU, or Linux"
        )


def checked_partitions(device: Device, partitions: Iterable[tuple[int, ...]]) -> tuple[tuple[int, ...], ...]:
    """Returns the distinct partitions, each with its slots in order.

    Raises:
        InvalidPlanError: A partition is empty or has a slot outside the device.
    """
    distinct = tuple(dict.fromkeys(tuple(sorted(slots)) for slots in partitions))
    for slots in distinct:
        if not slots or slots[0] < 0 or slots[-1] >= device.num_slots or len(set(slots)) != len(slots):
            raise InvalidPlanError(
                f"partition {slots} cannot be opened on {device.name}; use distinct slots from 0 to "
                f"{device.num_slots - 1}, at least one"
            )
    return distinct
