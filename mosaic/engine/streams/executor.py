"""Runs placed calls on streams: one launching thread, one autograd graph, real tensors.

Autograd runs each operation's backward on the stream of its forward, so a module keeps its partition in backward, and
at the end of a backward it makes the caller's stream wait for the streams on which gradients of leaves were made.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any

import torch

from mosaic.backends.streams.api import StreamApi
from mosaic.backends.streams.clock import StreamClock, StreamMark
from mosaic.backends.streams.lanes import StreamLane, StreamLanes
from mosaic.engine.calls.hidden import HOOKED
from mosaic.engine.calls.placed_module import LastGradients, PlacedModule
from mosaic.engine.calls.ranges import ProfilerRange, is_profiled, profiler_range
from mosaic.engine.calls.thread_state import TRANSFORMED, AsLane, is_traced, on_lane, on_user_stream
from mosaic.engine.graphs import ModuleGraphs
from mosaic.engine.placing import Executor, SpanLog
from mosaic.engine.streams.order import HeldState, LaneOrder, ModelCall, Orders, Point
from mosaic.engine.streams.tensor import StreamTensor, join_tensor, patch_torch, tagged
from mosaic.errors import ModuleContractError
from mosaic.find.structure import map_tensors, tensors_in, version_of, versions_of
from mosaic.timeline import Span

_MAX_PENDING = 512
_ALL_RECORDED, _EACH_RECORDED = 100, 10


class StreamExecutor(Executor):
    lanes: StreamLanes
    log: StreamTimeline

    def __init__(self, lanes: StreamLanes, *, graphs: ModuleGraphs | None = None) -> None:
        super().__init__(lanes)
        self.graphs = graphs
        patch_torch()
        self.log = StreamTimeline(lanes.api, lanes.clock)
        self.orders = Orders(lanes, self.log.note_backward)
        self._num_launched = 0
        self._barrier: Any = None  # the event at the end of the last call that ran behind all lanes, before all others
        self._waited: set[StreamLane] = set()

    # Calls of placed modules.

    def call(self, site: PlacedModule, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Calls a placed module on its lane's stream; what it raises comes out here."""
        if on_lane():
            return run(*args, **kwargs)
        reason, held = site.obstacle or self._obstacle(), self._held_by(site)
        if reason is not None:
            return self.run_here(site.name, run, args, kwargs, reason)
        if not on_user_stream():
            return _run_joined(run, args, kwargs)
        if site.is_alone and self.graphs is None:
            return self.run_alone(site, run, args, kwargs)
        if self.orders.call is None:
            held.look_for_hooks()
        if held.is_hooked:
            return self.run_here(site.name, run, args, kwargs, HOOKED)
        launched = run if self.graphs is None else partial(self.graphs.call, site, run)
        try:
            return self._launch(site, launched, args, kwargs, self.log)
        except torch.OutOfMemoryError:
            pass  # with it go the tensors of what failed; again with nothing beside it
        self.settle()
        self.lanes.api.synchronize()
        self.lanes.api.release_workspaces()
        self.lanes.api.empty_cache()
        return self.run_here(site.name, run, args, kwargs, "it ran out of memory on its lane, and was run again")

    def launch(self, site: PlacedModule, run: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Runs ``run`` on a module's lane, and times nothing: it may talk to other ranks."""
        if not on_user_stream():
            return _run_joined(run, args, {})
        return self._launch(site, run, args, {}, None)

    def _launch(
        self, site: PlacedModule, run: Callable[..., Any], args: Any, kwargs: Any, timeline: StreamTimeline | None
    ) -> Any:
        """Launches a call and returns its result, its tensors tagged with the lane; noted in a timeline, if any."""
        self._num_launched += 1
        lane: StreamLane = site.lane  # type: ignore[assignment]  # of this executor
        if self._barrier is not None and lane not in self._waited:
            self._barrier.wait(lane.stream)
            self._waited.add(lane)
        order, held = self.orders.of(lane), self._held_by(site)
        call = _Call(order, site.name)
        args = map_tensors(call.take, args)
        kwargs = map_tensors(call.take, kwargs) if kwargs else kwargs
        plains, who = call.plains, repr(site.name)
        order.check_held(held, who)
        order.enter(ready=self.orders.had(plains) and held.was_there())
        order.seal()
        before = versions_of(call.inputs)
        is_recorded = timeline is not None and timeline.is_recording

        def work() -> Any:
            with AsLane():
                if timeline is None or not is_recorded:
                    return run(*args, **kwargs)
                start = lane.mark()
                with profiler_range(site.name, "forward"):
                    result = run(*args, **kwargs)
                timeline.note(site, "forward", start, lane.mark().event)
                return result

        try:
            result = lane.run(work)
        finally:
            point = order.point()  # what it launched before it failed may still be running
            held.note_call()  # what the call wrote is part of it
        if timeline is not None and (is_recorded or lane.libraries is not None):
            timeline.watch_backward(site, result, call.inputs)
        for plain in plains:
            lane.api.record_use(plain, lane.stream)
            order.note_read(plain, point, who)
        order.note_held(held, point, who)
        if before != versions_of(call.inputs):
            call.note_writes(before)
        tagged_result = map_tensors(partial(call.tag, point), result)
        if order.is_owing:
            order.settle()
        return tagged_result

    def whole(self, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not on_user_stream() or self._obstacle() is not None:
            return run(*args, **kwargs)
        api, before = self.lanes.api, self.orders.call
        try:
            with api.use_stream(api.current_stream()):  # an interrupt inside may leave a lane's stream current
                self.orders.call = ModelCall(api, tensors_in((args, kwargs)))
                for held in self.orders.held.values():
                    held.begin()
                result = run(*args, **kwargs)
                if self._num_launched:
                    result = map_tensors(join_tensor, result)
        except BaseException:
            with suppress(RuntimeError):  # CUDA's answer where a capture of the user's was lost
                self.lanes.join()
            raise
        finally:
            self.orders.call = before
            if before is not None:  # a model that calls itself: the outer call began earlier
                for held in self.orders.held.values():
                    held.is_reached = True
        if self._num_launched:
            self.orders.join()
        return result

    def run_alone(self, site: PlacedModule, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Runs a module that has the whole device to itself on the user's own stream, behind all lanes."""
        if self._num_launched:
            args, kwargs = map_tensors(join_tensor, args), map_tensors(join_tensor, kwargs)
            self.lanes.join()
        start = self.log.mark() if self.log.is_recording else None
        with profiler_range(site.name, "forward"):
            result = run(*args, **kwargs)
        self._barrier = self.log.mark().event
        self._waited.clear()
        if start is not None:
            self.log.note(site, "forward", start, self._barrier)
            self.log.watch_backward(site, result, tensors_in((args, kwargs)))
        return result

    def reach(self, site: PlacedModule) -> None:
        """Orders the user's stream behind a module's lane, and the module's next call behind the user's stream."""
        if self.closed or not on_user_stream() or self.lanes.api.is_capturing():
            return
        order = self.orders.of(site.lane)  # type: ignore[arg-type]
        order.hold_all(self.lanes.api.current_stream())
        self._held_by(site).is_reached = True

    def _held_by(self, site: PlacedModule) -> HeldState:
        held = self.orders.held.get(site)
        if held is None:
            held = self.orders.held[site] = HeldState(site.module)
        return held

    def _obstacle(self) -> str | None:
        """Returns why a call made now cannot be launched on a lane, or None."""
        if is_traced():
            return "it is being traced or compiled; compile the placed modules instead"
        if self.closed:
            return "its lanes are closed"
        if self.lanes.api.is_capturing():
            return "the loop captures a CUDA graph, in which lanes cannot wait for what is outside"
        if self.orders.call is None and not self.orders.claim():  # the model's call has
            return "another thread trains another colocated model"
        return TRANSFORMED if torch._C._are_functorch_transforms_active() else None

    def run_here(self, module: str, run: Callable[..., Any], args: Any, kwargs: Any, reason: str) -> Any:
        """Makes a call on the user's own stream, behind all lanes and before what they are given later."""
        self.note_in_place(module, reason)
        has_lanes = not self.closed and on_user_stream() and not is_traced() and not self.lanes.api.is_capturing()
        if has_lanes:
            self.settle()
        result = _run_joined(run, args, kwargs)
        if has_lanes:
            self._barrier = self.log.mark().event
            self._waited.clear()
        return result

    # The rest of what a handle asks for.

    def settle(self) -> None:
        if not self.closed and on_user_stream() and not self.lanes.api.is_capturing():
            self.orders.join(with_backward=True)

    @property
    def is_in_flight(self) -> bool:
        """Returns True if a captured call waits for its backward; eager calls can end under any plan."""
        return self.graphs is not None and self.graphs.is_in_flight

    def close(self) -> None:
        """Ends the lanes; results that are still about can be used as before."""
        if not self.closed:
            self.closed, self.orders.thread = True, None
            self.log.close()
            if self.graphs is not None:
                self.graphs.close()
            self.lanes.close()

    @property
    def notes(self) -> tuple[str, ...]:
        eager = self.graphs.eager_calls.items() if self.graphs is not None else ()
        return tuple(f"{n} call{'s' if n > 1 else ''} of {name} launched eagerly: {why}" for (name, why), n in eager)


class _Call:
    """One call's arguments, and the streams that its results and writes belong to."""

    def __init__(self, order: LaneOrder, name: str) -> None:
        self._order = order
        self._name = name
        self.inputs: list[torch.Tensor] = []  # its tensors, plain
        self.plains: list[torch.Tensor] = []  # those that no lane made
        self._owners: dict[int, torch.Tensor] = {}  # by the id of the plain tensor: the caller's

    def take(self, tensor: torch.Tensor) -> torch.Tensor:
        """Orders the lane behind an input and returns it plain."""
        plain = tensor
        if type(tensor) is StreamTensor:
            tensor.order_before(self._order.stream)
            plain = tensor.plain()
        if id(plain) not in self._owners:
            self._owners[id(plain)] = tensor
            self.inputs.append(plain)
            if plain is tensor:
                self.plains.append(plain)
        return plain

    def tag(self, point: Point, tensor: torch.Tensor) -> torch.Tensor:
        """Tags a result; an argument that is returned is the caller's, a view of one stays with the lane of that."""
        owner = self._owners.get(id(tensor))
        if owner is None:
            owner = self._tag_view(tensor, point) if tensor._is_view() else tagged(tensor, point)
            self._owners[id(tensor)] = owner
        return owner

    def _tag_view(self, tensor: torch.Tensor, point: Point) -> torch.Tensor:
        base = tensor._base
        viewed = (t for t in self.inputs if base is t or (t._is_view() and base is t._base))
        owner = next((self._owners[id(t)] for t in viewed), None)
        if owner is None:
            return tagged(tensor, point)
        if type(owner) is not StreamTensor:
            self._order.is_owing = True
            return tensor
        self._order.hold(owner.order.stream, point)
        return tagged(tensor, owner.order.point())

    def note_writes(self, before: list[int | None]) -> None:
        """Orders the user's stream behind what the module wrote into its inputs, unless a lane made them."""
        for tensor, version in zip(self.inputs, before, strict=True):
            if version_of(tensor) == version:
                continue
            if type(self._owners[id(tensor)]) is StreamTensor:
                raise ModuleContractError(
                    f"{self._name!r} wrote into an argument that other streams may still be reading; give it a "
                    f"copy, or leave it out: colocate(..., exclude=[{self._name!r}])"
                )
            self._order.is_owing = True


def _run_joined(run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Makes a call on the current stream; in the middle of a backward, such as a checkpoint's, that is autograd's."""
    return run(*map_tensors(join_tensor, args), **map_tensors(join_tensor, kwargs))


class StreamTimeline(SpanLog):
    """Forwards and backwards of placed modules, by timed events that are read later, so that no step waits for them.

    A backward lasts from the first gradient of the module's results to that of its first parameter, or of an input.
    Events take time to launch: they are recorded in the first hundred steps, in each tenth, and while a profiler runs.
    """

    def __init__(self, api: StreamApi, clock: StreamClock) -> None:
        super().__init__()
        self._clock = clock
        self._api = api
        self._first_step = 0  # since spans were cleared
        self._in_step: set[tuple[str, str]] = set()
        self._pending: deque[tuple[PlacedModule, str, int, StreamMark, Any]] = deque()
        self._reading = threading.Lock()
        self.running: dict[str, _Backward] = {}  # by module, from the first gradient of its results on
        self._ends = LastGradients()

    @property
    def is_recording(self) -> bool:
        num_steps = self.num_backwards - self._first_step
        return num_steps < _ALL_RECORDED or num_steps % _EACH_RECORDED == 0 or is_profiled()

    def mark(self) -> StreamMark:
        """Notes the point that the current stream has come to; autograd's is that of the node that it is running."""
        return self._clock.mark(self._api.current_stream())

    def note(self, site: PlacedModule, phase: str, start: StreamMark, end: Any, *, step: int | None = None) -> None:
        """Notes a piece of a module's work between a mark and an event; a new step begins when one comes again."""
        if (site.name, phase) in self._in_step:
            self._in_step.clear()
            self._clock.start_step()
        self._in_step.add((site.name, phase))
        self._pending.append((site, phase, self.num_backwards if step is None else step, start, end))
        if len(self._pending) > _MAX_PENDING:
            self._read(wait=False)

    def watch_backward(self, site: PlacedModule, result: Any, inputs: Sequence[torch.Tensor]) -> None:
        """Prepares to see the backward of a call, if it will have one."""
        if not torch.is_grad_enabled():
            return
        results = [tensor for tensor in tensors_in(result) if tensor.requires_grad and not tensor.is_leaf]
        if results:
            backward = _Backward(self, site)
            for tensor in results:
                tensor.register_hook(backward.begin)
            if not self._ends.watch(site, partial(self._end, site.name)):
                for tensor in inputs:
                    if tensor.requires_grad:
                        tensor.register_hook(lambda _: backward.end())

    def spans(self) -> tuple[Span, ...]:
        """Returns what ran since the lanes were opened; waits for it."""
        self._read(wait=True)
        return super().spans()

    def clear(self) -> None:
        self._read(wait=False)  # so that the clock forgets the events of the steps
        super().clear()
        self._pending.clear()
        self._first_step = self.num_backwards

    def close(self) -> None:
        """Reads what is left, and takes the hooks off the parameters."""
        self._read(wait=True)
        self._ends.close()

    def note_backward(self) -> None:
        self.num_backwards += 1

    def _end(self, module: str) -> None:
        if module in self.running:
            self.running.pop(module).end()

    def _read(self, *, wait: bool) -> None:
        with self._reading:
            while self._pending and (wait or self._pending[0][-1].query()):
                site, phase, step, start, end = self._pending.popleft()
                assert isinstance(site.lane, StreamLane)
                end.synchronize()
                start_ms = site.lane.origin.ms_until(start)
                end_ms = start_ms + max(0.0, start.event.elapsed_time(end))
                self.add(site.name, phase, site.lane.slots, step, start_ms, end_ms)


class _Backward:
    """One backward of one call; refers to no tensor, since tensors' hooks refer to it."""

    def __init__(self, timeline: StreamTimeline, site: PlacedModule) -> None:
        self.site = site
        self._step = timeline.num_backwards
        self._timeline = timeline
        self._task = -1
        self._start: StreamMark | None = None
        self._target: ExitStack | None = None
        self._shown: ProfilerRange | None = None

    def begin(self, _: torch.Tensor) -> None:
        task = torch._C._current_graph_task_id()
        if self._start is None or self._task != task:  # an earlier backward may have come to no end
            self._task, self._start = task, self._timeline.mark()
            self._timeline.running[self.site.name] = self
            self._shown = ProfilerRange(self.site.name, "backward")
            lane = self.site.lane
            if isinstance(lane, StreamLane) and lane.libraries is not None and not self.site.is_alone:
                with lane.api.use_stream(lane.stream):  # whose workspace of cuBLAS there is
                    self._target = lane.libraries.begin_backward(lane.num_sms)

    def end(self) -> None:
        if self._start is not None and self._shown is not None:
            self._shown.close()
            end = self._timeline.mark().event
            self._timeline.note(self.site, "backward", self._start, end, step=self._step)
            self._start = None
        if self._target is not None:
            self._target.close()
