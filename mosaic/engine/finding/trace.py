"""The tracer: one run of a model shows which module feeds which, and what each reads and writes beside its arguments.

A ``TorchFunctionMode`` marks every tensor with the modules that it stems from, so that frozen modules are seen and
no graph has to be captured (autograd walks, fx, export and dynamo each fail on some models).

Foreign reads and writes decide the lane. A module that reads a tensor which its parent left in an attribute, whose
weights the parent updates while the model runs (a momentum encoder), or whose buffers the parent reads, has inputs and
outputs that its calls do not show. On a stream it keeps to the order of the user's own. On the host, where a lane runs
a module's Python later than its call, it runs where it is called.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from mosaic.engine.calls.caller import caller
from mosaic.engine.calls.hidden import Surroundings
from mosaic.engine.calls.obstacles import Obstacle, hides_tensors
from mosaic.engine.calls.structure import flatten, is_opaque, map_tensors, memory_of, tensors_in, version_of
from mosaic.engine.calls.thread_state import ThreadState
from mosaic.engine.calls.torch_functions import TorchFunction, look_up
from mosaic.graph import Edge
from mosaic.profiler import Subject

UNTIE = "untie the weights if they need not be tied, or name parts without them: colocate(..., modules=[...])"

_RESULTS = (torch.Tensor, tuple, list)
_READS = {"item", "tolist", "numpy", "is_nonzero", "nonzero", "__bool__", "__int__", "__float__", "__index__"}
_HOOKS = {
    "_forward_pre_hooks": "a forward pre-hook",
    "_forward_hooks": "a forward hook",
    "_backward_hooks": "a backward hook",
    "_backward_pre_hooks": "a backward pre-hook",
}
SHARED_IS_WRITTEN = Obstacle(
    "one of its results is written to in place, and another tensor has the same memory", todo="write to a copy"
)
_PURE_HOOKS = ("transformers.utils.output_capturing",)
"""Libraries whose hooks use their arguments and a context variable alone, in every model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Remark:
    """An observation about a module that is placed nevertheless."""

    module: str
    what: str
    where: str
    """File, line and function of the user's code; empty where ``what`` has it."""
    todo: str
    """The remedy."""
    matters: bool = False
    """It costs speed or puts numbers at risk: it is logged."""

    def __str__(self) -> str:
        return f"{self.seen}; {self.todo}"

    @property
    def seen(self) -> str:
        return f"{self.module}: {self.what}" + (f" ({self.where})" if self.where else "")


class Tracer(TorchFunctionMode):
    """Follows one run of a model; the maps below are by the name of a candidate.

    Args:
        model: The model.
        candidates: Modules that may be placed.

    Attributes:
        calls: The candidates' calls, in order.
        edges: By source and target.
        places: The line that calls each.
        obstacles: The reason why a candidate cannot be placed.
        in_order: What a module exchanges beside arguments and results.
        late: Those of ``in_order`` with an exchange after the module's call.
        aside: Obstacles of modules that read results of others in this way.
        local: Obstacles of modules that read, or write into, what their caller holds: elsewhere they compute something
            else.
        hidden: Obstacles of modules whose attributes, or the variables that their code names, change while the model
            runs.
        users: By the id of a parameter or buffer of the model, the candidates that use it; None for operations between
            them.
    """

    def __init__(self, model: nn.Module, candidates: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self.calls: dict[str, Subject] = {}
        self.edges: dict[tuple[str, str], Edge] = {}
        self.places: dict[str, str] = {}
        self.obstacles: dict[str, Obstacle] = {}
        self.in_order: dict[str, str] = {}
        self.late: dict[str, str] = {}
        self.aside: dict[str, Obstacle] = {}
        self.local: dict[str, Obstacle] = {}
        self.hidden: dict[str, Obstacle] = {}
        self.users: dict[int, set[str | None]] = {}
        self._candidates = candidates
        self._surroundings: dict[str, Surroundings] = {}
        self._running: list[str] = []
        self._left: set[str] = set()
        self._arguments: dict[str, list[tuple[torch.Tensor, int | None]]] = {}  # with their versions at the call
        self._alive: list[torch.Tensor] = []  # so that neither an id nor an address is reused
        # By id: marks, tensors made in a candidate that has not returned them, and owners.
        self._sources: dict[int, frozenset[str]] = {}
        self._inside: dict[int, str] = {}
        self._own = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
        self._owners: dict[int, dict[str, str]] = {}
        self._buffer_paths: dict[int, tuple[str, str]] = {}
        # By memory: whose it is, what was made where, and what a module read that was neither passed nor its own.
        self._parameters: dict[int, str] = {}
        self._buffers: dict[int, str] = {}
        self._passed: dict[int, str] = {}
        self._aliases: dict[int, set[int]] = {}  # results of candidates and of operations between them, by id
        self._made_between: set[int] = set()
        self._made_inside: set[int] = set()
        self._read: dict[int, str] = {}
        self._data: set[int] = set()  # ids of results of ``.data``, into which torch does not count writes
        self._uncounted: set[int] = set()
        # Parameters that are used with gradients: in their candidate, outside of it, and where.
        self._used: dict[str, set[int]] = {name: set() for name in candidates}
        self._used_outside: dict[str, set[int]] = {name: set() for name in candidates}
        self._use_places: dict[int, str] = {}
        # Remarks, and reads of values that cost nothing unless another module is called after them.
        self._remarks: dict[tuple[str, str], Remark] = {}
        self._value_reads: dict[str, Remark] = {}
        self._before: dict[str, frozenset[str]] = {}  # all candidates that each one waits for
        for name, module in candidates.items():
            for path, parameter in module.named_parameters():
                self._owners.setdefault(id(parameter), {})[name] = path
                self._parameters[memory_of(parameter)] = name
            for path, buffer in module.named_buffers():
                self._buffer_paths[id(buffer)] = (name, path)
                self._buffers[memory_of(buffer)] = name
            self._note_hooks(name, module)
        self._parameters.pop(0, None)
        self._buffers.pop(0, None)

    @property
    def remarks(self) -> tuple[Remark, ...]:
        """Remarks about placed modules, in order of appearance."""
        return tuple(self._remarks.values())

    # Calls.

    def begin(self) -> None:
        """The model begins to run."""
        self._surroundings = {name: Surroundings(module) for name, module in self._candidates.items()}

    def end(self) -> None:
        """It has run."""
        for name in self.calls:
            self._compare_surroundings(name)
        self._surroundings.clear()

    def _compare_surroundings(self, name: str) -> None:
        with torch._C.DisableTorchFunction():
            changed = self._surroundings[name].changed() if name not in self.hidden else None
        if changed is not None:
            self.hidden[name] = Obstacle(f"{changed}, changes while the model runs", todo="pass it as an argument")

    def enter(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A candidate begins to run."""
        self._compare_surroundings(name)
        tensors = tensors_in((args, kwargs))
        num_bytes: Counter[str] = Counter()
        for tensor in tensors:
            for source in self._sources.get(id(tensor), ()):
                num_bytes[source] += tensor.numel() * tensor.element_size()
        for source, count in sorted(num_bytes.items()):
            self.edges.setdefault((source, name), Edge(source=source, target=name, num_bytes=count))
        self.places[name] = caller()
        self.calls[name] = Subject(name, module, args, kwargs, ThreadState.capture().applied)
        self._note_opaque(name, "takes", (args, kwargs))
        self._running.append(name)
        self._arguments[name] = [(tensor, version_of(tensor)) for tensor in tensors]
        if any(memory_of(tensor) in self._uncounted for tensor in tensors):
            self.in_order[name] = "its arguments are written to through .data before it is called"
        self._before[name] = frozenset(num_bytes).union(*(self._before[source] for source in num_bytes))
        for source in [source for source in self._value_reads if source not in self._before[name]]:
            self._remark(self._value_reads.pop(source))
        compiled = next((path for path, part in module.named_modules() if _is_compiled(part)), None)
        if compiled is not None:
            what = f"{compiled or 'it'} is compiled; it compiles on its lane"
            todo = "torch.compile belongs there: on what is placed, as model.branch.compile(), not on the model"
            self._remark(Remark(module=name, what=what, where=caller(), todo=todo))
        for tensor in tensors:
            self._passed[memory_of(tensor)] = name
        self._passed.pop(0, None)
        self._alive.extend(tensors)

    def leave(self, name: str, result: Any) -> None:
        """A candidate has returned."""
        self._note_opaque(name, "returns", result)
        self._running.remove(name)
        self._left.add(name)
        self._compare_surroundings(name)
        if any(version_of(tensor) != version for tensor, version in self._arguments.pop(name)):
            self.in_order[name] = "it writes into its arguments"
            self.local[name] = Obstacle(self.in_order[name], todo="let it write to a copy")
        tensors = tensors_in(result)
        for tensor in tensors:
            self._inside.pop(id(tensor), None)
            self._owners.pop(id(tensor), None)  # a parameter that it returns is a result like others
        self._mark(tensors, frozenset({name}), shown=True)

    # Operations.

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs an operation and records it."""
        kwargs = kwargs or {}
        does = look_up(func)
        if does.reads:
            return func(*args, **kwargs)
        here = self._running[-1] if self._running else None
        inputs = tensors_in((args, kwargs))
        sources = self._sources_of(inputs)
        versions = [(tensor, tensor._version) for tensor in inputs if id(tensor) in self._buffer_paths]
        result = func(*args, **kwargs)
        results = tensors_in(result) if isinstance(result, _RESULTS) else []
        self._note_buffer_writes(here, versions)
        if does.replaces(kwargs) and not sources:  # writes of values from a lane are ordered behind all lanes
            self._note_write_to_argument(here, does.name, args, kwargs)
        self._note_uses(here, inputs, results)
        self._note_exchanges(here, does, args, kwargs, results)
        if sources and here is None and does.name in _READS:
            self._note_value_read(does.name, sources)
        if sources and results:
            self._mark(results, sources | self._sources_of(results), shown=here is None)
        if sources and does.name == "__setitem__":
            self._mark(tensors_in(args[0]), sources)
        return result

    def _sources_of(self, tensors: Sequence[torch.Tensor]) -> frozenset[str]:
        return frozenset().union(*(self._sources.get(id(tensor), frozenset()) for tensor in tensors))

    def _mark(self, tensors: Sequence[torch.Tensor], sources: frozenset[str], *, shown: bool = False) -> None:
        self._sources.update((id(tensor), sources) for tensor in tensors)
        for tensor in tensors if shown else ():
            self._aliases.setdefault(memory_of(tensor), set()).add(id(tensor))
        self._alive.extend(tensors)

    def _note_uses(self, here: str | None, inputs: list[torch.Tensor], results: list[torch.Tensor]) -> None:
        """Notes uses of parameters and buffers, and of tensors that a module made and did not return."""
        passed = {id(tensor) for tensor, _ in self._arguments[here]} if here is not None else set()
        for tensor in inputs:
            key = id(tensor)
            if key in self._own and key not in passed:
                self.users.setdefault(key, set()).add(here)
            name = self._inside.get(key, here)
            if name is not None and name != here:
                self.obstacles[name] = Obstacle(
                    f"a tensor made inside of it is used outside ({caller()}), other than as its result; return it",
                    todo="let the module return it",
                )
            for owner in self._owners.get(key, ()):
                if owner == here:
                    self._used[owner].add(key)
                elif any(result.requires_grad for result in results):
                    self._used_outside[owner].add(key)
                    self._use_places.setdefault(key, caller())
        if here is not None:
            old = {id(tensor) for tensor in inputs}
            made = [tensor for tensor in results if id(tensor) not in old]
            self._inside.update((id(tensor), here) for tensor in made)
            self._alive.extend(made)

    def _note_exchanges(
        self, here: str | None, does: TorchFunction, args: Any, kwargs: Any, results: Sequence[torch.Tensor]
    ) -> None:
        """Notes what a module and the operations around it read and write of each other."""
        inputs, written = tensors_in((args, kwargs)), does.written(args, kwargs)
        old = {id(tensor) for tensor in inputs}
        made = [tensor for tensor in results if id(tensor) not in old]
        if does.name == "__get__:data":
            self._data.update(map(id, made))
        self._uncounted |= {memory_of(tensor) for tensor in written if id(tensor) in self._data}
        self._alive.extend((*made, *written))
        if here is None:
            self._note_write_to_shared(written)
            self._made_between |= {memory_of(tensor) for tensor in (*made, *written)}
            readers = {self._read[memory_of(tensor)] for tensor in written if memory_of(tensor) in self._read}
        else:
            foreign = self._foreign_reads(here, inputs)
            readers = {here} if foreign else set()
            if any(self._sources.get(id(tensor)) for tensor in inputs if memory_of(tensor) in foreign):
                reason = "it reads a result of another module that is not among its arguments"
                self.aside[here] = Obstacle(reason, todo="pass it as an argument")
            self._made_inside |= {memory_of(tensor) for tensor in made}
        for name in readers:
            self._note_exchange(name, "it reads what was made between modules and is not among its arguments")
            self.local[name] = Obstacle(self.in_order[name], todo="pass it as an argument")
        if does.name == "__set__:data" and self._owners.get(id(args[0])):
            written = [args[0]]
            self._parameters[memory_of(args[0])] = next(iter(self._owners[id(args[0])]))
        for tensor in written:
            owner = self._parameters.get(memory_of(tensor), here)
            if owner is not None and owner != here:
                self._note_exchange(owner, "its parameters are written to while the model runs")
        for tensor in inputs:
            owner = self._buffers.get(memory_of(tensor), here)
            if owner is not None and owner != here:
                self._note_exchange(owner, "its buffers are used outside of it while the model runs")

    def _note_write_to_shared(self, written: Sequence[torch.Tensor]) -> None:
        for tensor in written:
            if memory_of(tensor) and len(self._aliases.get(memory_of(tensor), ())) > 1:
                for source in self._sources_of([tensor]):
                    self.hidden.setdefault(source, SHARED_IS_WRITTEN)

    def _foreign_reads(self, here: str, inputs: Sequence[torch.Tensor]) -> set[int]:
        """Notes the memory that a module reads and does not hold; returns what was made or written between modules."""
        own = {0, *(memory_of(tensor) for tensor, _ in self._arguments[here])}
        read = {memory_of(tensor) for tensor in inputs} - own - self._parameters.keys() - self._buffers.keys()
        read -= self._made_inside
        self._read.update(dict.fromkeys(read, here))
        return read & self._made_between

    def _note_exchange(self, name: str, what: str) -> None:
        self.in_order[name] = what
        if name in self._left:
            self.late[name] = what

    def _note_opaque(self, name: str, verb: str, value: Any) -> None:
        hidden = next((leaf for leaf in flatten(value)[0] if is_opaque(leaf)), None)
        if hidden is not None:
            self.obstacles[name] = hides_tensors(verb, hidden)

    # Remarks.

    def _remark(self, remark: Remark) -> None:
        self._remarks.setdefault((remark.module, remark.what), remark)

    def _note_value_read(self, name: str, sources: frozenset[str]) -> None:
        what = f"the code between modules looks at a value of its result ({name}), and waits for its lane there"
        todo = "move that behind the last module's call, or stay on tensors (torch.where)"
        for source in sources:
            remark = Remark(module=source, what=what, where=caller(), todo=todo, matters=True)
            self._value_reads.setdefault(source, remark)

    def _note_write_to_argument(self, here: str | None, name: str, args: Any, kwargs: Any) -> None:
        target = kwargs.get("out") if kwargs.get("out") is not None else next(iter(args), None)
        owner = self._passed.get(memory_of(target)) if isinstance(target, torch.Tensor) else None
        if owner is not None and owner != here:
            self.obstacles[owner] = Obstacle(
                f"its input is written to in place ({name}, {caller()}) after it was called; write to a copy",
                todo="write to a copy: x = x + 1 instead of x += 1",
            )

    def _note_buffer_writes(self, here: str | None, versions: Sequence[tuple[torch.Tensor, int]]) -> None:
        for tensor, version in versions:
            owner, path = self._buffer_paths[id(tensor)]
            if tensor._version != version and owner != here:
                what = f"its buffer {path} is updated outside of it"
                todo = "update it before the model's call, or exclude the module: colocate(..., exclude=[...])"
                self._remark(Remark(module=owner, what=what, where=caller(), todo=todo, matters=True))

    def _note_hooks(self, name: str, module: nn.Module) -> None:
        paths: dict[tuple[str, str], list[str]] = {}
        for path, part in module.named_modules():
            for attribute, text in _HOOKS.items():
                for hook in getattr(part, attribute).values():
                    if getattr(hook, "__module__", None) not in _PURE_HOOKS:
                        paths.setdefault((text, _place_of(hook)), []).append(path or "it")
        for (text, where), (first, *others) in paths.items():
            having = f"{first} and {len(others)} more have" if others else f"{first} has"
            what = f"{having} {text}, which will run on the lane's thread"
            todo = "let it touch nothing but its arguments, or exclude the module"
            self._remark(Remark(module=name, what=what, where=where, todo=todo))

    # After the run.

    def parted(self, shared: Mapping[str, Collection[int]], *, may_share: bool) -> dict[str, frozenset[int]]:
        """Returns for each candidate the ids of its parameters that others alone use; an obstacle if it uses one, too.

        Args:
            shared: For each candidate the ids of parameters that belong to a module outside of it as well.
            may_share: Whether the use of such a parameter is no obstacle.
        """
        for key, owners in self._owners.items():
            for name, path in owners.items():
                if may_share or key not in self._used[name]:
                    continue
                place = f" ({self._use_places[key]})" if key in self._use_places else ""
                if key in shared.get(name, ()):
                    self.obstacles[name] = Obstacle(
                        f"shares {path} with the rest of the model{place}", todo=UNTIE, is_of_a_part=True
                    )
                elif key in self._used_outside[name]:
                    self.obstacles[name] = Obstacle(
                        f"its parameter {path} is used outside of it too{place}",
                        todo="move that use into the module, or leave it where it is",
                        is_of_a_part=True,
                    )
        return {name: frozenset(self._used_outside[name]) | frozenset(shared.get(name, ())) for name in self._used}


def trace(model: nn.Module, candidates: Mapping[str, nn.Module], run: Callable[[], Any]) -> Tracer:
    """Runs the model and follows the arguments and results of its candidates."""
    tracer = Tracer(model, candidates)
    with _hooked(candidates, tracer), tracer:
        tracer.begin()
        run()
        tracer.end()
    tracer.calls = _without_graph(tracer.calls)
    return tracer


def _without_graph(calls: Mapping[str, Subject]) -> dict[str, Subject]:
    """Returns the calls with arguments that hold nothing of the run's autograd graph, such as activations.

    A leaf's ``AccumulateGrad`` node adds gradients on the stream that made it, as long as any graph holds it.
    """
    cuts: dict[int, torch.Tensor] = {}

    def cut(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_leaf:
            return tensor
        if id(tensor) not in cuts:
            cuts[id(tensor)] = tensor.detach().requires_grad_()
        return cuts[id(tensor)]

    return {
        name: replace(call, args=map_tensors(cut, call.args), kwargs=map_tensors(cut, call.kwargs))
        for name, call in calls.items()
    }


@contextmanager
def _hooked(candidates: Mapping[str, nn.Module], tracer: Tracer) -> Iterator[None]:
    def before(name: str) -> Callable[..., None]:
        return lambda module, args, kwargs: tracer.enter(name, module, args, kwargs)

    def after(name: str) -> Callable[..., None]:
        return lambda module, args, result: tracer.leave(name, result)

    handles = []
    for name, module in candidates.items():
        handles.append(module.register_forward_pre_hook(before(name), with_kwargs=True))
        handles.append(module.register_forward_hook(after(name)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _is_compiled(part: nn.Module) -> bool:
    return getattr(part, "_compiled_call_impl", None) is not None or type(part).__name__ == "OptimizedModule"


def _place_of(function: Any) -> str:
    """Returns file, line and name of a function's definition, looking into partials and bound methods."""
    inner = getattr(function, "func", function)
    inner = getattr(inner, "__func__", inner)
    code = getattr(inner, "__code__", None) or getattr(type(inner).__call__, "__code__", None)
    if code is None:
        return f"{type(inner).__module__}.{type(inner).__qualname__}"
    return f"{code.co_filename}:{code.co_firstlineno} in {code.co_name}"
