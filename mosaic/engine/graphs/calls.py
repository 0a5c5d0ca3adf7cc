"""A branch of a stage: one call of it, taken apart, and its module; what must be equal for a replay to be right."""

from __future__ import annotations

import enum
import functools
import random
from collections.abc import Callable, Hashable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from types import FunctionType, MethodType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.utils import _pytree as pytree

from mosaic.backends.streams.lanes import StreamLane
from mosaic.engine.calls.structure import PLAIN_TYPES, flatten, is_opaque, leaf_key, tensors_in, unflatten

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_GLOBAL_HOOKS = tuple(f"_global{name}" for name in _HOOKS)


class RefusalError(Exception):
    """A branch cannot be captured.

    Attributes:
        reason: Why, as the end of a sentence that starts with the branch's name.
        lasting: Whether a later call of the same kind would fare no better.
    """

    def __init__(self, reason: str, *, lasting: bool = True) -> None:
        super().__init__(reason)
        self.reason = reason
        self.lasting = lasting


@dataclass(frozen=True, slots=True, kw_only=True)
class Branch:
    """One call that a stage makes."""

    name: str
    run: Callable[..., Any]
    """Makes the call; launches everything on the current stream."""
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    lane: StreamLane
    """Where it runs."""
    module: nn.Module | None
    """Whose call it is. Without it, ``run`` may use its arguments only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Eager:
    """Stands for the result of a branch that the caller has to launch itself."""

    reason: str


@dataclass(frozen=True, slots=True)
class TakenCall:
    """A branch's arguments, taken apart."""

    branch: Branch
    leaves: tuple[Any, ...]
    """For each leaf of the arguments the index of its tensor, or ``(value,)`` for anything else."""
    spec: pytree.TreeSpec
    tensors: tuple[torch.Tensor, ...]
    """Distinct tensors, in order of appearance."""
    key: Hashable
    """Equal for calls of one kind: name, lane, function, nesting, and shapes and types or values of all arguments."""

    @staticmethod
    def take(branch: Branch, device: torch.device) -> TakenCall:
        """Takes a branch apart.

        Raises:
            RefusalError: An argument cannot be handed to a graph.
        """
        leaves, spec = flatten((branch.args, branch.kwargs))
        numbers: dict[int, int] = {}
        tensors: list[torch.Tensor] = []
        kept: list[Any] = []
        keys: list[Hashable] = []
        for leaf in leaves:
            if isinstance(leaf, torch.Tensor):
                _check_tensor(leaf, device)
                number = numbers.setdefault(id(leaf), len(tensors))
                if number == len(tensors):
                    tensors.append(leaf)
                kept.append(number)
                grad = leaf.requires_grad and torch.is_grad_enabled()
                keys.append((number, leaf.shape, leaf.stride(), leaf.dtype, grad))
            elif isinstance(leaf, enum.Enum) or not is_opaque(leaf):
                kept.append((leaf,))
                keys.append((type(leaf), leaf.name) if isinstance(leaf, enum.Enum) else leaf_key(leaf))
            else:
                raise RefusalError(f"it takes a {type(leaf).__name__}, which may hide tensors")
        key = (branch.name, id(branch.lane), id(branch.module), _key(branch.run), spec, tuple(keys))
        return TakenCall(branch, tuple(kept), spec, tuple(tensors), key)

    def static_inputs(self) -> list[torch.Tensor]:
        """Makes leaves like the tensors, with their values, on the current stream."""
        grad = torch.is_grad_enabled()
        made = []
        for tensor in self.tensors:
            static = torch.empty_like(tensor, requires_grad=False)
            static.copy_(tensor.detach())  # without a gradient, whatever the caller's mode
            made.append(static.requires_grad_(tensor.requires_grad and grad))
        return made

    def without_tensors(self) -> TakenCall:
        """Returns the call without what it holds of the user's memory and autograd graph."""
        return replace(self, tensors=(), branch=replace(self.branch, args=(), kwargs={}))

    def run_on(self, tensors: list[torch.Tensor]) -> Any:
        """Makes the call with other tensors in place of its own."""
        args, kwargs = unflatten(
            [leaf[0] if isinstance(leaf, tuple) else tensors[leaf] for leaf in self.leaves], self.spec
        )
        return self.branch.run(*args, **kwargs)


def _check_tensor(tensor: torch.Tensor, device: torch.device) -> None:
    if type(tensor) not in (torch.Tensor, nn.Parameter, nn.Buffer):
        raise RefusalError(f"it takes a {type(tensor).__name__}, not a plain tensor")
    if tensor.device != device:
        raise RefusalError(f"it takes a tensor on {tensor.device}, not on {device}")
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_conj() or tensor.is_neg():
        raise RefusalError("it takes a sparse, nested or lazily conjugated tensor")


def _key(value: Any, depth: int = 4) -> Hashable:
    """Returns what tells functions apart, and stays the same for one that is made anew at each step.

    What is told apart by its id stays alive with the capture, since that keeps the function.
    """
    if isinstance(value, tuple):
        return tuple(_key(item, depth) for item in value)
    if isinstance(value, PLAIN_TYPES):
        return leaf_key(value)
    if isinstance(value, functools.partial):
        return (_key(value.func, depth), _key((value.args, *sorted(value.keywords.items())), depth))
    if isinstance(value, MethodType):
        return (id(value.__self__), _key(value.__func__, depth))
    if not isinstance(value, FunctionType) or depth == 0:
        return id(value)
    try:
        closed = tuple(cell.cell_contents for cell in value.__closure__ or ())
    except ValueError:  # a cell that is empty as yet
        return id(value)
    defaults = (value.__defaults__ or (), *sorted((value.__kwdefaults__ or {}).items()))
    return (value.__code__, _key((closed, defaults), depth - 1))


class Change(NamedTuple):
    """How a module differs from the one that was captured."""

    text: str
    lasting: bool
    """Whether what was captured can never be right again, since memory that it uses was replaced."""


class ModuleState:
    """A module as it is captured; a graph may be replayed while ``change()`` finds nothing.

    A graph bakes in addresses of parameters and buffers, and everything that Python decides. Of the latter, what
    stands in plain attributes of the module's parts is compared (training modes, dropout rates, flags).

    Attributes:
        parameters: Distinct parameters, by id.
        tensors: Buffers and tensors in plain attributes, by id.
    """

    def __init__(self, module: nn.Module | None, device: torch.device) -> None:
        self._device = device
        self._parts = [] if module is None else list(module.named_modules())
        self._children = [(part._modules, dict(part._modules)) for _, part in self._parts]
        self._own: list[tuple[str, dict[str, Any], str, torch.Tensor, int, bool]] = []
        self._plain: list[tuple[str, dict[str, Any], str, Any]] = []
        self._names = [(path, vars(part), set(vars(part))) for path, part in self._parts]
        self._hooks = [(path, getattr(part, name)) for path, part in self._parts for name in _HOOKS]
        self.parameters: dict[int, nn.Parameter] = {}
        self.tensors: dict[int, torch.Tensor] = {}
        for path, part in self._parts:
            self._note(path, part._parameters, self.parameters)
            self._note(path, part._buffers, self.tensors)
            self._note(path, vars(part), self.tensors)

    def _note(self, path: str, home: dict[str, Any], tensors: dict[int, Any]) -> None:
        for key, value in home.items():
            name = f"{path}.{key}" if path else key
            if isinstance(value, torch.Tensor):
                tensors[id(value)] = value
                address = 0 if nn.parameter.is_lazy(value) else value.data_ptr()
                self._own.append((name, home, key, value, address, value.requires_grad))
            elif isinstance(value, PLAIN_TYPES):
                self._plain.append((name, home, key, value))
            elif type(value) in (list, tuple, dict) and not key.startswith("_"):
                tensors.update({id(t): t for t in tensors_in(value) if id(t) not in self.parameters})

    def obstacle(self) -> str | None:
        """Returns why no call of this module can be captured, or None."""
        for path, hooks in self._hooks:
            if hooks:
                return f"it has a hook on {path or 'itself'!r}, which a replay would not call"
        if any(getattr(nn.modules.module, name, None) for name in _GLOBAL_HOOKS):
            return "there are hooks on all modules, which a replay would not call"
        for name, _, _, tensor, _, _ in self._own:
            if type(tensor) not in (torch.Tensor, nn.Parameter, nn.Buffer):
                return f"its {name!r} is a {type(tensor).__name__}, not a plain tensor"
            if tensor.device != self._device:
                return f"its {name!r} is on {tensor.device}, not on {self._device}"
        return None

    def change(self) -> Change | None:
        """Returns what is no longer as it was, or None."""
        for name, home, key, value in self._plain:
            now = home.get(key, Change)
            if now is not value and not (type(now) is type(value) and now == value):
                return Change(f"its attribute {name!r} changed", lasting=False)
        for home, children in self._children:
            if home != children:
                return Change("its submodules were replaced", lasting=True)
        for name, home, key, tensor, address, trained in self._own:
            if home.get(key) is not tensor or tensor.data_ptr() != address:
                return Change(f"its {name!r} was replaced", lasting=True)
            if tensor.requires_grad != trained:
                return Change(f"its {name!r} began or ceased to require a gradient", lasting=False)
        for path, hooks in self._hooks:
            if hooks:
                return Change(f"{path or 'it'!r} got a hook", lasting=False)
        return None

    def new_attribute(self) -> str | None:
        """Takes attributes away that were made since; returns the name of one, or None."""
        found = None
        for path, home, names in self._names:
            for name in set(home) - names:
                del home[name]
                found = f"{path}.{name}" if path else name
        return found

    @functools.cached_property
    def aliases(self) -> dict[int, nn.Parameter]:
        """A stand-in for each parameter, by its id: the same memory, but a leaf of its own.

        A captured backward ends at these leaves. So it neither runs hooks that belong to the parameters (they run
        outside, once) nor waits for the streams of gradient accumulators that others made and keep, such as DDP.
        """
        return {
            key: nn.Parameter(parameter.data, requires_grad=parameter.requires_grad)
            for key, parameter in self.parameters.items()
        }

    @contextmanager
    def with_aliases(self) -> Iterator[None]:
        """Puts the stand-ins for parameters in place inside the block."""
        swapped: list[tuple[nn.Module, str, nn.Parameter]] = []
        try:
            for _, part in self._parts:
                for name, parameter in list(part._parameters.items()):
                    if parameter is not None and id(parameter) in self.aliases:
                        swapped.append((part, name, parameter))
                        setattr(part, name, self.aliases[id(parameter)])  # RNNs keep lists up to date in __setattr__
            yield
        finally:
            for part, name, parameter in reversed(swapped):
                setattr(part, name, parameter)

    @contextmanager
    def without_trace(self) -> Iterator[None]:
        """Gives buffers, tensors, plain attributes and random numbers back what they had before the block."""
        kept = [(tensor.data, tensor.detach().clone()) for tensor in self.tensors.values()]
        with ExitStack() as undo:
            undo.callback(random.setstate, random.getstate())
            undo.callback(np.random.set_state, np.random.get_state())
            undo.callback(torch.set_rng_state, torch.get_rng_state())
            if self._device.type == "cuda":
                undo.callback(torch.cuda.set_rng_state, random_state(self._device), self._device)
            try:
                yield
            finally:
                for tensor, before in kept:
                    tensor.copy_(before)
                for _, home, key, value in (*self._plain, *(own[:4] for own in self._own)):
                    if home.get(key) is not value:
                        home[key] = value


def random_state(device: torch.device) -> torch.Tensor:
    """Returns the state of a device's default generator; of one on a GPU, its seed and how many it has drawn."""
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()
