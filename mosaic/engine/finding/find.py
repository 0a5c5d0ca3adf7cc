"""Finding the modules of a model and which feeds which, by running it once and following its tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from mosaic.engine.calls.caller import caller
from mosaic.engine.calls.obstacles import Obstacle
from mosaic.engine.calls.structure import tensors_in
from mosaic.engine.finding.follow import UNTIE, follow
from mosaic.engine.finding.remarks import Remark
from mosaic.engine.finding.work_counter import WorkCounter
from mosaic.errors import UnsupportedModelError
from mosaic.graph import ModuleGraph, ModuleNode
from mosaic.profiler import Subject, preserved

_SMALLEST_SHARE = 0.02
_WRAPPER_SHARE = 0.9

Sample = Mapping[str, Any] | Sequence[Any] | torch.Tensor | Callable[[], Any]
"""One batch, given to the model as keywords, positions or its only argument; or a function that runs the model."""


@dataclass(frozen=True, slots=True)
class Finding:
    """What a traced step showed.

    Attributes:
        graph: The modules that can be placed, and their dependencies.
        subjects: The same modules with the inputs that they got.
        left_out: Modules that look worth placing and cannot be, with the reason.
        in_order: Modules that read or write more than their arguments while the model runs, so that on streams they
            keep to the order of the user's own; with what it is.
        parted: For each module the ids of its parameters that only others use, such as a table of embeddings that the
            model looks up before it calls its language model.
        remarks: What the user should know about modules that can be placed.
        places: For each module the line that calls it.
    """

    graph: ModuleGraph
    subjects: tuple[Subject, ...]
    left_out: dict[str, Obstacle]
    in_order: dict[str, str] = field(default_factory=dict)
    parted: dict[str, frozenset[int]] = field(default_factory=dict)
    remarks: tuple[Remark, ...] = ()
    places: dict[str, str] = field(default_factory=dict)

    def forget_run(self) -> None:
        """Lets go of what the run left in the model, once no module is run alone any more."""
        for subject in self.subjects:
            if subject.seen is not None:
                subject.seen.forget()


def find_modules(
    model: nn.Module,
    sample: Sample,
    *,
    include: Sequence[str] | None = None,
    exclude: Sequence[str] = (),
    may_share: bool = False,
) -> Finding:
    """Runs a model once on ``sample`` and finds what can be placed; the model is left as it was found.

    Args:
        model: Any module tree.
        sample: One batch, or a function that runs the model on one.
        include: Names or patterns of the modules to place; by default the outermost that are called once and hold
            2 % or more of the parameters, or do 2 % or more of the forward's matrix products, convolutions and
            attention with parameters of their own.
        exclude: Names or patterns of modules to leave where they are.
        may_share: Whether a module may use parameters that others use, too.

    Raises:
        UnsupportedModelError: There is no module to place, or ``include`` names none.
    """
    run = runner_of(model, sample)
    with preserved(model, sample) as seen, uncompiled(model):
        called, work = _note_calls(model, run)
        candidates, left_out = _choose(model, called, work, include, exclude)
        shared = {name: _shared_parameters(model, module) for name, module in candidates.items()}
        followed = follow(candidates, run, shared, may_share=may_share)
        while followed.obstacles:  # without them, what came to others through them comes from further up
            left_out |= followed.obstacles
            candidates = {name: module for name, module in candidates.items() if name not in followed.obstacles}
            followed = follow(candidates, run, shared, may_share=may_share)
    calls = followed.calls
    if not calls:
        why = "".join(f"\n  - {name}: {reason}" for name, reason in left_out.items())
        raise UnsupportedModelError(
            f"found no module to place in this {type(model).__name__}; name them: colocate(..., modules=[...]){why}"
        )
    nodes = tuple(_describe(call) for call in calls.values())
    graph = ModuleGraph(modules=nodes, edges=followed.edges)
    return Finding(
        graph,
        tuple(replace(call, seen=seen) for call in calls.values()),
        left_out,
        followed.in_order,
        followed.parted,
        tuple(remark for remark in followed.remarks if remark.module in calls),
        followed.places,
    )


def runner_of(model: nn.Module, sample: Sample) -> Callable[[], Any]:
    """Returns what runs a model on a sample."""
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


def uncompiled(model: nn.Module) -> AbstractContextManager[Any]:
    """Lets compiled parts run their own code: what is compiled shows neither its operators nor its lines."""
    compiled = any(
        getattr(part, "_compiled_call_impl", None) is not None or type(part).__name__ == "OptimizedModule"
        for part in model.modules()
    )
    return torch.compiler.set_stance("force_eager") if compiled else nullcontext()


def _note_calls(model: nn.Module, run: Callable[[], Any]) -> tuple[dict[str, list[str]], WorkCounter]:
    """Runs the model and returns the lines at which each of its modules is called, and how much each works."""
    called: dict[str, list[str]] = {name: [] for name, _ in model.named_modules()}
    work = WorkCounter()
    with work.counting(model, lambda name: called[name].append(caller())):
        run()
    return called, work


def _choose(
    model: nn.Module,
    called: dict[str, list[str]],
    work: WorkCounter,
    include: Sequence[str] | None,
    exclude: Sequence[str],
) -> tuple[dict[str, nn.Module], dict[str, Obstacle]]:
    """Returns the modules to follow, and those that were passed over with the reason."""
    modules = dict(model.named_modules())
    if include is not None:
        wanted = [name for name in modules if name and _matches(name, include)]
        if not wanted:
            raise UnsupportedModelError(
                f"no module is named {', '.join(include)}; the model's modules include {', '.join(list(modules)[1:9])}"
            )
    else:
        total = sum(p.numel() for p in model.parameters())
        wanted = list(_largest(model, "", {name for name, at in called.items() if at}, max(1, total), work))
    chosen: dict[str, nn.Module] = {}
    left_out: dict[str, Obstacle] = {}
    for name in wanted:
        if _matches(name, exclude):
            left_out[name] = Obstacle("excluded by the caller")
        elif (whole := next((other for other in chosen if name.startswith(f"{other}.")), None)) is not None:
            left_out[name] = Obstacle(
                f"is a part of {whole}, which is placed as a whole",
                todo="nothing; or name the parts: colocate(..., modules=[...])",
            )
        elif len(called[name]) != 1:
            left_out[name] = _called_often(called[name])
        elif (buffer := _shared_buffer(model, modules[name])) is not None:
            left_out[name] = Obstacle(f"shares {buffer} with the rest of the model", todo=UNTIE)
        else:
            chosen[name] = modules[name]
    return chosen, left_out


def _called_often(places: Sequence[str]) -> Obstacle:
    where = f" ({', '.join(dict.fromkeys(places))})" if places else ""
    return Obstacle(
        f"called {len(places)} times in a step{where}; a placed module is called once, on all its inputs",
        todo="call it once on a concatenated batch, or leave it where it is",
    )


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _largest(module: nn.Module, prefix: str, called: set[str], total: int, work: WorkCounter) -> Iterator[str]:
    """Yields the outermost called modules that are large or do much, looking through containers and wrappers."""
    for name, child in module.named_children():
        path = f"{prefix}.{name}" if prefix else name
        share = sum(p.numel() for p in child.parameters()) / total
        if share == 0 or (path in called and max(share, work.share(path)) < _SMALLEST_SHARE):
            continue
        if path not in called or share >= _WRAPPER_SHARE:
            inner = list(_largest(child, path, called, total, work))
            if len(inner) > 1 or path not in called:
                yield from inner
                continue
        yield path


def _shared_parameters(model: nn.Module, module: nn.Module) -> frozenset[int]:
    """Returns the ids of parameters that a module shares with something outside of it."""
    others = {id(p) for part in _outside(model, module) for p in part.parameters(recurse=False)}
    return frozenset(id(parameter) for parameter in module.parameters()) & others


def _shared_buffer(model: nn.Module, module: nn.Module) -> str | None:
    """Returns the name of a buffer that a module shares with something outside of it, or None."""
    others = {id(b) for part in _outside(model, module) for b in part.buffers(recurse=False)}
    return next((path for path, buffer in module.named_buffers() if id(buffer) in others), None)


def _outside(model: nn.Module, module: nn.Module) -> list[nn.Module]:
    """Returns the parts of a model that are no parts of ``module``."""
    inside = {id(part) for part in module.modules()}
    return [part for part in model.modules() if id(part) not in inside]


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
