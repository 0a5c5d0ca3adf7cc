"""A module as it is captured: a replay is right as long as the module is still that."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.utils import parametrize

from mosaic.engine.calls.structure import tensors_in
from mosaic.engine.graphs.python_state import PythonState
from mosaic.find.random_numbers import forked
from mosaic.find.restore import Objects

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_GLOBAL_HOOKS = tuple(f"_global{name}" for name in _HOOKS)


class ModuleChange(NamedTuple):
    """How a module differs from the one that was captured."""

    text: str
    lasting: bool
    """Whether what was captured can never be right again, since memory that it uses was replaced."""
    is_inside: bool = False
    """Whether it is in the contents of an attribute, such as a table that is filled once."""


class ModuleState:
    """A module as it is captured; a graph may be replayed while ``change()`` finds nothing.

    A graph bakes in addresses of parameters and buffers, and everything that Python decides. Of the latter, attributes
    of the module's parts and classes (training modes, dropout rates, flags) and context variables are compared.

    Attributes:
        parameters: Distinct parameters, by id.
        tensors: Buffers and tensors in plain attributes, by id.
    """

    def __init__(self, module: nn.Module | None, device: torch.device) -> None:
        self._device = device
        self._parts = [] if module is None else list(module.named_modules())
        self._children = [(part._modules, dict(part._modules)) for _, part in self._parts]
        self._own: list[tuple[str, dict[str, Any], str, torch.Tensor, tuple[Any, ...], bool]] = []
        self._names = [(path, vars(part), set(vars(part))) for path, part in self._parts]
        self._hooks = [(path, getattr(part, name)) for path, part in self._parts for name in _HOOKS]
        self.parameters: dict[int, nn.Parameter] = {}
        self.tensors: dict[int, torch.Tensor] = {}
        for path, part in self._parts:
            self._note(path, part._parameters, self.parameters)
            self._note(path, part._buffers, self.tensors)
            self._note(path, vars(part), self.tensors)
        self._python = PythonState(self._parts)

    def _note(self, path: str, home: dict[str, Any], tensors: dict[int, Any]) -> None:
        for key, value in home.items():
            name = f"{path}.{key}" if path else key
            if isinstance(value, torch.Tensor):
                tensors[id(value)] = value
                self._own.append((name, home, key, value, _place_of(value), value.requires_grad))
            elif type(value) in (list, tuple, dict) and not key.startswith("_"):
                tensors.update({id(t): t for t in tensors_in(value) if id(t) not in self.parameters})

    def obstacle(self) -> str | None:
        """Returns why no call of this module can be captured, or None."""
        for path, hooks in self._hooks:
            if hooks:
                return f"it has a hook on {path or 'itself'!r}, which a replay would not call"
        if _has_global_hooks():
            return "there are hooks on all modules, which a replay would not call"
        for path, part in self._parts:
            if parametrize._cache_enabled and parametrize.is_parametrized(part):
                return "it is called inside parametrize.cached(), and a replay would not compute its cached weights"
            if isinstance(part, nn.RNNBase) and part.dropout and part.num_layers > 1 and part.training:
                name = repr(path) if path else "it"
                return f"{name} draws dropout from numbers that cuDNN keeps, which a try would move on"
        for name, _, _, tensor, _, _ in self._own:
            if type(tensor) not in (torch.Tensor, nn.Parameter, nn.Buffer):
                return f"its {name!r} is a {type(tensor).__name__}, not a plain tensor"
            if tensor.device != self._device:
                return f"its {name!r} is on {tensor.device}, not on {self._device}"
        return None

    def change(self) -> ModuleChange | None:
        """Returns what is no longer as it was, or None."""
        text = self._python.change()
        if text is not None:
            return ModuleChange(text, lasting=False)
        for home, children in self._children:
            if home != children:
                return ModuleChange("its submodules were replaced", lasting=True)
        for name, home, key, tensor, place, trained in self._own:
            if home.get(key) is not tensor or _place_of(tensor) != place:
                return ModuleChange(f"its {name!r} was replaced", lasting=True)
            if tensor.requires_grad != trained:
                return ModuleChange(f"its {name!r} began or ceased to require a gradient", lasting=False)
        for path, hooks in self._hooks:
            if hooks:
                return ModuleChange(f"{path or 'it'!r} got a hook", lasting=False)
        if _has_global_hooks():
            return ModuleChange("all modules got a hook", lasting=False)
        text = self._python.change_inside()
        return None if text is None else ModuleChange(text, lasting=False, is_inside=True)

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
        """Gives tensors, random numbers, and what the module keeps in Python, back what they had before the block."""
        objects = Objects(self._parts[0][1]) if self._parts else None
        kept = [(tensor.data, tensor.detach().clone()) for tensor in self.tensors.values()]
        with forked(self._device):
            try:
                yield
            finally:
                for tensor, before in kept:
                    tensor.copy_(before)
                if objects is not None:
                    objects.restore()


def _place_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Returns where a tensor lies, and how."""
    address = 0 if nn.parameter.is_lazy(tensor) else tensor.data_ptr()
    return () if not address else (address, tensor.dtype, tensor.shape, tensor.stride())


def _has_global_hooks() -> bool:
    return any(getattr(nn.modules.module, name, None) for name in _GLOBAL_HOOKS)
