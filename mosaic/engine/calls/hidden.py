"""State that a module reads besides its arguments, and writes besides its results.

A host lane runs a module's Python later than its call, so a module that exchanges more with the code around it runs
where it is called. The sample's run shows such a module, and so does the first call of each kind (``Surroundings``).
Every other call checks what is cheap: torch's settings of the process, attributes, and how often parameters and buffers
were written to (``ModuleState``). ``docs/limits.md`` has the contract.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextvars import Context
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from mosaic.engine.calls.obstacles import Obstacle
from mosaic.find.random_numbers import CPU, random_state
from mosaic.find.restore import Objects, same
from mosaic.find.structure import version_of, versions_of
from mosaic.find.torch_settings import read, settings_of

_OF_PROCESS = settings_of("process")
_NUM_OF_TORCH = len(vars(nn.Module()))
_MAX_BYTES = 1 << 16
"""A larger buffer is not copied before each call of the model."""
_LEFT_ALONE = sys.stdlib_module_names | {"torch", "numpy", "mosaic"}
_NO_DATA = (type, ModuleType, BuiltinFunctionType, nn.Module)
_CONTAINERS = (list, dict, set, deque, np.ndarray)
_LOCKS = (type(threading.Lock()), type(threading.RLock()), threading.Condition, threading.Semaphore)

Settings = tuple[Any, ...]
Reading = list[tuple[Any, ...]]
"""The attributes of each part of a module."""


# A module, and what each call reads of it.


class ModuleState(NamedTuple):
    """A module taken apart, as it is at one moment."""

    modules: list[nn.Module]
    """All its parts; itself first."""
    trained: list[nn.Parameter]
    """The distinct parameters that take a gradient."""
    parameters: list[torch.Tensor]
    buffers: list[torch.Tensor]
    attributes: Reading
    """Attributes, training modes and hooks of all parts; not what objects among the attributes hold."""
    settings: Settings
    """Torch's settings of the process."""
    versions: tuple[list[int | None], list[int | None]]
    """Version counter of each parameter and each buffer."""

    @staticmethod
    def take(module: nn.Module | None, settings: Settings | None = None) -> ModuleState:
        """Takes a module apart; there is nothing in a function. Settings that are not passed are read."""
        modules: list[nn.Module] = [] if module is None else [module]
        trained: dict[int, nn.Parameter] = {}
        parameters: list[torch.Tensor] = []
        buffers: list[torch.Tensor] = []
        attributes: Reading = []
        for part in modules:  # which grows meanwhile
            own = vars(part)  # a scripted module has its parameters, buffers and parts elsewhere
            for parameter in part._parameters.values():
                if parameter is not None:
                    parameters.append(parameter)
                    if parameter.requires_grad:
                        trained[id(parameter)] = parameter
            for buffer in part._buffers.values():
                if buffer is not None:
                    buffers.append(buffer)
            for child in part._modules.values():
                if child is not None:
                    modules.append(child)
            if part._forward_hooks or part._forward_pre_hooks:
                attributes.append((*part._forward_hooks.values(), *part._forward_pre_hooks.values()))
            attributes.append((*own.values(),))  # copied at once, since other threads may be changing them
        settings = read(_OF_PROCESS) if settings is None else settings
        versions = versions_of(parameters), versions_of(buffers)
        return ModuleState(modules, list(trained.values()), parameters, buffers, attributes, settings, versions)

    def written(self, now: ModuleState, *, writes_buffers: bool) -> str | None:
        """Says whose tensors were written to since, or None."""
        if self.versions[0] != now.versions[0]:
            return "a parameter"
        return None if writes_buffers or self.versions[1] == now.versions[1] else "a buffer"

    def changed(self, now: ModuleState) -> str | None:
        """Says what else is another now, or None."""
        setting = changed_setting(self.settings, now.settings)
        if setting is not None:
            return f"torch's setting of the process ({setting})"
        if same(self.attributes, now.attributes):
            return None
        pairs = zip(self.attributes, now.attributes, strict=False)
        return f"an attribute ({next((_differing(old, new) for old, new in pairs if not same(old, new)), 'a part')})"


def modes_of(module: nn.Module | None) -> tuple[bool, ...]:
    return () if module is None else tuple([part.training for part in module.modules()])


def read_settings() -> Settings:
    """Returns torch's settings of the process; a lane cannot have its own."""
    return read(_OF_PROCESS)


def changed_setting(before: Settings, after: Settings) -> str | None:
    if before == after:
        return None
    return next(setting.name for setting, old, new in zip(_OF_PROCESS, before, after, strict=True) if old != new)


def _differing(before: tuple[Any, ...], after: tuple[Any, ...]) -> str:
    pairs = zip(before, after, strict=False)
    return repr(next((old for old, new in pairs if not same(old, new)), "one more or less"))


# What a run shows.


class Surroundings:
    """The attributes of a module, what objects among them hold, and what its code names, as they are now."""

    def __init__(self, module: nn.Module) -> None:
        self._places = [(place, place.value) for place in places_of(module.modules()) if place.holds_data]
        self._objects = Objects(module)
        self.tensors = tuple(self._objects.tensors)  # parameters, buffers, and tensors that attributes hold, each once
        self._objects.note(*(value for _, value in self._places if isinstance(value, _CONTAINERS)))
        attributes = (t for t in self._objects.tensors if not isinstance(t, nn.Parameter))
        self._versions = [(t, version_of(t)) for t in attributes if id(t) not in self._objects.buffers]

    def changed(self) -> str | None:
        """Names something that is another by now, or returns None."""
        for place, value in self._places:
            if not same(place.value, value):
                return f"{place.name!r}, a global or a variable that its code names"
        if any(version_of(tensor) != version for tensor, version in self._versions):
            return "a tensor in an attribute"
        name = self._objects.difference()
        return None if name is None else f"{name}, among its attributes"


class Place(NamedTuple):
    """The home and name of a value that code names."""

    name: str
    home: Mapping[str, Any] | CellType
    """Globals, a class's attributes, or the cell of an enclosed variable."""

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
        """Returns True for data, which may change; False for code."""
        value = self.value
        return not isinstance(value, _NO_DATA) and not hasattr(type(value), "__get__")  # functions and descriptors


def places_of(parts: Iterable[nn.Module]) -> list[Place]:
    """Returns the places that the code of modules names, each once.

    Looked at are classes that are neither torch's nor Python's own, their methods, and functions among hooks and
    attributes; not the functions that these call.
    """
    places: dict[tuple[int, str], Place] = {}
    for place in _all_places(parts):
        places.setdefault((id(place.home), place.name), place)
    return list(places.values())


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


def _named_by(value: Any) -> Iterator[Place]:
    while isinstance(value, functools.partial):
        value = value.func
    function = getattr(value, "fget", None) or getattr(value, "__func__", value)
    if not isinstance(function, FunctionType) or _is_left_alone(function.__module__ or "builtins"):
        return
    todo: list[CodeType] = [function.__code__]
    for code in todo:  # which grows meanwhile
        for name in code.co_names:
            if name in function.__globals__:
                yield Place(name, function.__globals__)
        todo += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        yield Place(name, cell)


def _is_left_alone(module: str) -> bool:
    return module.partition(".")[0] in _LEFT_ALONE


def belongs_to_thread(module: nn.Module | None) -> Obstacle | None:
    """Returns an obstacle if an attribute of a module's parts, or what their code names, belongs to one thread."""
    parts = [] if module is None else list(module.modules())
    named = [(name, value) for part in parts for name, value in vars(part).items()]
    named += [(place.name, place.value) for place in places_of(parts)]
    for name, value in named:
        if isinstance(value, threading.local):
            return Obstacle(
                f"it reads {name}, a threading.local, whose values a lane's thread does not have",
                todo="use a contextvars.ContextVar, which goes with the call, or an argument",
            )
        if isinstance(value, _LOCKS):
            return Obstacle(
                f"it holds {name}, a lock, for which its lane and its caller would wait for each other",
                todo="take the lock around the model's call",
            )
    return None


def sets_context(before: Context, after: Context) -> Obstacle | None:
    """Returns an obstacle if a call has set a context variable: on a lane it would be set for nobody else."""
    for variable in after:
        if variable not in before or before[variable] is not after[variable]:
            return Obstacle(f"it sets the context variable {variable.name!r}", todo="set it around the module's call")
    return None


# Undoing.


class Rewind:
    """The state that a model's call may change, noted so that a call that came to nothing can be made again.

    Noted are random numbers, small buffers, attributes, and lists, dicts and sets among them.
    """

    def __init__(self, model: nn.Module) -> None:
        self._random = random_state(CPU)
        state = ModuleState.take(model, settings=())
        self._attributes = [(part, dict(vars(part)), dict(part._buffers)) for part in state.modules]
        self._containers = [
            (value, value.copy())
            for _, attributes, _ in self._attributes
            for value in list(attributes.values())[_NUM_OF_TORCH:]
            if type(value) in (list, dict, set)
        ]
        small = [b for b in state.buffers if b.layout is torch.strided and b.nbytes <= _MAX_BYTES]
        self._buffers = [(tensor, tensor.detach().clone()) for tensor in small]
        copied = {id(tensor) for tensor in small}
        self._untouched = [tensor for tensor in (*state.parameters, *state.buffers) if id(tensor) not in copied]
        self._versions = versions_of(self._untouched)
        self._gradients = [(parameter, parameter.grad) for parameter in state.trained]

    def undo(self) -> bool:
        """Puts everything back; changes nothing and returns False where parameters or large buffers were written to."""
        if versions_of(self._untouched) != self._versions:
            return False
        if any(parameter.grad is not grad for parameter, grad in self._gradients):
            return False  # a backward has run
        for part, attributes, buffers in self._attributes:
            vars(part).clear()
            vars(part).update(attributes)
            part._buffers.clear()
            part._buffers.update(buffers)
        for container, content in self._containers:
            container.clear()
            container.extend(content) if isinstance(container, list) else container.update(content)
        with torch.no_grad():
            for tensor, before in self._buffers:
                if not torch.equal(tensor, before):  # a write in vain would spoil what earlier graphs have saved
                    tensor.copy_(before)
        self._random.restore()
        return True
