"""Exchanges between modules and the operations around them other than by arguments and results.

A lane on a stream waits for its inputs' producers. A module that reads a tensor which its parent left in an attribute,
whose weights the parent updates while the model runs (a momentum encoder), or whose buffers the parent reads, has
inputs and outputs that its calls do not show. Such a module keeps to the order of the user's stream.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from mosaic.engine.calls.structure import memory_of, tensors_of, version_of
from mosaic.engine.calls.torch_functions import look_up


class Exchanges:
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
        self._between: dict[int, torch.Tensor] = {}  # by memory: made or written between modules; kept, so that no
        self._inside: dict[int, torch.Tensor] = {}  # address is given out twice, as is what was made in modules
        self._read: dict[int, str] = {}  # memory that a module read and that is neither given nor its own
        self._data: dict[int, torch.Tensor] = {}  # what ``.data`` returned: torch does not count writes into it
        self._uncounted: set[int] = set()  # memory that such writes went to

    def enter(self, name: str, given: Sequence[torch.Tensor]) -> None:
        """A module begins to run on ``given``."""
        self._given[name] = [(tensor, version_of(tensor)) for tensor in given]
        if any(memory_of(tensor) in self._uncounted for tensor in given):
            self.found[name] = "its arguments are written to through .data before it is called"

    def leave(self, name: str) -> None:
        """A module has returned."""
        if any(version_of(tensor) != version for tensor, version in self._given.pop(name)):
            self.found[name] = "it writes into its arguments"

    def note(self, running: str | None, func: Any, args: Any, kwargs: Any, results: Sequence[torch.Tensor]) -> None:
        """An operator ran, inside of the module ``running`` or between modules."""
        does = look_up(func)
        inputs, written = list(tensors_of((args, kwargs))), does.written(args, kwargs)
        came = {id(tensor) for tensor in inputs}
        made = [tensor for tensor in results if id(tensor) not in came]
        if does.name == "__get__:data":
            self._data.update((id(tensor), tensor) for tensor in made)
        self._uncounted |= {memory_of(tensor) for tensor in written if id(tensor) in self._data}
        if running is None:
            for tensor in (*made, *written):
                self._between[memory_of(tensor)] = tensor
            found = {self._read[memory_of(tensor)] for tensor in written if memory_of(tensor) in self._read}
        else:
            found = {running} if self._reads_others(running, inputs) else set()
            self._inside.update((memory_of(tensor), tensor) for tensor in made)
        self.found |= dict.fromkeys(found, "it reads what was made between modules and is not among its arguments")
        self._note_owned(running, func, args, kwargs, inputs)

    def _reads_others(self, running: str, inputs: Sequence[torch.Tensor]) -> bool:
        """Notes what a module reads and does not hold; whether some of it was made or written between modules."""
        own = {0, *(memory_of(tensor) for tensor, _ in self._given[running])}
        read = {memory_of(tensor) for tensor in inputs} - own - self._parameters.keys() - self._buffers.keys()
        others = {memory for memory in read if memory not in self._inside}
        self._read.update((memory, running) for memory in others)
        return not others.isdisjoint(self._between)

    def _note_owned(self, running: str | None, func: Any, args: Any, kwargs: Any, inputs: list[torch.Tensor]) -> None:
        does = look_up(func)
        written = does.written(args, kwargs)
        if does.name == "__set__:data" and id(args[0]) in self._named:
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
