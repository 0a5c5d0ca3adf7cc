"""Inputs of one call, and sources of a tensor."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from traceback import walk_tb
from types import FrameType
from typing import Any

import torch
from torch.utils import _pytree as pytree

from mosaic.parts.split import Value


@dataclass(kw_only=True, eq=False)
class SeenCall:
    """One call of a layer or another module, with its inputs."""

    path: str
    """The module's name."""
    call: int
    """Number of earlier calls."""
    line: str
    """File and line that called it."""
    values: set[Value] = field(default_factory=set)
    """Values of earlier calls that it read."""
    parameters: set[str] = field(default_factory=set)
    """Parameters that it read, or that operations before it read."""
    inputs: set[str] = field(default_factory=set)
    """Tensors of the sample that it read."""
    random: set[str] = field(default_factory=set)
    """Lines of operations between calls that drew random numbers for its inputs."""
    rows: set[str] = field(default_factory=set)
    """Lines of operations between calls that made the shape of its inputs depend on values of other calls."""
    outputs: set[str] = field(default_factory=set)
    """Places in the model's output that it read, for the loss alone."""
    form: tuple[list[Any], Any] | None = None
    """Its result without the tensors."""
    has_effects: bool = False
    """True if a run changes arguments or buffers, or draws numbers of numpy or Python."""
    keeps_shape: bool = False
    """True if its first result has its first input's shape."""

    def read(self, sources: Sources) -> None:
        """Adds the sources of a read tensor."""
        self.values |= sources.values
        self.parameters |= sources.parameters
        self.inputs |= sources.inputs
        self.random |= sources.random
        self.rows |= sources.rows
        self.outputs |= sources.outputs


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """Sources of a tensor."""

    values: frozenset[Value] = frozenset()
    """Values of calls."""
    parameters: frozenset[str] = frozenset()
    """Parameters that operations between calls read."""
    inputs: frozenset[str] = frozenset()
    """Tensors of the sample."""
    random: frozenset[str] = frozenset()
    """Lines that drew random numbers between calls."""
    rows: frozenset[str] = frozenset()
    """Lines that made its shape depend on values of calls."""
    outputs: frozenset[str] = frozenset()
    """Places in the model's output."""
    inside: frozenset[SeenCall] = frozenset()
    """Calls that made it and did not return it."""

    def __or__(self, other: Sources) -> Sources:
        if not other or self is other:
            return self
        if not self:
            return other
        return Sources(
            values=self.values | other.values,
            parameters=self.parameters | other.parameters,
            inputs=self.inputs | other.inputs,
            random=self.random | other.random,
            rows=self.rows | other.rows,
            outputs=self.outputs | other.outputs,
            inside=self.inside | other.inside,
        )

    def __bool__(self) -> bool:
        return any((self.values, self.parameters, self.inputs, self.random, self.rows, self.outputs, self.inside))


NOTHING = Sources()


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Returns the tensors in nested containers."""
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def caller() -> str:
    """Returns file and line of the running user code."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(("mosaic.parts", "torch.")):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def is_checkpointed() -> bool:
    """Returns True within ``torch.utils.checkpoint``."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__") != "torch.utils.checkpoint":
        frame = frame.f_back
    return frame is not None


def line_of(error: BaseException) -> str:
    """Returns file and line of the user's code that raised an error."""
    lines = [
        (frame.f_globals.get("__name__", ""), frame.f_code.co_filename, line)
        for frame, line in walk_tb(error.__traceback__)
    ]
    own = [(file, line) for name, file, line in lines if not name.startswith(("mosaic.", "torch."))]
    return ":".join(map(str, own[-1])) if own else "in torch"
