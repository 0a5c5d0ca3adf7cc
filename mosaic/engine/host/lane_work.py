"""Work on the lanes of one plan: handing it over, waiting for it, and the record of when it ran.

The caller's backward waits for what it launched on the lanes, and sums gradients in the plain loop's order.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch

from mosaic.engine.calls.ranges import profiler_range
from mosaic.engine.calls.thread_state import as_lane, forget_cast_weights, on_lane
from mosaic.engine.host.lane_tensor import LaneTensor, to_plain
from mosaic.errors import UnforeseenError
from mosaic.timeline import Span

if TYPE_CHECKING:
    from mosaic.backends.base import Lanes, Ticket
    from mosaic.engine.calls.placed_module import PlacedModule

T = TypeVar("T")
_LOG = logging.getLogger("mosaic")
_MAX_SPANS = 20_000
_MAX_UNSEEN = 256
_HOST_ALLOCATOR = ("can't allocate memory", "not enough memory")
"""The words of ``c10::alloc_cpu``, on POSIX and elsewhere; it raises a plain RuntimeError."""


class LaneWork:
    """Hands work to lanes and waits for it.

    Attributes:
        lanes: The lanes.
        unseen: Work whose end the caller has not seen, and whose errors must not be lost.
        log: When work ran.
        num_backwards: How many of the caller's backwards have ended; those inside of others are not counted.
        num_launched: How many calls of modules went to lanes.
        backwards: The caller's backwards.
        way_out: How a module is left out, with its name put in.
        closed: Whether the lanes were given back.
        looks_early: Whether what has failed is raised at the next call already, wherever the program is by then.
    """

    way_out = "colocate(..., exclude=[{!r}])"

    def __init__(self, lanes: Lanes) -> None:
        self.lanes = lanes
        self.backwards = Backwards(self)
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
        return self.log.spans(origin_ns)

    @property
    def origin_ns(self) -> int:
        return self.log.origin_ns

    def clear_spans(self) -> None:
        self.log.clear()


class Backwards:
    """The backwards that are running in the caller's threads, the inner ones of reentrant autograd included.

    Attributes:
        num_failed: How many an error cut short.
    """

    def __init__(self, work: LaneWork) -> None:
        self.num_failed = 0
        self._work = work
        self._begun: list[weakref.ref[RunningBackward]] = []
        self._aside: dict[int, tuple[torch.Tensor, torch.Tensor | None]] = {}

    def current(self) -> RunningBackward:
        """Returns the running backward; makes it wait for the lanes before it returns."""
        task = torch._C._current_graph_task_id()
        alive = [running for ref in self._begun if (running := ref()) is not None]
        for running in alive:
            if running.task == task:
                return running
        if not alive:
            self.forget_failed()
        running = RunningBackward(self, task)
        self._begun.append(weakref.ref(running, self._let_go))
        torch.autograd.Variable._execution_engine.queue_callback(running)  # type: ignore[attr-defined]
        return running

    def _let_go(self, _: weakref.ref[RunningBackward]) -> None:
        """Autograd has let go of a backward that did not end, before its error reaches the loop."""
        self.forget_failed()

    def forget_failed(self) -> None:
        """Cleans up after a backward that an error cut short; the lanes come to rest first."""
        if self._begun and all(ref() is None for ref in self._begun):
            self.num_failed += 1
            self._work.drain()
            self._begun.clear()
            self._settle()

    def end(self, ended: RunningBackward) -> None:
        self._begun = [ref for ref in self._begun if ref() is not None and ref() is not ended]
        try:
            for ticket in ended.launched:
                self._work.wait(ticket)
            self._work.check_unseen()
        except BaseException:
            self._work.drain()
            raise
        finally:
            if not self._begun:
                self._work.num_backwards += 1
                self._settle()

    def reach(self, site: PlacedModule, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Keeps gradient sums in the plain order when a parameter gets several gradients in one backward.

        They may be those of several calls of its module, or the loop's own, such as a penalty's. The engine would add
        all of them before it adds them to what a parameter has from earlier backwards. So what is there is set aside
        and added at the end.
        """
        several = len(site.in_flight) + len(site.in_place) > 1
        for parameter in parameters:
            if several or (parameter.grad is not None and not has_hooks(parameter)):
                self.set_aside(parameter)

    def set_aside(self, leaf: torch.Tensor) -> None:
        """Keeps what ``leaf.grad`` has from earlier backwards out of the way until this one has ended.

        Doing it again during the same backward does nothing.
        """
        if id(leaf) not in self._aside:
            self._aside[id(leaf)] = (leaf, leaf.grad)
            leaf.grad = None

    def _settle(self) -> None:
        aside, self._aside = self._aside, {}
        for leaf, earlier in aside.values():
            if earlier is None:
                continue
            if (later := leaf.grad) is not None:
                with torch.no_grad():  # in place, as autograd adds, unless a sparse gradient would become dense
                    earlier = later + earlier if earlier.is_sparse and not later.is_sparse else earlier.add_(later)
            leaf.grad = earlier

    def follow_in_place(self, site: PlacedModule, outputs: Sequence[torch.Tensor]) -> None:
        """Follows the results of a module's call that ran in place until its backward.

        Its backward runs in the caller's graph. If later calls of the same backward ran on the lane, both would add
        to the same gradients at once; so until then they run in place too.
        """
        call = _InPlaceCall()

        def arrived(grad: torch.Tensor) -> Any:
            if site.in_flight:
                self.current()
                self.reach(site, site.parameters)
            if not torch._C._autograd._get_current_graph_task_keep_graph():
                site.in_place.discard(call)
            return to_plain(grad)

        for tensor in outputs:
            if tensor.requires_grad and not tensor.is_leaf:
                tensor.register_hook(arrived)
                site.in_place.add(call)  # its life is that of the hooks


class RunningBackward:
    """Called by autograd at the end of one backward; autograd lets go of it when that backward fails.

    Attributes:
        task: Autograd's number of it.
        launched: What it handed to lanes.
    """

    def __init__(self, backwards: Backwards, task: int) -> None:
        self._backwards = backwards
        self.task = task
        self.launched: list[Ticket[Any]] = []

    def __call__(self) -> None:
        self._backwards.end(self)


class _InPlaceCall:
    """Stands for one call that ran in place."""


def has_hooks(leaf: torch.Tensor) -> bool:
    """Returns True if a leaf's gradient has hooks."""
    return bool(leaf._backward_hooks) or bool(getattr(leaf, "_post_accumulate_grad_hooks", None))


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
        return self._result


class SpanLog:
    """The last 20,000 pieces of work, in nanoseconds of ``time.perf_counter_ns``; threads may note at the same time."""

    def __init__(self) -> None:
        self._spans: deque[tuple[str, str, tuple[int, ...], int, int, int]] = deque(maxlen=_MAX_SPANS)

    def note(self, module: str, phase: str, slots: tuple[int, ...], step: int, start_ns: int) -> None:
        self._spans.append((module, phase, slots, step, start_ns, time.perf_counter_ns()))

    def spans(self, origin_ns: int) -> tuple[Span, ...]:
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
        return min((span[4] for span in self._spans), default=0)

    def clear(self) -> None:
        self._spans.clear()


def is_out_of_memory(error: BaseException) -> bool:
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
