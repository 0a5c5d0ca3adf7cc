"""The order of work on streams: between a lane, other lanes, and the stream of the user's loop.

One thread launches everything, so that order is a matter of events alone and no thread ever waits. The rules:

* Work on a lane starts after what made its inputs: another lane's ``Point``, or all that the user's stream was given.
* In a call of the whole model, work on its arguments waits for the beginning of that call only. Every lane waits for
  that point once: before it lie the optimizer's step and gradients whose memory may be the lane's own.
* Torch's allocator is not told of all that the user's stream reads of a lane's memory: gradients that the model takes
  in its own call, results of other classes, attributes. Until the end of that call each piece of work on the lane
  waits for all that the user's stream was given, since it may get that memory.
* A write waits for the readers on other streams, and whoever reads later waits for the write.
* Tensors of the user's stream that a lane reads, and what its modules hold, must stay as they are until the user's
  stream waits for the lane. This is checked by counted writes and addresses, and an error. Writes through ``.data``
  are not counted; the finder sees those in the sample's run.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, ClassVar

import torch
from torch import nn

from mosaic.backends.streams.api import StreamApi
from mosaic.backends.streams.lanes import StreamLane, StreamLanes
from mosaic.engine.calls.hidden import HeldTensors, parts_of
from mosaic.engine.calls.placed_module import PlacedModule
from mosaic.errors import ModuleContractError
from mosaic.find.structure import memory_of, version_of, versions_of
from mosaic.find.trace import caller


class Point:
    """All that a lane was given up to some moment; its event is recorded at the first wait for it."""

    __slots__ = ("event", "index", "order")

    def __init__(self, order: LaneOrder, index: int) -> None:
        self.order = order
        self.index = index
        self.event: Any = None


class ModelCall:
    """A call of the whole model: what was there when it began."""

    def __init__(self, api: StreamApi, arguments: Iterable[torch.Tensor]) -> None:
        self.began = api.new_event()
        self.stream = api.current_stream()
        self.began.record(self.stream)
        self._arguments: dict[int, tuple[torch.Tensor, int | None]] = {}
        for tensor in arguments:
            self._arguments[id(tensor)] = (tensor, version_of(tensor))
            if (base := tensor._base) is not None:
                self._arguments[id(base)] = (base, version_of(base))

    def had(self, tensor: torch.Tensor) -> bool:
        """Returns True if a tensor is one of the arguments, or a view of one, and was not written to since."""
        argument = self._arguments.get(id(tensor))
        if argument is None and tensor._is_view():
            argument = self._arguments.get(id(tensor._base))
        return argument is not None and argument[1] is not None and argument[1] == argument[0]._version


class LaneOrder:
    """One lane's place in the order."""

    def __init__(self, lane: StreamLane, home: Orders) -> None:
        self.is_owing = False  # it made something that carries no point, for which the user's stream has to wait
        self.lane = lane
        self.stream = lane.stream
        self.handle: int = lane.stream.cuda_stream
        self.device = home.api.device
        self.home = home
        self._index = 0
        self._open: Point | None = None
        self._last: Point | None = None
        self._last_write: Point | None = None
        self.readers: dict[int, Any] = {}  # streams by handle, whose own comparisons take longer
        self._passed: dict[int, int] = {}  # by handle: the index of the point that a stream waits for
        self._reads: deque[tuple[int, HeldState | weakref.ref[torch.Tensor], int, str]] = deque()
        self._entered: Any = None  # the beginning of a call, and not the call, which has its arguments
        self._lent: Any = None  # likewise: the call in which the user's stream may read memory that nobody tells of

    # What the lane waits for.

    def enter(self, *, ready: bool) -> None:
        """Prepares the lane for work; unless its plain inputs are ``ready``, it waits for the user's stream."""
        call = self.home.call
        if call is not None and self._entered is not call.began:
            call.began.wait(self.stream)
            self.readers.pop(call.stream.cuda_stream, None)
            self._entered = call.began
        if call is None or not ready or self._lent is call.began:
            self.wait_for(self.home.api.current_stream())

    def lend(self) -> None:
        """Notes that the user's stream may read memory of the lane without the allocator's knowledge."""
        self._lent = self.home.call.began if self.home.call is not None else None

    def wait_for(self, stream: Any) -> None:
        self.home.api.order(stream, before=self.stream)
        self.readers.pop(stream.cuda_stream, None)

    def hold_back_writer(self, stream: Any) -> None:
        """Makes a stream wait for whoever reads this lane's tensors, since it is going to write into one."""
        for reader in self.readers.values():
            self.home.api.order(reader, before=stream)
        if stream.cuda_stream == self.handle:
            self.readers.clear()

    # What waits for the lane.

    def point(self) -> Point:
        """Returns the point behind what was launched last; more small work may follow before it is passed."""
        if self._open is None:
            self._index += 1
            self._open = self._last = Point(self, self._index)
        return self._open

    def seal(self) -> None:
        point, self._open = self._open, None
        if point is not None:
            self._record(point)

    def wrote(self) -> None:
        """Notes that the lane's last work wrote into one of its tensors: every reader must wait for it."""
        self._last_write = self.point()

    def hold(self, stream: Any, point: Point, *, reads: bool = True) -> None:
        """Makes a stream wait for a point of this lane, and for writes into the lane's tensors.

        ``reads`` says whether work on the stream will use tensors of the lane.
        """
        handle = stream.cuda_stream
        if handle == self.handle or self.lane.closed:
            return
        if reads:
            self.readers[handle] = stream
        if self._last_write is not None and self._last_write.index > point.index:
            point = self._last_write
        if self._passed.get(handle, 0) >= point.index:
            return
        if point is self._open:
            self.seal()
        elif point.event is None:  # this stream is the first to wait for it alone, or an interrupt came
            self._record(point)
        point.event.wait(stream)
        self._passed[handle] = point.index

    def _record(self, point: Point) -> None:
        event = self.home.api.new_event()
        event.record(self.stream)
        point.event = event

    def settle(self) -> None:
        """Makes the user's stream wait for what carries no point, if there is such."""
        if self.is_owing:
            self.is_owing = False
            self.hold_all(self.home.api.current_stream())

    def hold_all(self, stream: Any, *, with_backward: bool = False) -> None:
        """Makes the user's stream wait for everything that the lane was given, or also for what autograd gave it."""
        if with_backward and not self.lane.closed:
            self.home.api.order(self.stream, before=stream)
            self._open, self._passed[stream.cuda_stream] = None, self._index
        if self._last is not None:
            self.lend()
            self.hold(stream, self._last, reads=False)
            self.check_reads(stream)

    def note_joined(self, stream: Any) -> None:
        """Notes that a stream waits for all lanes, hence for all readers."""
        if self.readers:
            self.readers = {stream.cuda_stream: stream}

    # Tensors of the user's stream.

    def note_read(self, tensor: torch.Tensor, point: Point, who: str) -> None:
        """Notes that the lane has read a tensor of the user's stream when it passes a point."""
        version = version_of(tensor)
        if version is not None:
            self._reads.append((point.index, weakref.ref(tensor), version, who))

    def note_held(self, held: HeldState, point: Point, who: str) -> None:
        self._reads.append((point.index, held, 0, who))

    def check_reads(self, stream: Any) -> None:
        """Checks that what the lane read before the points that the user's stream knows is as it was.

        Raises:
            ModuleContractError: Something was written to.
        """
        if not self._reads:
            return
        index, changed = self._passed.get(stream.cuda_stream, 0), None
        while self._reads and self._reads[0][0] <= index:
            _, what, version, who = self._reads.popleft()
            if isinstance(what, HeldState):
                if not what.is_as_left():
                    changed = changed or f"a parameter or buffer of {who}"
            elif (tensor := what()) is not None and version_of(tensor) != version:
                changed = changed or f"an input of {who}"
        if changed is not None:
            raise _written_beside(changed)

    def check_held(self, held: HeldState, who: str) -> None:
        """Checks before another call of a module that nobody wrote to what the lane is perhaps still reading."""
        is_read = self._reads and any(what is held for _, what, _, _ in self._reads)
        if is_read and not (held.is_as_left() and held.holds_the_same()):
            raise _written_beside(f"a parameter or buffer of {who}")


def _written_beside(what: str) -> ModuleContractError:
    return ModuleContractError(
        f"{what} was written to while its lane had perhaps not finished with it (found at {caller()}); write before "
        "or after the model's call, or to a copy, or leave the module out: colocate(..., exclude=[...])"
    )


class Orders:
    """All lanes that are open together; ``note_backward`` is called when any backward begins."""

    alive: ClassVar[set[weakref.ref[Orders]]] = set()
    _claiming: ClassVar[threading.Lock] = threading.Lock()
    _owner: ClassVar[threading.Thread | None] = None  # the thread that claimed lanes last

    def __init__(self, lanes: StreamLanes, note_backward: Callable[[], object]) -> None:
        self.api = lanes.api
        self.held: dict[PlacedModule, HeldState] = {}
        self.note_backward = note_backward
        self.call: ModelCall | None = None  # the call of the whole model that is running, or None
        self.thread: threading.Thread | None = None  # that launches
        self._lanes: dict[tuple[int, ...], LaneOrder] = {}
        self.alive.add(weakref.ref(self, self.alive.discard))

    def of(self, lane: StreamLane) -> LaneOrder:
        order = self._lanes.get(lane.slots)
        if order is None:
            order = self._lanes[lane.slots] = LaneOrder(lane, self)
        return order

    def had(self, tensors: Iterable[torch.Tensor]) -> bool:
        """Returns True in a call of the model that had all tensors as arguments, as they are."""
        return self.call is not None and all(map(self.call.had, tensors))

    def claim(self) -> bool:
        """Takes the lanes for the calling thread; False if another has lanes, whose streams and memory may be these."""
        here = threading.current_thread()
        if self.thread is here and Orders._owner is here:
            return True
        with self._claiming:
            others = [
                orders.thread for each in list(self.alive) if (orders := each()) is not None and orders is not self
            ]
            is_free = not any(thread is not None and thread is not here and thread.is_alive() for thread in others)
            if is_free:
                Orders._owner = here
            self.thread = here if is_free else None
            return is_free

    def begin_backward(self) -> None:
        """Notes that the user's stream is going to have gradients, which lie in memory of any lane."""
        self.note_backward()
        for order in list(self._lanes.values()):  # another thread may be opening one
            order.lend()

    def end_backward(self, gradients: Iterable[torch.Tensor | None], *, twice: bool) -> None:
        """Tells the allocator of gradients that the current stream has now, which a later backward may let go.

        ``twice`` says whether gradients have gradients, and so a graph that holds what it read of them.
        """
        if torch._C._are_functorch_transforms_active():
            return  # they are wrappers
        held = [t.grad for state in list(self.held.values()) for t in state.held.parameters] if twice else []
        here = self.api.current_stream()
        for gradient in (*gradients, *held):
            if type(gradient) is not torch.Tensor or gradient.layout is not torch.strided:
                continue  # none, or one that is being traced
            if not torch._C._functorch.is_legacy_batchedtensor(gradient):  # is_grads_batched
                self.api.record_use(gradient, here)

    def join(self, *, with_backward: bool = False) -> None:
        """Makes the user's stream wait for all work of lanes that has points, or for what autograd launched, too."""
        here = self.api.current_stream()
        for order in self._lanes.values():
            order.hold_all(here, with_backward=with_backward)
        for order in self._lanes.values():
            order.note_joined(here)


class HeldState:
    """Parameters and buffers of one module, compared at the moments that matter.

    What differs from the beginning of the model's call was written before the module's own, which then waits for the
    user's stream. What differs from the end of the module's call was written beside its lane, an error. What it held
    before lives until its next call, so that nothing else gets the memory that a lane reads.
    """

    def __init__(self, module: nn.Module | None) -> None:
        self.is_reached = False  # a parameter, buffer or child was taken from the module since the model's call began
        self.is_hooked = False  # hooks follow its gradients in the model's call
        self.held = HeldTensors(parts_of(module))
        forget = partial(setattr, self, "held", HeldTensors(()))
        self._module = weakref.ref(module, lambda _: forget()) if module is not None else None
        self._began: Any = None
        self._after: Any = None

    def begin(self) -> None:
        """Notes the state at the beginning of a call of the model; what was done before is ordered before all lanes."""
        self.is_reached = False
        self._began = self._marks()
        self.look_for_hooks()

    def look_for_hooks(self) -> None:
        self.is_hooked = torch.is_grad_enabled() and self.held.has_gradient_hooks()

    def was_there(self) -> bool:
        """Returns True if all of it was there, as it is now, when the model's call began."""
        return self.holds_the_same() and not self.is_reached and self._began == self._marks()

    def note_call(self) -> None:
        self._after = self._marks()

    def is_as_left(self) -> bool:
        return bool(self._after == self._marks())

    def holds_the_same(self) -> bool:
        """Returns True if the module holds the same tensors as before; notes those that it holds now."""
        if self.held.are_same():
            return True
        self.held = HeldTensors(parts_of(self._module() if self._module is not None else None))
        return False

    def _marks(self) -> list[Any]:
        tensors = self.held.tensors
        try:
            return [*versions_of(tensors), *map(torch.Tensor.data_ptr, tensors)]
        except RuntimeError:  # one has no memory of its own
            return [*versions_of(tensors), *map(memory_of, tensors)]
