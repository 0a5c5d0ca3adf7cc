"""State that a module reads besides its arguments, and writes besides its results.

A host lane runs a module's Python later than its call. A module that exchanges more with the code around it, as the
sample's run and the first call of each kind show (``Surroundings``), runs where it is called. Other calls compare
settings of the process, attributes, and version counters (``ModuleState``). ``docs/limits.md`` has the contract.
"""

from __future__ import annotations

import functools
import itertools
import sys
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextvars import Context
from operator import attrgetter, is_
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import nn

from mosaic.engine.calls.obstacles import Obstacle
from mosaic.find.random_numbers import CPU, Generator, RandomState, python_state, random_state, torch_state
from mosaic.find.restore import Objects, same
from mosaic.find.structure import PLAIN_TYPES, tensors_in, version_of, versions_of
from mosaic.find.torch_settings import read, settings_of

_OF_PROCESS = settings_of("process")
_NUM_OF_TORCH = len(vars(nn.Module()))
_HOOKS, _LATE_HOOKS = attrgetter("_backward_hooks"), attrgetter("_post_accumulate_grad_hooks")
HOOKED = "hooks follow its gradients, which lanes would call in another order"
_MAX_BYTES = 1 << 16  # a larger buffer is not copied before each call of the model
_LEFT_ALONE = sys.stdlib_module_names | {"torch", "numpy", "mosaic"}
_SETTINGS, _MAX_SETTINGS = (*PLAIN_TYPES, tuple, list, set, dict), 1000
_NO_DATA = (type, ModuleType, BuiltinFunctionType, nn.Module)
_OF_ALL = {"setstate", "set_state", "set_rng_state", "fork_rng", "seed", "set_printoptions", "redirect_stdout"}
_OF_THREADS = Obstacle(
    "it holds a lock, which its caller may wait with, or a threading.local, whose values a lane's thread does not have",
    remedy="take the lock around the model's call; use a contextvars.ContextVar or an argument",
)
_ITERATOR = Obstacle("it holds an iterator, which others may advance, too", remedy="pass its items as arguments")
_THREADED = (threading.local, type(threading.Lock()), type(threading.RLock()), threading.Condition, threading.Semaphore)


def parts_of(module: nn.Module | None) -> list[nn.Module]:
    """Returns a module and all its parts, each once, without reaching into them."""
    parts = [] if module is None else [module]
    seen = set(map(id, parts))
    for part in parts:  # which grows meanwhile
        children = {id(each): each for each in part._modules.values() if each is not None}
        parts += [child for key, child in children.items() if key not in seen]
        seen |= children.keys()
    return parts


def has_hooks(leaves: Sequence[torch.Tensor]) -> bool:
    """Returns whether hooks follow the gradients of leaves; Mosaic's count, too."""
    return any(map(_HOOKS, leaves)) or any(map(_LATE_HOOKS, leaves))


class HeldTensors:
    """Parameters, buffers and children of some parts when this was made; compared as objects, without operators."""

    def __init__(self, parts: Sequence[nn.Module]) -> None:
        named = {id(each): each for part in parts for each in part._parameters.values() if each is not None}
        self.parameters = list(named.values())
        self.buffers = [each for part in parts for each in part._buffers.values() if each is not None]
        self.tensors = [*self.parameters, *self.buffers]
        self._held = _with_contents(t for p in parts for t in (p._parameters, p._buffers, p._modules))
        self._values = [*itertools.chain.from_iterable(map(dict.values, self._held[1]))]
        self._backward_hooks = [hooks for part in parts for hooks in (part._backward_hooks, part._backward_pre_hooks)]

    def has_gradient_hooks(self) -> bool:
        """Returns True if hooks other than Mosaic's follow gradients of the parts or of their parameters."""
        tables = filter(None, (*map(_HOOKS, self.parameters), *map(_LATE_HOOKS, self.parameters)))
        hooks = [hook for table in tables for hook in table.values()]
        is_own = [getattr(hook, "__module__", "").startswith("mosaic.") for hook in hooks]
        return any(self._backward_hooks) or not all(is_own)

    def are_same(self) -> bool:
        values = [*itertools.chain.from_iterable(map(dict.values, self._held[0]))]
        return len(values) == len(self._values) and all(map(is_, values, self._values))


class Parts(HeldTensors):
    """The parts of a module with their attributes, hooks and tensors, as they were when this was made.

    Of objects among the attributes only settings, which hold plain values, are compared. The module is not kept alive.
    """

    def __init__(self, module: nn.Module | None, number: int = 0) -> None:
        parts = parts_of(module)
        super().__init__(parts)
        self.number = number
        self.draws_in_python = True  # a call draws Python's or numpy's numbers, or may
        values = [value for part in parts for value in list(vars(part).values())[_NUM_OF_TORCH:]]
        self.containers = [value for value in values if type(value) in (list, dict, set, deque)]  # among attributes
        self.generators = [value for value in values if isinstance(value, Generator)]
        self._attributes = _with_contents([*map(vars, parts), *_settings_in(values)])
        forward = [hooks for part in parts for hooks in (part._forward_hooks, part._forward_pre_hooks)]
        self._hooks = [*self._backward_hooks, *forward]
        self._hook_numbers = list(map(tuple, filter(None, self._hooks)))  # hooks may keep a whole run alive

    def is_now(self) -> bool:
        numbers = list(map(tuple, filter(None, self._hooks)))
        return same(*self._attributes) and numbers == self._hook_numbers and self.are_same()

    def difference(self) -> str | None:
        if self.is_now():
            return None
        for table, content in self._tables():
            for name in {**content, **table}:
                before, now = content.get(name), table.get(name)
                if before is not now and (isinstance(now, torch.Tensor) or not same(before, now)):
                    return repr(name)
        return "a hook"

    def restore(self) -> None:
        """Replaces, adds and removes what has changed since, except for hooks."""
        for table, content in self._tables():
            if [*table] != [*content] or not all(map(is_, table.values(), content.values())):
                table.clear()
                table.update(content)

    def _tables(self) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
        for tables, contents in (self._attributes, self._held):
            yield from zip(tables, contents, strict=True)


def _settings_in(values: Iterable[Any]) -> list[dict[str, Any]]:
    """Returns the contents of dicts and objects among values that hold plain values alone, such as configurations."""
    tables = {id(table): table for value in values if type(table := getattr(value, "__dict__", value)) is dict}
    small = [table for table in tables.values() if len(table) < _MAX_SETTINGS]  # no vocabularies
    return [table for table in small if all(isinstance(each, _SETTINGS) for each in table.values())]


def _with_contents(tables: Iterable[Any]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    plain = [table for table in tables if isinstance(table, dict)]  # those of a scripted module are none
    return plain, list(map(dict, plain))


class ModuleState(NamedTuple):
    parts: Parts
    trained: list[nn.Parameter]
    settings: tuple[Any, ...]
    versions: list[int | None]
    """Version counters of parameters and of buffers."""

    def written(self, *, writes_buffers: bool) -> str | None:
        versions, count = versions_of(self.parts.tensors), len(self.parts.parameters)
        if versions == self.versions or (writes_buffers and versions[:count] == self.versions[:count]):
            return None
        return "a buffer" if versions[:count] == self.versions[:count] else "a parameter"

    def changed(self) -> str | None:
        """Names a setting or an attribute that differs now, or returns None."""
        setting = changed_setting(self.settings, read_settings())
        if setting is not None:
            return f"torch's setting of the process ({setting})"
        difference = self.parts.difference()
        return None if difference is None else f"an attribute ({difference})"


def modes_of(module: nn.Module | None) -> tuple[bool, ...]:
    return () if module is None else tuple([part.training for part in module.modules()])


read_settings = functools.partial(read, _OF_PROCESS)


def changed_setting(before: tuple[Any, ...], after: tuple[Any, ...]) -> str | None:
    if before == after:
        return None
    return next(setting.name for setting, old, new in zip(_OF_PROCESS, before, after, strict=True) if old != new)


class Surroundings:
    """The attributes of a module, the contents of objects among them, and what its code names, as they are now."""

    def __init__(self, module: nn.Module) -> None:
        self._places = [(place, place.value) for place in places_of(module.modules()) if place.holds_data]
        self._objects = Objects(module)
        self._named = Objects(*(value for _, value in self._places if not isinstance(value, torch.Tensor)))
        self.tensors = tuple(self._objects.tensors)  # parameters, buffers, and tensors that attributes hold, each once
        own = set(map(id, (*module.parameters(), *module.buffers())))
        self._versions = [(t, version_of(t)) for t in (*self.tensors, *self._named.tensors) if id(t) not in own]

    def changed(self) -> str | None:
        if (outside := self.changed_outside()) is not None:
            return outside
        if any(version_of(tensor) != version for tensor, version in self._versions):
            return "a tensor in an attribute"
        name = self._objects.difference()
        return None if name is None else f"{name}, among its attributes"

    def changed_outside(self) -> str | None:
        names = (repr(place.name) for place, value in self._places if not same(place.value, value))
        name = next(names, None) or self._named.difference()
        return None if name is None else f"{name}, among globals and variables that its code names"

    def keeps_graph(self) -> bool:
        """Returns whether tensors with a graph have come into attributes or containers."""
        contents = (*self._objects.contents, *self._named.contents)
        tables = [table.values() if isinstance(table, dict) else table for table, _ in contents]
        tensors = [each for each in tensors_in([v for table in tables for v in table]) if each.grad_fn is not None]
        return any(not self._objects.has(tensor) and not self._named.has(tensor) for tensor in tensors)


class Place(NamedTuple):
    """The home and name of a value that code names."""

    name: str
    home: Mapping[str, Any] | CellType  # globals, a class's attributes, or the cell of an enclosed variable

    @property
    def value(self) -> Any:
        if not isinstance(self.home, CellType):
            return self.home.get(self.name)
        try:
            return self.home.cell_contents
        except ValueError:  # nothing is in it yet
            return None

    @property
    def holds_data(self) -> bool:
        value = self.value
        return not isinstance(value, _NO_DATA) and not hasattr(type(value), "__get__")  # functions and descriptors


def places_of(parts: Iterable[nn.Module]) -> list[Place]:
    """Returns the places that the code of modules names, each once.

    The code is that of classes that are neither torch's nor Python's own, their methods, and functions among hooks and
    attributes, with the functions that these name, but not those that such functions name.
    """
    return list({(id(place.home), place.name): place for place in _all_places(parts)}.values())


def compiled_code(parts: Sequence[nn.Module]) -> str | None:
    named = [((p.name, p.value) for p in places_of(parts)), *(vars(part).items() for part in parts)]
    return next((name for name, value in itertools.chain(*named) if hasattr(value, "_torchdynamo_orig_callable")), None)


def _all_places(parts: Iterable[nn.Module]) -> Iterator[Place]:
    seen: set[type] = set()
    for part in parts:
        for kind in type(part).__mro__:
            if kind not in seen and not _is_left_alone(kind.__module__) and "_mosaic_plain" not in vars(kind):
                seen.add(kind)
                for name, value in vars(kind).items():
                    if not name.startswith("__"):
                        yield Place(name, vars(kind))
                    yield from _named_by(value)
        for value in (*part._forward_hooks.values(), *part._forward_pre_hooks.values(), *vars(part).values()):
            yield from _named_by(value)


def _named_by(value: Any, home: Mapping[str, Any] | CellType | None = None) -> Iterator[Place]:
    """Yields the places that a function names; it is in ``home`` if a function that is followed names it."""
    while isinstance(value, functools.partial):
        value = value.func
    function = getattr(value, "fget", None) or getattr(value, "__func__", value)
    if not isinstance(function, FunctionType) or _is_left_alone(function.__module__ or "builtins"):
        return
    names = _names_in(function)
    places = list(itertools.starmap(Place, zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)))
    for each in (function.__globals__, home):
        places += [Place(name, each) for name in names if isinstance(each, Mapping) and name in each]
    seen: set[int] = set()
    for place in places:  # which grows meanwhile, by what is named of a class or of a file
        held = place.value
        if isinstance(held, (type, ModuleType)) and id(held) not in seen:
            seen.add(id(held))
            if not _is_left_alone(held.__module__ if isinstance(held, type) else held.__name__):
                places += [Place(name, vars(held)) for name in names if name in vars(held)]
        yield place
        if home is None:
            yield from _named_by(held, place.home)


def _names_in(function: FunctionType) -> dict[str, None]:
    codes: list[CodeType] = [function.__code__]
    for code in codes:  # which grows meanwhile
        codes += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return dict.fromkeys(name for code in codes for name in code.co_names)


def _is_left_alone(module: str) -> bool:
    return module.partition(".")[0] in _LEFT_ALONE


def holds_back(module: nn.Module | None) -> Obstacle | None:
    """Returns an obstacle if a module reaches what a thread owns or waits for, or what changes the whole process."""
    places = places_of([] if module is None else module.modules())
    others = Objects(module, *(place.value for place in places if place.holds_data)).others
    for value in others:
        if isinstance(value, _THREADED):
            return _OF_THREADS
        if hasattr(type(value), "__next__") and type(value).__module__ in ("builtins", "itertools"):
            return _ITERATOR
    for value in (*others, *(place.value for place in places)):
        names = _OF_ALL.intersection(_names_in(value)) if isinstance(value, FunctionType) else ()
        if names:
            return Obstacle(f"its code names {min(names)}(), which changes the whole process for a while")
    return None


def sets_context(before: Context, after: Context) -> Obstacle | None:
    """Returns an obstacle if a call has set a context variable, which on a lane would stay in the lane's context."""
    for variable in after:
        if variable not in before or before[variable] is not after[variable]:
            return Obstacle(f"it sets the context variable {variable.name!r}", remedy="set it around the module's call")
    return None


class Rewind:
    """The random numbers, small buffers and attributes before a model's call, to make a failed call again."""

    def __init__(self, parts: Parts, arguments: Sequence[Any]) -> None:
        self._parts, self._arguments = parts, Objects(arguments, parts.generators)
        self._has_iterator = any(hasattr(argument, "__next__") for argument in arguments)
        self._random = random_state(CPU) if parts.draws_in_python else torch_state(CPU)  # Python's take long to copy
        self._containers = [(value, value.copy()) for value in parts.containers]
        small = [b for b in parts.buffers if b.layout is torch.strided and b.nbytes <= _MAX_BYTES]
        self._buffers = [(tensor, tensor.detach().clone()) for tensor in small]
        self._untouched = [*self._arguments.tensors, *parts.parameters, *({*parts.buffers} - {*small})]
        self._versions = versions_of(self._untouched)
        self._gradients = [(each, each.grad) for each in parts.parameters if each.requires_grad and each.is_leaf]

    def undo(self) -> bool:
        """Restores everything; only returns False where arguments, parameters or large buffers were written to."""
        has_gone_backward = any(parameter.grad is not grad for parameter, grad in self._gradients)
        if has_gone_backward or self._has_iterator or versions_of(self._untouched) != self._versions:
            return False
        self._parts.restore()
        self._arguments.restore()
        for container, content in self._containers:
            container.clear()
            container.extend(content) if isinstance(container, (list, deque)) else container.update(content)
        with torch.no_grad():
            for tensor, before in self._buffers:
                if not torch.equal(tensor, before):  # a write in vain would spoil what earlier graphs have saved
                    tensor.copy_(before)
        self._random.restore()
        return True

    def draws_in_python(self) -> bool:
        noted = RandomState((), self._random.python, self._random.numpy)
        return noted.python is not None and not noted.is_same(python_state())
