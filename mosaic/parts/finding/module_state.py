"""State of modules besides parameters: put back behind a run, and refused where the next run would see it."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import nn

from mosaic.errors import UnsplittableError

_NUMBERS = int | float | np.ndarray
_CONTAINERS = dict | list | set | deque
_OF_TORCH = frozenset(vars(nn.Module()))
_ABSENT = object()


@contextmanager
def kept_state(model: nn.Module) -> Iterator[None]:
    """Puts buffers, and attributes that are numbers, arrays or containers, back as they were.

    Raises:
        UnsplittableError: A number, an array or a buffer is another one behind the run. Chunks call what is around
            their layers more often than the plain loop does, and in another order.
    """
    states = [_State(path, module) for path, module in model.named_modules()]
    try:
        yield
        for state in states:
            state.check()
    finally:
        for state in states:
            state.put_back()


class _State:
    def __init__(self, path: str, module: nn.Module) -> None:
        self._path, self._module = path or "the model", module
        self._attributes = {
            name: value if isinstance(value, int | float) else copy.copy(value)
            for name, value in vars(module).items()
            if name not in _OF_TORCH and isinstance(value, _NUMBERS | _CONTAINERS)
        }
        self._buffers = [(name, one, one.detach().clone()) for name, one in module._buffers.items() if one is not None]

    def check(self) -> None:
        for name, value in vars(self._module).items():
            old = self._attributes.get(name, getattr(type(self._module), name, _ABSENT))
            is_state = name not in _OF_TORCH and isinstance(value, _NUMBERS) and isinstance(old, _NUMBERS)
            if is_state and not isinstance(value, bool) and not np.array_equal(old, value, equal_nan=True):
                raise self._changed(name)
        for name, old in self._attributes.items():
            now = vars(self._module).get(name)
            if isinstance(old, _CONTAINERS) and isinstance(now, _CONTAINERS) and len(now) != len(old):
                raise self._changed(name)
        for name, old, value in self._buffers:
            new = self._module._buffers.get(name)
            if new is not old and new is not None and not (new.is_meta or torch.equal(new, value)):
                raise UnsplittableError(
                    f"{self._path} puts another tensor into its buffer {name} when it is called; chunks call it more "
                    "often than the plain loop does, and in another order: let the loop change it"
                )

    def _changed(self, name: str) -> UnsplittableError:
        return UnsplittableError(
            f"{self._path} changes its attribute {name} when it is called; chunks call it more often than the plain "
            "loop does, and in another order: let the loop change it"
        )

    def put_back(self) -> None:
        state = vars(self._module)
        for name in [name for name, value in state.items() if isinstance(value, int | float)]:
            if name not in self._attributes and name not in _OF_TORCH and hasattr(type(self._module), name):
                del state[name]
        for name, value in self._attributes.items():
            now = state.get(name)
            if not isinstance(now, _CONTAINERS) or type(now) is not type(value):
                state[name] = value
            elif len(now) != len(value):
                now.clear()
                (now.extend if isinstance(now, list | deque) else now.update)(value)
        with torch.no_grad():
            for name, one, value in self._buffers:
                self._module._buffers[name] = one
                one.copy_(value)
