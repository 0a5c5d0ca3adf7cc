"""Finding the modules of a model and which feeds which, by running it once and following its tensors."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import combinations
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nested._internal.nested_tensor import NestedTensor

from mosaic.cost.counting.operators import count_flops, kind_of
from mosaic.cost.counts import OperatorKind
from mosaic.engine.calls.hidden import compiled_code
from mosaic.engine.calls.obstacles import Obstacle, hides_tensors
from mosaic.engine.calls.thread_state import TRANSFORMED
from mosaic.engine.finding.exchanges import Exchanges
from mosaic.errors import MosaicError, UnsupportedModelError, said_by
from mosaic.find.restore import Objects, preserved
from mosaic.find.structure import flatten, is_opaque, tensors_in
from mosaic.find.trace import Operation, Tracer, caller
from mosaic.graph import ModuleGraph, ModuleNode
from mosaic.profiler import Subject

_WRAPPERS = ("DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule", "DataParallel", "OptimizedModule")
_SUBSTANCE, _TENTH, _MOST = 0.02, 0.1, 0.9  # shares of the whole
_CALL_ONCE = "call it once on a concatenated batch, or leave it where it is"
_TRANSFORMED = Obstacle(TRANSFORMED, remedy="call it on the whole batch, or leave it where it is")
_ALL = "all modules"  # which is no name
_HEAVY = (OperatorKind.MATMUL, OperatorKind.CONV, OperatorKind.ATTENTION)
_SCRIPTED = Obstacle("is scripted by torch.jit, which hides its calls", remedy="colocate the module that was scripted")
_COMPILED = Obstacle(
    "torch compiles it, and a lane of the host would run some of its calls uncompiled", remedy="leave it uncompiled"
)
_EXCLUDED = Obstacle("excluded by the caller")
Sample = Mapping[str, Any] | Sequence[Any] | torch.Tensor | Callable[[], Any]
"""One batch, given to the model as keywords, positions or its only argument; or a function that runs the model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The modules of a model, and what a traced step showed of each."""

    graph: ModuleGraph
    subjects: tuple[Subject, ...]  # the modules of the graph with their inputs
    left_out: dict[str, Obstacle]  # modules that look worth placing and cannot be
    exchanging: dict[str, Obstacle]  # modules that read or write more than arguments: they run where they are called
    local: dict[str, Obstacle]  # modules that exchange values with their caller otherwise: no other rank can run them
    in_place: dict[str, Obstacle]  # exchanging modules, and others that a lane of the host would run too late
    parted: dict[str, frozenset[int]]  # ids of a module's parameters that others use, such as a table of embeddings
    users: dict[int, frozenset[str | None]]  # by the id of a parameter or buffer; None for operations between modules


def find_modules(
    model: nn.Module,
    sample: Sample,
    *,
    include: Sequence[str] | None = None,
    exclude: Sequence[str] = (),
    may_share: bool = False,
) -> Finding:
    """Runs a model on ``sample`` and finds the modules that can be placed; the model stays as it was.

    Args:
        include: Names or patterns of the modules to place, but not of their parts; by default ``Course`` chooses.
        may_share: Lets a module use parameters that others use, too.

    Raises:
        UnsupportedModelError: There is no module to place, or a name or pattern fits none.
    """
    run, modules = runner_of(model, sample), dict(model.named_modules())
    batch = Objects(None if callable(sample) else sample)
    with preserved(model, sample), uncompiled():
        course = Course(model)
        try:
            with course.following(modules):
                run()
        except (MosaicError, torch.OutOfMemoryError, MemoryError):
            raise
        except Exception as error:  # the model's own code may raise anything
            raise ValueError(
                f"{type(model).__name__} raised {said_by(error)} with the sample; pass one batch that the model accepts"
            ) from error
        for pattern in (*(include or ()), *exclude):
            if not _matching(modules, [pattern]):
                some = ", ".join([*modules][1:9])
                raise UnsupportedModelError(f"no module is named {pattern}; the model's modules include {some}")
        names = course.chosen() if include is None else _matching(modules, include)
        scripted = {name: _SCRIPTED for name, each in modules.items() if isinstance(each, torch.jit.ScriptModule)}
        obstacles = course.obstacles | scripted | dict.fromkeys(_matching(modules, exclude), _EXCLUDED)
        left_out = scripted | {name: obstacles[name] for name in names if name in obstacles}
        free = [name for name in names if name not in obstacles]
        placed = [name for name in free if not any(name.startswith(f"{other}.") for other in free)]
        exchanges = Exchanges(model, {name: modules[name] for name in placed})
        batch.restore()  # of what the model has removed from it
        with exchanges.watching():
            run()
    compiled = {name: _COMPILED for name in placed if _is_compiled([*modules[name].modules()])}
    parted, calls = exchanges.parted(may_share=may_share), tuple(exchanges.calls.values())
    outer = [name for name in left_out if not any(other.startswith(f"{name}.") for other in placed)]
    left_out = {name: left_out[name] for name in outer if not any(name.startswith(f"{other}.") for other in outer)}
    if not calls:
        why = "".join(f"\n  - {name}: {reason.sentence}" for name, reason in left_out.items())
        raise UnsupportedModelError(
            f"found no module to place in this {type(model).__name__}; name them: colocate(..., modules=[...]){why}"
        )
    return Finding(
        graph=ModuleGraph(modules=tuple(map(_describe, calls)), edges=tuple(exchanges.edges.values())),
        subjects=calls,
        left_out=left_out,
        exchanging=exchanges.exchanging,
        local=exchanges.local,
        in_place=exchanges.hidden | exchanges.exchanging | compiled,
        parted=parted,
        users=exchanges.users,
    )


def _matching(names: Iterable[str], patterns: Sequence[str]) -> list[str]:
    return [name for name in names if name and any(fnmatchcase(name, pattern) for pattern in patterns)]


def runner_of(model: nn.Module, sample: Sample) -> Callable[[], Any]:
    if isinstance(sample, torch.Tensor):
        return lambda: model(sample)
    if isinstance(sample, Mapping):
        return lambda: model(**sample)
    if isinstance(sample, Sequence) and not isinstance(sample, str):
        return lambda: model(*sample)
    if callable(sample):
        return sample
    what = "a batch (a dict of keywords, a list, a tuple or a tensor), or a function that runs the model on one"
    raise TypeError(f"sample is a {type(sample).__name__}; give {what}")


def wrapped_parts(model: nn.Module) -> Iterator[tuple[str, str]]:
    """Yields the name and the wrapper of each part in a wrapper that cannot be colocated."""
    for name, module in model.named_modules():
        for kind in type(module).__mro__:
            is_branch = kind.__name__ == "OptimizedModule" and name  # which runs on its lane
            if kind.__name__ in _WRAPPERS and kind.__module__.startswith("torch.") and not is_branch:
                yield name, kind.__name__


def uncompiled() -> AbstractContextManager[Any]:
    """Lets compiled code run as it was written, because it shows neither its operators nor its lines."""
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()


def _is_compiled(parts: Sequence[nn.Module]) -> bool:
    is_whole = any(part._compiled_call_impl or type(part).__name__ == "OptimizedModule" for part in parts)
    return is_whole or compiled_code(parts) is not None


def _describe(call: Subject) -> ModuleNode:
    shapes = [("x".join(map(str, x.shape)) or "scalar", x.dtype) for x in tensors_in((call.args, call.kwargs))]
    return ModuleNode(
        name=call.name,
        num_parameters=_size(call.module),
        trainable=any(parameter.requires_grad for parameter in call.module.parameters()),
        inputs=tuple(f"{shape} {str(dtype).removeprefix('torch.')}" for shape, dtype in shapes),
    )


class Course(Tracer[int]):
    """Follows one run, and chooses the modules that a person would place.

    Labels are the modules that computed a tensor, a bit each, with all modules around them. Work is the forward
    operations of matrix products, convolutions and attention; a module of nothing else is bound by memory: glue.

    Boundaries are the model's own: its named children, and theirs. Lists and dicts of modules, which nobody calls, are
    looked through. Worth placing is a module with 2 % of the work or of the parameters. From the model downwards, a
    module is opened

    * that is a wrapper: it has 90 % of the work and several parts worth placing, which are no layers of one list;
    * in which two parts have a tenth of its work each, no value from one another, and none in common from within.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__(0)
        self._model, self._total = model, max(1, _size(model))
        self._called: dict[str, list[str]] = {name: [] for name, _ in model.named_modules()}  # the lines that call it
        self._bits = {name: 1 << index for index, name in enumerate(self._called)}
        self._around = [0]  # with each running module, its bit and those of all around it
        self._reading = [0]
        self._read = dict.fromkeys(self._called, 0)
        self._obstacles: dict[str, Obstacle] = {}
        self._flops: Counter[str] = Counter()

    def end(self, operation: Operation, labels: int) -> int:
        """Counts an operator for every running module; what it makes stems from its inputs and from these."""
        self._reading[-1] |= labels
        is_plain = isinstance(operation.operator, torch._ops.OpOverload)
        is_ragged = any(isinstance(tensor, NestedTensor) for tensor in operation.inputs)  # whose sizes are no numbers
        if self.running and is_plain and not is_ragged and kind_of(operation.operator) in _HEAVY:
            result = operation.results[0] if len(operation.results) == 1 else operation.results
            flops = count_flops(operation.operator, operation.args, operation.kwargs, result)
            self._flops.update(dict.fromkeys((_ALL, *self.running), flops))
        return labels | self._around[-1]

    def enter(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._called[name].append(caller())
        self._around.append(self._around[-1] | self._bits[name])
        self._reading.append(0)
        self._note_opaque(name, "takes", (args, kwargs))
        if torch._C._are_functorch_transforms_active():
            self._obstacles[name] = _TRANSFORMED

    def leave(self, name: str, result: Any) -> None:
        self._note_opaque(name, "returns", result)
        self._around.pop()
        labels = self._reading.pop()
        self._read[name] |= labels
        self._reading[-1] |= labels

    def _note_opaque(self, name: str, verb: str, value: Any) -> None:
        for leaf in flatten(value)[0]:
            if is_opaque(leaf):
                self._obstacles.setdefault(name, hides_tensors(verb, leaf))
            elif isinstance(leaf, torch.Tensor) and leaf.is_nested:
                self._obstacles.setdefault(name, Obstacle(f"it {verb} a nested tensor", remedy="make it nested inside"))

    # After the run.

    @property
    def obstacles(self) -> dict[str, Obstacle]:
        for name, places in self._called.items():
            if len(places) != 1:
                where = f" ({', '.join(dict.fromkeys(places))})" if places else ""
                often = Obstacle(f"called {len(places)} times in a step{where}", remedy=_CALL_ONCE)
                self._obstacles.setdefault(name, often)
        return self._obstacles

    def chosen(self) -> list[str]:
        return [part.name for part in self._cut("", self._model) if part.weight >= _SUBSTANCE]

    def _cut(self, path: str, module: nn.Module) -> list[_Part]:
        """Returns the parts of a module, the opened ones replaced by theirs."""
        cut: list[_Part] = []
        for part in self._parts(path, module):
            inner = self._cut(part.name, part.module) if part.is_compound else []
            cut += inner if self._opens(part, inner) else [part]
        return cut

    def _opens(self, part: _Part, inner: Sequence[_Part]) -> bool:
        compound = [each for each in inner if each.is_compound]
        apart = [a for a in compound if not any(a.is_listed_with(b) for b in compound if b is not a)]
        if part.work >= _MOST and sum(each.weight >= _SUBSTANCE for each in apart) > 1:
            return True
        heavy = [each for each in compound if each.work >= max(_SUBSTANCE, _TENTH * part.work)]
        return any(self._are_independent(a, b, inner) for a, b in combinations(heavy, 2))

    def _are_independent(self, a: _Part, b: _Part, inner: Sequence[_Part]) -> bool:
        """Returns True if no value goes from one into the other, or from a third into both."""
        others = [part for part in inner if part is not a and part is not b]
        is_between = self._reaches(a, b) or self._reaches(b, a)
        return not is_between and not any(self._reaches(other, a) and self._reaches(other, b) for other in others)

    def _reaches(self, first: _Part, second: _Part) -> bool:
        return bool(self._bits[first.name] & self._read[second.name])

    def _parts(self, path: str, module: nn.Module) -> list[_Part]:
        """Returns the called modules with parameters right below a module, or below containers in it."""
        parts: list[_Part] = []
        for name, child in module.named_children():
            inside = f"{path}.{name}" if path else name
            share = _size(child) / self._total
            if share and not self._called.get(inside):
                parts += self._parts(inside, child)
            elif share:
                work = self._flops[inside] / self._flops[_ALL] if self._flops[_ALL] else share
                parts.append(_Part(inside, child, work, max(work, share), any(map(_size, child.children()))))
        return parts


class _Part(NamedTuple):
    name: str
    module: nn.Module
    work: float  # its share of the work; that of the parameters where no work was counted
    weight: float  # its share of the work, or of the parameters if it is larger
    is_compound: bool  # it has children with parameters; a single layer gains nothing from company

    def is_listed_with(self, other: _Part) -> bool:
        """Returns True if both stand in one list and are of one class."""
        where, _, own = self.name.rpartition(".")
        return own.isdigit() and where == other.name.rpartition(".")[0] and type(self.module) is type(other.module)


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
