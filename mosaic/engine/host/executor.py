"""One step on the host, from top to bottom: who waits for whom, and where each piece of work runs.

::

    caller   model( left(x)   right(y)   left * right        ) | loss.backward()                    | step
               |       |          |        joins both          |    |        |                      |
    lane 1     |    [forward]-----|--------^     [results] ----'    | [backward]-- gradients to --.  |
    lane 2     |            [forward]------'                     [backward]------- leaves --------'

The sections of ``Executor`` follow a step: the model is called; a placed module's call is sent to its lane, or runs
where it is made; the lane waits for the call's inputs and runs its forward; operations between modules follow their
branch; the backward of each call is handed to the lane of its forward; at the end of the caller's backward the lanes
are awaited and gradients of leaves become plain.
"""

from __future__ import annotations

import os
import time
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn

from mosaic.engine.calls.attach import attach, detach, is_attached
from mosaic.engine.calls.caller import caller, note_in_place
from mosaic.engine.calls.hidden import ModuleState, Settings, Surroundings, places_of, read_settings
from mosaic.engine.calls.obstacles import Obstacle
from mosaic.engine.calls.placed_module import LastGradients, PlacedModule
from mosaic.engine.calls.ranges import ProfilerRange, are_seen
from mosaic.engine.calls.signature import Arguments, Signature, learn, learn_function
from mosaic.engine.calls.thread_state import as_lane, forget_cast_weights, interception, is_in_autocast, on_lane
from mosaic.engine.host.backwards import Backwards, ReadyTicket, SpanLog, SumTicket
from mosaic.engine.host.call import Call, CallFunction, refuse
from mosaic.engine.host.lane_tensor import LaneTensor, join_joined, joined, to_plain, waits_for_plain
from mosaic.errors import UnforeseenError
from mosaic.find.random_numbers import advance, draw_here
from mosaic.find.structure import flatten, map_tensors, shapes_of, tensors_in, unflatten

if TYPE_CHECKING:
    from mosaic.backends.base import Lane, Lanes, Ticket
    from mosaic.timeline import Span

T = TypeVar("T")
_MAX_FUNCTIONS = 10_000
_MAX_UNSEEN = 256
_MANY = 16
"""Kinds of calls of a module from which the user is told."""
_SHARED_IS_WRITTEN = "one of its results is written to in place, and another tensor has the same memory"
_FAST_PATHS = (nn.MultiheadAttention, nn.TransformerEncoder, nn.TransformerEncoderLayer)
"""Torch's own modules that compute other bits where an argument is of a subclass of ``torch.Tensor``."""


class Executor:
    """The lanes of one plan and everything in flight on them."""

    calls_again = True
    way_out = "colocate(..., exclude=[{!r}])"

    def __init__(self, lanes: Lanes) -> None:
        self.lanes = lanes
        self.backwards = Backwards(self)
        self.unseen: deque[Ticket[Any]] = deque()  # work whose end the caller has not seen; no error must be lost
        self.looks_early = True  # what has failed is raised at the next call, wherever the program is by then
        self.log = SpanLog()
        self.num_launched = 0  # how many calls of modules went to lanes
        self.closed = False
        self.in_place: Counter[tuple[str, str]] = Counter()
        self.places: dict[tuple[str, str], str] = {}  # for each module and reason, the line of the first such call
        self.in_order: dict[str, str] = {}  # none: the caller's operators end before lanes begin
        self._learned: Counter[str] = Counter()
        self._functions: dict[Hashable, Signature | None] = {}
        self._glue: dict[tuple[Lane, str], PlacedModule] = {}
        self._called: dict[str, PlacedModule] = {}
        self._ends = LastGradients()  # of modules that run in the caller's thread
        self._began: dict[str, tuple[int, ProfilerRange]] = {}
        self._taken: list[tuple[nn.Module, Callable[..., Any]]] = []  # attached parts, and by which function
        self._in_autocast = False  # the model's own call is inside of an autocast
        self._settings: Settings | None = None  # torch's, when the model's call or a block began
        self._paused = False
        self._process = os.getpid()
        self._compiled: str | None = None  # a function between modules that is compiled
        self._has_looked = False

    # 1. The model is called: nothing that a lane is still computing leaves it.

    def whole(self, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs the model's own call; its result is plain."""
        if os.getpid() != self._process:
            return run(*args, **kwargs)
        if not self._has_looked:
            self._has_looked = True
            self._look_at(run)
        self.begin()
        self._in_autocast = is_in_autocast()
        try:
            result = run(*args, **kwargs)
            if not self.num_launched:
                return result
            result = map_tensors(joined, result)
            self.check_unseen()
            self.drain()  # work whose results are unused may still read parameters and modes
            return result
        except BaseException as error:
            self.drain()
            errors = map(_error_of, self.unseen)
            unforeseen = next((first for first in errors if isinstance(first, UnforeseenError)), None)
            if isinstance(error, Exception) and unforeseen not in (None, error):  # the model's error may come of it
                raise unforeseen from error
            raise
        finally:
            self._in_autocast = False
            self.end()

    def _look_at(self, run: Any) -> None:
        """Finds code between modules that needs values, from the model's own bound call: it gets plain tensors."""
        model: nn.Module = (run.args[0] if isinstance(run, partial) else run).__self__
        placed = [module for module in model.modules() if module is not model and is_attached(module)]
        inside = {id(part) for module in placed for part in module.modules()}
        between = [part for part in model.modules() if id(part) not in inside]
        self._take((part for part in between if isinstance(part, _FAST_PATHS) or _is_compiled(part)), _call_plainly)
        named = [(place.name, place.value) for place in places_of(between)]
        named += [item for part in between for item in vars(part).items()]
        self._compiled = next((name for name, value in named if hasattr(value, "_torchdynamo_orig_callable")), None)

    def begin(self) -> None:
        """A call of the model, or a block, begins: notes torch's settings, and forgets what an error cut short."""
        self._settings = read_settings()
        self.unseen.clear()
        if torch._C._current_graph_task_id() == -1:
            self.backwards.forget_failed()

    def end(self) -> None:
        self._settings = None

    # 2. A placed module is called: on its lane if its calls are known to allow that, where it is called otherwise.

    def call(self, site: PlacedModule, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if on_lane() or os.getpid() != self._process:
            return run(*args, **kwargs)
        if site.is_alone and torch.get_num_threads() == site.lane.num_threads:
            return self.run_alone(site, run, args, kwargs)
        reason = site.obstacle or interception()
        if reason is not None:
            return self._run_here(site, run, args, kwargs, reason)
        with torch._C.DisableTorchFunctionSubclass():
            arguments = Arguments.take(args, kwargs, join_joined)
            reason = _unplanned(site, arguments)
            if reason is None:
                state = ModuleState.take(site.module)
                signature = site.signatures.get(_kind(site, arguments, state))
                if signature is not None:
                    reason = self._obstacle(site, signature, arguments)
        if reason is not None:
            return self._run_here(site, run, args, kwargs, reason)
        if signature is None:
            return self._learn(site, run, args, kwargs)
        awaited = self.awaits(site, state)
        generator = self.lane_generator(signature.draws) if signature.may_draw else None
        with torch._C.DisableTorchFunctionSubclass():
            call = Call(self, site, run, arguments, signature, generator, origin=caller(), state=state)
            result = self.launch(site, call, arguments)
        if awaited:
            self.reach(site)
        if self._settings is None or self._compiled is not None:
            return map_tensors(joined, result)
        return result

    def run_alone(
        self, site: PlacedModule, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Calls a module that has the whole device to itself: in the caller's own thread, behind all lanes.

        No other module may run beside it, so that handing it to a lane would cost time and gain nothing.
        """
        if self.num_launched:
            args, kwargs = map_tensors(joined, args), map_tensors(joined, kwargs)
            self.drain()
        start = time.perf_counter_ns()
        with ProfilerRange(site.name, "forward"):
            result = run(*args, **kwargs)
        self.log.note(site.name, "forward", site.lane.slots, self.num_backwards, start)
        if torch.is_grad_enabled():
            self._time_backward(site, result)
        return result

    def _time_backward(self, site: PlacedModule, result: Any) -> None:
        """Records the time from the first gradient of a call's results to the last one of its parameters."""

        def ended() -> None:
            if site.name in self._began:
                began_ns, shown = self._began.pop(site.name)
                shown.close()
                self.log.note(site.name, "backward", site.lane.slots, self.num_backwards, began_ns)

        sees_end = self._ends.watch(site, ended)

        def arrived(grad: torch.Tensor) -> Any:
            self.backwards.current()  # counts this backward
            self.drain()  # its slots are those of the lanes
            if sees_end and site.name not in self._began:
                self._began[site.name] = time.perf_counter_ns(), ProfilerRange(site.name, "backward")
            return to_plain(grad)

        for tensor in tensors_in(result):
            if tensor.requires_grad and not tensor.is_leaf:
                tensor.register_hook(arrived)

    def _obstacle(self, site: PlacedModule, signature: Signature, arguments: Arguments) -> str | None:
        """Returns why a call of a known kind runs where it is made, or None."""
        grad = arguments.grad
        if signature.alone is not None and grad and (site.in_flight or site.in_place):
            site.obstacle = f"it is called again before the backward of its last call, and {signature.alone}"
        if signature.obstacle is not None or site.obstacle is not None:
            return signature.obstacle or site.obstacle
        if signature.views_input:
            return "it returns a view of one of its inputs, so that whoever writes into one writes into the other"
        if site.in_place and grad:
            return "an earlier call of the same backward ran in place"
        if signature.recasts and not self._in_autocast:
            return "it uses a weight several times, in an autocast that may end before its lane does"
        return None

    def awaits(self, site: PlacedModule, state: ModuleState) -> bool:
        """Returns whether a call's forward is waited for where it is made, since what it reads may change right after.

        A loop that calls a module outside of the model may refill its inputs or replace its weights at once.
        """
        if self._settings is None:
            return True
        if self._settings != state.settings:
            self.drain()  # the others were called under other settings
            return True
        return site.awaited is not None

    def _run_here(self, site: PlacedModule, run: Callable[..., Any], args: Any, kwargs: Any, reason: str) -> Any:
        note_in_place(self, site.name, reason)
        if isinstance(reason, Obstacle) and reason.apart:
            self.drain()
        self.reach(site)
        result = run(*map_tensors(joined, args), **map_tensors(joined, kwargs))
        inputs = {id(tensor) for tensor in tensors_in((args, kwargs))}
        results = [tensor for tensor in tensors_in(result) if id(tensor) not in inputs]
        self.backwards.follow_in_place(site, results)
        return result

    def _learn(self, site: PlacedModule, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Makes the first call of a kind where it is made, and learns what the next ones will return."""
        args, kwargs = map_tensors(joined, args), map_tensors(joined, kwargs)
        self.drain()  # nothing is known of it
        self._learned[site.name] += 1
        arguments = Arguments.take(args, kwargs)
        before = None if site.module is None else Surroundings(site.module)
        result, results, signature = learn(lambda: run(*args, **kwargs), arguments, site.module, site.parted)
        kind = _kind(site, arguments, ModuleState.take(site.module))
        site.learned(kind, signature, None if before is None else before.changed())
        self._take(signature.drawing or (), draw_here)
        self.backwards.follow_in_place(site, results)
        return result

    def _take(self, parts: Iterable[nn.Module], function: Callable[..., Any]) -> None:
        """Sends the calls of parts of the model through a function."""
        for part in parts:
            if not is_attached(part):
                attach(part, function)
                self._taken.append((part, function))

    def reach(self, site: PlacedModule) -> None:
        """Waits for a module's forward before its caller reads or writes what it holds, or it runs in place."""
        last = site.last_forward
        if last is not None and not on_lane() and os.getpid() == self._process:
            site.last_forward = None
            try:
                last.wait()
            except BaseException:
                if not last.done:  # an interrupt of the caller's; what the lane raised is raised where it is needed
                    raise

    # 3. Its lane waits for the call's inputs and runs the forward; the caller goes on with what stands for its results.

    def launch(self, site: PlacedModule, call: Call, arguments: Arguments) -> Any:
        """Hands a call of a known kind to its module's lane; returns what it will return."""
        signature, inputs = call.signature, arguments.differentiable
        for tensor in inputs:
            waits_for_plain(tensor)
        after = self.inputs_of(arguments.tensors, site)
        ticket = self.submit(site, "glue" if call.is_glue else "forward", call.forward, after)
        self._note_unseen(ticket)
        if not call.is_glue:
            self.num_launched += 1
            site.last_forward = ticket
            self._called[site.name] = site
        results = call.pending(ticket)
        if signature.is_differentiable:
            site.in_flight.add(call)
            edges = [inputs[index] for index in signature.edges]
            results = list(CallFunction.apply(call, results, site.anchor, *edges, *call.parameters))
        if signature.is_single:
            return results[0]
        fresh = iter(results)
        tensors = [
            next(fresh) if info.same_input is None else arguments.leaves[info.same_input] for info in signature.outputs
        ]
        leaves = [leaf[0] if isinstance(leaf, tuple) else tensors[leaf] for leaf in signature.leaves]
        return unflatten(leaves, signature.spec)

    @staticmethod
    def lane_generator(draws: int) -> tuple[torch.Generator, torch.Tensor]:
        """Returns a generator for the lane and the state it must end in, and moves the default generator there.

        The default generator is one for the whole process, from which the plain loop's modules draw one after another.
        """
        generator = torch.Generator()
        generator.set_state(torch.get_rng_state())
        advance(torch.default_generator, draws)
        return generator, torch.get_rng_state()

    def submit(self, site: PlacedModule, phase: str, work: Callable[[], T], after: Sequence[Ticket[Any]]) -> Ticket[T]:
        """Hands a piece of work to a module's lane; once the lanes are closed, does it right away."""
        if self.closed:
            for ticket in after:
                self.wait(ticket)
            return ReadyTicket(work())
        slots, step = site.lane.slots, self.backwards.num_ended

        def run() -> T:
            start = time.perf_counter_ns()
            try:
                with as_lane():
                    if not are_seen():
                        return work()
                    with ProfilerRange(site.name, phase if slots else f"{phase} routing"):
                        return work()
            finally:
                self.log.note(site.name, phase, slots, step, start)

        return site.lane.submit(run, after=after)

    def inputs_of(self, tensors: Iterable[Any], site: PlacedModule) -> list[Ticket[Any]]:
        """Returns what work on a module's lane must wait for to read lane tensors among ``tensors``.

        Its own lane is ordered anyway. Lanes of another executor cannot be waited for on a lane; their tensors are
        waited for here.
        """
        after = []
        for tensor in tensors:
            if type(tensor) is not LaneTensor or (
                tensor._lane is site.lane and type(tensor._ticket) is not SumTicket and tensor._executor is self
            ):
                continue
            if tensor._executor is self:
                after.append(tensor._ticket)
            else:
                tensor.value()
        return after

    def wait(self, ticket: Ticket[T]) -> T:
        """Waits for work; if it failed, lets all lanes come to rest before raising its error."""
        try:
            return ticket.wait()
        except BaseException as error:
            if not on_lane():
                self.drain()
                self.unseen = deque(ticket for ticket in self.unseen if _error_of(ticket) not in (None, error))
            raise

    def _note_unseen(self, ticket: Ticket[Any]) -> None:
        """Adds work whose result nobody may ever use, and looks at what has ended."""
        unseen = self.unseen
        unseen.append(ticket)
        while unseen and ((self.looks_early and unseen[0].done) or len(unseen) > _MAX_UNSEEN):
            self.wait(unseen.popleft())

    def check_unseen(self) -> None:
        """Waits for all work, and raises what it raised."""
        while self.unseen:
            self.wait(self.unseen.popleft())

    # 4. Listed functions between modules follow their branch: each is a call on the lane, forward and backward.

    def follow(self, first: LaneTensor, func: Any, args: Any, kwargs: Any) -> Any:
        """Runs a function on the lane of its arguments; returns NotImplemented if it has to run where it is called."""
        if self.closed or os.getpid() != self._process or interception() is not None:
            return NotImplemented
        arguments = Arguments.take(args, kwargs)
        if not _may_follow(arguments):
            return NotImplemented
        key = (func, arguments.key())
        if key not in self._functions:
            if len(self._functions) >= _MAX_FUNCTIONS:  # shapes that never repeat
                self._functions.clear()
            self._functions[key] = learn_function(func, arguments)
        signature = self._functions[key]
        if signature is None:
            return NotImplemented
        place = (first._lane, first._module)
        site = self._glue.get(place)
        if site is None:
            site = self._glue[place] = PlacedModule(first._module, None, first._lane)
        call = Call(self, site, func, arguments, signature, None, origin=caller(), is_glue=True)
        result = self.launch(site, call, arguments)
        for tensor, info in zip(flatten(result)[0], signature.new_outputs, strict=False):
            if info.view_of is not None:
                tensor._is_shared = arguments.leaves[info.view_of]._is_shared = True
        return result

    def refuse_write(self, tensor: LaneTensor) -> Exception:
        """Keeps the module behind a tensor in place from now on; returns the error for the present call."""
        site, todo = self._called[tensor._module], "write to a copy"
        return refuse(site, _SHARED_IS_WRITTEN, todo, origin=caller(), way_out=self.way_out)

    def add(self, first: LaneTensor, second: LaneTensor) -> LaneTensor:
        """Adds two gradients of calls, either of which may be missing; the work that needs the sum computes it."""
        for term in (first, second):
            if term._executor is not self:  # no lane of these may wait for another executor's
                term.value()
        return LaneTensor(second, self, second._lane, SumTicket(first, second), 0, second._module)

    # 5. Autograd reaches a call: ``Call.launch_backward`` hands its backward to the lane. At the end of the caller's
    #    backward (``Backwards.end``) the lanes are awaited, and the gradients of parameters become whole.

    # 6. Between steps.

    def drain(self) -> None:
        """Waits until the lanes are at rest; a lane itself does not wait."""
        if os.getpid() == self._process and not on_lane():
            self.lanes.drain()
            forget_cast_weights()

    def settle(self) -> None:
        self.drain()

    def pause(self) -> None:
        """Comes to rest and takes everything off the model, so that another executor can run it meanwhile."""
        self.drain()
        self._paused = True
        self._ends.close()
        for part, _ in self._taken:
            detach(part)

    def resume(self) -> None:
        """Undoes ``pause``."""
        self._paused = False
        for part, function in self._taken:
            attach(part, function)

    def close(self) -> None:
        """Gives the lanes back; later work runs in the caller's thread."""
        self.closed = True
        self.lanes.close()
        self._ends.close()
        if not self._paused:  # or they are another executor's by now
            for part, _ in self._taken:
                detach(part)
        self._taken.clear()

    @property
    def is_in_flight(self) -> bool:
        return any(site.in_flight for site in self._glue.values())

    def forget_calls(self) -> None:
        """Forgets functions whose results are lost, though a traceback may keep them alive."""
        for site in self._glue.values():
            site.forget_calls()

    @property
    def num_failed(self) -> int:
        return self.backwards.num_failed

    @property
    def num_backwards(self) -> int:
        return self.backwards.num_ended

    def spans(self) -> tuple[Span, ...]:
        return self.log.spans()

    def clear_spans(self) -> None:
        self.log.clear()

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes on kinds of calls that do not repeat."""
        learned = (
            f"{count} calls of {module} ran in place, since each was the first of its kind; pass what changes from "
            "call to call, such as a number, as a tensor"
            for module, count in self._learned.items()
            if count > _MANY
        )
        waits = f"results are waited for where modules are called: {self._compiled!r} is compiled by torch"
        return (*([waits] if self._compiled else []), *learned)

    @property
    def num_learned(self) -> int:
        """Number of first calls of their kind, which run where they are made."""
        return self._learned.total()


def _unplanned(site: PlacedModule, arguments: Arguments) -> str | None:
    """Returns why a call with such arguments runs where it is made, whatever its module does; or None."""
    if arguments.opaque is not None:
        return f"it takes a {arguments.opaque}, which may hide tensors"
    if any(tensor.layout is not torch.strided for tensor in arguments.differentiable):
        return "it takes a sparse tensor that wants a gradient"
    shapes, planned = shapes_of(arguments.tensors), site.shapes
    if site.adopts_shapes:
        site.shapes, site.adopts_shapes = shapes, False
    if planned is None or planned == shapes or site.shapes == shapes:
        return None
    if [shape for shape, _ in planned] != [shape for shape, _ in shapes]:
        return "its inputs have other shapes than the plan was made for"
    return (
        "its inputs have another dtype than the plan was made for; let the sample run as the loop's batches do, under "
        "the same autocast"
    )


def _kind(site: PlacedModule, arguments: Arguments, state: ModuleState) -> Hashable:
    """Returns what two calls of a module must share to be of one kind."""
    dtypes = tuple([tensor.dtype for tensor in (*state.parameters, *state.buffers)])
    return arguments.key(tuple(map(id, state.trained)), dtypes, site.variant_of(state.attributes))


def _error_of(ticket: Ticket[Any]) -> BaseException | None:
    """Returns what finished work raised."""
    try:
        ticket.wait()
    except BaseException as error:
        return error
    return None


def _is_compiled(part: nn.Module) -> bool:
    return getattr(part, "_compiled_call_impl", None) is not None or type(part).__name__ == "OptimizedModule"


def _may_follow(arguments: Arguments) -> bool:
    """Returns whether a function may run on a lane with such arguments.

    Autocast keeps its cast of a leaf for all uses in the calling thread; an index of tensors may select any number of
    elements; and what is not strided, or stands for other numbers than its memory holds, is not foreseen.
    """
    casts = arguments.grad and arguments.state.autocast
    for leaf in arguments.leaves:
        if isinstance(leaf, torch.Tensor):
            if casts and leaf.is_leaf and leaf.requires_grad:
                return False
            if leaf.layout is not torch.strided or leaf.dtype.is_complex:
                return False
            if type(leaf) is LaneTensor:
                continue
            if type(leaf) not in (torch.Tensor, nn.Parameter) or leaf.device.type != "cpu":
                return False
            if leaf.is_quantized or leaf.is_neg():
                return False
        elif isinstance(leaf, slice) and any(isinstance(end, torch.Tensor) for end in (leaf.start, leaf.stop)):
            return False
    return arguments.opaque is None


def _call_plainly(run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return run(*map_tensors(joined, args), **map_tensors(joined, kwargs))
