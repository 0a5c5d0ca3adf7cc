"""Runs placed calls on their lanes, and operations between them where they belong."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from mosaic.engine.call import Call, CallFunction
from mosaic.engine.gradients import LeafGradients
from mosaic.engine.lane_tensor import LaneTensor, Ready, lane_tensors
from mosaic.engine.operators import Operators
from mosaic.engine.random_numbers import advance_default
from mosaic.engine.signature import Arguments, Signature, learn
from mosaic.engine.structure import map_tensors, unflatten
from mosaic.engine.thread_state import is_intercepted
from mosaic.timeline import Span

if TYPE_CHECKING:
    from mosaic.backends.base import Lane, Lanes, Ticket
    from mosaic.engine.site import Site

T = TypeVar("T")
_LOG = logging.getLogger("mosaic")

_MAX_SPANS = 20_000


class Executor:
    """The lanes of one plan and everything in flight on them.

    Attributes:
        pending: Tickets of the backwards that the caller's backward has launched and not yet waited for.
        in_place: For each module and reason, how many of its calls ran where they were made.
        places: For each module and reason, the line of the first such call.
        step: How many of the caller's backwards have ended.
    """

    def __init__(self, lanes: Lanes) -> None:
        self.lanes = lanes
        self.pending: list[Ticket[Any]] = []
        self.in_place: Counter[tuple[str, str]] = Counter()
        self.places: dict[tuple[str, str], str] = {}
        self.step = 0
        self._spans: deque[tuple[str, str, tuple[int, ...], int, int, int]] = deque(maxlen=_MAX_SPANS)
        self.closed = False
        self._backward: int | None = None
        self._here = threading.local()
        self.gradients = LeafGradients(self.expect_end_of_backward)
        self.last_write: dict[Lane, Ticket[Any]] = {}
        self._operators = Operators(self)

    # Calls of placed modules.

    def call(self, site: Site, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Calls a placed module: on its lane if its calls are known to allow that, where it is called otherwise."""
        if site.obstacle is not None or is_intercepted() or self.on_lane:
            return self._run_here(site, run, args, kwargs, site.obstacle or "another torch mode is active")
        arguments = Arguments.take(join_joined(args), join_joined(kwargs))
        if arguments.opaque is not None:
            return self._run_here(site, run, args, kwargs, f"it takes a {arguments.opaque}, which may hide tensors")
        if site.shapes is not None and site.shapes != shapes_of(arguments.leaves):
            return self._run_here(site, run, args, kwargs, "its inputs have other shapes than the plan was made for")
        key = arguments.key(site.module)
        signature = site.signatures.get(key)
        if signature is None:
            return self._learn(site, run, args, kwargs, key)
        if signature.obstacle is not None:
            return self._run_here(site, run, args, kwargs, signature.obstacle)
        return self._launch(site, run, arguments, signature)

    def _run_here(self, site: Site, run: Callable[..., Any], args: Any, kwargs: Any, reason: str) -> Any:
        self.in_place[site.name, reason] += 1
        if (site.name, reason) not in self.places:
            self.places[site.name, reason] = _caller()
            _LOG.warning("%s runs in place at %s: %s", site.name, self.places[site.name, reason], reason)
        return run(*map_tensors(_joined, args), **map_tensors(_joined, kwargs))

    def _learn(self, site: Site, run: Callable[..., Any], args: Any, kwargs: Any, key: Any) -> Any:
        args, kwargs = map_tensors(_joined, args), map_tensors(_joined, kwargs)
        result, signature = learn(lambda: run(*args, **kwargs), Arguments.take(args, kwargs))
        site.signatures[key] = signature
        return result

    def _launch(self, site: Site, run: Callable[..., Any], arguments: Arguments, signature: Signature) -> Any:
        generator = self._lane_generator(signature.draws)
        inputs = arguments.differentiable
        after = self.inputs_from(lane_tensors(arguments.leaves), site.lane)
        call = Call(self, site, _noting_origin(run, site.name), arguments, signature, generator)
        call.note_inputs(inputs)
        ticket = self.submit(site, "forward", call.forward, after)
        made = [
            LaneTensor(info.like, self, site.lane, ticket, pick, site.name) for pick, info in enumerate(signature.made)
        ]
        if any(info.differentiable for info in signature.made):
            site.entered(call)
            edges = [inputs[index] for index in signature.edges]
            made = list(CallFunction.apply(call, made, site.anchor, *edges))
        fresh = iter(made)
        tensors = [
            next(fresh) if info.same_input is None else arguments.leaves[info.same_input] for info in signature.outputs
        ]
        leaves = [leaf[0] if isinstance(leaf, tuple) else tensors[leaf] for leaf in signature.leaves]
        return unflatten(leaves, signature.spec)

    @staticmethod
    def _lane_generator(draws: int) -> tuple[torch.Generator, torch.Tensor] | None:
        """Returns a generator for the lane and the state it must end in, and moves the default generator there."""
        if not draws:
            return None
        generator = torch.Generator()
        generator.set_state(torch.get_rng_state())
        advance_default(draws)
        return generator, torch.get_rng_state()

    # Operations on lane tensors.

    def operate(self, first: LaneTensor, func: Any, args: Any, kwargs: Any) -> Any:
        """Runs one operator that has lane tensors among its arguments; see ``mosaic.engine.operators``."""
        return self._operators.run(first, func, args, kwargs)

    def inputs_from(self, found: Iterable[LaneTensor], lane: Lane) -> list[Ticket[Any]]:
        """Returns what work on ``lane`` must wait for to read the tensors ``found``; its own lane is ordered anyway."""
        others = [tensor for tensor in found if tensor._lane is not lane]
        writes = [self.last_write[tensor._lane] for tensor in others if tensor._lane in self.last_write]
        return [tensor._ticket for tensor in others] + writes

    # Lanes.

    @property
    def on_lane(self) -> bool:
        """Whether the calling thread is running a lane's work."""
        return getattr(self._here, "on_lane", False)

    def submit(self, site: Site, phase: str, work: Callable[[], T], after: Sequence[Ticket[Any]]) -> Ticket[T]:
        """Hands a piece of a module's work to its lane."""
        return self.submit_to(site.lane, site.name, phase, work, after)

    def submit_to(
        self, lane: Lane, module: str, phase: str, work: Callable[[], T], after: Sequence[Ticket[Any]]
    ) -> Ticket[T]:
        """Hands work to a lane and records when it runs; once the lanes are closed, does it right away."""
        if self.closed:
            for ticket in after:
                self.wait(ticket)
            return Ready(work())
        return lane.submit(self._on_lane(module, phase, lane.slots, work), after=after)

    def value(self, tensor: LaneTensor) -> torch.Tensor:
        """Waits for a tensor's value; if its work failed, lets all lanes come to rest before raising that error."""
        if not self.on_lane and tensor._lane in self.last_write:
            self.wait(self.last_write[tensor._lane])  # it may have written into this tensor, through a view
        return self.wait(tensor._ticket)[tensor._pick]

    def wait(self, ticket: Ticket[T]) -> T:
        """Waits for work; if it failed, lets all lanes come to rest before raising what it raised."""
        try:
            return ticket.wait()
        except Exception:
            if not self.on_lane:
                self.drain()
            raise

    def drain(self) -> None:
        """Waits until the lanes are at rest."""
        self.lanes.drain()

    def _on_lane(self, module: str, phase: str, slots: tuple[int, ...], work: Callable[[], T]) -> Callable[[], T]:
        step = self.step

        def run() -> T:
            self._here.on_lane = True
            start = time.perf_counter_ns()
            try:
                return work()
            finally:
                self._spans.append((module, phase, slots, step, start, time.perf_counter_ns()))

        return run

    # Backward.

    def expect_end_of_backward(self) -> None:
        """Makes the caller's running backward wait for the lanes before it returns."""
        task = torch._C._current_graph_task_id()
        if self._backward == task:
            return
        self.reset()
        self._backward = task
        torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)  # type: ignore[attr-defined]

    def _end_backward(self) -> None:
        self._backward = None
        pending, self.pending = self.pending, []
        self.step += 1
        try:
            for ticket in pending:
                self.wait(ticket)
        finally:
            self.gradients.settle()

    def reset(self) -> None:
        """Forgets a backward that an error cut short; the lanes come to rest first."""
        if torch._C._current_graph_task_id() == self._backward or not (self.pending or self.gradients.unsettled):
            return
        self.drain()
        self.pending = []
        self.gradients.settle()

    def close(self) -> None:
        """Gives the lanes back; what is still asked of them later runs where it is asked."""
        self.closed = True
        self.lanes.close()
        self.gradients.close()

    # Records.

    def spans(self, origin_ns: int) -> tuple[Span, ...]:
        """Returns what ran, in milliseconds since ``origin_ns`` on the lanes' clock."""
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
        """When the oldest recorded piece of work started."""
        return min((span[4] for span in self._spans), default=0)

    def clear_spans(self) -> None:
        """Forgets what ran so far."""
        self._spans.clear()


def join_joined(value: Any) -> Any:
    """Replaces lane tensors that were joined before by what they joined to."""
    return map_tensors(lambda t: t.join() if isinstance(t, LaneTensor) and t._joined is not None else t, value)


def shapes_of(leaves: Sequence[Any]) -> tuple[tuple[Any, ...], ...]:
    """Returns shapes and dtypes of the tensors among leaves: what a plan was made for."""
    return tuple((tuple(leaf.shape), leaf.dtype) for leaf in leaves if isinstance(leaf, torch.Tensor))


def _joined(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.join() if isinstance(tensor, LaneTensor) else tensor


def _noting_origin(run: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Adds to an error inside a module where the user called it, since it surfaces where the result is needed."""
    origin = _caller()

    def noted(*args: Any, **kwargs: Any) -> Any:
        try:
            return run(*args, **kwargs)
        except BaseException as error:
            error.add_note(f"raised in module {name!r}, called at {origin}")
            raise

    return noted


def _caller() -> str:
    """Returns file, line and function of the user's code that is being run."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(("mosaic.engine", "torch.")):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"
