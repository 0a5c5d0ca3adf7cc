"""A traced run of candidates: which feeds which, and what each reads and writes beside arguments and results.

This decides the lane. A module that reads a tensor which its parent left in an attribute, whose weights the parent
updates while the model runs (a momentum encoder), or whose buffers the parent reads, has inputs and outputs that its
calls do not show. It runs where it is called.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from mosaic.engine.calls.hidden import Surroundings
from mosaic.engine.calls.obstacles import SHARED_IS_WRITTEN, Obstacle, hides_tensors
from mosaic.engine.calls.thread_state import ThreadState
from mosaic.find.structure import flatten, is_opaque, map_tensors, tensors_in, version_of
from mosaic.find.trace import Operation, Tracer, caller
from mosaic.graph import Edge
from mosaic.profiler import Subject

_UNTIE = "untie the weights if they need not be tied, or name parts without them: colocate(..., modules=[...])"
_PASS = "pass it as an argument, and return what others read"


@dataclass(slots=True)
class _Weight:
    """Parameters or buffers of the model in one memory, and their uses."""

    is_buffer: bool
    ids: set[int] = field(default_factory=set)
    paths: dict[str, str] = field(default_factory=dict)
    """By a candidate that has it, its name there."""
    users: set[str | None] = field(default_factory=set)
    """Candidates that use it; None for operations between them."""
    used_outside: dict[str, str] = field(default_factory=dict)
    """By a candidate that has it, the line that uses it with a gradient elsewhere."""
    is_returned: bool = False
    """A candidate returns it, as a result like others."""


class Exchanges(Tracer[frozenset[str]]):
    """Follows one run of a model; labels are candidates, the modules that may be placed.

    Its maps are by their names; see ``Finding``. ``calls`` has their calls in order, ``edges`` goes by source and
    target, and ``obstacles`` keep a candidate from being placed.
    """

    def __init__(self, model: nn.Module, candidates: Mapping[str, nn.Module]) -> None:
        super().__init__(frozenset())
        self.calls: dict[str, Subject] = {}
        self.edges: dict[tuple[str, str], Edge] = {}
        self.obstacles: dict[str, Obstacle] = {}
        self.exchanging: dict[str, Obstacle] = {}
        self.local: dict[str, Obstacle] = {}
        self.hidden: dict[str, Obstacle] = {}
        self._candidates = candidates
        self._surroundings: dict[str, Surroundings] = {}
        self._arguments: dict[str, list[tuple[torch.Tensor, int | None]]] = {}  # with their versions at the call
        # By memory.
        self._weights: dict[int, _Weight] = {}
        self._passed: dict[int, str] = {}
        self._aliases: dict[int, set[int]] = {}  # ids of results of candidates and of functions between them
        self._maker: dict[int, str | None] = {}  # the candidate that made it; None for the code between
        self._read: dict[int, str] = {}  # by a module that neither holds it nor takes it
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

    # Calls.

    @contextmanager
    def watching(self) -> Iterator[None]:
        with self.following(self._candidates):
            with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():  # hooks are among the attributes
                self._surroundings = {name: Surroundings(module) for name, module in self._candidates.items()}
            yield
            for name in self.calls:
                self._compare_surroundings(name)
        self._surroundings.clear()

    def _compare_surroundings(self, name: str, *, is_called: bool = True) -> None:
        if name in self.hidden:
            return
        around = self._surroundings[name]
        with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
            keeps_graph = is_called and around.keeps_graph()
            changed = around.changed() if is_called else around.changed_outside()
        if keeps_graph:  # a loss that uses it goes backward through the branch's graph from outside
            what = "a tensor made inside of it is kept after its call, by a hook, a list or an attribute"
            todo = "return it, keep tensor.detach(), or leave the module out: colocate(..., exclude=[...])"
            self.hidden[name] = self.local[name] = Obstacle(what, todo=todo)
        elif changed is not None:
            self.hidden[name] = Obstacle(f"{changed}, changes while the model runs", todo="pass it as an argument")

    def enter(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for other in {**self.calls, name: None}:  # a lane may run an earlier call by now
            self._compare_surroundings(other, is_called=other == name)
        tensors = tensors_in((args, kwargs))
        num_bytes: Counter[str] = Counter()
        for tensor in tensors:
            for source in self.labels([tensor]):
                num_bytes[source] += tensor.numel() * tensor.element_size()
        for source, count in sorted(num_bytes.items()):
            self.edges.setdefault((source, name), Edge(source=source, target=name, num_bytes=count))
        args, kwargs = _without_graph((args, kwargs))
        self.calls[name] = Subject(name, module, args, kwargs, ThreadState.capture().applied)
        self._note_opaque(name, "takes", (args, kwargs))
        self._arguments[name] = [(tensor, version_of(tensor)) for tensor in tensors]
        memories = set(map(self.memory, tensors))
        if memories & self._uncounted:
            self._note_exchange(name, "its arguments are reached through .data before it is called")
        self._passed |= dict.fromkeys(memories, name)

    def leave(self, name: str, result: Any) -> None:
        self._note_opaque(name, "returns", result)
        self._compare_surroundings(name)
        arguments = self._arguments.pop(name)
        if any(version_of(tensor) != version for tensor, version in arguments):
            self._note_exchange(name, "it writes into its arguments", todo="let it write to a copy", is_local=True)
        for tensor in tensors_in(result):
            if self.memory(tensor) in self._weights:
                self._weights[self.memory(tensor)].is_returned = True
            self._note_alias(tensor)
            self.mark(tensor, frozenset({name}), anew=True)

    def _note_opaque(self, name: str, verb: str, value: Any) -> None:
        opaque = next((leaf for leaf in flatten(value)[0] if is_opaque(leaf)), None)
        if opaque is not None:
            self.obstacles[name] = hides_tensors(verb, opaque)

    # Functions and operators.

    def function(self, name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs a function, and notes what no operator shows."""
        here = self.running[-1] if self.running else None
        if name == "__set__:data":
            self._note_write(here, [args[0]], name)
            weight = self._weights.get(self.memory(args[0]))
            if weight is not None:
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
        if operation.name == "_to_copy" and self.memory(operation.inputs[0]) in self._weights:
            for tensor in operation.created:  # autocast keeps what it casts for other uses
                self._weights[self.memory(tensor)] = self._weights[self.memory(operation.inputs[0])]
        self._note_uses(here, operation)
        if here is None:
            for tensor in operation.written:
                if len(self._aliases.get(self.memory(tensor), ())) > 1:
                    self.hidden |= dict.fromkeys(self.labels([tensor]) - self.hidden.keys(), SHARED_IS_WRITTEN)
            self._maker |= dict.fromkeys(map(self.memory, (*operation.created, *operation.written)))
        else:
            self._note_foreign_reads(here, operation.inputs)
            self._maker |= dict.fromkeys(map(self.memory, operation.created), here)
        if operation.written:
            self._note_write(here, operation.written, operation.name)
        return labels

    def _note_uses(self, here: str | None, operation: Operation) -> None:
        passed = {self.memory(tensor) for tensor, _ in self._arguments[here]} if here is not None else set()
        has_gradient = operation.name != "detach" and torch.is_grad_enabled()
        has_gradient &= any(tensor.requires_grad for tensor in operation.inputs)
        has_gradient &= any(tensor.is_floating_point() or tensor.is_complex() for tensor in operation.results)
        for tensor in operation.inputs:
            name = self._maker.get(self.memory(tensor))
            if name is not None and name != here and name not in self.labels([tensor]):
                self.obstacles[name] = Obstacle(
                    f"a tensor made inside of it is used outside ({caller()}), other than as its result; return it",
                    todo="let the module return it",
                )
            weight = self._weights.get(self.memory(tensor))
            if weight is None:
                continue
            if self.memory(tensor) not in passed:
                weight.users.add(here)
            for owner in weight.paths.keys() - {here}:
                if weight.is_buffer:
                    self._note_exchange(owner, "its buffers are used outside of it while the model runs")
                elif has_gradient and not weight.is_returned:
                    weight.used_outside.setdefault(owner, caller())

    def _note_foreign_reads(self, here: str, inputs: Sequence[torch.Tensor]) -> None:
        """Notes the memory that a module reads and does not hold, and whether others made it."""
        own = {self.memory(tensor) for tensor, _ in self._arguments[here]} | self._weights.keys()
        foreign = {memory for memory in map(self.memory, inputs) if memory not in own}
        foreign -= {memory for memory in foreign if self._maker.get(memory) == here}
        self._read |= dict.fromkeys(foreign, here)
        if foreign & self._maker.keys():
            self._note_read_between(here)

    def _note_write(self, here: str | None, tensors: Sequence[torch.Tensor], function: str) -> None:
        """Notes a write into parameters or arguments of other modules, or into what they read."""
        for memory in map(self.memory, tensors):
            weight = self._weights.get(memory)
            if weight is not None and not weight.is_buffer:
                for owner in weight.paths.keys() - {here}:
                    self._note_exchange(owner, "its parameters are written to while the model runs")
            if here is None and memory in self._read:
                self._note_read_between(self._read[memory])
            owner = self._passed.get(memory, here) or ""
            if owner != (here or ""):
                self.obstacles[owner] = Obstacle(
                    f"its input is written to in place ({function}, {caller()}) after it was called; write to a copy",
                    todo="write to a copy: x = x + 1 instead of x += 1",
                )

    def _note_read_between(self, name: str) -> None:
        what = "it reads what was made between modules and is not among its arguments"
        self._note_exchange(name, what, todo="pass it as an argument", is_local=True)

    def _note_exchange(self, name: str, what: str, *, todo: str = _PASS, is_local: bool = False) -> None:
        self.exchanging[name] = Obstacle(what, todo=todo)
        if is_local:
            self.local[name] = self.exchanging[name]

    def _note_alias(self, tensor: torch.Tensor) -> None:
        self._aliases.setdefault(self.memory(tensor), set()).add(id(tensor))
        self._alive.append(tensor)

    # After the run.

    @property
    def users(self) -> dict[int, frozenset[str | None]]:
        """By the id of a parameter or buffer of the model, the candidates that use it; None for uses between them."""
        weights = {id(weight): weight for weight in self._weights.values() if weight.users}.values()
        return {key: frozenset(weight.users) for weight in weights for key in weight.ids}

    def parted(self, *, may_share: bool) -> dict[str, frozenset[int]]:
        """Returns for each candidate the ids of its parameters that others alone use; an obstacle if it uses one, too.

        Args:
            may_share: Whether the use of such a parameter is no obstacle.
        """
        ids = {name: set(keys) for name, keys in self._shared.items()}
        for weight in self._weights.values():
            for name, path in weight.paths.items() if not weight.is_buffer else ():
                if name in weight.used_outside:
                    ids[name] |= weight.ids
                if not may_share and not weight.is_returned and name in weight.users and weight.ids & ids[name]:
                    place = f" ({weight.used_outside[name]})" if name in weight.used_outside else ""
                    what = f"shares {path} with the rest of the model{place}"
                    self.obstacles[name] = Obstacle(what, todo=_UNTIE, is_of_a_part=True)
        return {name: frozenset(keys) for name, keys in ids.items()}


def _without_graph(arguments: tuple[Any, Any]) -> Any:
    """Returns arguments that hold nothing of the run's autograd graph, such as activations.

    A leaf's ``AccumulateGrad`` node adds gradients on the stream that made it, as long as any graph holds it.
    """
    cuts: dict[int, torch.Tensor] = {}

    def cut(tensor: torch.Tensor) -> torch.Tensor:
        return tensor if tensor.is_leaf else cuts.setdefault(id(tensor), tensor.detach().requires_grad_())

    with torch._C._DisableTorchDispatch():
        return map_tensors(cut, arguments)
