"""Finding the modules of a model and which feeds which, by running it once and following its tensors."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from mosaic.engine.calls.obstacles import Obstacle
from mosaic.engine.finding.choose import Choice, Course
from mosaic.engine.finding.exchanges import Exchanges
from mosaic.errors import MosaicError, UnsupportedModelError, said_by
from mosaic.find.restore import preserved
from mosaic.find.structure import tensors_in
from mosaic.graph import ModuleGraph, ModuleNode
from mosaic.profiler import Subject

_WRAPPERS = {
    "DistributedDataParallel": "wrap the branches in a process group of their own instead",
    "FullyShardedDataParallel": "colocate the plain model",
    "FSDPModule": "colocate the plain model",
    "DataParallel": "colocate the plain model",
    "OptimizedModule": "colocate the plain model and compile its branches in place: model.branch.compile()",
}
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
    """These, and further ones that the host runs in place, where a lane runs a module later than its call."""
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
        include: Names or patterns of the modules to place; by default those that ``Choice`` chooses.
        exclude: Names or patterns of modules to leave where they are.
        may_share: Lets a module use parameters that others use, too.

    Raises:
        UnsupportedModelError: There is no module to place, or ``include`` names none.
    """
    run = runner_of(model, sample)
    with preserved(model, sample), uncompiled():
        course = _watch(model, run)
        candidates = _Candidates(model, course, exclude=exclude, include=include)
        while candidates.modules:
            exchanges = Exchanges(model, candidates.modules)
            with exchanges.watching():
                run()
            parted = exchanges.parted(may_share=may_share)
            if not exchanges.obstacles:
                break
            candidates.drop(exchanges.obstacles)  # without them, what came through them comes from further up
    left_out = candidates.left_out()
    if not candidates.modules or not exchanges.calls:
        why = "".join(f"\n  - {name}: {reason.sentence}" for name, reason in left_out.items())
        raise UnsupportedModelError(
            f"found no module to place in this {type(model).__name__}; name them: colocate(..., modules=[...]){why}"
        )
    calls = exchanges.calls
    return Finding(
        graph=ModuleGraph(modules=tuple(map(_describe, calls.values())), edges=tuple(exchanges.edges.values())),
        subjects=tuple(calls.values()),
        left_out=left_out,
        exchanging=exchanges.exchanging,
        local=exchanges.local,
        in_place=exchanges.hidden | exchanges.exchanging,
        parted=parted,
        users=exchanges.users,
    )


class _Candidates:
    """Modules of a model that may be placed; an obstacle takes a module away.

    Where the obstacle is one of a part alone (a tied table of embeddings), another part that does most of the module's
    work is a candidate in its stead. Without ``include``, names or patterns, ``Choice`` chooses.
    """

    def __init__(
        self, model: nn.Module, course: Course, *, exclude: Sequence[str], include: Sequence[str] | None
    ) -> None:
        self._all = dict(model.named_modules())
        self._choice = Choice(model, course)
        self._is_free = include is None
        self._names = self._choice.of_model() if include is None else _matching(self._all, include)
        if include is not None and not self._names:
            raise UnsupportedModelError(
                f"no module is named {', '.join(include)}; the model's modules include {', '.join([*self._all][1:9])}"
            )
        scripted = [name for name, module in self._all.items() if isinstance(module, torch.jit.ScriptModule)]
        self._scripted = dict.fromkeys(scripted, _SCRIPTED)
        self._obstacles = course.obstacles | self._scripted | dict.fromkeys(_matching(self._all, exclude), _EXCLUDED)
        self.drop({})

    def drop(self, obstacles: Mapping[str, Obstacle]) -> None:
        """Takes modules away, and adds parts of theirs in their stead."""
        self._obstacles |= obstacles
        self.modules: dict[str, nn.Module] = {}  # that may be placed
        self._left_out = dict(self._scripted)
        names = [*self._names]
        for name in names:  # which grows meanwhile
            whole = next((other for other in self.modules if name.startswith(f"{other}.")), None)
            if whole is not None:
                todo = "to place the parts, name them without the whole: colocate(..., modules=[...])"
                self._left_out[name] = Obstacle(f"is a part of {whole}, which is placed as a whole", todo=todo)
            elif (obstacle := self._obstacles.get(name)) is None:
                self.modules[name] = self._all[name]
            else:
                self._left_out[name] = obstacle
                if obstacle.is_of_a_part and self._is_free:
                    names += self._choice.in_stead_of(name, self._all[name])

    def left_out(self) -> dict[str, Obstacle]:
        """Returns the obstacles of modules without a placed part, except those of parts of other such modules."""
        whole = [name for name in self._left_out if not any(placed.startswith(f"{name}.") for placed in self.modules)]
        return {
            name: self._left_out[name] for name in whole if not any(name.startswith(f"{other}.") for other in whole)
        }


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


def wrapped_parts(model: nn.Module) -> Iterator[tuple[str, str, str]]:
    """Yields the name, the wrapper and a remedy of each part in a wrapper that cannot be colocated."""
    for name, module in model.named_modules():
        for kind in type(module).__mro__:
            if kind.__name__ == "OptimizedModule" and name:  # a compiled branch runs on its lane
                continue
            if kind.__name__ in _WRAPPERS and kind.__module__.startswith("torch."):
                yield name, kind.__name__, _WRAPPERS[kind.__name__]


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
