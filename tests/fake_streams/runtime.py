"""The runtime itself: ``StreamApi`` on the CPU, with every operator seen through a dispatch mode."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from typing import Any
from unittest import mock

import torch
from torch.autograd import Variable
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from fake_streams.backward import Backward, Engine, Origins
from fake_streams.clocks import Clock, Launch, merge
from fake_streams.events import FakeEvent, FakeStream, Hold
from fake_streams.graphs import FakeGraph, Pool, Recording
from fake_streams.memory import Memory, RaceError

__all__ = ["FakeStream", "FakeStreams", "Hold", "Launch", "RaceError"]

WORKSPACE_BYTES = 32 << 20
TOTAL_BYTES = 80 << 30
POOLED_STREAMS = 32


class FakeStreams:
    """A runtime whose streams run operators on the CPU, right away, and whose clocks know what orders them.

    Use it inside ``with runtime.watching():``; a launch that is not ordered after what it reads raises ``RaceError``.
    A backward runs as on CUDA: each node on the stream of its forward, behind the nodes that it has gradients from.
    """

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.host: Clock = {}
        self.told: Clock = {}
        """Launches known to the host as ended, by waiting or by asking. An answer is luck, so it orders nothing."""
        self.launches: list[Launch] = []
        self.memory = Memory()
        self.main = FakeStream(0)
        self._streams: dict[int, FakeStream] = {0: self.main}
        self._pooled: dict[int, list[FakeStream]] = {}
        self._num_new: Counter[int] = Counter()
        self.lent: list[int] = []
        """Streams of the pool that were not given back."""
        self._of_thread = threading.local()
        self._fresh = 1 << 62
        self._holds: list[Hold] = []
        self._with_workspace: dict[int, Recording | None] = {}
        self.generator: torch.Tensor | None = None
        """The generator's state that all graphs share, as before torch 2.13; None: each has its own."""

    # StreamApi.

    def external_stream(self, handle: int) -> FakeStream:
        if handle not in self._streams:
            self._streams[handle] = FakeStream(handle)
        return self._streams[handle].again()

    def new_stream(self, priority: int = 0) -> FakeStream:
        """Returns the next of 32 streams of a priority.

        ``c10/cuda/CUDAStream.h``: "There are 32 of these streams per device, and when a stream is requested one of
        these streams is returned round-robin."
        """
        number, pooled = self._num_new[priority], self._pooled.setdefault(priority, [])
        self._num_new[priority] += 1
        if number < POOLED_STREAMS:
            pooled.append(self.new_aside(priority))
        self.lent.append(pooled[number % POOLED_STREAMS].handle)
        return pooled[number % POOLED_STREAMS].again()

    def give_back(self, stream: FakeStream) -> None:
        self.lent.remove(stream.handle)

    def new_aside(self, priority: int = 0) -> FakeStream:
        """Makes a stream of its own, such as a communicator's."""
        self._fresh += 1
        self._streams[self._fresh] = FakeStream(self._fresh, priority)
        return self._streams[self._fresh].again()

    def current_stream(self) -> FakeStream:
        last = self._stack[-1] if self._stack else self.main
        return (last.stream() if isinstance(last, Backward) else last).again()

    def use_stream(self, stream: FakeStream) -> AbstractContextManager[None]:
        return _Current(self, stream)

    def new_event(self, *, timing: bool = False) -> FakeEvent:
        return FakeEvent(self, timing)

    def order(self, stream: FakeStream, *, before: FakeStream) -> None:
        event = self.new_event()
        event.record(stream)
        event.wait(before)

    def record_use(self, tensor: torch.Tensor, stream: FakeStream) -> None:
        self.memory.declare(tensor, stream.handle)

    def synchronize(self) -> None:
        self.refuse_in_capture("synchronize")
        for hold in self._holds:
            hold.wait()
        for stream in self._streams.values():
            merge(self.host, stream.clock)
        merge(self.told, self.host)
        for stream in self._streams.values():  # whatever comes now is launched after all of it
            merge(stream.clock, self.host)

    def is_capturing(self) -> bool:
        return self.current_stream().capture is not None

    def new_graph(self) -> FakeGraph:
        return FakeGraph(self)

    def new_graph_pool(self) -> Pool:
        return Pool()

    @property
    def draws_apart(self) -> bool:
        return self.generator is None

    @contextmanager
    def capture(self, graph: FakeGraph, *, stream: FakeStream, pool: Pool) -> Iterator[None]:
        self.synchronize()
        recording = Recording(stream, pool)
        with self.use_stream(stream):
            recording.begin()
            try:
                yield
            finally:
                recording.end()
        graph.take(recording)

    def reserved_bytes(self) -> int:
        return len(self._with_workspace) * WORKSPACE_BYTES

    def free_bytes(self) -> int:
        return TOTAL_BYTES - self.reserved_bytes()

    def release_workspaces(self) -> None:
        self._with_workspace.clear()

    def empty_cache(self) -> None:
        self.refuse_in_capture("empty_cache")

    # For tests.

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        """Makes a tensor one of the host's page-locked memory, and returns it."""
        self.memory.pin(tensor)
        return tensor

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
        """Returns True while autograd runs a node; its final callbacks run on the loop's own stream."""
        return torch._C._current_graph_task_id() != -1 and torch._C._current_autograd_node() is not None

    def running(self, backward: Backward) -> AbstractContextManager[None]:
        """Around one run of autograd's engine: its nodes say which stream is current."""
        return _Current(self, backward)

    def recorded(self, stream: FakeStream) -> FakeEvent:
        """Returns an event that was recorded on a stream now."""
        event = self.new_event()
        event.record(stream)
        return event

    @property
    def origins(self) -> Origins:
        """The streams on which this thread made its nodes."""
        if not hasattr(self._of_thread, "origins"):
            self._of_thread.origins = Origins(self)
        return self._of_thread.origins  # type: ignore[no-any-return]

    def operate(
        self, name: str, reads: list[torch.Tensor], writes: list[torch.Tensor], makes: list[torch.Tensor]
    ) -> None:
        """Notes one operator of torch's, with what it is given, what it writes to, and what it takes memory for."""
        if (reads or writes) and all(self.memory.is_host(tensor) for tensor in (*reads, *writes)):
            self.memory.check_host(reads, writes, self.host)
            for tensor in makes:
                self.memory.pin(tensor)
            return
        gradients = self._stack[-1].next_sum() if self._stack and isinstance(self._stack[-1], Backward) else None
        if gradients is not None:
            gradients.begin()
            self.origins.note(gradients.stream, made_already=1)
            with self.use_stream(gradients.stream):
                self.operate(name, reads, writes, makes)
            gradients.end(self)
            return
        here = self.current_stream()
        self.memory.let_go({handle: stream.clock for handle, stream in self._streams.items()})
        self.memory.allocate(makes, here.handle, private=here.capture is not None)
        self.launch(name, reads, [*writes, *makes])

    def end_copy(self, tensors: list[torch.Tensor]) -> None:
        """Blocks the host until the current stream has copied, if its memory has part in that."""
        if any(self.memory.is_host(tensor) for tensor in tensors):
            self.recorded(self.current_stream()).synchronize()

    def launch(self, name: str, reads: list[torch.Tensor], writes: list[torch.Tensor]) -> None:
        """Notes one piece of work on the current stream."""
        stream = self.current_stream()
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
        for tensor in reads:
            self.memory.read(tensor, launch)
        for tensor in writes:
            self.memory.write(tensor, launch)

    @property
    def _stack(self) -> list[FakeStream | Backward]:
        if not hasattr(self._of_thread, "stack"):
            self._of_thread.stack = []
        return self._of_thread.stack  # type: ignore[no-any-return]


class _Current:
    """Makes a stream current, or the one that a backward is on, until it is left; forgotten, it stays current.

    As ``torch.cuda.stream`` it leaves the stream current that it found, whatever was forgotten inside.
    """

    def __init__(self, runtime: FakeStreams, entry: FakeStream | Backward) -> None:
        self._runtime = runtime
        self._entry = entry

    def __enter__(self) -> None:
        self._depth = len(self._runtime._stack)
        self._runtime._stack.append(self._entry)
        if isinstance(self._entry, FakeStream):
            self._runtime.origins.note(self._entry)

    def __exit__(self, *error: object) -> None:
        del self._runtime._stack[self._depth :]
        self._runtime.origins.note(self._runtime.current_stream())


def _modes_of_the_program() -> list[TorchDispatchMode]:
    return [mode for mode in _get_current_dispatch_mode_stack() if not isinstance(mode, _Watch)]


class _Watch(TorchDispatchMode):
    def __init__(self, runtime: FakeStreams) -> None:
        super().__init__()
        self._runtime = runtime
        self._hidden = mock.patch("mosaic.engine.graphs._get_current_dispatch_mode_stack", _modes_of_the_program)

    def __enter__(self) -> Any:
        engine = Variable._execution_engine
        if not (isinstance(engine, Engine) and engine.runtime is self._runtime):
            Variable._execution_engine = Engine(self._runtime, engine)
        self._hidden.start()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._hidden.stop()
        engine = Variable._execution_engine
        if isinstance(engine, Engine) and engine.runtime is self._runtime:
            Variable._execution_engine = engine.engine

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "c10d":  # what moves and when is for who stands in for NCCL to say
            return func(*args, **kwargs)
        recording = self._runtime.current_stream().capture
        written = _written(func, args, kwargs)
        if recording is not None:
            recording.before(func, kwargs, written)
        result = func(*args, **kwargs)
        if func.name().startswith("aten::_foreach"):  # torch counts these writes, but not under a mode
            torch.autograd.graph.increment_version(written)
        given = _tensors((args, kwargs))
        if torch.is_grad_enabled():
            for tensor in given:
                if tensor.requires_grad and tensor.is_leaf:
                    self._runtime.origins.note_leaf(tensor)
        made = _tensors(result)
        if not _is_view(func):
            storages = {tensor.untyped_storage()._cdata for tensor in given}
            fresh = [tensor for tensor in made if tensor.untyped_storage()._cdata not in storages]
            read = [tensor for tensor in given if not any(tensor is one for one in written)]
            if "empty" in func.__name__:  # it takes memory, and launches no kernel that reads
                read = []
            self._runtime.operate(str(func), read, written, fresh)
            if func is torch.ops.aten.copy_.default and not (kwargs.get("non_blocking") or any(args[2:])):
                self._runtime.end_copy(given)
        if recording is not None:
            recording.note(func, args, kwargs, result)
        return result


def _written(func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    written: list[torch.Tensor] = []
    for index, name in _written_arguments(func):
        written += _tensors(args[index] if index < len(args) else kwargs.get(name))
    if func is torch.ops.aten.native_batch_norm.default and args[5]:
        written += _tensors(args[3:5])  # the running statistics; its schema does not say so
    return written


@cache
def _written_arguments(func: Any) -> tuple[tuple[int, str], ...]:
    arguments = enumerate(func._schema.arguments)
    return tuple(
        (index, own.name) for index, own in arguments if own.alias_info is not None and own.alias_info.is_write
    )


@cache
def _is_view(func: Any) -> bool:
    returns = func._schema.returns
    return bool(returns) and returns[0].alias_info is not None and not returns[0].alias_info.is_write


def _tensors(value: Any) -> list[torch.Tensor]:
    """Returns the tensors in arguments of an operator, which are nested in lists, tuples and dicts alone."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, (list, tuple)):
        return []
    return [tensor for each in value for tensor in _tensors(each)]
