"""Everything of Python's that a model reaches: its parts, their attributes, and what these hold."""

from __future__ import annotations

import functools
import sys
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from enum import Enum
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn

from mosaic.profiler.preserve.kinds import CLASS, GLOBALS, ITERATOR, ITERATORS, SLOTS, Kind, kind_of

_MAX_OBJECTS_DEEP = 3
"""How many objects and functions may lie between a part of the model and something that it changes."""

_ATOMS = frozenset(
    (
        *(type(None), bool, int, float, complex, str, bytes, slice, range, property),
        *(type, BuiltinFunctionType, ModuleType),
        *(torch.dtype, torch.device, torch.Size, torch.memory_format, torch.layout),
    )
)
_FUNCTIONS = (FunctionType, MethodType, functools.partial)
_LEFT_ALONE = sys.stdlib_module_names - {"types", "collections"} | {"torch", "numpy", "triton", "mosaic"}
_CONTAINERS = (dict, OrderedDict, list, set, deque)
_OF_PARTS = ("_modules", "_parameters", "_buffers")
_WALKED_IN_TORCH = "torch.optim"


Where = tuple[Any, str]
"""How something was reached: from where, and by which name."""

Change = tuple[Any, Kind, Any]
"""An object, and what it became."""


def path_of(where: Where | None) -> str:
    """Returns the names on the way to something."""
    names: list[str] = []
    while where is not None:
        where, name = where
        names.append(name)
    return ".".join(name for name in reversed(names) if name and name not in _OF_PARTS) or "the model"


class Seen:
    """What a run of a model was seen to change.

    Attributes:
        written: The storages that it wrote.
        left: Its attributes and containers that had changed in the end, with what they had become.
    """

    def __init__(self) -> None:
        self.written: frozenset[int] = frozenset()
        self.left: tuple[Change, ...] = ()

    def forget(self) -> None:
        """Lets go of what the run left, which may be large."""
        self.left = ()


class Reach:
    """What can be reached from a model and from what it is run on.

    Looks into containers, plain objects and classes of the model's parts, and into what functions that lie there,
    such as methods and hooks, enclose and which globals they name; not into objects of Python's own library or of torch
    other than modules and optimizers, or objects that own a thread.

    Args:
        model: The model. An iterator that it holds is looked at, though none can be put back.
        given: What it is run on: batches, or functions that run the model, with what these enclose.

    Attributes:
        tensors: All tensors, each once.
        buffers: Ids of those that are a part's buffers.
    """

    def __init__(self, model: nn.Module, *given: Any) -> None:
        self.tensors: list[tuple[torch.Tensor, Where]] = []
        self.buffers: set[int] = set()
        self._objects: list[tuple[Any, Kind, Any, Where]] = []
        self._functions: list[tuple[Any, Where, int]] = []
        self._queue: deque[tuple[Any, Where, int]] = deque()
        self._seen: set[int] = set()
        self._kind_of: Callable[[type], Any] = functools.cache(kind_of)
        self._is_plain: Callable[[type], bool] = functools.cache(_is_plain)
        self._add(model, (None, ""), 0)
        self._walk(iterators=ITERATORS)
        self._enter_functions()
        self._num_of_model = len(self._objects)
        for one in given:
            self._add(one, (None, "the sample"), 0)
        self._walk()
        self._enter_functions()

    def reaches(self, value: Any) -> bool:
        """Whether something was come upon."""
        return id(value) in self._seen

    def changed(self) -> Iterator[Change]:
        """Yields what is not as it was of the model's attributes and containers, and of what its functions enclose."""
        for found, kind, kept, _ in self._objects[: self._num_of_model]:
            if kind.inner is not None and not kind.is_same(found, kept):
                yield found, kind, kind.keep(found)

    def steps_back(self) -> Iterator[tuple[Where, Callable[[], Any]]]:
        """Yields for each object that changed where it was reached and what puts it back."""
        for found, kind, kept, where in self._objects:
            if not kind.is_same(found, kept):
                yield where, functools.partial(kind.put_back, found, kept)

    def _add(self, value: Any, where: Where, depth: int) -> None:
        if type(value) in _ATOMS or id(value) in self._seen:
            return
        self._seen.add(id(value))
        if isinstance(value, _FUNCTIONS):
            self._functions.append((value, where, depth))
        elif type(value) in _CONTAINERS and not value:  # as most dicts of a part are
            kind = self._kind_of(type(value))
            self._objects.append((value, kind, kind.keep(value), where))
        else:
            self._queue.append((value, where, depth))

    def _walk(self, iterators: tuple[type, ...] = ()) -> None:
        while self._queue:
            self._visit(*self._queue.popleft(), iterators)

    def _enter_functions(self) -> None:
        while self._functions:
            self._enter_function(*self._functions.pop())
            self._walk()

    def _visit(self, value: Any, where: Where, depth: int, iterators: tuple[type, ...]) -> None:
        found = type(value)
        if issubclass(found, torch.Tensor):
            self.tensors.append((value, where))
        kind = ITERATOR if issubclass(found, iterators) else self._kind_of(found)
        if kind is not None:
            self._keep(value, kind, where, depth)
        if issubclass(found, nn.Module):
            self._enter_part(value, where)
        elif self._is_plain(found) and depth < _MAX_OBJECTS_DEEP:
            self._enter_object(value, where, depth + 1)

    def _keep(self, value: Any, kind: Any, where: Where, depth: int) -> None:
        kept = kind.keep(value)
        self._objects.append((value, kind, kept, where))
        if type(kept) is dict:
            for name, item in kept.items():
                if type(item) in _ATOMS:  # as most attributes are
                    continue
                self._add(item, (where, name if type(name) is str else "[...]"), depth)
        elif kind.inner is not None:
            for item in kind.inner(kept):
                self._add(item, where, depth)

    def _enter_part(self, part: nn.Module, where: Where) -> None:
        self._add(vars(part), where, 0)
        for name, child in part.named_children():  # those of scripted parts are in no dict, nor are their tensors
            self._add(child, (where, name), 0)
        for name, parameter in part.named_parameters(recurse=False):
            self._add(parameter, (where, name), 0)
        for name, buffer in part.named_buffers(recurse=False):
            self.buffers.add(id(buffer))
            self._add(buffer, (where, name), 0)
        for base in type(part).__mro__:
            if not _is_left_alone(base.__module__) and id(base) not in self._seen:
                self._seen.add(id(base))
                self._keep(base, CLASS, (None, base.__qualname__), 0)

    def _enter_object(self, value: Any, where: Where, depth: int) -> None:
        attributes = getattr(value, "__dict__", None) if type(value).__dictoffset__ else None
        if type(attributes) is dict:
            if any(isinstance(held, threading.Thread) for held in attributes.values()):
                return  # others change it
            self._add(attributes, where, depth)
        self._keep(value, SLOTS, where, depth)

    def _enter_function(self, function: Any, where: Where, depth: int) -> None:
        if isinstance(function, functools.partial):
            held: tuple[Any, ...] = function.func, function.args, function.keywords
        elif isinstance(function, MethodType):
            held = function.__self__, function.__func__
        else:
            held = function.__closure__ or ()
            if depth < _MAX_OBJECTS_DEEP and not _is_left_alone(function.__module__ or "builtins"):
                self._keep(function, GLOBALS, (None, function.__module__), depth + 1)
        for value in held:
            self._add(value, where, depth)


def _is_left_alone(module: str) -> bool:
    return module.partition(".")[0] in _LEFT_ALONE


def _is_plain(found: type) -> bool:
    """Whether the attributes of a type's objects are state like a module's own."""
    return not issubclass(found, (type, Enum)) and (
        issubclass(found, torch.Tensor)
        or not _is_left_alone(found.__module__)
        or found.__module__.startswith(_WALKED_IN_TORCH)
    )
