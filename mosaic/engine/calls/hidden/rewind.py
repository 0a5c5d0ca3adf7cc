"""Undoing a call of the whole model that came to nothing, so that it can be made again."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from mosaic.engine.calls.hidden.hidden_state import parts_of
from mosaic.engine.calls.structure import version_of
from mosaic.find.random_numbers import CPU, random_state

_MAX_BYTES = 1 << 16
_NUM_OF_TORCH = len(vars(nn.Module()))


class Rewind:
    """What a model's call may change, as it is now: random numbers, small buffers, attributes, and lists among them.

    Args:
        model: The model.
    """

    def __init__(self, model: nn.Module) -> None:
        self._random = random_state(CPU)
        parts = parts_of(model)
        self._attributes = [(part, dict(vars(part)), dict(part._buffers)) for part in parts.modules]
        self._containers = [kept for part in parts.modules for kept in _containers_of(part)]
        small = [t for t in parts.tensors[parts.num_parameters :] if t.nbytes <= _MAX_BYTES]
        self._buffers = [(tensor, tensor.detach().clone()) for tensor in small]
        kept = {id(tensor) for tensor in small}
        self._untouched = [(tensor, version_of(tensor)) for tensor in parts.tensors if id(tensor) not in kept]
        self._gradients = [parameter.grad for parameter in parts.trained]
        self._trained = parts.trained

    def undo(self) -> bool:
        """Puts everything back; changes nothing and returns False where parameters or large buffers were written to."""
        if any(version_of(tensor) != version for tensor, version in self._untouched):
            return False
        if any(p.grad is not grad for p, grad in zip(self._trained, self._gradients, strict=True)):
            return False  # a backward has run
        for part, attributes, buffers in self._attributes:
            vars(part).clear()
            vars(part).update(attributes)
            part._buffers.clear()
            part._buffers.update(buffers)
        for container, content in self._containers:
            _refill(container, content)
        with torch.no_grad():
            for tensor, before in self._buffers:
                if not torch.equal(tensor, before):  # a write in vain would spoil what earlier graphs have saved
                    tensor.copy_(before)
        self._random.restore()
        return True


def _containers_of(part: nn.Module) -> list[tuple[Any, Any]]:
    found = []
    for value in list(vars(part).values())[_NUM_OF_TORCH:]:
        if type(value) in (list, dict, set):
            found.append((value, value.copy()))
    return found


def _refill(container: Any, content: Any) -> None:
    if isinstance(container, list):
        container[:] = content
    else:
        container.clear()
        container.update(content)
