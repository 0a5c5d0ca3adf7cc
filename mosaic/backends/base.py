"""The protocols of a backend: what a device is, and lanes that run work on partitions of it.

A *lane* is ordered work on one partition: a pinned thread on the host, a green-context stream on CUDA. Work is
handed over with ``submit`` and answered by a *ticket*. ``tests/contract`` holds every backend of the table to these
promises. What only some backends can do has an answer here that says no: a new backend derives from the protocols and
writes what it can do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, Self, TypeVar, runtime_checkable

import torch

from mosaic.device import Device
from mosaic.errors import BackendUnavailableError, InvalidPlanError

if TYPE_CHECKING:
    from mosaic.backends.cuda.driver import SmPlacement
    from mosaic.backends.streams.api import StreamApi
    from mosaic.backends.streams.lanes import StreamLanes
    from mosaic.backends.streams.memory import LaneMemory

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

    @property
    def num_sms(self) -> int | None:
        """SMs that its work may use; None where nobody confines it, or nobody tells."""
        return None

    @property
    def num_threads(self) -> int | None:
        """Intra-op threads of its own thread; None where the caller's thread launches."""
        return None

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

    @property
    def streams(self) -> StreamLanes | None:
        """Themselves where they are streams, with their events and graphs; None where they are not."""
        return None

    def lane(self, slots: tuple[int, ...]) -> Lane:
        """Returns the lane of a partition; raises KeyError if it was not opened."""

    def aside(self, name: str) -> Lane:
        """Opens a lane that holds no slots, or returns it, for work that waits for other processes.

        Raises:
            BackendUnavailableError: Lanes have no threads that could wait.
        """
        raise BackendUnavailableError(
            f"no lane without slots can be opened for {name!r}", found=type(self).__name__, needed="lanes with threads"
        )

    def has(self, lane: Lane) -> bool:
        """Whether a lane is one of these."""
        try:
            return self.lane(lane.slots) is lane
        except KeyError:
            return False

    def measure_memory(self) -> tuple[LaneMemory, ...]:
        """Measures what each lane costs in device memory before any module runs on it; nothing where it costs none."""
        return ()

    def drain(self) -> None:
        """Waits until everything submitted so far has ended; raises nothing that the work raised."""

    def close(self) -> None:
        """Drains, then gives threads, streams and contexts back. Calling it again does nothing."""

    def __enter__(self) -> Self:
        """Returns itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Closes the lanes."""
        self.close()


class Backend(Protocol):
    """A way to run modules on partitions of a device."""

    @property
    def name(self) -> str:
        """Its name in the table of backends."""

    @property
    def device(self) -> Device:
        """What it runs on."""

    @property
    def torch_device(self) -> torch.device:
        """Where the tensors of its modules live."""

    @property
    def notes(self) -> tuple[str, ...]:
        """What the user should know about it here, one sentence each; empty when all is well."""
        return ()

    @property
    def api(self) -> StreamApi | None:
        """The runtime whose streams its lanes are; None where they are no streams, and nothing can be captured."""
        return None

    def open_lanes(self, partitions: Iterable[tuple[int, ...]]) -> Lanes:
        """Opens one lane for each distinct partition, beforehand, so that a step never creates one.

        Raises:
            InvalidPlanError: A partition is empty or asks for a slot that the device does not have.
        """

    def open_plain_lanes(self, partitions: Iterable[tuple[int, ...]], priorities: Sequence[int] | None = None) -> Lanes:
        """Opens lanes under the names of partitions that nothing confines to these: to compare with.

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

    def with_sms(
        self, *, fine_slots: bool = False, sm_placement: SmPlacement = "merged", sm_target: bool = False
    ) -> Backend:
        """Returns a backend of the same device with these SM settings besides its own; itself if that adds none.

        Raises:
            BackendUnavailableError: Its partitions have no such settings.
        """
        asked = {"fine_slots": fine_slots, "sm_placement": sm_placement != "merged", "sm_target": sm_target}
        names = [name for name, is_asked in asked.items() if is_asked]
        if names:
            raise BackendUnavailableError(
                f"{' and '.join(names)} cannot be had on the {self.name} backend; leave them out of Options",
                found=self.device.name,
                needed="SMs of a GPU (the cuda backend)",
            )
        return self

    def sm_target_pays(self) -> bool:
        """Returns whether giving libraries the SM count of a lane was measured to pay on this device."""
        return False

    def alternatives(self) -> Mapping[str, Callable[[], Backend]]:
        """Returns the other ways to make slots or partitions on the same device, by name."""
        return {}

    def read_units(self) -> tuple[int, ...]:
        """Returns the sorted ids of the SMs or cores that work runs on; to be called from work on a lane.

        Raises:
            BackendUnavailableError: They cannot be read here.
        """
        raise BackendUnavailableError(
            "what work runs on cannot be read", found=f"the {self.name} backend", needed="a GPU, or Linux"
        )

    def other_processes(self) -> frozenset[int]:
        """Returns the processes besides this one that compute on the device, as far as somebody tells."""
        return frozenset()


def checked_partitions(device: Device, partitions: Iterable[tuple[int, ...]]) -> tuple[tuple[int, ...], ...]:
    """Returns the distinct partitions, each with its slots in order.

    Raises:
        InvalidPlanError: A partition is empty or asks for a slot that the device does not have.
    """
    wanted = tuple(dict.fromkeys(tuple(sorted(slots)) for slots in partitions))
    for slots in wanted:
        if not slots or slots[0] < 0 or slots[-1] >= device.num_slots or len(set(slots)) != len(slots):
            raise InvalidPlanError(
                f"partition {slots} cannot be opened on {device.name}; use distinct slots from 0 to "
                f"{device.num_slots - 1}, at least one"
            )
    return wanted
