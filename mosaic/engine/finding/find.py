"""Finding the modules of a model and which feeds which, by running it once and following its tensors."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from itertools import combinations
from typing import Any

import torch
from torch import nn
from torch.nested._internal.nested_tensor import NestedTensor

from mosaic.cost.counting.operators import count_flops, kind_of
from mosaic.cost.counts import OperatorKind
from mosaic.engine.calls.obstacles import Obstacle, hides_tensors
from mosaic.engine.calls.thread_state import TRANSFORMED, is_transformed
from mosaic.engine.finding.exchanges import Exchanges
from mosaic.errors import MosaicError, UnsupportedModelError, said_by
from mosaic.find.restore import preserved
from mosaic.find.structure import flatten, is_opaque, tensors_in
from mosaic.find.trace import Operation, Tracer, caller
from mosaic.graph import ModuleGraph, ModuleNode
from mosaic.profiler import Subject

_WRAPPERS = (
    *("DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule", "DataParallel"),
    "OptimizedModule",  # a compiled branch runs on its lane
)
_SUBSTANCE, _TENTH, _MOST = 0.02, 0.1, 0.9  # shares of the whole
_CALL_ONCE = "call it once on a concatenated batch, or leave it where it is"
_TRANSFORMED = Obstacle(TRANSFORMED, todo="call it on the whole batch, or leave it where it is")
_ALL = "all modules"  # which is no name
_HEAVY = (OperatorKind.MATMUL, OperatorKind.CONV, OperatorKind.ATTENTION)
_SCRIPTED = Obstacle(
    "is scripted by torch.jit, which shows neither its calls nor its parts",
    todo="colocate the module that it was made from, or leave it where it is",
)
_EXCLUDED = Obstacle("excluded by the caller")
Sample = Mapping[str, Any] | Sequence[Any] | torch.Tensor | Callable[[], Any]
"""One batch, given to the model as keywords, positions or its only argument; or a function that runs the model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The modules of a model, and what a traced step showed of each."""

    graph: ModuleGraph
    """The modules that can be placed, and their dependencies."""
    subjects: tuple[Subject, ...]
    """The same modules with their inputs."""
    left_out: dict[str, Obstacle]
    """Modules that look worth placing and cannot be."""
    exchanging: dict[str, Obstacle] = field(default_factory=dict)
    """Modules that read or write more than arguments while the model runs, and therefore run where they are called."""
    local: dict[str, Obstacle] = field(default_factory=dict)
    """Modules that exchange values with their caller in another way, so that no other rank can run them."""
    in_place: dict[str, Obstacle] = field(default_factory=dict)
    """Those, and further ones that the host runs in place, where a lane runs a module later than its call."""
    parted: dict[str, frozenset[int]] = field(default_factory=dict)
    """Ids of a module's parameters that only others use, such as a table of embeddings that the model looks up before
    it calls its language model."""
    users: dict[int, frozenset[str | None]] = field(default_factory=dict)
    """By the id of a parameter or buffer, the modules that use it; None for operations between modules."""


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
        model: Any module tree.
        sample: One batch, or a function that runs the model on one.
        include: Names or patterns of the modules to place, but not of their parts; by default ``Choice`` chooses.
        exclude: Names or patterns of modules to leave where they are.
        may_share: Lets a module use parameters that others use, too.

    Raises:
        UnsupportedModelError: There is no module to place, or ``include`` names none.
    """
    run, modules = runner_of(model, sample), dict(model.named_modules())
    with preserved(model, sample), uncompiled():
        course = _watch(model, run)
        names = Choice(model, course).of_model() if include is None else _matching(modules, include)
        if include is not None and not names:
            raise UnsupportedModelError(
                f"no module is named {', '.join(include)}; the model's modules include {', '.join([*modules][1:9])}"
            )
        scripted = {name: _SCRIPTED for name, each in modules.items() if isinstance(each, torch.jit.ScriptModule)}
        obstacles = course.obstacles | scripted | dict.fromkeys(_matching(modules, exclude), _EXCLUDED)
        left_out = scripted | {name: obstacles[name] for name in names if name in obstacles}
        placed: dict[str, nn.Module] = {}
        for name in names:
            if name not in obstacles and not any(name.startswith(f"{other}.") for other in placed):
                placed[name] = modules[name]
        exchanges = Exchanges(model, placed)
        with exchanges.watching():
            run()
    parted = exchanges.parted(may_share=may_share)
    outer = [name for name in left_out if not any(other.startswith(f"{name}.") for other in placed)]
    left_out = {name: left_out[name] for name in outer if not any(name.startswith(f"{other}.") for other in outer)}
    if not exchanges.calls:
        why = "".join(f"\n  - {name}: {reason.sentence}" for name, reason in left_out.items())
        raise UnsupportedModelError(
            f"found no module to place in this {type(model).__name__}; name them: colocate(..., modules=[...]){why}"
        )
    return Finding(
        graph=ModuleGraph(
            modules=tuple(map(_describe, exchanges.calls.values())), edges=tuple(exchanges.edges.values())
        ),
        subjects=tuple(exchanges.calls.values()),
        left_out=left_out,
        exchanging=exchanges.exchanging,
        local=exchanges.local,
        in_place=exchanges.hidden | exchanges.exchanging,
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
    raise TypeError(
        f"sample is a {type(sample).__name__}; give a batch as a dict (keywords), a list or tuple (positions) or a "
        "tensor, or a function that runs the model on one"
    )


def wrapped_parts(model: nn.Module) -> Iterator[tuple[str, str]]:
    """Yields the name and the wrapper of each part in a wrapper that cannot be colocated."""
    for name, module in model.named_modules():
        for kind in type(module).__mro__:
            is_branch = kind.__name__ == "OptimizedModule" and name
            if kind.__name__ in _WRAPPERS and kind.__module__.startswith("torch.") and not is_branch:
                yield name, kind.__name__


def uncompiled() -> AbstractContextManager[Any]:
    """Lets compiled code run as it was written, because it shows neither its operators nor its lines."""
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()


def _watch(model: nn.Module, run: Callable[[], Any]) -> Course:
    """Runs the model, and follows all of its modules."""
    course = Course(model)
    with course.following(dict(model.named_modules())):
        try:
            run()
        except (MosaicError, torch.OutOfMemoryError, MemoryError):
            raise
        except Exception as error:  # the model's own code may raise anything
            raise ValueError(
                f"{type(model).__name__} raised {said_by(error)} when it was called with the sample; pass one batch "
                "that the model accepts"
            ) from error
    return course


def _describe(call: Subject) -> ModuleNode:
    tensors = tensors_in((call.args, call.kwargs))
    return ModuleNode(
        name=call.name,
        num_parameters=sum(p.numel() for p in call.module.parameters()),
        trainable=any(p.requires_grad for p in call.module.parameters()),
        inputs=tuple(
            f"{'x'.join(map(str, t.shape)) or 'scalar'} {str(t.dtype).removeprefix('torch.')}" for t in tensors
        ),
    )


# Choosing.


class Course(Tracer[int]):
    """Follows one run; labels are the modules that computed a tensor, a bit each, with all modules around them.

    Work is the forward operations of matrix products, convolutions and attention. Others are left out: they are bound
    by memory, and a module of nothing else is glue. The work of a part counts for all that it is part of.

    Attributes:
        called: For each module the lines that call it.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__(0)
        self.called: dict[str, list[str]] = {name: [] for name, _ in model.named_modules()}
        self._bits = {name: 1 << index for index, name in enumerate(self.called)}
        self._around = [0]  # with each running module, its bit and those of all around it
        self._reading = [0]
        self._read = dict.fromkeys(self.called, 0)
        self._obstacles: dict[str, Obstacle] = {}
        self._flops: Counter[str] = Counter()

    @property
    def obstacles(self) -> dict[str, Obstacle]:
        obstacles = {**self._obstacles}
        for name, places in self.called.items():
            where = f" ({', '.join(dict.fromkeys(places))})" if places else ""
            often = f"called {len(places)} times in a step{where}; a placed module is called once, on all its inputs"
            if len(places) != 1:
                obstacles.setdefault(name, Obstacle(often, todo=_CALL_ONCE))
        return obstacles

    def work(self, name: str, otherwise: float) -> float:
        """Returns the share of a module in the operations of all, or ``otherwise`` where none were counted."""
        return self._flops[name] / self._flops[_ALL] if self._flops[_ALL] else otherwise

    def reaches(self, first: str, second: str) -> bool:
        """Returns True if a value that ``first`` computed goes into ``second``, through whatever is between them."""
        return bool(self._bits[first] & self._read[second])

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
        self.called[name].append(caller())
        self._around.append(self._around[-1] | self._bits[name])
        self._reading.append(0)
        self._note_opaque(name, "takes", (args, kwargs))
        if is_transformed():
            self._obstacles[name] = _TRANSFORMED

    def leave(self, name: str, result: Any) -> None:
        self._note_opaque(name, "returns", result)
        self._around.pop()
        labels = self._reading.pop()
        self._read[name] |= labels
        self._reading[-1] |= labels

    def _note_opaque(self, name: str, verb: str, value: Any) -> None:
        opaque = next((leaf for leaf in flatten(value)[0] if is_opaque(leaf)), None)
        if opaque is not None:
            self._obstacles.setdefault(name, hides_tensors(verb, opaque))


class Choice:
    """Chooses among the modules of a model.

    Boundaries are the model's own: its named children, and theirs. Lists and dicts of modules, which nobody calls, are
    looked through. Worth placing is a module with 2 % of the work or of the parameters. From the model downwards, a
    module is opened

    * that is a wrapper: it has 90 % of the work and several parts worth placing, which are no layers of one list;
    * in which two parts, each with a tenth of its work, are independent of each other and need nothing in common from
      within. (Two are independent if no value goes from one into the other.)

    All else stays whole; above all a stack of layers, because cutting it gains nothing.
    """

    def __init__(self, model: nn.Module, course: Course) -> None:
        self._model = model
        self._course = course
        self._total = max(1, _size(model))

    def of_model(self) -> list[str]:
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
        """Returns True if neither feeds the other, and no other part feeds both."""
        reaches = self._course.reaches
        others = [part.name for part in inner if part is not a and part is not b]
        is_between = reaches(a.name, b.name) or reaches(b.name, a.name)
        return not is_between and not any(reaches(other, a.name) and reaches(other, b.name) for other in others)

    def _parts(self, path: str, module: nn.Module) -> list[_Part]:
        """Returns the called modules with parameters right below a module, or below containers in it."""
        parts: list[_Part] = []
        for name, child in module.named_children():
            inside = f"{path}.{name}" if path else name
            if not (size := _size(child)):
                continue
            if not self._course.called.get(inside):
                parts += self._parts(inside, child)
                continue
            share = size / self._total
            work = self._course.work(inside, share)
            is_compound = any(map(_size, child.children()))
            parts.append(_Part(inside, child, work=work, weight=max(work, share), is_compound=is_compound))
        return parts


@dataclass(frozen=True, slots=True, eq=False)
class _Part:
    """A module that may be placed."""

    name: str
    module: nn.Module
    work: float  # its share of the work
    weight: float  # that, or its share of the parameters if it is larger
    is_compound: bool  # it has children with parameters; a single layer gains nothing from company

    def is_listed_with(self, other: _Part) -> bool:
        """Returns True if both stand in one list and are of one class."""
        where, _, own = self.name.rpartition(".")
        return own.isdigit() and where == other.name.rpartition(".")[0] and type(self.module) is type(other.module)


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
