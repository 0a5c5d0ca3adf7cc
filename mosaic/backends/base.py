"""The protocols of a backend: a device, and lanes that run work on partitions of it.

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
    """The promise of one piece of submitted work."""

    @property
    def done(self) -> bool:
        """True once the work has ended, with a result or an error."""

    def wait(self) -> Result:
        """Orders the caller after the work and returns its result.

        On the host this blocks until the work has ended. On CUDA it makes the caller's stream wait, not the thread.

        Raises:
            BaseException: The error of the work, each time.
        """


class Mark(Protocol):
    """A point in the order of a lane's work."""

    def ms_until(self, later: Self) -> float:
        """Waits until both points have been passed; returns the milliseconds from this one to the later one."""


class Lane(Protocol):
    """Ordered work on one partition."""

    slots: tuple[int, ...]
    """The slots that its work holds while it runs."""
    num_sms: int | None = None
    """SMs that its work may use; None if it is not confined or the number is unknown."""
    num_threads: int | None = None
    """Intra-op threads of its own thread; None if the caller's thread launches."""

    def submit(self, work: Callable[[], T], *, after: Sequence[Ticket[object]] = ()) -> Ticket[T]:
        """Submits work that starts when all earlier work of this lane and all of ``after`` has ended.

        It also waits until no other lane holds one of its slots. It never waits for work submitted later, so
        that submission order rules out deadlock. Work in ``after`` that failed does not stop it from starting.

        Lanes that are no streams have a thread each, on which nothing else runs: ``submit`` returns before the end.

        On CUDA (``Lanes.launches_inline``) the work launches kernels, and *ends* when these have ended; the calling
        thread launches it before ``submit`` returns, behind the work queued on the caller's own stream. Work on lanes
        with a slot in common runs in the order of submission, even if the earlier one still waits for its inputs. A
        backward that autograd launches later takes no turns with lanes that share its slots.
        """

    def mark(self) -> Mark:
        """Marks the present point of the lane; call it from work that runs on it."""


@runtime_checkable
class Lanes(Protocol):
    """The lanes that are open on one device, one for each distinct partition."""

    @property
    def streams(self) -> Any:
        """Itself (``StreamLanes``) if the lanes are streams, with their events and graphs; otherwise None."""
        return None

    @property
    def launches_inline(self) -> bool:
        """True if the caller's thread launches the work: lanes then overlap only while no work blocks it."""
        return self.streams is not None

    def lane(self, slots: tuple[int, ...]) -> Lane:
        """Returns the lane of a partition; raises KeyError if it was not opened."""

    def aside(self, name: str) -> Lane:
        """Returns a lane that holds no slots, opened at the first call, for work that waits for other processes.

        Raises:
            BackendUnavailableError: Lanes have no threads that could wait.
        """
        raise BackendUnavailableError(
            f"no lane without slots can be opened for {name!r}", found="streams", needed="lanes with threads"
        )

    def drain(self) -> None:
        """Waits until everything submitted so far has ended; raises none of its errors."""

    def close(self) -> None:
        """Drains, then releases threads, streams and contexts. Calling it again does nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class Backend(Protocol):
    """A way to run modules on partitions of a device."""

    @property
    def name(self) -> str:
        """Its name in the table of backends."""

    @property
    def device(self) -> Device:
        """The device and its slots."""

    @property
    def torch_device(self) -> torch.device:
        """The device of its modules' tensors."""

    @property
    def notes(self) -> tuple[str, ...]:
        """Conditions here that the user should know, a sentence each; empty when all is well."""
        return ()

    @property
    def api(self) -> StreamApi | None:
        """The runtime whose streams its lanes are; None if they are not streams, and nothing can be captured."""
        return None

    def open_lanes(self, partitions: Iterable[tuple[int, ...]]) -> Lanes:
        """Opens one lane for each distinct partition, beforehand, so that a step never creates one.

        Raises:
            InvalidPlanError: A partition is empty or asks for a slot that the device does not have.
        """

    def open_plain_lanes(self, partitions: Iterable[tuple[int, ...]], priorities: Sequence[int] | None = None) -> Lanes:
        """Opens lanes under the names of partitions that nothing confines to these, for comparisons.

        Raises:
            BackendUnavailableError: Its lanes are confined.
        """
        raise BackendUnavailableError(
            "plain streams cannot be had", found=f"the {self.name} backend, whose lanes are confined", needed="a GPU"
        )

    @property
    def sm_settings(self) -> str:
        """Settings of its SMs that change how long modules take, in words; empty for the default ones."""
        return ""

    def with_sm_target(self) -> Backend:
        """Returns a backend of the same device whose lanes set their SM count in libraries.

        Raises:
            BackendUnavailableError: Its lanes have no SMs.
        """
        raise BackendUnavailableError(
            f"sm_target cannot be had on the {self.name} backend; leave it out of Options",
            found=self.device.name,
            needed="SMs of a GPU (the cuda backend)",
        )

    def sm_target_pays(self) -> bool:
        """Returns True if a measurement on this device showed a gain from libraries that know a lane's SM count."""
        return False

    def read_units(self) -> tuple[int, ...]:
        """Returns the sorted ids of the SMs or cores that work runs on; call it from work on a lane.

        Raises:
            BackendUnavailableError: They cannot be read here.
        """
        raise BackendUnavailableError(
            "what work runs on cannot be read", found=f"the {self.name} backend", needed="a GPU, or Linux"
        )


def checked_partitions(device: Device, partitions: Iterable[tuple[int, ...]]) -> tuple[tuple[int, ...], ...]:
    """Returns the distinct partitions, each with its slots in order.

    Raises:
        InvalidPlanError: A partition is empty or asks for a slot that the device does not have.
    """
    distinct = tuple(dict.fromkeys(tuple(sorted(slots)) for slots in partitions))
    for slots in distinct:
        if not slots or slots[0] < 0 or slots[-1] >= device.num_slots or len(set(slots)) != len(slots):
            raise InvalidPlanError(
                f"partition {slots} cannot be opened on {device.name}; use distinct slots from 0 to "
                f"{device.num_slots - 1}, at least one"
            )
    return distinct
