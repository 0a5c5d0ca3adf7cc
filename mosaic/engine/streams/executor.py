"""Runs placed calls on streams: one launching thread, one autograd graph, real tensors.

Autograd runs each operation's backward on the stream of its forward, so a module keeps its partition in backward, and
at the end of a backward it makes the caller's stream wait for the streams on which gradients of leaves were made.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch

from mosaic.backends.streams.lanes import StreamLane
from mosaic.engine.calls.caller import note_in_place
from mosaic.engine.calls.ranges import ProfilerRange
from mosaic.engine.calls.thread_state import TRANSFORMED, as_lane, is_traced, is_transformed, on_lane
from mosaic.engine.graphs import ModuleGraphs
from mosaic.engine.placing import Executor
from mosaic.engine.streams.order import HeldState, LaneOrder, ModelCall, Orders, Point
from mosaic.engine.streams.tensor import (
    StreamTensor,
    count_foreach_writes,
    join_tensor,
    make_dlpack_wait,
    on_user_stream,
    tagged,
)
from mosaic.engine.streams.timeline import StreamTimeline
from mosaic.errors import ModuleContractError
from mosaic.find.structure import map_tensors, tensors_in, version_of

if TYPE_CHECKING:
    from mosaic.backends.streams.lanes import StreamLanes
    from mosaic.engine.calls.placed_module import PlacedModule
    from mosaic.timeline import Span


class StreamExecutor(Executor):
    """The lanes of one plan on streams of one device."""

    lanes: StreamLanes

    def __init__(
        self,
        lanes: StreamLanes,
        *,
        in_order: Mapping[str, str] | None = None,
        graphs: ModuleGraphs | None = None,
    ) -> None:
        self.lanes = lanes
        self.graphs = graphs
        self.in_place: Counter[tuple[str, str]] = Counter()
        self.places: dict[tuple[str, str], str] = {}
        self.closed = False
        self.in_order = dict(in_order or {})
        self.held: WeakKeyDictionary[PlacedModule, HeldState] = WeakKeyDictionary()
        self.orders = Orders(lanes)
        make_dlpack_wait()
        count_foreach_writes()
        self.timeline = StreamTimeline(lanes.api, lanes.clock, self.orders.lend)
        self._num_launched = 0
        self._alone: Any = None  # the event at the end of the last module that had the device to itself
        self._waited: set[StreamLane] = set()

    # Calls of placed modules.

    def call(self, site: PlacedModule, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Calls a placed module on its lane's stream; what it raises comes out here."""
        if on_lane():
            return run(*args, **kwargs)
        reason = site.obstacle or _obstacle()
        if reason is None and self.closed:
            reason = "its lanes are closed"
        if reason is not None:
            return self._run_here(site, run, args, kwargs, reason)
        if not on_user_stream():
            return self._run_again(site, run, args, kwargs)
        if site.is_alone and self.graphs is None:
            return self.run_alone(site, run, args, kwargs)
        launched = run
        if self.graphs is not None and site.name not in self.in_order:
            launched = partial(self.graphs.call, site, run)
        try:
            return self._launch(site, launched, args, kwargs, self.timeline)
        except torch.OutOfMemoryError:
            pass  # with the error go the tensors of what failed, before it is tried again
        return self._run_with_less(site, run, args, kwargs)

    def launch(self, site: PlacedModule, run: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Runs ``run`` on a module's lane, once whatever it raises, and times nothing: it may talk to other ranks.

        In the middle of a backward it runs in the order of autograd's stream.
        """
        if not on_user_stream():
            return self._run_again(site, run, args, {})
        return self._launch(site, run, args, {}, None)

    def _launch(
        self, site: PlacedModule, run: Callable[..., Any], args: Any, kwargs: Any, timeline: StreamTimeline | None
    ) -> Any:
        """Launches a call and returns its result, its tensors tagged with the lane; noted in a timeline, if any."""
        self._num_launched += 1
        lane = _lane_of(site)
        if self._alone is not None and lane not in self._waited:
            self._alone.wait(lane.stream)
            self._waited.add(lane)
        order, held, in_order = self.orders.of(lane), self._held_by(site), site.name in self.in_order
        call = _Call(order, site.name, in_order=in_order)
        args, kwargs = map_tensors(call.take, args), map_tensors(call.take, kwargs)
        plains = call.plains
        if self.orders.call is None:
            held.note_tables()
        order.check_held(held, repr(site.name))
        order.enter(ready=not in_order and all(map(self.orders.is_ready, plains)) and held.was_there())
        if in_order:
            for other in {order, *call.orders}:
                other.hold_back_writer(order.stream)
        order.seal()
        point = order.new_point()  # what it launches before it fails may still be running
        before = [version_of(tensor) for tensor in call.inputs]
        results: list[Any] = []

        def work() -> None:
            with as_lane(), ProfilerRange(site.name, "forward"):
                results.append(run(*args, **kwargs))

        try:
            ticket = lane.launch(work, behind_caller=False)
        finally:
            held.note_call()  # what the call wrote is part of it
        point.event = ticket.end
        result = results.pop()
        if timeline is not None:
            assert ticket.start is not None
            timeline.note(site, "forward", ticket.start, ticket.end)
            timeline.watch_backward(site, result, call.inputs)
        for plain in plains:
            lane.api.record_use(plain, lane.stream)
            order.note_read(plain, point, repr(site.name))
        order.note_held(held, point, repr(site.name))
        call.note_writes(before, point)
        tagged_result = map_tensors(lambda tensor: call.tag(tensor, point), result)
        if in_order:
            order.lend()
            order.hold_user(lane.api.current_stream(), point)
        order.settle()
        return tagged_result

    def whole(self, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs the model's own call: nothing that a lane is still computing leaves it unordered."""
        if self.closed or not on_user_stream() or _obstacle() is not None:
            return run(*args, **kwargs)
        api, before = self.lanes.api, self.orders.call
        is_captured = before is None and api.is_capturing()  # by the user, in a graph of theirs
        if is_captured:
            self._forget_events()
        try:
            with api.use_stream(api.current_stream()):  # an interrupt inside may leave a lane's stream current
                self.orders.call = ModelCall(api, tensors_in((args, kwargs)))
                for held in self.held.values():
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
            for held in self.held.values():
                held.is_reached = before is not None  # a model that calls itself: the outer call began earlier
        if self._num_launched:
            self.orders.join()
        if is_captured:
            self._forget_events()
        return result

    def _forget_events(self) -> None:
        """Forgets what lanes waited for so far: work inside of a capture can wait for none outside, and vice versa."""
        self.orders.forget()
        self._alone = None
        for lane in self.lanes:
            lane.last = None

    def run_alone(self, site: PlacedModule, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Runs a module that has the whole device to itself on the user's own stream, behind all lanes.

        A lane would gain nothing. What lanes are given later starts behind it.
        """
        if self._num_launched:
            args, kwargs = map_tensors(join_tensor, args), map_tensors(join_tensor, kwargs)
            self.lanes.join()
        start = self.timeline.mark()
        with ProfilerRange(site.name, "forward"):
            result = run(*args, **kwargs)
        self._alone = self.timeline.mark().event
        self.timeline.note(site, "forward", start, self._alone)
        self._waited.clear()
        self.timeline.watch_backward(site, result, tensors_in((args, kwargs)))
        return result

    def reach(self, site: PlacedModule) -> None:
        """Somebody outside reaches into a placed module: its parameters, buffers, attributes or children.

        What the user's stream is given from now on comes behind the module's lane, and the module's next call behind
        the user's stream.
        """
        if self.closed or not on_user_stream():
            return
        self.orders.of(_lane_of(site)).hold_all(self.lanes.api.current_stream())
        self._held_by(site).is_reached = True

    def _held_by(self, site: PlacedModule) -> HeldState:
        held = self.held.get(site)
        if held is None:
            held = self.held[site] = HeldState(site.module)
        return held

    def _run_with_less(self, site: PlacedModule, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Runs a call again for which there was no memory beside the others: once, with nothing beside it.

        What the failed try had written into buffers or drawn of random numbers by then stays written and drawn.
        """
        self.settle()
        self.lanes.api.synchronize()
        self.lanes.api.release_workspaces()
        self.lanes.api.empty_cache()
        reason = "it ran out of memory on its lane, and was run again in the plain way"
        return self._run_here(site, run, args, kwargs, reason)

    def _run_here(self, site: PlacedModule, run: Callable[..., Any], args: Any, kwargs: Any, reason: str) -> Any:
        note_in_place(self, site.name, reason)
        if not is_traced():
            self.settle()
        return run(*map_tensors(join_tensor, args), **map_tensors(join_tensor, kwargs))

    def _run_again(self, site: PlacedModule, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Runs a call in the middle of a backward (a recomputation) on its lane, in the order of autograd's stream."""
        api, stream = self.lanes.api, self.orders.of(_lane_of(site)).stream
        here = api.current_stream()
        args, kwargs = map_tensors(join_tensor, args), map_tensors(join_tensor, kwargs)
        self.orders.order(here, before=stream)
        with api.use_stream(stream), _lane_of(site).under_settings(), as_lane():
            result = run(*args, **kwargs)
        self.orders.order(stream, before=here)
        for values, used_on in ((args, stream), (kwargs, stream), (result, here)):
            for tensor in tensors_in(values):
                api.record_use(tensor, used_on)
        return result

    # The rest of what a handle asks for.

    def settle(self) -> None:
        """Makes the user's stream wait for the lanes; blocks nothing."""
        if not self.closed and on_user_stream():
            self.orders.join()
            self.lanes.join()

    @property
    def is_in_flight(self) -> bool:
        """Returns True if a captured call waits for its backward; eager calls can end under any plan."""
        return self.graphs is not None and self.graphs.is_in_flight

    def close(self) -> None:
        """Ends the lanes; results that are still about can be used as before."""
        if not self.closed:
            self.closed = True
            self.timeline.close()
            if self.graphs is not None:
                self.graphs.close()
            self.lanes.close()

    @property
    def notes(self) -> tuple[str, ...]:
        """Says which calls were not launched as graphs, and why."""
        if self.graphs is None:
            return ()
        return tuple(
            f"{count} call{'s' if count > 1 else ''} of {name} launched eagerly: {reason}"
            for (name, reason), count in self.graphs.eager_calls.items()
        )

    @property
    def num_backwards(self) -> int:
        return self.timeline.num_backwards

    def spans(self) -> tuple[Span, ...]:
        return self.timeline.spans()

    def clear_spans(self) -> None:
        self.timeline.clear()


class _Call:
    """One call's arguments, and the streams that its results and writes belong to."""

    def __init__(self, order: LaneOrder, name: str, *, in_order: bool) -> None:
        self._order = order
        self._name = name
        self._in_order = in_order
        self.inputs: list[torch.Tensor] = []  # its tensors, plain
        self.plains: list[torch.Tensor] = []  # those that no lane made
        self._owners: dict[int, torch.Tensor] = {}  # by the id of the plain tensor: the caller's
        self._tagged: dict[int, torch.Tensor] = {}

    @property
    def orders(self) -> list[LaneOrder]:
        return [tensor.order for tensor in self._owners.values() if type(tensor) is StreamTensor]

    def take(self, tensor: torch.Tensor) -> torch.Tensor:
        """Orders the lane behind an input and returns it plain."""
        plain = tensor.plain_for(self._order.stream) if type(tensor) is StreamTensor else tensor
        if id(plain) not in self._owners:
            self._owners[id(plain)] = tensor
            self.inputs.append(plain)
            if plain is tensor:
                self.plains.append(plain)
        return plain

    def tag(self, tensor: torch.Tensor, point: Point) -> torch.Tensor:
        """Tags a result; an argument that is returned is the caller's, a view of one stays with the lane of that."""
        known = self._owners.get(id(tensor), self._tagged.get(id(tensor)))
        if known is None:
            known = self._tagged[id(tensor)] = (
                self._tag_view(tensor, point) if tensor._is_view() else tagged(tensor, point)
            )
        return known

    def _tag_view(self, tensor: torch.Tensor, point: Point) -> torch.Tensor:
        base = tensor._base
        viewed = (t for t in self.inputs if base is t or (t._is_view() and base is t._base))
        owner = next((self._owners[id(t)] for t in viewed), None)
        if owner is None:
            return tagged(tensor, point)
        if type(owner) is not StreamTensor:
            self._order.is_owing = True
            return tensor
        owner.order.wait_for_point(point)
        return tagged(tensor, owner.order.point())

    def note_writes(self, before: list[int | None], point: Point) -> None:
        """Orders others behind what the module wrote into its inputs."""
        for tensor, version in zip(self.inputs, before, strict=True):
            if version_of(tensor) == version:
                continue
            owner = self._owners[id(tensor)]
            if type(owner) is not StreamTensor:
                self._order.is_owing = True
                continue
            if owner.order.has_readers(besides=self._order.stream) and not self._in_order:
                raise ModuleContractError(
                    f"{self._name!r} wrote into an argument that other streams may still be reading; give it a "
                    f"copy, or leave it out: colocate(..., exclude=[{self._name!r}])"
                )
            owner.order.wait_for_point(point)
            owner.order.wrote(point if owner.order is self._order else None)


def _lane_of(site: PlacedModule) -> StreamLane:
    assert isinstance(site.lane, StreamLane), "a site of another executor"
    return site.lane


def _obstacle() -> str | None:
    """Returns why a call made now must run where it is made, or None."""
    if is_traced():
        return "it is being traced or compiled; compile the placed modules instead"
    return TRANSFORMED if is_transformed() else None
