"""What a placed module holds besides its arguments, and whether somebody writes to it while its lane may read it.

Operators on the user's own stream are not seen, so nothing orders them against a lane. Torch counts writes, and memory
has addresses: what differs from the beginning of the model's call was written before the module's own, which then
waits for the user's stream; what differs from the end of the module's call was written beside its lane, an error.
Writes through ``.data`` are not counted. The finder sees those that are in the sample's run.
"""

from __future__ import annotations

import weakref
from typing import TypeAlias

import torch
from torch import nn

from mosaic.engine.calls.structure import version_of

Marks: TypeAlias = list[tuple[int, int | None, int]]
"""For each parameter and buffer its identity, how often it was written to, and where it lies."""


class HeldState:
    """Parameters and buffers of one module, at the moments that matter.

    Args:
        module: The module; it is not kept alive. None has no state.

    Attributes:
        is_reached: Whether somebody outside reached into the module since the model's call began.
    """

    def __init__(self, module: nn.Module | None) -> None:
        self.is_reached = False
        self._module = weakref.ref(module) if module is not None else None
        self._began: Marks | None = None
        self._after: Marks = []

    def begin(self) -> None:
        """A call of the whole model begins: what was done before is ordered before all lanes."""
        self.is_reached = False
        self._began = self._marks()

    def was_there(self) -> bool:
        """Whether all of it was there, as it is now, when the model's call began."""
        return not self.is_reached and self._began == self._marks()

    def note_call(self) -> None:
        """The module's own call was launched; what it wrote is part of it."""
        self._after = self._marks()

    def is_as_left(self) -> bool:
        """Whether nobody wrote to it since its last call."""
        return self._after == self._marks()

    def _marks(self) -> Marks:
        found: Marks = []
        todo = [self._module()] if self._module is not None else []
        while todo:
            part = todo.pop()
            if part is not None:
                found += [_mark(tensor) for tensor in part._parameters.values() if tensor is not None]
                found += [_mark(tensor) for tensor in part._buffers.values() if tensor is not None]
                todo += part._modules.values()
        return found


def _mark(tensor: torch.Tensor) -> tuple[int, int | None, int]:
    try:
        return id(tensor), tensor._version, tensor.data_ptr()
    except RuntimeError:  # it has no memory of its own, or no version
        return id(tensor), version_of(tensor), 0
