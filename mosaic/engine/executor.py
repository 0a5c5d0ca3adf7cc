"""Runs placed calls on their lanes, and operations between them where they belong."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from mosaic.backends.host.lanes import HostLanes
from mosaic.engine.backward import Backwards
from mosaic.engine.calls.attach import attach, detach, is_attached
from mosaic.engine.calls.caller import caller, note_in_place
from mosaic.engine.calls.out_of_memory import SecondTries
from mosaic.engine.calls.random_numbers import advance_default, draw_here
from mosaic.engine.calls.shapes import other_inputs, shapes_of
from mosaic.engine.calls.signature import Arguments, Signature, learn
from mosaic.engine.calls.structure import map_tensors, tensors_in, unflatten
from mosaic.engine.calls.thread_state import as_lane, forget_cast_weights, interception, is_in_autocast, on_lane
from mosaic.engine.host.batch import Batch
from mosaic.engine.host.call import Call, CallFunction
from mosaic.engine.host.direct import DirectCalls
from mosaic.engine.host.forwards import Forwards
from mosaic.engine.host.gradients import LeafGradients
from mosaic.engine.host.lane_tensor import LaneTensor, Ready, join_joined, joined, lane_tensors
from mosaic.engine.host.operators import Operators
from mosaic.engine.host.span_log import SpanLog

if TYPE_CHECKING:
    from mosaic.backends.base import Lane, Lanes, Ticket
    from mosaic.engine.calls.placed_module import Site
    from mosaic.timeline import Span

T = TypeVar("T")


class Executor:
    """The lanes of one plan and everything in flight on them.

    Attributes:
        in_place: For each module and reason, how many of its calls ran where they were made.
        places: For each module and reason, the line of the first such call.
        in_order: Modules that keep to the order of the caller's work, and why: none, since callers' operators end
            before lanes begin.
        backwards: The caller's backwards.
        gradients: Leaves whose gradients lanes compute.
        forwards: Those that nobody has seen end.
        second_tries: Calls for which there was no memory beside the others.
        num_launched: How many calls went to lanes.
        closed: Whether the lanes were given back.
    """

    def __init__(self, lanes: Lanes) -> None:
        self.lanes = lanes
        self.in_place: Counter[tuple[str, str]] = Counter()
        self.places: dict[tuple[str, str], str] = {}
        self.in_order: dict[str, str] = {}
        self.log = SpanLog()
        self.closed = False
        self.backwards = Backwards(self)
        self.gradients = LeafGradients(self.backwards.current)
        self.forwards = Forwards(self.wait)
        self.last_write: dict[Lane, Ticket[Any]] = {}
        self._operators = Operators(self)
        self._batches: dict[Lane, Batch] = {}
        self._drawing: list[torch.nn.Module] = []
        self.num_launched = 0
        self._direct = DirectCalls(self)
        self.second_tries = SecondTries()
        self._in_autocast = False  # the model's own call is inside of an autocast
        self._paused = False

    # Calls of placed modules.

    def call(self, site: Site, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Calls a placed module: on its lane if its calls are known to allow that, where it is called otherwise."""
        if on_lane():
            return run(*args, **kwargs)
        if site.is_alone and torch.get_num_threads() == getattr(site.lane, "num_threads", 0):
            return self.run_alone(site, run, args, kwargs)
        reason = site.obstacle or interception()
        if reason is not None:
            return self._run_here(site, run, args, kwargs, reason)
        arguments = Arguments.take(args, kwargs)
        arguments.leaves[:] = map(join_joined, arguments.leaves)
        if arguments.opaque is not None:
            return self._run_here(site, run, args, kwargs, f"it takes a {arguments.opaque}, which may hide tensors")
        if site.shapes is not None and site.shapes != shapes_of(arguments.leaves):
            return self._run_here(site, run, args, kwargs, other_inputs(site.shapes, shapes_of(arguments.leaves)))
        modes, parameters = site.parts()
        key = arguments.key(modes, parameters)
        signature = site.signatures.get(key)
        if signature is None:
            return self._learn(site, run, args, kwargs, key)
        if signature.alone is not None and arguments.state.grad and (site.is_in_place or site.is_in_flight):
            site.obstacle = f"it is called again before the backward of its last call, and {signature.alone}"
        reason = signature.obstacle or site.obstacle
        if reason is None and site.is_in_place and arguments.state.grad:
            reason = "an earlier call of the same backward ran in place"
        if reason is None and signature.recasts and not self._in_autocast:
            reason = "it uses a weight several times, in an autocast that may end before its lane does"
        if reason is not None:
            return self._run_here(site, run, args, kwargs, reason)
        return self._launch(site, run, arguments, signature, parameters)

    def run_alone(self, site: Site, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Calls a module that has the whole device to itself: in the caller's own thread, behind all lanes."""
        return self._direct.run(site, run, args, kwargs)

    def _run_here(self, site: Site, run: Callable[..., Any], args: Any, kwargs: Any, reason: str) -> Any:
        note_in_place(self, site.name, reason)
        self._wait_for_earlier(site)
        result = run(*map_tensors(joined, args), **map_tensors(joined, kwargs))
        came = {id(tensor) for tensor in tensors_in((args, kwargs))}
        self._ran_in_place(site, [tensor for tensor in tensors_in(result) if id(tensor) not in came])
        return result

    def _ran_in_place(self, site: Site, made: list[torch.Tensor]) -> None:
        site.ran_in_place(self, made)
        for parameter in site.parts()[1]:  # what the module left lying about may be used beside its results
            self.gradients.expect(parameter)

    def _learn(self, site: Site, run: Callable[..., Any], args: Any, kwargs: Any, key: Any) -> Any:
        args, kwargs = map_tensors(joined, args), map_tensors(joined, kwargs)
        self._wait_for_earlier(site)
        arguments = Arguments.take(args, kwargs)
        result, made, signature = learn(lambda: run(*args, **kwargs), arguments, site.module, site.parted)
        site.signatures[key] = signature
        self.let_draw(signature.drawing or ())
        if site.signatures[key].obstacle is None:
            site.ran_in_place(self, made)
        else:
            self._ran_in_place(site, made)
        return result

    def let_draw(self, parts: Iterable[torch.nn.Module]) -> None:
        """Makes parts of modules draw their random numbers from the generator of the lane that they run on."""
        for part in parts:
            if not is_attached(part):
                attach(part, draw_here)
                self._drawing.append(part)

    def _wait_for_earlier(self, site: Site) -> None:
        """Lets earlier calls of a module end before one runs in place: they may write into its buffers."""
        if site.last_forward is not None:
            self.wait(site.last_forward)

    def _launch(
        self,
        site: Site,
        run: Callable[..., Any],
        arguments: Arguments,
        signature: Signature,
        parameters: list[torch.nn.Parameter],
    ) -> Any:
        generator = self.lane_generator(signature.draws)
        call = Call(self, site, run, arguments, signature, generator, origin=caller(), parameters=parameters)
        return self.launch(site, call, arguments)

    def launch(self, site: Site, call: Call, arguments: Arguments) -> Any:
        """Hands a call of a known kind to its module's lane; returns what it will return."""
        signature, inputs = call.signature, arguments.differentiable
        for leaf in inputs:
            if leaf.is_leaf:
                self.gradients.expect(leaf)
        after = self.inputs_from(lane_tensors(arguments.leaves), site.lane)
        self.num_launched += 1
        ticket = site.last_forward = self.submit(site, "forward", call.forward, after)
        self.forwards.note(ticket)
        made = call.pending(ticket)
        if any(info.differentiable for info in signature.made):
            site.entered(call)
            edges = [inputs[index] for index in signature.edges]
            made = list(CallFunction.apply(call, made, site.anchor, *edges, *call.parameters))
        fresh = iter(made)
        tensors = [
            next(fresh) if info.same_input is None else arguments.leaves[info.same_input] for info in signature.outputs
        ]
        leaves = [leaf[0] if isinstance(leaf, tuple) else tensors[leaf] for leaf in signature.leaves]
        return unflatten(leaves, signature.spec)

    @staticmethod
    def lane_generator(draws: int) -> tuple[torch.Generator, torch.Tensor] | None:
        """Returns a generator for the lane and the state it must end in, and moves the default generator there."""
        if not draws:
            return None
        generator = torch.Generator()
        generator.set_state(torch.get_rng_state())
        advance_default(draws)
        return generator, torch.get_rng_state()

    # Operations on lane tensors.

    def operate(self, first: LaneTensor, func: Any, args: Any, kwargs: Any) -> Any:
        """Runs one operator that has lane tensors among its arguments; see ``mosaic.engine.host.operators``."""
        return self._operators.run(first, func, args, kwargs)

    def inputs_from(self, found: Iterable[LaneTensor], lane: Lane) -> list[Ticket[Any]]:
        """Returns what work on ``lane`` must wait for to read the tensors ``found``; its own lane is ordered anyway.

        Lanes of another executor cannot be waited for on a lane; their tensors are waited for here.
        """
        others = []
        for tensor in found:
            if tensor._executor is not self:
                tensor.value()
            elif tensor._lane is not lane:
                others.append(tensor)
        writes = [self.last_write[tensor._lane] for tensor in others if tensor._lane in self.last_write]
        for other in {tensor._lane for tensor in others}:
            self._hand_over(other)
        return [tensor._ticket for tensor in others] + writes

    def has(self, lane: Lane) -> bool:
        """Whether a lane is one of this executor's."""
        if isinstance(self.lanes, HostLanes):
            return self.lanes.has(lane)
        try:
            return self.lanes.lane(lane.slots) is lane
        except KeyError:
            return False

    def batch(self, lane: Lane, module: str) -> Batch:
        """Returns the operators that are being collected for a lane."""
        found = self._batches.get(lane)
        if found is None or not found.takes_more:
            self._hand_over(lane)
            found = self._batches[lane] = Batch(self, lane, module)
        return found

    def _hand_over(self, lane: Lane) -> None:
        batch = self._batches.pop(lane, None)
        if batch is not None:
            _ = batch.ticket

    # Lanes.

    def submit(self, site: Site, phase: str, work: Callable[[], T], after: Sequence[Ticket[Any]]) -> Ticket[T]:
        """Hands a piece of a module's work to its lane, behind what was collected for it."""
        self._hand_over(site.lane)
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

    def hand_over_all(self) -> None:
        """Hands over everything that was collected."""
        for lane in list(self._batches):
            self._hand_over(lane)

    def check_forwards(self) -> None:
        """Waits for all forwards, those included whose results nobody used, and raises what they raised."""
        self.forwards.check()

    def _on_lane(self, module: str, phase: str, slots: tuple[int, ...], work: Callable[[], T]) -> Callable[[], T]:
        step = self.backwards.ended

        def run() -> T:
            start = time.perf_counter_ns()
            try:
                with as_lane():
                    return work()
            finally:
                self.log.note(module, phase, slots, step, start)

        return run

    def begin(self) -> None:
        """Called before the model's own forward: forgets what an error cut short."""
        self.forwards.forget()
        if torch._C._current_graph_task_id() == -1:
            self.backwards.forget_failed()

    def whole(self, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs the model's own call: nothing that a lane is still computing leaves it."""
        self.begin()
        self._in_autocast = is_in_autocast()
        try:
            result = run(*args, **kwargs)
            if not self.num_launched:
                return result
            result = map_tensors(joined, result)
            self.check_forwards()
            self.drain()  # what nobody used may still read parameters and modes
            return result
        except BaseException:
            self.drain()
            raise
        finally:
            self._in_autocast = False

    def watch(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Prepares parameters that operations between modules use: lanes may compute their gradients."""
        for parameter in parameters:
            if parameter.requires_grad:
                self.gradients.expect(parameter)

    def settle(self) -> None:
        """Lets the lanes come to rest."""
        self.drain()

    def pause(self) -> None:
        """Comes to rest and takes everything off the model, so that another executor can run it meanwhile."""
        self.drain()
        self._paused = True
        self.gradients.close()
        self._direct.close()
        for part in self._drawing:
            detach(part)

    def resume(self) -> None:
        """Undoes ``pause``; leaves are hooked anew where they are used."""
        self._paused = False
        for part in self._drawing:
            attach(part, draw_here)

    @property
    def is_in_flight(self) -> bool:
        """Never by itself: calls whose backward may come are known to their sites."""
        return False

    @property
    def num_failed(self) -> int:
        """How many backwards an error cut short."""
        return self.backwards.failed

    @property
    def notes(self) -> tuple[str, ...]:
        """What there was no memory for; anything else that is out of the ordinary has a module and a reason."""
        return self.second_tries.sentences()

    @property
    def num_backwards(self) -> int:
        """How many backwards have ended."""
        return self.backwards.ended

    def close(self) -> None:
        """Gives the lanes back; what is still asked of them later runs where it is asked."""
        self.hand_over_all()
        self.closed = True
        self.lanes.close()
        self.gradients.close()
        self._direct.close()
        if not self._paused:  # or they are another executor's by now
            for part in self._drawing:
                detach(part)
        self._drawing.clear()

    # Records.

    def record(self, site: Site, phase: str, start_ns: int) -> None:
        """Notes work of a module's that ran in the caller's thread and ends now."""
        self.log.note(site.name, phase, site.lane.slots, self.backwards.ended, start_ns)

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
