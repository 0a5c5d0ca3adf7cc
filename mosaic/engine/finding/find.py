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
        include: Names or patterns of the modules to place; by default those that ``Choice`` chooses.
        exclude: Names or patterns of modules to leave where they are.
        may_share: Lets a module use parameters that others use, too.

    Raises:
        UnsupportedModelError: There is no module to place, or ``include`` names none.
    """
    run, modules = runner_of(model, sample), dict(model.named_modules())
    with preserved(model, sample), uncompiled():
        course = _watch(model, run)
        choice = Choice(model, course)
        names = choice.of_model() if include is None else _matching(modules, include)
        if include is not None and not names:
            raise UnsupportedModelError(
                f"no module is named {', '.join(include)}; the model's modules include {', '.join([*modules][1:9])}"
            )
        scripted = {name: _SCRIPTED for name, each in modules.items() if isinstance(each, torch.jit.ScriptModule)}
        obstacles = course.obstacles | scripted | dict.fromkeys(_matching(modules, exclude), _EXCLUDED)
        while True:
            queue, placed, left_out = [*names], dict[str, nn.Module](), {**scripted}
            for name in queue:  # which grows meanwhile
                whole = next((other for other in placed if name.startswith(f"{other}.")), None)
                obstacle = obstacles.get(name) if whole is None else _part_of(whole)
                if obstacle is None:
                    placed[name] = modules[name]
                    continue
                left_out[name] = obstacle
                if obstacle.is_of_a_part and include is None:  # such as a tied table of embeddings
                    queue += choice.in_stead_of(name, modules[name])
            exchanges = Exchanges(model, placed)
            with exchanges.watching():
                run()
            parted = exchanges.parted(may_share=may_share)
            if not exchanges.obstacles:
                break
            obstacles |= exchanges.obstacles  # without these modules, what came through them comes from further up
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


def _part_of(whole: str) -> Obstacle:
    todo = "to place the parts, name them without the whole: colocate(..., modules=[...])"
    return Obstacle(f"is a part of {whole}, which is placed as a whole", todo=todo)


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
