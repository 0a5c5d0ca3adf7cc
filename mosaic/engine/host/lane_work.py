"""Work on the lanes of one plan: handing it over, waiting for it, and the record of when it ran."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch

from mosaic.engine.calls.ranges import profiler_range
from mosaic.engine.calls.thread_state import as_lane, forget_cast_weights, on_lane
from mosaic.errors import UnforeseenError
from mosaic.timeline import Span

if TYPE_CHECKING:
    from mosaic.backends.base import Lanes, Ticket
    from mosaic.engine.calls.placed_module import PlacedModule
    from mosaic.engine.host.lane_tensor import LaneTensor

T = TypeVar("T")
_LOG = logging.getLogger("mosaic")
_MAX_SPANS = 20_000
_MAX_UNSEEN = 256
_HOST_ALLOCATOR = ("can't allocate memory", "not enough memory")
"""What ``c10::alloc_cpu`` says, on POSIX and elsewhere; it raises a plain RuntimeError."""


class LaneWork:
    """Hands work to lanes and waits for it.

    Attributes:
        lanes: The lanes.
        unseen: Work whose end the caller has not seen, and whose errors must not be lost.
        log: When work ran.
        num_backwards: How many of the caller's backwards have ended; those inside of others are not counted.
        num_launched: How many calls of modules went to lanes.
        closed: Whether the lanes were given back.
        looks_early: Whether what has failed is raised at the next call already, wherever the program is by then.
    """

    def __init__(self, lanes: Lanes) -> None:
        self.lanes = lanes
        self.unseen: deque[Ticket[Any]] = deque()
        self.log = SpanLog()
        self.num_backwards = 0
        self.num_launched = 0
        self.closed = False
        self.looks_early = True

    def submit(self, site: PlacedModule, phase: str, work: Callable[[], T], after: Sequence[Ticket[Any]]) -> Ticket[T]:
        """Hands a piece of work to a module's lane; once the lanes are closed, does it right away."""
        if self.closed:
            for ticket in after:
                self.wait(ticket)
            return ReadyTicket(work())
        lane, step = site.lane, self.num_backwards
        shown = phase if lane.slots else f"{phase} routing"

        def run() -> T:
            start = time.perf_counter_ns()
            try:
                with as_lane(), profiler_range(site.name, shown):
                    return work()
            finally:
                self.log.note(site.name, phase, lane.slots, step, start)

        return lane.submit(run, after=after)

    def inputs_of(self, tensors: Iterable[Any], site: PlacedModule) -> list[Ticket[Any]]:
        """Returns what work on a module's lane must wait for to read lane tensors among ``tensors``.

        Its own lane is ordered anyway. Lanes of another executor cannot be waited for on a lane; their tensors are
        waited for here.
        """
        after = []
        for tensor in tensors:
            executor = getattr(tensor, "_executor", None)
            if executor is None or (tensor._lane is site.lane and type(tensor._ticket) is not SumTicket):
                continue
            if executor is self:
                after.append(tensor._ticket)
            else:
                tensor.value()
        return after

    def value(self, tensor: LaneTensor) -> Any:
        """Waits for a tensor's value; if its work failed, lets all lanes come to rest before raising that error."""
        return self.wait(tensor._ticket)[tensor._pick]

    def wait(self, ticket: Ticket[T]) -> T:
        """Waits for work; if it failed, lets all lanes come to rest before raising what it raised."""
        try:
            return ticket.wait()
        except BaseException as error:
            if not on_lane():
                self.drain()
                self.unseen = deque(ticket for ticket in self.unseen if _error_of(ticket) not in (None, error))
            raise

    def drain(self) -> None:
        """Waits until the lanes are at rest; a lane itself does not wait."""
        if not on_lane():
            self.lanes.drain()
            forget_cast_weights()

    def note_unseen(self, ticket: Ticket[Any]) -> None:
        """Adds work whose result nobody may ever use, and looks at what has ended."""
        unseen = self.unseen
        unseen.append(ticket)
        while unseen and ((self.looks_early and unseen[0].done) or len(unseen) > _MAX_UNSEEN):
            self.wait(unseen.popleft())

    def check_unseen(self) -> None:
        """Waits for all work, and raises what it raised."""
        while self.unseen:
            self.wait(self.unseen.popleft())

    def unforeseen(self) -> UnforeseenError | None:
        """Returns the first ``UnforeseenError`` that the caller has not seen, or None; all work has ended."""
        errors = map(_error_of, self.unseen)
        return next((error for error in errors if isinstance(error, UnforeseenError)), None)

    def record(self, site: PlacedModule, phase: str, start_ns: int) -> None:
        """Notes work of a module's that ran in the caller's thread and ends now."""
        self.log.note(site.name, phase, site.lane.slots, self.num_backwards, start_ns)

    def spans(self, origin_ns: int) -> tuple[Span, ...]:
        """Returns what ran, in milliseconds since ``origin_ns`` on the lanes' clock."""
        return self.log.spans(origin_ns)

    @property
    def origin_ns(self) -> int:
        """When the oldest recorded piece of work started."""
        return self.log.origin_ns

    def clear_spans(self) -> None:
        """Forgets what ran so far."""
        self.log.clear()


class SumTicket:
    """A sum of two gradients, either of which may be missing; computed by the work that needs it first."""

    interval_ns = (0, 0)

    def __init__(self, first: LaneTensor, second: LaneTensor) -> None:
        self._operands: tuple[LaneTensor, ...] = (first, second)
        self._sum: list[torch.Tensor | None] | None = None

    @property
    def done(self) -> bool:
        """Returns True once both are there."""
        return all(tensor._ticket.done for tensor in self._operands)

    def wait(self) -> list[torch.Tensor | None]:
        """Waits for both, and returns their sum."""
        operands = self._operands
        if self._sum is None:  # two threads may both compute it
            first, second = [tensor._ticket.wait()[tensor._pick] for tensor in operands]
            with torch.no_grad():
                self._sum = [second if first is None else first if second is None else first + second]
            self._operands = ()
        return self._sum


class ReadyTicket(Generic[T]):
    """A ticket for what is there already."""

    done = True
    interval_ns = (0, 0)

    def __init__(self, result: T) -> None:
        self._result = result

    def wait(self) -> T:
        """Returns the result."""
        return self._result


class SpanLog:
    """The last 20,000 pieces of work, in nanoseconds of ``time.perf_counter_ns``; threads may note at the same time."""

    def __init__(self) -> None:
        self._spans: deque[tuple[str, str, tuple[int, ...], int, int, int]] = deque(maxlen=_MAX_SPANS)

    def note(self, module: str, phase: str, slots: tuple[int, ...], step: int, start_ns: int) -> None:
        """Notes work that ends now."""
        self._spans.append((module, phase, slots, step, start_ns, time.perf_counter_ns()))

    def spans(self, origin_ns: int) -> tuple[Span, ...]:
        """Returns what ran, by its start, in milliseconds since ``origin_ns``."""
        return tuple(
            Span(
                module=module,
                phase=phase,  # type: ignore[arg-type]
                slots=slots,
                step=step,
                start_ms=(start - origin_ns) / 1e6,
                end_ms=(end - origin_ns) / 1e6,
            )
            for module, phase, slots, step, start, end in sorted(self._spans, key=lambda span: span[4])
        )

    @property
    def origin_ns(self) -> int:
        """When the oldest of them started."""
        return min((span[4] for span in self._spans), default=0)

    def clear(self) -> None:
        """Forgets them."""
        self._spans.clear()


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory could not be had."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(saying in str(error) for saying in _HOST_ALLOCATOR)


def _error_of(ticket: Ticket[Any]) -> BaseException | None:
    """Returns what finished work raised."""
    try:
        ticket.wait()
    except BaseException as error:
        return error
    return None
