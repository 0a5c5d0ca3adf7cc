"""State of modules besides parameters: restored after a run, and rejected if it would affect the next run."""

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
    """Saves all modules' state, and restores it at the end."""
    states = [ModuleState(path, module) for path, module in model.named_modules()]
    try:
        yield states
    finally:
        for state in states:
            state.restore()


class ModuleState:
    """Saved buffers of a module, and attributes that are numbers, arrays or containers."""

    def __init__(self, path: str, module: nn.Module) -> None:
        self._path, self._module = path or "the model", module
        self._attributes: dict[str, Any] = {
            name: value if isinstance(value, int | float) else copy.copy(value)
            for name, value in vars(module).items()
            if name not in _OF_TORCH and isinstance(value, (*_NUMBERS, *_CONTAINERS))
        }
        self._buffers = [
            (name, buffer, buffer.detach().clone()) for name, buffer in module._buffers.items() if buffer is not None
        ]

    def check(self, is_drawn: Callable[[Any], bool]) -> None:
        """Checks that a run left no state that changes the next one.

        Args:
            is_drawn: Returns True for a container with tensors that were drawn between layers.

        Raises:
            UnsplittableError: A number, an array, a buffer or a queue has changed, or a new container has drawn
                numbers. Chunks call modules around their layers more often than the plain loop, and in another order.
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

    def restore(self) -> None:
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
                if not (buffer.is_meta or torch.equal(buffer, content)):  # a graph may have saved it: no needless write
                    buffer.copy_(content)


def _has_same(first: Any, second: Any) -> bool:
    """Returns True if two containers hold the same objects."""
    values = [tuple(each.items()) if isinstance(each, dict) else tuple(each) for each in (first, second)]
    return len(values[0]) == len(values[1]) and all(map(_is_same, *values))


def _is_same(first: Any, second: Any) -> bool:
    are_tuples = isinstance(first, tuple) and isinstance(second, tuple)
    return all(map(_is_same, first, second)) if are_tuples else first is second
