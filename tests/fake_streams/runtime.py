"""The runtime itself: ``StreamApi`` on the CPU, with every operator seen through a dispatch mode."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from fake_streams.clocks import Clock, Launch, merge
from fake_streams.graphs import FakeGraph, Pool, Recording
from fake_streams.memory import Memory, RaceError

__all__ = ["FakeStreams", "Hold", "Launch", "RaceError"]

HOLD_S = 60
WORKSPACE_BYTES = 32 << 20
TOTAL_BYTES = 80 << 30


class FakeStream:
    """A stream; the one with handle 0 is the user's."""

    def __init__(self, handle: int, priority: int = 0, *, aside: bool = False) -> None:
        self.handle = handle
        self.aside = aside  # autograd knows nothing of it: in a backward, too, only waits order others behind it
        self.priority = priority
        self.clock: Clock = {}
        self.capture: Recording | None = None

    def __repr__(self) -> str:
        return f"FakeStream({self.handle})"


class FakeEvent:
    """An event; passed at once for the CPU, never before its recording for the clocks."""

    def __init__(self, runtime: FakeStreams, timing: bool) -> None:
        self._runtime = runtime
        self._timing = timing
        self._clock: Clock | None = None
        self._recorded_ms = 0.0
        self._capture: Recording | None = None

    @property
    def _at_ms(self) -> float:
        holds = self._runtime.holds_before(self._clock)
        return max([self._recorded_ms, *(hold.opened_ms for hold in holds)])

    def record(self, stream: FakeStream) -> None:
        self._clock = dict(stream.clock)
        self._recorded_ms = time.perf_counter() * 1e3
        self._capture = stream.capture

    def wait(self, stream: FakeStream) -> None:
        if self._clock is None:
            return  # as CUDA: waiting for what was never recorded does nothing
        if self._capture is not None and self._capture.open:
            self._capture.join(stream)
        elif self._capture is not None:
            self._refuse_captured()
        elif stream.capture is not None and stream.capture.open:
            raise RuntimeError("a capturing stream waits for an event from outside of the capture")
        merge(stream.clock, self._clock)

    def _refuse_captured(self) -> None:
        if self._capture is not None:  # cudaErrorCapturedEvent
            raise RuntimeError("the operation is not permitted on an event last recorded in a capturing stream")

    def query(self) -> bool:
        self._runtime.refuse_in_capture("query")
        self._refuse_captured()
        return all(hold.is_open for hold in self._runtime.holds_before(self._clock))

    def synchronize(self) -> None:
        self._runtime.refuse_in_capture("synchronize")
        self._refuse_captured()
        for hold in self._runtime.holds_before(self._clock):
            hold.wait()
        if self._clock is not None:
            merge(self._runtime.host, self._clock)

    def elapsed_time(self, end_event: FakeEvent) -> float:
        if not (self._timing and end_event._timing):
            raise ValueError("an event without timing has no time")
        return end_event._at_ms - self._at_ms


class Hold:
    """Work of one stream that does not end before it is told to, for a test of what waits for it."""

    def __init__(self, launch: Launch) -> None:
        self.launch = launch
        self.opened_ms = 0.0
        self._opened = threading.Event()

    @property
    def is_open(self) -> bool:
        return self._opened.is_set()

    def open(self) -> None:
        self.opened_ms = time.perf_counter() * 1e3
        self._opened.set()

    def wait(self) -> None:
        if not self._opened.wait(HOLD_S):
            raise RuntimeError(f"{self.launch} was held for {HOLD_S} s while a thread waited for it")


class FakeStreams:
    """A runtime whose streams run operators on the CPU, right away, and whose clocks know what orders them.

    Use it inside ``with runtime.watching():``; a launch that is not ordered after what it reads raises ``RaceError``.
    Inside of backward all streams count as ordered, which autograd does on CUDA.
    """

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.host: Clock = {}
        self.launches: list[Launch] = []
        self.memory = Memory()
        self.main = FakeStream(0)
        self._streams: dict[int, FakeStream] = {0: self.main}
        self._asides: list[FakeStream] = []
        self._current = threading.local()
        self._fresh = 1 << 62
        self._holds: list[Hold] = []
        self._with_workspace: dict[int, Recording | None] = {}
        self.generator: torch.Tensor | None = None
        """Where all graphs find the generator's state, as they do before torch 2.13; None: each has its own."""

    # StreamApi.

    def external_stream(self, handle: int) -> FakeStream:
        if handle not in self._streams:
            self._streams[handle] = FakeStream(handle)
        return self._streams[handle]

    def new_stream(self, priority: int = 0) -> FakeStream:
        self._fresh += 1
        stream = self._streams[self._fresh] = FakeStream(self._fresh, priority)
        return stream

    def new_aside(self) -> FakeStream:
        """Makes a stream that autograd does not know of, such as a communicator's."""
        self._fresh += 1
        self._asides.append(FakeStream(self._fresh, aside=True))
        return self._asides[-1]

    def current_stream(self) -> FakeStream:
        return getattr(self._current, "stream", self.main)

    @contextmanager
    def use_stream(self, stream: FakeStream) -> Iterator[None]:
        before = self.current_stream()
        self._current.stream = stream
        try:
            yield
        finally:
            self._current.stream = before

    def new_event(self, *, timing: bool = False) -> FakeEvent:
        return FakeEvent(self, timing)

    def record_use(self, tensor: torch.Tensor, stream: FakeStream) -> None:
        self.memory.declare(tensor, stream.handle)

    def synchronize(self) -> None:
        self.refuse_in_capture("synchronize")
        for hold in self._holds:
            hold.wait()
        for stream in (*self._streams.values(), *self._asides):
            merge(self.host, stream.clock)
        for stream in self._streams.values():  # whatever comes now is launched after all of it
            merge(stream.clock, self.host)

    def is_capturing(self) -> bool:
        return self.current_stream().capture is not None

    def new_graph(self) -> FakeGraph:
        return FakeGraph(self)

    def new_graph_pool(self) -> Pool:
        return Pool()

    @contextmanager
    def capture(self, graph: FakeGraph, *, stream: FakeStream, pool: Pool) -> Iterator[None]:
        self.synchronize()
        recording = Recording(stream, pool)
        before, self._current.stream = self.current_stream(), stream
        recording.begin()
        try:
            yield
        finally:  # as torch.cuda.graph.__exit__: if the first line raises, the stream stays the current one
            recording.end()
            self._current.stream = before
        graph.take(recording)

    def allocated_bytes(self) -> int:
        return 0

    def reserved_bytes(self) -> int:
        return len(self._with_workspace) * WORKSPACE_BYTES

    def free_bytes(self) -> int:
        return TOTAL_BYTES - self.reserved_bytes()

    def release_workspaces(self) -> None:
        self._with_workspace.clear()

    def empty_cache(self) -> None:
        self.refuse_in_capture("empty_cache")

    # For tests.

    def hold(self) -> Hold:
        """Gives the current stream work that does not end before it is opened."""
        self.launch("hold", [], [])
        hold = Hold(self.launches[-1])
        self._holds.append(hold)
        return hold

    def holds_before(self, clock: Clock | None) -> list[Hold]:
        """Returns the holds that lie before a point."""
        return [hold for hold in self._holds if (clock or {}).get(hold.launch.stream, 0) >= hold.launch.number]

    def refuse_in_capture(self, what: str) -> None:
        for stream in self._streams.values():
            if stream.capture is not None:
                stream.capture.refuse(what)

    def watching(self) -> TorchDispatchMode:
        """The mode under which operators are seen."""
        return _Watch(self)

    def on(self, stream: FakeStream | int) -> list[Launch]:
        """Launches of one stream, in order."""
        handle = stream if isinstance(stream, int) else stream.handle
        return [launch for launch in self.launches if launch.stream == handle]

    @staticmethod
    def in_backward() -> bool:
        """Whether autograd is running a node: what it calls once all have run, it calls on the loop's own stream."""
        return torch._C._current_graph_task_id() != -1 and torch._C._current_autograd_node() is not None

    def launch(self, name: str, reads: list[torch.Tensor], writes: list[torch.Tensor]) -> None:
        """Notes one operator on the current stream."""
        stream = self.current_stream()
        if self.in_backward():
            for other in self._streams.values():
                merge(stream.clock, other.clock)
        merge(stream.clock, self.host)
        number = stream.clock.get(stream.handle, 0) + 1
        stream.clock[stream.handle] = number
        if "mm" in name:  # cuBLAS takes a workspace at its first product on a stream
            made_in = self._with_workspace.setdefault(stream.handle, stream.capture)
            if made_in is not stream.capture:
                # "The memory would be in use in two places." (torch/_inductor/cudagraph_trees.py)
                raise RuntimeError("a workspace of cuBLAS is used inside of a capture, and outside of it or in another")
        launch = Launch(name, stream.handle, number, dict(stream.clock))
        self.launches.append(launch)
        # autograd would have launched it on its forward's stream
        if self.in_backward() and not stream.aside:
            for other in self._streams.values():
                merge(other.clock, stream.clock)
        for tensor in reads:
            self.memory.read(tensor, launch)
        for tensor in writes:
            self.memory.write(tensor, launch)
        self.memory.check_freed({handle: other.clock for handle, other in self._streams.items()})


class _Watch(TorchDispatchMode):
    def __init__(self, runtime: FakeStreams) -> None:
        super().__init__()
        self._runtime = runtime

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "c10d":  # what moves and when is for who stands in for NCCL to say
            return func(*args, **kwargs)
        recording = self._runtime.current_stream().capture
        written = _written(func, args, kwargs)
        if recording is not None:
            recording.before(func, kwargs, written)
        result = func(*args, **kwargs)
        given = _tensors((args, kwargs))
        made = _tensors(result)
        if not _is_view(func):
            storages = {tensor.untyped_storage()._cdata for tensor in given}
            fresh = [tensor for tensor in made if tensor.untyped_storage()._cdata not in storages]
            self._runtime.launch(str(func), [t for t in given if not any(t is w for w in written)], [*written, *fresh])
        if recording is not None:
            recording.note(func, args, kwargs, result)
        return result


def _written(func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            found += _tensors(args[index] if index < len(args) else kwargs.get(argument.name))
    if func is torch.ops.aten.native_batch_norm.default and args[5]:
        found += _tensors(args[3:5])  # the running statistics; its schema does not say so
    return found


def _is_view(func: Any) -> bool:
    returns = func._schema.returns
    return bool(returns) and returns[0].alias_info is not None and not returns[0].alias_info.is_write


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]
