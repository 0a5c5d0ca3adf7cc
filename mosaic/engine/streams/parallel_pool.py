"""``mosaic.parallel`` on streams of a device: each name on its lane, and modules, where asked for, by CUDA graphs.

Nothing but arguments orders the lanes of a block. Two pieces with a module in common would write its running statistics
at once, and under autocast one would read the cast that the other is making of a weight; so might the code between
pieces. Inside of a block torch functions are seen: whoever touches what a lane was given waits for that lane.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode, _pop_mode_temporarily

from mosaic.backends.base import Backend
from mosaic.backends.streams.lanes import StreamLane
from mosaic.engine.calls.placed_module import PlacedModule, owner_of
from mosaic.engine.calls.structure import memory_of, tensors_in
from mosaic.engine.calls.torch_functions import look_up
from mosaic.engine.graphs import ModuleGraphs
from mosaic.engine.streams.executor import StreamExecutor
from mosaic.engine.streams.order import HeldState, LaneOrder, Orders
from mosaic.engine.streams.tensor import StreamTensor, on_user_stream
from mosaic.errors import InvalidPlanError


class StreamPool:
    """The lanes of a block's names on one device; lives as long as the process."""

    def __init__(self, backend: Backend, slots: Mapping[str, tuple[int, ...]], *, cuda_graphs: bool) -> None:
        lanes = backend.open_lanes(slots.values())
        if lanes.streams is None:
            raise TypeError(f"the backend {backend.name!r} has no lanes on streams")
        self.executor = StreamExecutor(lanes.streams)
        self.graphs = ModuleGraphs(lanes.streams.api) if cuda_graphs else None
        self._shared = _SharedMemory(self.executor.orders, settle=self.executor.settle)
        self._slots = slots
        self._sites: dict[tuple[str, int], PlacedModule] = {}

    def begin(self) -> None:
        self._shared.begin()

    def end(self, *, failed: bool) -> None:
        """Makes the caller's stream wait for the lanes."""
        self._shared.end()
        if failed:
            self.executor.lanes.join()
        else:
            self.executor.settle()

    def call(self, name: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs a piece of work on the lane of its name; a module by a CUDA graph, if graphs are on."""
        site, order = self._site(name, owner_of(function)), self.executor.orders.of(self._lane(name))
        if isinstance(function, nn.Module):
            self._shared.note_module(function, order)
            run = function if self.graphs is None else partial(self.graphs.call, site, function)
        else:
            run = partial(self._shared.watched, order, function)
            if self.graphs is not None:
                self.graphs.eager_calls[name, "it is a function and no module"] += 1
        with self._shared.unwatched(), self._shared.alone() if _is_compiled(function) else nullcontext():
            return self.executor.call(site, run, args, kwargs)

    def _site(self, name: str, module: nn.Module | None) -> PlacedModule:
        key = (name, id(module))
        site = self._sites.get(key)
        if site is None or site.module is not module:
            site = self._sites[key] = PlacedModule(name, module, self._lane(name))
            self.executor.held[site] = HeldState(None)  # operations of a block are seen
        return site

    def _lane(self, name: str) -> StreamLane:
        if name not in self._slots:
            raise InvalidPlanError(f"{name!r} is not in the plan of this block; it has {', '.join(self._slots)}")
        return self.executor.lanes.lane(self._slots[name])


class _SharedMemory:
    """The memory that pieces of a block use besides their arguments, by lane.

    Of a module it is known before its call. Any other function is watched while it runs.
    """

    def __init__(self, orders: Orders, *, settle: Callable[[], None]) -> None:
        self._orders = orders
        self._settle = settle
        self._users: dict[int, set[LaneOrder]] = {}
        self._watches: list[_Watch] = []

    def begin(self) -> None:
        watch = _Watch(self._touched_between)
        watch.__enter__()
        self._watches.append(watch)

    def end(self) -> None:
        """Ends a block; the caller awaits the lanes."""
        self._watches.pop().__exit__(None, None, None)
        self._users.clear()

    def unwatched(self) -> AbstractContextManager[Any]:
        """Leaves what runs inside alone, unless a mode of the user's is above."""
        return _pop_mode_temporarily() if isinstance(_get_current_function_mode(), _Watch) else nullcontext()

    def note_module(self, module: nn.Module, order: LaneOrder) -> None:
        """Orders a lane that is going to run a module behind others that were given some of it."""
        self._touch({memory_of(tensor) for tensor in (*module.parameters(), *module.buffers())}, order)

    def watched(self, order: LaneOrder, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Calls a function and orders its lane behind others that were given what it uses."""
        own: set[int] = {0, *(memory_of(tensor) for tensor in tensors_in((args, kwargs)))}

        def touched(tensors: list[torch.Tensor]) -> Callable[[Any], None]:
            inputs = {memory_of(tensor) for tensor in tensors}
            self._touch(inputs - own, order)
            return lambda result: own.update({memory_of(tensor) for tensor in tensors_in(result)} - inputs)

        with _Watch(touched):
            return function(*args, **kwargs)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Lets nothing run beside what runs inside."""
        self._settle()
        yield
        self._settle()

    def _touch(self, memory: set[int], order: LaneOrder) -> None:
        for address in memory - {0}:
            users = self._users.setdefault(address, set())
            if order not in users:
                for other in users:
                    self._orders.order(other.stream, before=order.stream)
                users.add(order)

    def _touched_between(self, tensors: list[torch.Tensor]) -> None:
        if self._users and on_user_stream() and any(memory_of(tensor) in self._users for tensor in tensors):
            self._settle()
            self._users.clear()


class _Watch(TorchFunctionMode):
    """Tells of the plain tensors that a torch function is given, and of its result to what that returned."""

    def __init__(self, touched: Callable[[list[torch.Tensor]], Callable[[Any], None] | None]) -> None:
        super().__init__()
        self._touched = touched

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.compiler.is_compiling() or look_up(func).reads:
            return func(*args, **kwargs)
        tensors = [tensor for tensor in tensors_in((args, kwargs)) if type(tensor) is not StreamTensor]
        returned = self._touched(tensors)
        result = func(*args, **kwargs)
        if returned is not None:
            returned(result)
        return result


def _is_compiled(function: Callable[..., Any]) -> bool:
    """Returns True if torch compiled a function, or some of its module: it shows no torch functions."""
    owner = owner_of(function)
    parts = owner.modules() if owner is not None and owner is not function else ()
    return hasattr(function, "_torchdynamo_orig_callable") or any(
        part._compiled_call_impl is not None or hasattr(part, "_orig_mod") for part in parts
    )
