"""Work on the lanes of one plan: operators that are being collected, work in flight, and the record of both."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from mosaic.engine.calls.ranges import ProfilerRange
from mosaic.engine.calls.thread_state import as_lane, forget_cast_weights, on_lane
from mosaic.engine.host.batch import Batch
from mosaic.engine.host.forwards import Forwards
from mosaic.engine.host.lane_tensor import LaneTensor, ReadyTicket
from mosaic.engine.host.span_log import SpanLog

if TYPE_CHECKING:
    import torch

    from mosaic.backends.base import Lane, Lanes, Ticket
    from mosaic.engine.calls.placed_module import PlacedModule
    from mosaic.timeline import Span

T = TypeVar("T")


class LaneWork:
    """Hands work to lanes and waits for it.

    Attributes:
        lanes: The lanes.
        forwards: Those that nobody has seen end.
        last_write: By lane, its last operator that wrote into one of its tensors.
        log: When work ran.
        num_backwards: How many of the caller's backwards have ended; those inside of others are not counted.
        num_launched: How many calls went to lanes.
        closed: Whether the lanes were given back.
    """

    def __init__(self, lanes: Lanes) -> None:
        self.lanes = lanes
        self.forwards = Forwards(self.wait)
        self.last_write: dict[Lane, Ticket[Any]] = {}
        self.log = SpanLog()
        self.num_backwards = 0
        self.num_launched = 0
        self.closed = False
        self._batches: dict[Lane, Batch] = {}

    def inputs_from(self, found: Iterable[LaneTensor], lane: Lane) -> list[Ticket[Any]]:
        """Returns what work on ``lane`` must wait for to read the tensors ``found``; its own lane is ordered anyway.

        Lanes of another executor cannot be waited for on a lane; their tensors are waited for here.
        """
        others = []
        for tensor in found:
            home: object = tensor._executor
            if home is not self:
                tensor.value()
            elif tensor._lane is not lane:
                others.append(tensor)
        writes = [self.last_write[tensor._lane] for tensor in others if tensor._lane in self.last_write]
        for other in {tensor._lane for tensor in others}:
            self._hand_over(other)
        return [tensor._ticket for tensor in others] + writes

    def submit(self, site: PlacedModule, phase: str, work: Callable[[], T], after: Sequence[Ticket[Any]]) -> Ticket[T]:
        """Hands a piece of a module's work to its lane, behind what was collected for it."""
        self._hand_over(site.lane)
        return self._submit_to(site.lane, site.name, phase, work, after)

    def batch(self, lane: Lane, module: str) -> Batch:
        """Returns the operators that are being collected for a lane."""
        found = self._batches.get(lane)
        if found is None or not found.takes_more:
            self._hand_over(lane)
            found = self._batches[lane] = Batch(lambda work, after: self._submit_to(lane, module, "glue", work, after))
        return found

    def hand_over_all(self) -> None:
        """Hands over everything that was collected."""
        for lane in list(self._batches):
            self._hand_over(lane)

    def has(self, lane: Lane) -> bool:
        """Whether a lane is one of these."""
        return self.lanes.has(lane)

    def value(self, tensor: LaneTensor) -> torch.Tensor:
        """Waits for a tensor's value; if its work failed, lets all lanes come to rest before raising that error."""
        if not on_lane() and tensor._lane in self.last_write:
            self.wait(self.last_write[tensor._lane])  # it may have written into this tensor, through a view
        return self.wait(tensor._ticket)[tensor._pick]

    def wait(self, ticket: Ticket[T]) -> T:
        """Waits for work; if it failed, lets all lanes come to rest before raising what it raised."""
        try:
            return ticket.wait()
        except BaseException as error:
            if not on_lane():
                self.drain()
                self.forwards.told(error)
            raise

    def drain(self) -> None:
        """Waits until the lanes are at rest; a lane itself does not wait."""
        if not on_lane():
            self.hand_over_all()
            self.lanes.drain()
            forget_cast_weights()

    def check_forwards(self) -> None:
        """Waits for all forwards, those included whose results nobody used, and raises what they raised."""
        self.forwards.check()

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

    def _hand_over(self, lane: Lane) -> None:
        batch = self._batches.pop(lane, None)
        if batch is not None:
            _ = batch.ticket

    def _submit_to(
        self, lane: Lane, module: str, phase: str, work: Callable[[], T], after: Sequence[Ticket[Any]]
    ) -> Ticket[T]:
        """Hands work to a lane and records when it runs; once the lanes are closed, does it right away."""
        if self.closed:
            for ticket in after:
                self.wait(ticket)
            return ReadyTicket(work())
        step, shown = self.num_backwards, phase if lane.slots else f"{phase} routing"

        def run() -> T:
            start = time.perf_counter_ns()
            try:
                with as_lane(), ProfilerRange(module, shown):
                    return work()
            finally:
                self.log.note(module, phase, lane.slots, step, start)

        return lane.submit(run, after=after)
