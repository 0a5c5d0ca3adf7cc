"""Everything of Python's that a model reaches: its parts, their attributes, and what these hold."""

from __future__ import annotations

import functools
import sys
import threading
from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping
from enum import Enum
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn

from mosaic.profiler.preserve.kinds import CLASS, ITERATOR, SLOTS, Kind, is_iterator, kind_of, slots_of

_MAX_OBJECTS_DEEP = 3
"""How many objects that are no modules may lie between a part of the model and something that it changes."""

_ATOMS = frozenset(
    (
        *(type(None), bool, int, float, complex, str, bytes, slice, range, property),
        *(type, BuiltinFunctionType, ModuleType),
        *(torch.dtype, torch.device, torch.Size, torch.memory_format, torch.layout),
    )
)
_FUNCTIONS = (FunctionType, MethodType, functools.partial)
_CONTAINERS = frozenset((dict, OrderedDict, list, set, deque))
_LEFT_ALONE = sys.stdlib_module_names - {"types", "collections", "builtins"}
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


class Reach:
    """What can be reached from a model and from what it is run on.

    Looks into containers, plain objects and classes of the model's parts, and into what functions that lie there
    enclose, such as hooks; not into objects of Python's own library or of torch other than modules and optimizers,
    globals, or objects that own a thread.

    Args:
        model: The model. An iterator that it holds is looked at, though none can be put back.
        given: What it is run on: batches, or functions that run the model, with what these enclose.

    Attributes:
        objects: Those that may change in place, with what they are now.
        tensors: All tensors, each once.
        buffers: Ids of those that are a part's buffers.
    """

    def __init__(self, model: nn.Module, *given: Any) -> None:
        self.objects: list[tuple[Any, Kind, Any, Where]] = []
        self.tensors: list[tuple[torch.Tensor, Where]] = []
        self.buffers: set[int] = set()
        self._empty: list[Any] = []
        self._functions: list[tuple[Any, Where, int]] = []
        self._queue: list[tuple[Any, Where, int]] = []
        self._seen: set[int] = set()
        self._kinds: dict[type, Kind | None] = {}
        self._plain: dict[type, bool] = {}
        self._slotted: dict[type, bool] = {}
        self._add(model, (None, ""), 0)
        self._walk(keeps_iterators=True)
        self._num_of_model = len(self._empty), len(self.objects)
        for one in given:
            self._add(one, (None, "the sample"), 0)
        while self._functions or self._queue:
            functions, self._functions = self._functions, []
            for function, where, depth in functions:
                for value in _enclosed(function):
                    self._add(value, where, depth)
            self._walk(keeps_iterators=False)

    def reaches(self, value: Any) -> bool:
        """Whether something was come upon."""
        return id(value) in self._seen

    def changed(self) -> Iterator[Change]:
        """Yields the attributes and containers of the model that are not as they were."""
        num_empty, num_others = self._num_of_model
        for found in self._empty[:num_empty]:
            kind = self._kind_of(type(found))
            if found and kind is not None:
                yield found, kind, kind.keep(found)
        for found, kind, kept, _ in self.objects[:num_others]:
            if kind.inner is not None and not kind.is_same(found, kept):
                yield found, kind, kind.keep(found)

    def put_back(self) -> Iterator[str]:
        """Puts every object back, and says what each that could not be was."""
        for found in self._empty:
            if found:
                found.clear()
        for found, kind, kept, where in self.objects:
            try:
                if not kind.is_same(found, kept):
                    kind.put_back(found, kept)
            except Exception as error:  # the rest must be put back all the same
                yield f"{path_of(where)}: {error}"

    def _add(self, value: Any, where: Where, depth: int) -> None:
        found = type(value)
        if found in _ATOMS or id(value) in self._seen:
            return
        self._seen.add(id(value))
        if found in _CONTAINERS and not value:
            self._empty.append(value)  # as most dicts of a module are
        elif found in _FUNCTIONS:
            self._functions.append((value, where, depth))
        else:
            self._queue.append((value, where, depth))

    def _walk(self, *, keeps_iterators: bool) -> None:
        queue = self._queue
        while queue:
            nearest, self._queue = queue, []
            for value, where, depth in nearest:
                self._visit(value, where, depth, keeps_iterators)
            queue = self._queue

    def _visit(self, value: Any, where: Where, depth: int, keeps_iterators: bool) -> None:
        kind_of_value = type(value)
        kind = self._kind_of(kind_of_value)
        if issubclass(kind_of_value, torch.Tensor):
            self.tensors.append((value, where))
        elif kind is None and keeps_iterators and is_iterator(kind_of_value):
            kind = ITERATOR
        if kind is not None:
            kept = kind.keep(value)
            self.objects.append((value, kind, kept, where))
            self._enter(kept, kind, where, depth)
        if issubclass(kind_of_value, nn.Module):
            self._enter_part(value, where)
        elif self._is_plain(kind_of_value) and depth < _MAX_OBJECTS_DEEP:
            self._enter_object(value, where, depth + 1)

    def _enter(self, kept: Any, kind: Kind, where: Where, depth: int) -> None:
        if isinstance(kept, Mapping):
            for name, value in kept.items():
                if type(value) not in _ATOMS:
                    self._add(value, (where, name if type(name) is str else "[...]"), depth)
        elif kind.inner is not None:
            for value in kind.inner(kept):
                if type(value) not in _ATOMS:
                    self._add(value, where, depth)

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
            if base.__module__.partition(".")[0] not in ("torch", "builtins") and id(base) not in self._seen:
                self._seen.add(id(base))
                place = (None, base.__qualname__)
                kept = CLASS.keep(base)
                self.objects.append((base, CLASS, kept, place))
                for name, value in kept.items():
                    if type(value) not in _FUNCTIONS:
                        self._add(value, (place, name), 0)

    def _enter_object(self, value: Any, where: Where, depth: int) -> None:
        attributes = getattr(value, "__dict__", None) if type(value).__dictoffset__ else None
        if type(attributes) is dict:
            if any(isinstance(held, threading.Thread) for held in attributes.values()):
                return  # others change it
            self._add(attributes, where, depth)
        if self._has_slots(type(value)):
            kept = SLOTS.keep(value)
            self.objects.append((value, SLOTS, kept, where))
            self._enter(kept, SLOTS, where, depth)

    def _kind_of(self, found: type) -> Kind | None:
        if found not in self._kinds:
            self._kinds[found] = kind_of(found)
        return self._kinds[found]

    def _has_slots(self, found: type) -> bool:
        if found not in self._slotted:
            self._slotted[found] = any(True for _ in slots_of(found))
        return self._slotted[found]

    def _is_plain(self, found: type) -> bool:
        """Whether the attributes of a type's objects are state like a module's own."""
        if found not in self._plain:
            package = found.__module__.partition(".")[0]
            self._plain[found] = not issubclass(found, (type, Enum)) and (
                issubclass(found, torch.Tensor)
                or (package not in _LEFT_ALONE and package not in ("torch", "builtins", "numpy", "mosaic"))
                or found.__module__.startswith(_WALKED_IN_TORCH)
            )
        return self._plain[found]


def _enclosed(function: Any) -> tuple[Any, ...]:
    """Returns what a function brings with it."""
    if isinstance(function, functools.partial):
        return function.func, function.args, function.keywords
    if isinstance(function, MethodType):
        return function.__self__, function.__func__
    return tuple(cell for cell in function.__closure__ or () if _is_filled(cell))


def _is_filled(cell: Any) -> bool:
    try:
        _ = cell.cell_contents
    except ValueError:
        return False
    return True
