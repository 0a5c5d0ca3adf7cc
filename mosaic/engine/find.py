"""Finding the modules of a model and which feeds which, by running it once and following its tensors.

A ``TorchFunctionMode`` marks every tensor with the modules that it stems from, so that frozen modules are seen and
no graph has to be captured (autograd walks, fx, export and dynamo each fail on some models).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from mosaic.engine.structure import flatten, is_opaque, tensors_in
from mosaic.errors import UnsupportedModelError
from mosaic.graph import Edge, ModuleGraph, ModuleNode
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
    """

    graph: ModuleGraph
    subjects: tuple[Subject, ...]
    left_out: dict[str, str]


def find_modules(
    model: nn.Module, sample: Sample, *, include: Sequence[str] | None = None, exclude: Sequence[str] = ()
) -> Finding:
    """Runs a model once on ``sample`` and finds what can be placed; the model is left as it was found.

    Args:
        model: Any module tree.
        sample: One batch, or a function that runs the model on one.
        include: Names or patterns of the modules to place; by default the largest that are called once and hold
            2 % or more of the parameters.
        exclude: Names or patterns of modules to leave where they are.

    Raises:
        UnsupportedModelError: There is no module to place, or ``include`` names none.
    """
    run = _runner(model, sample)
    with preserved(model):
        counts = _count_calls(model, run)
        candidates, left_out = _choose(model, counts, include, exclude)
        calls, edges = _follow(model, candidates, run)
    for name in list(calls):
        reason = _obstacle(calls[name])
        if reason is not None:
            left_out[name] = reason
            del calls[name]
    if not calls:
        why = "".join(f"\n  - {name}: {reason}" for name, reason in left_out.items())
        raise UnsupportedModelError(
            f"found no module to place in this {type(model).__name__}; name them: colocate(..., modules=[...]){why}"
        )
    kept_edges = tuple(edge for edge in edges if edge.source in calls and edge.target in calls)
    nodes = tuple(_describe(call) for call in calls.values())
    return Finding(ModuleGraph(modules=nodes, edges=kept_edges), tuple(calls.values()), left_out)


def _runner(model: nn.Module, sample: Sample) -> Callable[[], Any]:
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


def _count_calls(model: nn.Module, run: Callable[[], Any]) -> dict[str, int]:
    """Runs the model and returns how often each of its modules is called."""
    counts: dict[str, int] = {name: 0 for name, _ in model.named_modules()}

    def counting(name: str) -> Callable[[Any, Any], None]:
        def hook(_module: Any, _args: Any) -> None:
            counts[name] += 1

        return hook

    handles = [module.register_forward_pre_hook(counting(name)) for name, module in model.named_modules()]
    try:
        run()
    finally:
        for handle in handles:
            handle.remove()
    return counts


def _choose(
    model: nn.Module, counts: dict[str, int], include: Sequence[str] | None, exclude: Sequence[str]
) -> tuple[dict[str, nn.Module], dict[str, str]]:
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
        wanted = list(_largest(model, "", counts, max(1, total)))
    chosen: dict[str, nn.Module] = {}
    left_out: dict[str, str] = {}
    for name in wanted:
        if _matches(name, exclude):
            left_out[name] = "excluded by the caller"
        elif counts[name] != 1:
            left_out[name] = f"called {counts[name]} times in a step; a placed module is called once"
        elif (shared := _shared_with_others(modules, name)) is not None:
            left_out[name] = f"shares {shared} with the rest of the model"
        else:
            chosen[name] = modules[name]
    return chosen, left_out


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _largest(module: nn.Module, prefix: str, counts: dict[str, int], total: int) -> Iterator[str]:
    """Yields the outermost called modules that are large, looking through containers and wrappers."""
    for name, child in module.named_children():
        path = f"{prefix}.{name}" if prefix else name
        share = sum(p.numel() for p in child.parameters()) / total
        if share < _SMALLEST_SHARE:
            continue
        if counts.get(path, 0) == 0 or share >= _WRAPPER_SHARE:
            inner = list(_largest(child, path, counts, total))
            if len(inner) > 1 or counts.get(path, 0) == 0:
                yield from inner
                continue
        yield path


def _shared_with_others(modules: Mapping[str, nn.Module], name: str) -> str | None:
    """Returns the name of a parameter or buffer that a module shares with something outside of it, or None."""
    inside = {id(part) for part in modules[name].modules()}
    others = {
        id(tensor)
        for path, module in modules.items()
        if id(module) not in inside and not path.startswith(f"{name}.")
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False))
    }
    return next((path for path, tensor in _tensors_of(modules[name]) if id(tensor) in others), None)


def _tensors_of(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()


class _Follower(TorchFunctionMode):
    """Marks tensors with the modules that they stem from."""

    def __init__(self) -> None:
        super().__init__()
        self._sources: dict[int, frozenset[str]] = {}
        self._alive: list[torch.Tensor] = []  # so that an id is never given out twice

    def sources(self, value: Any) -> frozenset[str]:
        """Returns the modules that the tensors in ``value`` stem from."""
        found = (self._sources.get(id(tensor), frozenset()) for tensor in tensors_in(value))
        return frozenset().union(*found)

    def mark(self, value: Any, sources: frozenset[str]) -> None:
        """Says where the tensors in ``value`` stem from."""
        for tensor in tensors_in(value):
            self._sources[id(tensor)] = sources
            self._alive.append(tensor)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Passes marks on from an operator's inputs to its results, and to what it writes into."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        sources = self.sources((args, kwargs))
        if sources and isinstance(result, torch.Tensor | tuple | list):
            self.mark(result, sources | self.sources(result))
        if sources and getattr(func, "__name__", "") == "__setitem__":
            self.mark(args[0], sources)
        return result


def _follow(
    model: nn.Module, candidates: dict[str, nn.Module], run: Callable[[], Any]
) -> tuple[dict[str, Subject], tuple[Edge, ...]]:
    """Runs the model and returns the candidates' calls in order, and the edges between them."""
    from mosaic.engine.thread_state import ThreadState

    calls: dict[str, Subject] = {}
    edges: dict[tuple[str, str], Edge] = {}
    follower = _Follower()

    def before(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            for source in sorted(follower.sources((args, kwargs))):
                edges.setdefault((source, name), Edge(source=source, target=name))
            calls[name] = Subject(name, module, args, kwargs, ThreadState.capture().applied)

        return hook

    def after(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, result: Any) -> None:
            follower.mark(result, frozenset({name}))

        return hook

    with _hooked(candidates, before, after), follower:
        run()
    return calls, tuple(edges.values())


@contextmanager
def _hooked(
    modules: dict[str, nn.Module],
    before: Callable[[str], Callable[..., None]],
    after: Callable[[str], Callable[..., None]],
) -> Iterator[None]:
    handles = []
    for name, module in modules.items():
        handles.append(module.register_forward_pre_hook(before(name), with_kwargs=True))
        handles.append(module.register_forward_hook(after(name)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _obstacle(call: Subject) -> str | None:
    """Returns why a module that was called cannot be placed, or None."""
    hidden = next((type(leaf).__name__ for leaf in flatten((call.args, call.kwargs))[0] if is_opaque(leaf)), None)
    return None if hidden is None else f"it takes a {hidden}, which may hide tensors"


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
