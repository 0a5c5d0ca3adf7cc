"""A traced run of candidates: which feeds which, and what each reads and writes beside arguments and results.

A module that reads a tensor which its parent left in an attribute, whose weights its parent updates during the run
(a momentum encoder), or whose buffers the parent reads, exchanges more than its calls show. It runs where it is called.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from mosaic.engine.calls.hidden import Surroundings
from mosaic.engine.calls.obstacles import SHARED_IS_WRITTEN, Obstacle
from mosaic.engine.calls.thread_state import Applied, ThreadState
from mosaic.find.structure import map_tensors, tensors_in, version_of
from mosaic.find.trace import Operation, Tracer, caller
from mosaic.graph import Edge
from mosaic.profiler import Subject

_UNTIE = "untie the weights if they need not be tied, or name parts without them: colocate(..., modules=[...])"
_PASS = "pass it as an argument, and return what others read"
_KEEPS_GRAPH = Obstacle(
    "a tensor made inside of it is kept after its call, by a hook, a list or an attribute",
    remedy="return it, keep tensor.detach(), or leave the module out: colocate(..., exclude=[...])",
)
_READS_BETWEEN = Obstacle("it reads a tensor created between modules that is not an argument", remedy=_PASS)
_READS_DATA = Obstacle("its arguments are reached through .data before it is called", remedy=_PASS)
_WRITES_ARGUMENTS = Obstacle("it writes into its arguments", remedy="let it write to a copy")
_BUFFERS_ARE_USED = Obstacle("its buffers are used outside of it while the model runs", remedy=_PASS)
_WEIGHTS_ARE_WRITTEN = Obstacle("its parameters are written to while the model runs", remedy=_PASS)


@dataclass(slots=True)
class _Weight:
    """Parameters or buffers of the model in one memory."""

    is_buffer: bool
    ids: set[int] = field(default_factory=set)
    paths: dict[str, str] = field(default_factory=dict)  # by a candidate that has it, its name there
    users: dict[str | None, str] = field(default_factory=dict)
    """By a candidate that uses it, or None for operations between them, the line that does with a gradient, or ""."""


class Exchanges(Tracer[frozenset[str]]):
    """Follows one run of a model; labels are candidates, which may be placed. Its maps are by their names."""

    def __init__(self, model: nn.Module, candidates: Mapping[str, nn.Module]) -> None:
        super().__init__(frozenset())
        self.calls: dict[str, Subject] = {}  # in order
        self.edges: dict[tuple[str, str], Edge] = {}  # by source and target
        self.exchanging: dict[str, Obstacle] = {}
        self.local: dict[str, Obstacle] = {}
        self.hidden: dict[str, Obstacle] = {}
        self._candidates = candidates
        self._surroundings: dict[str, Surroundings] = {}
        # By a running candidate, its tensors by memory with their versions at the call; None is the code between.
        self._arguments: dict[str | None, dict[int, tuple[torch.Tensor, int | None]]] = {None: {}}
        # By memory.
        self._weights: dict[int, _Weight] = {}
        self._aliases: defaultdict[int, set[int]] = defaultdict(set)  # ids of results of candidates and functions
        self._maker: dict[int, str | None] = {}  # the candidate that made it; None for the code between
        self._readers: defaultdict[int, set[str]] = defaultdict(set)  # candidates that take it, or do not hold it
        self._uncounted: set[int] = set()  # reached through ``.data``, whose writes torch does not count
        for is_buffer, tensors in ((False, model.parameters()), (True, model.buffers())):
            for tensor in tensors:
                self._weights.setdefault(self.memory(tensor), _Weight(is_buffer)).ids.add(id(tensor))
        self._shared: dict[str, set[int]] = {}  # ids of parameters that belong to a module outside, too
        for name, module in candidates.items():
            inside = set(module.modules())
            others = {id(p) for part in model.modules() if part not in inside for p in part.parameters(recurse=False)}
            self._shared[name] = others & set(map(id, module.parameters()))
            for path, tensor in (*module.named_parameters(), *module.named_buffers()):
                self._weights[self.memory(tensor)].paths[name] = path

    @contextmanager
    def watching(self) -> Iterator[None]:
        with self.following(self._candidates):
            with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():  # hooks are among the attributes
                self._surroundings = {name: Surroundings(module) for name, module in self._candidates.items()}
            yield
            for name in self.calls:
                self._compare_surroundings(name)
        self._surroundings.clear()  # which may hold the graph of the run, and with it the stream of each leaf

    def _compare_surroundings(self, name: str, *, is_called: bool = True) -> None:
        if name in self.hidden:
            return
        around = self._surroundings[name]
        with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
            keeps_graph = is_called and around.keeps_graph()
            changed = around.changed() if is_called else around.changed_outside()
        if keeps_graph:  # a loss that uses it goes backward through the branch's graph from outside
            self.hidden[name] = self.local[name] = _KEEPS_GRAPH
        elif changed is not None:
            self.hidden[name] = Obstacle(f"{changed}, changes while the model runs", remedy="pass it as an argument")

    def enter(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for other in {**self.calls, name: None}:  # a lane may run an earlier call by now
            self._compare_surroundings(other, is_called=other == name)
        tensors = tensors_in((args, kwargs))
        for source in sorted(self.labels(tensors)):
            num_bytes = sum(each.numel() * each.element_size() for each in tensors if source in self.labels([each]))
            self.edges.setdefault((source, name), Edge(source=source, target=name, num_bytes=num_bytes))
        args, kwargs = _without_graph((args, kwargs))
        self.calls[name] = Subject(name, module, args, kwargs, partial(Applied, ThreadState.capture()))
        self._arguments[name] = {self.memory(tensor): (tensor, version_of(tensor)) for tensor in tensors}
        if self._arguments[name].keys() & self._uncounted:
            self.exchanging[name] = _READS_DATA
        for memory in self._arguments[name]:
            self._readers[memory].add(name)

    def leave(self, name: str, result: Any) -> None:
        self._compare_surroundings(name)
        if any(version_of(tensor) != version for tensor, version in self._arguments.pop(name).values()):
            self.exchanging[name] = self.local[name] = _WRITES_ARGUMENTS
        for tensor in tensors_in(result):
            self._note_alias(tensor)
            self.mark(tensor, frozenset({name}), anew=True)

    def _note_alias(self, tensor: torch.Tensor) -> None:
        self._aliases[self.memory(tensor)].add(id(tensor))
        self._alive.append(tensor)

    def function(self, name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        here = self.running[-1] if self.running else None
        if name == "__set__:data":
            self._note_write(here, [args[0]], name)
            if (weight := self._weights.get(self.memory(args[0]))) is not None:
                self._weights[self.memory(args[1])] = weight
        result = func(*args, **kwargs)
        if name == "__get__:data":
            self._uncounted.add(self.memory(result))
        elif here is None and isinstance(result, (torch.Tensor, tuple, list)):
            for tensor in tensors_in(result):
                if self.labels([tensor]):
                    self._note_alias(tensor)
        return result

    def end(self, operation: Operation, labels: frozenset[str]) -> frozenset[str]:
        here = self.running[-1] if self.running else None
        self._note_uses(here, operation)
        if here is not None:
            foreign = set(map(self.memory, operation.inputs)) - self._arguments[here].keys() - self._weights.keys()
            for memory in foreign:
                if self._maker.get(memory) != here:
                    self._readers[memory].add(here)
                    if memory in self._maker:
                        self.exchanging[here] = self.local[here] = _READS_BETWEEN
        self._maker |= dict.fromkeys(map(self.memory, operation.created), here)
        self._note_write(here, operation.written, operation.name)
        return labels

    def _note_uses(self, here: str | None, operation: Operation) -> None:
        has_gradient = operation.name != "detach" and torch.is_grad_enabled()
        has_gradient &= any(tensor.requires_grad for tensor in operation.inputs)
        has_gradient &= any(tensor.is_floating_point() or tensor.is_complex() for tensor in operation.results)
        for tensor in operation.inputs:
            memory = self.memory(tensor)
            name = self._maker.get(memory)
            if name is not None and name != here and name not in self.labels([tensor]):
                what = f"a tensor made inside of it is used outside ({caller()}), other than as its result"
                self.exchanging[name] = self.local[name] = Obstacle(what, remedy="let the module return it")
            if (weight := self._weights.get(memory)) is None:
                continue
            if weight.is_buffer:
                self.exchanging |= dict.fromkeys(weight.paths.keys() - {here}, _BUFFERS_ARE_USED)
            user = None if memory in self._arguments[here] else here  # what is passed is used by the one who passes it
            if not weight.users.get(user):
                weight.users[user] = caller() if has_gradient else ""

    def _note_write(self, here: str | None, tensors: Sequence[torch.Tensor], function: str) -> None:
        """Notes a write into parameters or arguments of other modules, into what they read, or into their results."""
        for tensor in tensors:
            memory = self.memory(tensor)
            weight = self._weights.get(memory)
            if weight is not None and not weight.is_buffer:
                self.exchanging |= dict.fromkeys(weight.paths.keys() - {here}, _WEIGHTS_ARE_WRITTEN)
            if here is None:
                self._maker[memory] = None
                if len(self._aliases[memory]) > 1:
                    self.hidden = dict.fromkeys(self.labels([tensor]), SHARED_IS_WRITTEN) | self.hidden
            for reader in self._readers[memory] - {here}:
                what = f"its input is written to in place ({function}, {caller()}) after it was called"
                self.exchanging[reader] = self.local[reader] = Obstacle(what, remedy="write to a copy: x = x + 1")

    @property
    def users(self) -> dict[int, frozenset[str | None]]:
        return {key: frozenset(weight.users) for weight in self._weights.values() if weight.users for key in weight.ids}

    def parted(self, *, may_share: bool) -> dict[str, frozenset[int]]:
        """Returns for each candidate the ids of parameters that others use; they alone may, unless ``may_share``."""
        ids = {name: set(keys) for name, keys in self._shared.items()}
        for weight in self._weights.values():
            for name, path in weight.paths.items() if not weight.is_buffer else ():
                line = next((line for user, line in weight.users.items() if user != name and line), "")
                ids[name] |= weight.ids if line else set()
                if not may_share and name in weight.users and weight.ids & ids[name]:
                    what = f"shares {path} with the rest of the model" + (f" ({line})" if line else "")
                    self.exchanging[name] = Obstacle(what, remedy=_UNTIE)
        return {name: frozenset(keys) for name, keys in ids.items()}


def _without_graph(arguments: tuple[Any, Any]) -> Any:
    """Returns arguments without the run's autograd graph, which holds activations and ties leaves to its stream."""
    cuts: dict[int, torch.Tensor] = {}

    def cut(tensor: torch.Tensor) -> torch.Tensor:
        return tensor if tensor.is_leaf else cuts.setdefault(id(tensor), tensor.detach().requires_grad_())

    with torch._C._DisableTorchDispatch():
        return map_tensors(cut, arguments)
