"""What modules exchange with the operations between them other than by arguments and results.

A lane on a stream waits for its inputs' producers. A module that reads a tensor which its parent left in an attribute,
whose weights the parent updates while the model runs (a momentum encoder), or whose buffers the parent reads, has
inputs and outputs that its calls do not show. Such a module keeps to the order of the user's stream.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from mosaic.engine.calls.structure import memory_of
from mosaic.engine.calls.torch_functions import kind_of, tensors_of
from mosaic.engine.streams.order import version_of


class Beside:
    """Follows one run of a model.

    Attributes:
        found: Modules that exchange more than arguments and results, each with what it was.
    """

    def __init__(self, candidates: Mapping[str, nn.Module]) -> None:
        self.found: dict[str, str] = {}
        self._parameters = {memory_of(p): name for name, module in candidates.items() for p in module.parameters()}
        self._named = {id(p): name for name, module in candidates.items() for p in module.parameters()}
        self._buffers = {memory_of(b): name for name, module in candidates.items() for b in module.buffers()}
        self._parameters.pop(0, None)
        self._buffers.pop(0, None)
        self._given: dict[str, list[tuple[torch.Tensor, int | None]]] = {}
        self._between: dict[int, torch.Tensor] = {}  # made between modules, and kept so that no id is given out twice

    def enter(self, name: str, given: Sequence[torch.Tensor]) -> None:
        """A module begins to run on ``given``."""
        self._given[name] = [(tensor, version_of(tensor)) for tensor in given]

    def leave(self, name: str) -> None:
        """A module has returned."""
        if any(version_of(tensor) != version for tensor, version in self._given.pop(name)):
            self.found[name] = "it writes into its arguments"

    def note(self, running: str | None, func: Any, args: Any, kwargs: Any, results: Sequence[torch.Tensor]) -> None:
        """An operator ran, inside of the module ``running`` or between modules."""
        inputs = list(tensors_of((args, kwargs)))
        if running is not None:
            given = {id(tensor) for tensor, _ in self._given[running]}
            if any(id(tensor) in self._between and id(tensor) not in given for tensor in inputs):
                self.found[running] = "it reads what was made between modules and is not among its arguments"
        else:
            came = {id(tensor) for tensor in inputs}
            self._between.update((id(tensor), tensor) for tensor in results if id(tensor) not in came)
        self._note_owned(running, func, args, kwargs, inputs)

    def _note_owned(self, running: str | None, func: Any, args: Any, kwargs: Any, inputs: list[torch.Tensor]) -> None:
        kind = kind_of(func)
        written = kind.written(args, kwargs)
        if kind.name == "__set__:data" and id(args[0]) in self._named:
            written = [args[0]]
            self._parameters[memory_of(args[0])] = self._named[id(args[0])]
        for tensor in written:
            owner = self._parameters.get(memory_of(tensor), running)
            if owner is not None and owner != running:
                self.found[owner] = "its parameters are written to while the model runs"
        for tensor in inputs:
            owner = self._buffers.get(memory_of(tensor), running)
            if owner is not None and owner != running:
                self.found[owner] = "its buffers are used outside of it while the model runs"
