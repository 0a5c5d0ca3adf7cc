"""Exchanges between modules and the operations around them other than by arguments and results.

A lane waits for its inputs' producers. A module that reads a tensor which its parent left in an attribute,
whose weights the parent updates while the model runs (a momentum encoder), or whose buffers the parent reads, has
inputs and outputs that its calls do not show. On a stream such a module keeps to the order of the user's own. On the
host, where lanes have threads, its forward is waited for if the exchange comes after its call; it runs where it is
called if it reads a result of another module.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from mosaic.engine.calls.obstacles import Obstacle
from mosaic.engine.calls.structure import memory_of, tensors_of, version_of
from mosaic.engine.calls.torch_functions import look_up


class Exchanges:
    """Follows one run of a model.

    Attributes:
        found: Modules that exchange more than arguments and results, each with what it was.
        late: Those of them with an exchange after their call.
        aside: Those that read results of other modules in this way.
        local: Those that read, or write into, what their caller holds, so that they compute something else elsewhere.
    """

    def __init__(self, candidates: Mapping[str, nn.Module]) -> None:
        self.found: dict[str, str] = {}
        self.late: dict[str, str] = {}
        self.aside: dict[str, Obstacle] = {}
        self.local: dict[str, Obstacle] = {}
        self._left: set[str] = set()
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
        self._left.add(name)
        if any(version_of(tensor) != version for tensor, version in self._given.pop(name)):
            self.found[name] = "it writes into its arguments"
            self.local[name] = Obstacle(self.found[name], todo="let it write to a copy")

    def note(
        self,
        running: str | None,
        func: Any,
        args: Any,
        kwargs: Any,
        results: Sequence[torch.Tensor],
        *,
        stems: Callable[[torch.Tensor], bool],
    ) -> None:
        """An operator ran, inside of the module ``running`` or between modules.

        Args:
            running: The module, or None.
            func: The operator.
            args: Its arguments.
            kwargs: Its named arguments.
            results: The tensors that it returned.
            stems: Tells whether a tensor stems from a module.
        """
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
            strange = self._others_read(running, inputs)
            found = {running} if strange else set()
            if any(stems(tensor) for tensor in inputs if memory_of(tensor) in strange):
                self.aside[running] = Obstacle(
                    "it reads a result of another module that is not among its arguments", todo="pass it as an argument"
                )
            self._inside.update((memory_of(tensor), tensor) for tensor in made)
        for name in found:
            self._note(name, "it reads what was made between modules and is not among its arguments")
            self.local[name] = Obstacle(self.found[name], todo="pass it as an argument")
        self._note_owned(running, func, args, kwargs, inputs)

    def _others_read(self, running: str, inputs: Sequence[torch.Tensor]) -> set[int]:
        """Notes the memory that a module reads and does not hold; returns what was made or written between modules."""
        own = {0, *(memory_of(tensor) for tensor, _ in self._given[running])}
        read = {memory_of(tensor) for tensor in inputs} - own - self._parameters.keys() - self._buffers.keys()
        others = {memory for memory in read if memory not in self._inside}
        self._read.update((memory, running) for memory in others)
        return others & self._between.keys()

    def _note_owned(self, running: str | None, func: Any, args: Any, kwargs: Any, inputs: list[torch.Tensor]) -> None:
        does = look_up(func)
        written = does.written(args, kwargs)
        if does.name == "__set__:data" and id(args[0]) in self._named:
            written = [args[0]]
            self._parameters[memory_of(args[0])] = self._named[id(args[0])]
        for tensor in written:
            owner = self._parameters.get(memory_of(tensor), running)
            if owner is not None and owner != running:
                self._note(owner, "its parameters are written to while the model runs")
        for tensor in inputs:
            owner = self._buffers.get(memory_of(tensor), running)
            if owner is not None and owner != running:
                self._note(owner, "its buffers are used outside of it while the model runs")

    def _note(self, owner: str, what: str) -> None:
        self.found[owner] = what
        if owner in self._left:
            self.late[owner] = what
