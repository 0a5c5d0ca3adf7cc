"""One step on the host, from top to bottom: who waits for whom, and where each piece of work runs.

::

    caller   model( left(x)   right(y)   left * right        ) | loss.backward()                    | step
               |       |          |        joins both          |    |        |                      |
    lane 1     |    [forward]-----|--------^     [results] ----'    | [backward]-- gradients to --.  |
    lane 2     |            [forward]------'                     [backward]------- leaves --------'

The sections of ``HostExecutor`` follow a step.
"""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, TypeVar

import torch
from torch import nn
from torch.overrides import _get_current_function_mode, _pop_mode_temporarily

from mosaic.backends.base import Lane, Lanes, Ticket
from mosaic.engine.calls.attach import attach, detach, is_attached
from mosaic.engine.calls.hidden import HOOKED, ModuleState, Surroundings, compiled_code, read_settings
from mosaic.engine.calls.obstacles import Obstacle
from mosaic.engine.calls.placed_module import LastGradients, PlacedModule
from mosaic.engine.calls.ranges import ProfilerRange, profiler_range
from mosaic.engine.calls.signature import HOOKS_GRADIENTS, Arguments, Signature, learn, learn_function
from mosaic.engine.calls.thread_state import become_lane, forget_cast_weights, interception, on_lane
from mosaic.engine.calls.torch_functions import attributes_of
from mosaic.engine.host.backwards import Backwards, SumTicket
from mosaic.engine.host.call import Call, CallFunction, refuse
from mosaic.engine.host.lane_tensor import LaneTensor, join_joined, joined, patch_logging, to_plain, waits_for_plain
from mosaic.engine.placing import Executor, SpanLog
from mosaic.errors import UnforeseenError
from mosaic.find.random_numbers import LaneRandomness, advance
from mosaic.find.structure import flatten, map_tensors, shapes_of, tensors_in, unflatten
from mosaic.find.trace import caller

T = TypeVar("T")
_MAX_FUNCTIONS = 10_000
_MANY_KINDS = 16
_EARLIER = "an earlier call of the same backward ran in place"
_FAST_PATHS = (nn.MultiheadAttention, nn.TransformerEncoder, nn.TransformerEncoderLayer)
"""Modules of torch's that compute other bits where an argument has a class of its own, or a mode is active."""


class HostExecutor(Executor):
    """The lanes of one plan and everything in flight on them."""

    calls_again = True
    without_it = "colocate(..., exclude=[{!r}])"

    def __init__(self, lanes: Lanes) -> None:
        super().__init__(lanes)
        patch_logging()
        self.backwards = Backwards(self)
        self.errors: dict[int, BaseException] = {}  # of work that nobody has waited for, by its number
        self._num_submitted = self._began_at = self._caller = 0
        self.log = SpanLog()
        self.num_launched = 0  # how many calls of modules went to lanes
        self._learned: Counter[str] = Counter()
        self._functions: dict[Hashable, Signature | None] = {}
        self._glue: dict[tuple[Lane, str], PlacedModule] = {}
        self._called: dict[str, PlacedModule] = {}
        self._ends = LastGradients()  # of modules that run in the caller's thread
        self._began: dict[str, tuple[int, ProfilerRange]] = {}
        self._settings: tuple[Any, ...] | None = None  # torch's, when the model's call or a block began
        self._process = os.getpid()
        self._compiled: str | None = None  # a function between modules that is compiled
        self._has_looked = False

    # 1. The model is called: nothing that a lane is still computing leaves it.

    def whole(self, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if os.getpid() != self._process:
            return run(*args, **kwargs)
        if not self._has_looked:
            self._has_looked = True
            self._look_at(run)
        self.begin()
        try:
            result = run(*args, **kwargs)
            if not self.num_launched:
                return result
            result = map_tensors(joined, result)
            self.check_errors()  # work whose results are unused may still read parameters and modes
            return result
        except BaseException as error:
            self.drain()
            unforeseen = next((each for each in self.errors.values() if isinstance(each, UnforeseenError)), None)
            if isinstance(error, Exception) and unforeseen not in (None, error):  # the model's error may come of it
                raise unforeseen from error
            raise
        finally:
            self.end()

    def _look_at(self, run: Any) -> None:
        """Finds code between modules that needs plain tensors, from the model's own bound call."""
        model: nn.Module = (run.args[0] if isinstance(run, partial) else run).__self__
        placed = [module for module in model.modules() if module is not model and is_attached(module)]
        inside = {id(part) for module in placed for part in module.modules()}
        between = [part for part in model.modules() if id(part) not in inside]
        for part in between:
            is_compiled = part._compiled_call_impl or type(part).__name__ == "OptimizedModule"
            if (is_compiled or isinstance(part, _FAST_PATHS)) and not is_attached(part):
                attach(part, _call_plainly)
        self._compiled = compiled_code(between)

    def begin(self) -> None:
        """Begins a call of the model, or a block."""
        self._settings, self._began_at, self.has_failed = read_settings(), self._num_submitted, False
        self.errors.clear()
        if torch._C._current_graph_task_id() == -1:
            self.backwards.forget_failed()

    def end(self) -> None:
        self._settings = None
        self.errors.clear()

    # 2. A placed module is called: on its lane if its calls are known to allow that, where it is called otherwise.

    def call(self, site: PlacedModule, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if on_lane() or os.getpid() != self._process:
            return run(*args, **kwargs)
        if site.is_alone and torch.get_num_threads() == site.lane.num_threads:
            return self.run_alone(site, run, args, kwargs)
        reason = site.obstacle or interception()
        if reason is None and site.has_fast_path and torch._C._len_torch_function_stack():
            reason = "a default device is set, with which torch leaves its fast path of attention"
        if reason is None:
            with torch._C.DisableTorchFunctionSubclass():
                arguments = Arguments.take(args, kwargs, join_joined)
                state = site.state()
                signature = site.signatures.get(_kind(arguments, state))
                reason = self._reuses(site, grad=arguments.grad) or _unplanned(site, arguments, state, signature)
                if reason is None and signature is not None:
                    reason = signature.obstacle or (_EARLIER if arguments.grad and site.in_place else None)
                    if reason is None:
                        return self._send(site, run, arguments, signature, state)
        if reason is not None:
            return self._run_here(site, run, args, kwargs, reason)
        return self._learn(site, run, args, kwargs, state)

    def _send(
        self,
        site: PlacedModule,
        run: Callable[..., Any],
        arguments: Arguments,
        signature: Signature,
        state: ModuleState,
    ) -> Any:
        awaits, randomness = self.awaits(site, state), None
        if signature.may_draw:
            generator, before = torch.Generator(), torch.get_rng_state()
            generator.set_state(before)
            advance(torch.default_generator, signature.draws)  # as the call would, while its lane draws the numbers
            randomness = generator, torch.get_rng_state() if signature.draws else before
        call = Call(self, site, run, arguments, signature, randomness, origin=caller(), state=state)
        result = self.launch(site, call, arguments)
        if awaits:
            self.reach(site)
        return map_tensors(joined, result) if self._settings is None or self._compiled is not None else result

    def run_alone(
        self, site: PlacedModule, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Calls a module that has the whole device to itself: in the caller's thread, behind all lanes."""
        if self.num_launched:
            args, kwargs = map_tensors(joined, args), map_tensors(joined, kwargs)
            self.drain()
        start = time.perf_counter_ns()
        with profiler_range(site.name, "forward"):
            result = run(*args, **kwargs)
        self.note_span(site, "forward", self.num_backwards, start)
        if torch.is_grad_enabled():
            self._time_backward(site, result)
        return result

    def _time_backward(self, site: PlacedModule, result: Any) -> None:
        """Records the time from the first gradient of a call's results to the last one of its parameters."""

        def ended() -> None:
            if site.name in self._began:
                began_ns, shown = self._began.pop(site.name)
                shown.close()
                self.note_span(site, "backward", self.num_backwards, began_ns)

        sees_end = self._ends.watch(site, ended)

        def arrived(grad: torch.Tensor) -> Any:
            self.backwards.begin()  # counts it
            self.drain()  # its slots are those of the lanes
            if sees_end and site.name not in self._began:
                self._began[site.name] = time.perf_counter_ns(), ProfilerRange(site.name, "backward")
            return to_plain(grad)

        for tensor in tensors_in(result):
            if tensor.requires_grad and not tensor.is_leaf:
                tensor.register_hook(arrived)

    def note_span(self, site: PlacedModule, phase: str, step: int, start_ns: int) -> None:
        self.log.add(site.name, phase, site.lane.slots, step, start_ns / 1e6, time.perf_counter_ns() / 1e6)

    def _reuses(self, site: PlacedModule, *, grad: bool) -> str | None:
        """Keeps a module off its lane where sums of its gradients would have another order than the plain loop's."""
        if site.alone is None or not grad or not (site.in_flight or site.in_place):
            return None
        reason = f"it is called again before the backward of its last call, and {site.alone}"
        error = refuse(site, reason, "call it once in a step", origin=caller(), without_it=self.without_it)
        if self._settings is not None and site.in_flight and site.number > self._began_at:
            raise error  # the call of the model is repeated
        return site.obstacle

    def awaits(self, site: PlacedModule, state: ModuleState) -> bool:
        """Returns whether a call's forward is waited for where it is made.

        A loop that calls a module outside of the model may refill its inputs or replace its weights right after.
        """
        if self._settings is not None and self._settings != state.settings:
            self.drain()  # the others were called under other settings
            return True
        return self._settings is None

    def _run_here(self, site: PlacedModule, run: Callable[..., Any], args: Any, kwargs: Any, reason: str) -> Any:
        self.note_in_place(site.name, reason)
        if isinstance(reason, Obstacle) and reason.apart:
            self.drain()
        self.reach(site)
        if reason is not HOOKS_GRADIENTS:  # of what has other uses, too
            args, kwargs = map_tensors(joined, args), map_tensors(joined, kwargs)
        return self.call_plainly(site, run, args, kwargs)

    def call_plainly(self, site: PlacedModule, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        self._reuses(site, grad=torch.is_grad_enabled())
        result = run(*args, **kwargs)
        inputs = {id(tensor) for tensor in tensors_in((args, kwargs))}
        results = [tensor for tensor in tensors_in(result) if id(tensor) not in inputs]
        self.backwards.follow_in_place(site, results)
        return result

    def _learn(self, site: PlacedModule, run: Callable[..., Any], args: Any, kwargs: Any, state: ModuleState) -> Any:
        """Runs the first call of a kind in place, and learns what the next ones will return."""
        args, kwargs = map_tensors(joined, args), map_tensors(joined, kwargs)
        self.drain()  # nothing is known of it
        self._learned[site.name] += 1
        self.num_learned += 1
        arguments = Arguments.take(args, kwargs)
        for part in [] if site.module is None else site.module.modules():
            if isinstance(part, _FAST_PATHS):
                site.has_fast_path = True
                attach(part, _call_unwatched) if not is_attached(part) else None
        before = None if site.module is None else Surroundings(site.module)
        result, results, signature = learn(lambda: run(*args, **kwargs), arguments, site.module, site.parted)
        kind = _kind(arguments, site.state())
        changed = None if before is None else before.changed()
        site.learned(kind, signature, changed or state.written(writes_buffers=True))
        self.backwards.follow_in_place(site, results)
        return result

    def reach(self, site: PlacedModule) -> None:
        """Waits for a module's forward before its caller reads or writes what it holds."""
        last = site.last_forward
        if last is not None and threading.get_ident() == self._caller and os.getpid() == self._process:
            site.last_forward = None
            try:
                last.wait()
            except BaseException:
                if not last.done:  # an interrupt of the caller's; what the lane raised is raised where it is needed
                    raise

    # 3. Its lane waits for the call's inputs and runs the forward; the caller goes on with what stands for its results.

    def launch(self, site: PlacedModule, call: Call, arguments: Arguments) -> Any:
        """Submits a call of a kind that was learned to its module's lane; returns its pending results."""
        signature, inputs = call.signature, arguments.differentiable
        for tensor in inputs:
            waits_for_plain(tensor)
        after = self.inputs_of(arguments.tensors, site)
        results = [
            LaneTensor(info.like, self, site, None, pick, is_shared=info.shares_memory)
            for pick, info in enumerate(signature.new_outputs)
        ]
        if any(output.differentiable for output in signature.new_outputs):
            site.in_flight.add(call)
            places = [each.edge() if type(each) is LaneTensor else each for each in inputs]
            edges = [places[index] for index in signature.edges]
            results = list(CallFunction.apply(call, results, site.anchor, *edges, *call.parameters))
        ticket = self.submit(site, "glue" if call.is_glue else "forward", call.forward, after)
        for tensor in results:
            tensor._ticket = ticket
        if not call.is_glue:
            self.num_launched += 1
            site.last_forward, site.number, self._caller = ticket, self._num_submitted, threading.get_ident()
            self._called[site.name] = site
        if signature.is_single:
            return results[0]
        fresh = iter(results)
        tensors = [
            next(fresh) if info.same_input is None else arguments.leaves[info.same_input] for info in signature.outputs
        ]
        leaves = [leaf[0] if isinstance(leaf, tuple) else tensors[leaf] for leaf in signature.leaves]
        return unflatten(leaves, signature.spec)

    def submit(self, site: PlacedModule, phase: str, work: Callable[[], T], after: Sequence[Ticket[Any]]) -> Ticket[T]:
        """Submits work to a module's lane; runs it at once if lanes are closed, or the thread's operators watched."""
        if self.closed or torch._C._len_torch_dispatch_stack():
            for ticket in after:
                self.wait(ticket)
            result = work()
            return SimpleNamespace(done=True, wait=lambda: result)  # type: ignore[return-value]
        self._num_submitted += 1
        slots, step, number = site.lane.slots, self.num_backwards, self._num_submitted

        def run() -> T:
            become_lane()
            start = time.perf_counter_ns()
            try:
                with profiler_range(site.name, phase if slots else f"{phase} routing"):
                    return work()
            except BaseException as error:
                self.errors[number] = error
                self.has_failed = True
                raise
            finally:
                self.note_span(site, phase, step, start)

        return site.lane.submit(run, after=after)

    def inputs_of(self, tensors: Iterable[Any], site: PlacedModule) -> list[Ticket[Any]]:
        """Returns what work on a module's lane must wait for to read ``tensors``.

        A lane cannot wait for another executor's, such as another model's; its tensors are waited for here.
        """
        after = []
        for tensor in tensors:
            if type(tensor) is not LaneTensor:
                continue
            if tensor._executor is not self:
                tensor.value()
            elif tensor._site.lane is not site.lane or type(tensor._ticket) is SumTicket:
                after.append(tensor._ticket)  # its own lane is ordered anyway
        return after

    def wait(self, ticket: Ticket[T]) -> T:
        """Waits for work; if it failed, lets all lanes come to rest before raising its error."""
        try:
            return ticket.wait()
        except BaseException as error:
            if not on_lane():
                self.drain()
                self.errors = {number: each for number, each in self.errors.items() if each is not error}
            raise

    def check_errors(self) -> None:
        """Lets the lanes come to rest, and raises the error of the first work that failed unnoticed."""
        self.drain()
        if self.errors:
            raise self.errors[min(self.errors)]

    # 4. Listed functions between modules follow their branch: each is a call on the lane, forward and backward.

    def follow(self, first: LaneTensor, func: Any, args: Any, kwargs: Any) -> Any:
        """Runs a function on the lane of its arguments; returns NotImplemented where it has to run in place."""
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
        lane, name = first._site.lane, first._site.name
        site = self._glue.get((lane, name))
        if site is None:
            site = self._glue[lane, name] = PlacedModule(name, None, lane)
        call = Call(self, site, func, arguments, signature, None, origin=caller(), is_glue=True)
        result = self.launch(site, call, arguments)
        for tensor, info in zip(flatten(result)[0], signature.new_outputs, strict=False):
            if info.view_of is not None:
                tensor._is_shared = arguments.leaves[info.view_of]._is_shared = True
        return result

    def refuse_use(self, tensor: LaneTensor, reason: Obstacle) -> Exception:
        site = self._called[tensor._site.name]
        return refuse(site, reason, reason.remedy, origin=caller(), without_it=self.without_it)

    def add(self, first: LaneTensor, second: LaneTensor) -> LaneTensor:
        for term in (first, second):
            if term._executor is not self:  # no lane of these may wait for another executor's
                term.value()
        return LaneTensor(second, self, second._site, SumTicket(first, second), 0)

    # 5. Between steps, and behind ``Call.launch_backward`` and ``Backwards.end``.

    def drain(self) -> None:
        if os.getpid() == self._process and not on_lane():
            self.lanes.drain()
            forget_cast_weights()

    settle = drain

    def close(self) -> None:
        """Ends the lanes; later work runs in the caller's thread."""
        self.closed = True
        self.lanes.close()
        self._ends.close()

    @property
    def is_in_flight(self) -> bool:
        return any(site.in_flight for site in self._glue.values())

    def forget_calls(self) -> None:
        for site in self._glue.values():
            site.forget_calls()

    @property
    def notes(self) -> tuple[str, ...]:
        learned = (
            f"{count} calls of {module} ran in place, since each was the first of its kind; pass what changes from "
            "call to call, such as a number, as a tensor"
            for module, count in self._learned.items()
            if count > _MANY_KINDS
        )
        waits = f"results are waited for where modules are called: {self._compiled!r} is compiled by torch"
        return (*([waits] if self._compiled else []), *learned)


def _unplanned(site: PlacedModule, arguments: Arguments, state: ModuleState, signature: Signature | None) -> str | None:
    if arguments.grad and state.parts.has_gradient_hooks():
        return HOOKED
    if any(map(attributes_of, arguments.tensors)):
        return "it takes a tensor with attributes, which it may read"
    if signature is not None:
        return None  # the first call of its kind has passed
    if arguments.opaque is not None:
        return f"it takes a {arguments.opaque}, which may hide tensors"
    if any(tensor.layout is not torch.strided for tensor in arguments.differentiable):
        return "it takes a sparse tensor that wants a gradient"
    shapes, planned = shapes_of(arguments.tensors), site.shapes
    if planned is None or planned == shapes:
        return None
    kind = "shapes" if [shape for shape, _ in planned] != [shape for shape, _ in shapes] else "dtypes"
    return f"its inputs have other {kind} than planned; use a sample like the loop's batches"


def _kind(arguments: Arguments, state: ModuleState) -> Hashable:
    dtypes = tuple([tensor.dtype for tensor in state.parts.tensors])
    return arguments.key(state.parts.number, tuple(map(id, state.trained)), dtypes)


def _may_follow(arguments: Arguments) -> bool:
    """Returns whether a function may run on a lane with such arguments.

    Autocast keeps its cast of a leaf for all uses in the calling thread, a slice of tensors selects any number of
    elements, and an integer tensor of one element may be a size.
    """
    casts = arguments.grad and arguments.state.autocast
    for leaf in arguments.leaves:
        if isinstance(leaf, torch.Tensor):
            is_plain = type(leaf) in (torch.Tensor, nn.Parameter) and leaf.device.type == "cpu"
            if (
                (casts and leaf.is_leaf and leaf.requires_grad)
                or leaf.layout is not torch.strided
                or leaf.dtype.is_complex
                or (leaf.numel() == 1 and not leaf.is_floating_point())
                or (type(leaf) is not LaneTensor and (not is_plain or leaf.is_quantized or leaf.is_neg()))
            ):
                return False
        elif isinstance(leaf, slice) and any(isinstance(end, torch.Tensor) for end in (leaf.start, leaf.stop)):
            return False
    return arguments.opaque is None


def _call_plainly(run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return run(*map_tensors(joined, args), **map_tensors(joined, kwargs))


def _call_unwatched(run: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Calls a module of torch's that draws nothing without ``LaneRandomness``, under which it leaves its fast path."""
    is_watched = torch._C._len_torch_function_stack() and isinstance(_get_current_function_mode(), LaneRandomness)
    if not is_watched or any(part.training for part in run.__self__.modules()):
        return run(*args, **kwargs)
    with _pop_mode_temporarily():
        return run(*args, **kwargs)


def detach_parts(model: nn.Module) -> None:
    """Restores the plain classes of the parts that executors have attached; they do not, since all attach the same."""
    for part in model.modules():
        if getattr(type(part), "_mosaic_intercept", None) in (_call_plainly, _call_unwatched):
            detach(part)
