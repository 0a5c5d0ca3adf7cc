"""What a captured module relies on: its parts, parameters, buffers and settings, and stand-ins for its parameters."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from mosaic.engine.structure import PLAIN_TYPES, tensors_in

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_GLOBAL_HOOKS = (
    "_global_forward_hooks",
    "_global_forward_pre_hooks",
    "_global_backward_hooks",
    "_global_backward_pre_hooks",
)


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
class Change:
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

    def __init__(self, module: nn.Module | None) -> None:
        self._parts = [] if module is None else list(module.named_modules())
        self._children = [(part._modules, dict(part._modules)) for _, part in self._parts]
        self._own: list[tuple[str, dict[str, Any], str, torch.Tensor, int, bool]] = []
        self._plain: list[tuple[str, dict[str, Any], str, Any]] = []
        self._names = [(path, vars(part), set(vars(part))) for path, part in self._parts]
        self._hooks = [(path, getattr(part, name)) for path, part in self._parts for name in _HOOKS]
        self.parameters: dict[int, nn.Parameter] = {}
        self.tensors: dict[int, torch.Tensor] = {}
        for path, part in self._parts:
            for name, parameter in part._parameters.items():
                if parameter is not None:
                    self.parameters[id(parameter)] = parameter
                    self._note_tensor(path, part._parameters, name, parameter)
            for name, buffer in part._buffers.items():
                if buffer is not None:
                    self.tensors[id(buffer)] = buffer
                    self._note_tensor(path, part._buffers, name, buffer)
            self._note_attributes(path, part)
        self._aliases: dict[int, nn.Parameter] = {}

    def _note_tensor(self, path: str, home: dict[str, Any], name: str, tensor: torch.Tensor) -> None:
        uninitialized = nn.parameter.is_lazy(tensor)
        address = 0 if uninitialized else tensor.data_ptr()
        self._own.append((_dotted(path, name), home, name, tensor, address, tensor.requires_grad))

    def _note_attributes(self, path: str, part: nn.Module) -> None:
        for name, value in vars(part).items():
            if isinstance(value, PLAIN_TYPES):
                self._plain.append((_dotted(path, name), vars(part), name, value))
            elif isinstance(value, torch.Tensor):
                self.tensors[id(value)] = value
                self._note_tensor(path, vars(part), name, value)
            elif type(value) in (list, tuple, dict) and not name.startswith("_"):
                self.tensors.update({id(t): t for t in tensors_in(value) if id(t) not in self.parameters})

    def obstacle(self, device: torch.device) -> str | None:
        """Returns why no call of this module can be captured, or None."""
        for path, hooks in self._hooks:
            if hooks:
                return f"it has a hook on {path or 'itself'!r}, which a replay would not call"
        if any(getattr(nn.modules.module, name, None) for name in _GLOBAL_HOOKS):
            return "there are hooks on all modules, which a replay would not call"
        for name, _, _, tensor, _, _ in self._own:
            if type(tensor) not in (torch.Tensor, nn.Parameter, nn.Buffer):
                return f"its {name!r} is a {type(tensor).__name__}, not a plain tensor"
            if tensor.device != device:
                return f"its {name!r} is on {tensor.device}, not on {device}"
        return None

    def change(self) -> Change | None:
        """Returns what is no longer as it was, or None."""
        for name, home, key, value in self._plain:
            now = home.get(key, RefusalError)
            if now is not value and not (type(now) is type(value) and now == value):
                return Change(text=f"its attribute {name!r} changed", lasting=False)
        for home, children in self._children:
            if home != children:
                return Change(text="its submodules were replaced", lasting=True)
        for name, home, key, tensor, address, trained in self._own:
            if home.get(key) is not tensor or tensor.data_ptr() != address:
                return Change(text=f"its {name!r} was replaced", lasting=True)
            if tensor.requires_grad != trained:
                return Change(text=f"its {name!r} began or ceased to require a gradient", lasting=False)
        for path, hooks in self._hooks:
            if hooks:
                return Change(text=f"{path or 'it'!r} got a hook", lasting=False)
        return None

    def new_attribute(self) -> str | None:
        """Takes attributes away that were made since; returns the name of one, or None."""
        found = None
        for path, home, names in self._names:
            for name in set(home) - names:
                del home[name]
                found = _dotted(path, name)
        return found

    def aliases(self) -> dict[int, nn.Parameter]:
        """Returns a stand-in for each parameter, by its id: the same memory, but a leaf of its own.

        A captured backward ends at these leaves. So it neither runs hooks that belong to the parameters (they run
        outside, once) nor waits for the streams of gradient accumulators that others made and keep, such as DDP.
        """
        if not self._aliases:
            self._aliases = {
                key: nn.Parameter(parameter.data, requires_grad=parameter.requires_grad)
                for key, parameter in self.parameters.items()
            }
        return self._aliases

    @contextmanager
    def with_aliases(self) -> Iterator[None]:
        """Puts the stand-ins in place inside the block."""
        aliases = self.aliases()
        swapped: list[tuple[nn.Module, str, nn.Parameter]] = []
        try:
            for _, part in self._parts:
                for name, parameter in list(part._parameters.items()):
                    if parameter is not None and id(parameter) in aliases:
                        swapped.append((part, name, parameter))
                        setattr(part, name, aliases[id(parameter)])  # RNNs keep lists up to date in __setattr__
            yield
        finally:
            for part, name, parameter in reversed(swapped):
                setattr(part, name, parameter)

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Gives buffers, tensors and plain attributes back the values that they had before the block."""
        kept = [(tensor.data, tensor.detach().clone()) for tensor in self.tensors.values()]
        try:
            yield
        finally:
            for tensor, before in kept:
                tensor.copy_(before)
            for _, home, key, value in (*self._plain, *(own[:4] for own in self._own)):
                if home.get(key) is not value:
                    home[key] = value


@contextmanager
def without_trace(states: Sequence[ModuleState], device: torch.device) -> Iterator[None]:
    """Undoes what trial runs inside the block do to modules and to random numbers."""
    with ExitStack() as undo:
        for state in states:
            undo.enter_context(state.restored())
        undo.callback(random.setstate, random.getstate())
        undo.callback(np.random.set_state, np.random.get_state())
        undo.callback(torch.set_rng_state, torch.get_rng_state())
        if device.type == "cuda":
            undo.callback(torch.cuda.set_rng_state, torch.cuda.get_rng_state(device), device)
        yield


def storages(tensors: Iterable[torch.Tensor]) -> set[int]:
    """Returns keys of the memory behind tensors."""
    return {tensor.untyped_storage()._cdata for tensor in tensors}


def _dotted(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
