"""Pieces on streams that share memory besides their arguments: they keep to the order in which they were called.

Nothing but arguments orders the lanes of a block. Two pieces with a module in common would write its running statistics
at once, and under autocast one would read the cast that the other is making of a weight; so might the code between
pieces. Inside of a block torch functions are seen: whoever touches what a lane was given waits for that lane.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode, _pop_mode_temporarily

from mosaic.engine.calls.pieces import owner_of
from mosaic.engine.calls.structure import memory_of, tensors_in, tensors_of
from mosaic.engine.calls.torch_functions import look_up
from mosaic.engine.streams.order import LaneOrder, Orders
from mosaic.engine.streams.tensor import StreamTensor, on_user_stream

_MAX_FUNCTIONS = 64


class SharedMemory:
    """What the pieces of a block use besides their arguments, and on which lanes.

    Of a module it is known before its call. Any other function is watched while it runs. Where a replay stands for it
    nothing can be watched: what was used when it was tried and captured counts.

    Args:
        orders: The lanes.
        settle: Makes the user's stream wait for all lanes.
    """

    def __init__(self, orders: Orders, *, settle: Callable[[], None]) -> None:
        self._orders = orders
        self._settle = settle
        self._users: dict[int, set[LaneOrder]] = {}
        self._replayed: dict[Hashable, tuple[Callable[..., Any], set[int]]] = {}  # keys have the functions' ids
        self._watches: list[_Watch] = []

    def begin(self) -> None:
        """Opens a block."""
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

    def watched(
        self, used: set[int], order: LaneOrder, function: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> Any:
        """Calls a function; adds what it uses to ``used``, and orders its lane behind others that were given it."""
        made: set[int] = {0, *(memory_of(tensor) for tensor in tensors_in((args, kwargs)))}

        def touched(tensors: list[torch.Tensor]) -> Callable[[Any], None]:
            inputs = {memory_of(tensor) for tensor in tensors}
            used.update(inputs - made)
            if not self._orders.api.is_capturing():
                self._touch(inputs - made, order)
            return lambda result: made.update({memory_of(tensor) for tensor in tensors_of(result)} - inputs)

        with _Watch(touched):
            return function(*args, **kwargs)

    @contextmanager
    def replaying(self, key: Hashable, function: Callable[..., Any], order: LaneOrder) -> Iterator[set[int]]:
        """Around a call of a function that may be a replay; the first of its kind runs with nothing beside it."""
        known = key in self._replayed
        if not known and len(self._replayed) >= _MAX_FUNCTIONS:
            self._replayed.clear()
        _, used = self._replayed.setdefault(key, (function, set()))
        if known:
            self._touch(used, order)
        with nullcontext() if known else self.alone():
            yield used

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Lets nothing run beside what runs inside."""
        self._settle()
        yield
        self._settle()

    def _touch(self, memory: set[int], order: LaneOrder) -> None:
        for one in memory - {0}:
            users = self._users.setdefault(one, set())
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
        tensors = [tensor for tensor in tensors_of((args, kwargs)) if type(tensor) is not StreamTensor]
        returned = self._touched(tensors)
        result = func(*args, **kwargs)
        if returned is not None:
            returned(result)
        return result


def is_compiled(function: Callable[..., Any]) -> bool:
    """Whether torch compiled a function, or some of the module that it is a method of: it shows no torch functions."""
    owner = owner_of(function)
    parts = owner.modules() if owner is not None and owner is not function else ()
    return hasattr(function, "_torchdynamo_orig_callable") or any(
        part._compiled_call_impl is not None or hasattr(part, "_orig_mod") for part in parts
    )
