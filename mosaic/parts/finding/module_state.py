"""State of modules besides parameters: put back behind a run, and refused where the next run would see it."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn

from mosaic.errors import UnsplittableError

_NUMBERS = (int, float, np.ndarray)
_CONTAINERS = (dict, list, set, deque)
_OF_TORCH = frozenset(vars(nn.Module()))


@contextmanager
def kept_state(model: nn.Module) -> Iterator[list[ModuleState]]:
    """Gives all modules' state as it is, and puts it back at the end."""
    states = [ModuleState(path, module) for path, module in model.named_modules()]
    try:
        yield states
    finally:
        for state in states:
            state.put_back()


class ModuleState:
    """Buffers of a module, and attributes that are numbers, arrays or containers, as they were."""

    def __init__(self, path: str, module: nn.Module) -> None:
        self._path, self._module = path or "the model", module
        self._attributes: dict[str, Any] = {
            name: value if isinstance(value, int | float) else copy.copy(value)
            for name, value in vars(module).items()
            if name not in _OF_TORCH and isinstance(value, (*_NUMBERS, *_CONTAINERS))
        }
        self._buffers = [(name, one, one.detach().clone()) for name, one in module._buffers.items() if one is not None]

    def check(self, is_drawn: Callable[[Any], bool]) -> None:
        """Checks that a run changed nothing by which the next one gives something else.

        Args:
            is_drawn: Whether a container holds tensors that were drawn between layers.

        Raises:
            UnsplittableError: A number, an array or a buffer is another one, a queue has moved on, or another container
                has drawn numbers. Chunks call what is around their layers more often than the plain loop does, and in
                another order.
        """
        for name, value in vars(self._module).items():
            old: Any = self._attributes.get(name, getattr(type(self._module), name, None))
            is_state = name not in _OF_TORCH and isinstance(value, _NUMBERS) and isinstance(old, _NUMBERS)
            if is_state and not isinstance(value, bool) and not np.array_equal(old, value, equal_nan=True):
                raise self._changed(name)
            is_queue = isinstance(value, deque) or (isinstance(value, _CONTAINERS) and is_drawn(value))
            if name not in _OF_TORCH and is_queue and not _has_same(value, old if isinstance(old, _CONTAINERS) else ()):
                raise self._changed(name)
        for name, buffer, content in self._buffers:
            new = self._module._buffers.get(name)
            if new is not None and new is not buffer and not (new.is_meta or torch.equal(new, content)):
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
        """Puts it back."""
        state = vars(self._module)
        for name in [name for name, value in state.items() if isinstance(value, (int, float, *_CONTAINERS))]:
            if name not in self._attributes and name not in _OF_TORCH and hasattr(type(self._module), name):
                del state[name]
        for name, value in self._attributes.items():
            now = state.get(name)
            if isinstance(now, np.ndarray) and now.shape == np.shape(value):
                now[...] = value
            elif not isinstance(now, _CONTAINERS) or type(now) is not type(value):
                state[name] = value
            elif not _has_same(now, value):
                now.clear()
                (now.extend if isinstance(now, list | deque) else now.update)(value)
        with torch.no_grad():
            for name, buffer, content in self._buffers:
                self._module._buffers[name] = buffer
                if not (buffer.is_meta or torch.equal(buffer, content)):  # graphs may have saved it as it is
                    buffer.copy_(content)


def _has_same(one: Any, other: Any) -> bool:
    """Whether two containers hold the same objects."""
    values = [tuple(found.items()) if isinstance(found, dict) else tuple(found) for found in (one, other)]
    return len(values[0]) == len(values[1]) and all(map(_is_same, *values))


def _is_same(one: Any, other: Any) -> bool:
    return all(map(_is_same, one, other)) if isinstance(one, tuple) and isinstance(other, tuple) else one is other
