"""Following tensors from module to module through one run of a model.

A ``TorchFunctionMode`` marks every tensor with the modules that it stems from, so that frozen modules are seen and
no graph has to be captured (autograd walks, fx, export and dynamo each fail on some models).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from mosaic.engine.calls.caller import caller
from mosaic.engine.calls.obstacles import Obstacle, hides_tensors
from mosaic.engine.calls.structure import flatten, is_opaque, map_tensors, tensors_in
from mosaic.engine.calls.thread_state import ThreadState
from mosaic.engine.calls.torch_functions import look_up
from mosaic.engine.finding.candidates import UNTIE
from mosaic.engine.finding.exchanges import Exchanges
from mosaic.engine.finding.remarks import Remark, Remarks
from mosaic.graph import Edge
from mosaic.profiler import Subject

_RESULTS = (torch.Tensor, tuple, list)


class _Follower(TorchFunctionMode):
    """Marks tensors with the modules that they stem from.

    Attributes:
        obstacles: Candidates that reach others, or are reached, by more than arguments and results; with the reason.
        remarks: What the user should know about candidates that can be placed.
        exchanges: What the candidates exchange with the operations between them, other than by arguments and results.
    """

    def __init__(self, candidates: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self.obstacles: dict[str, Obstacle] = {}
        self.exchanges = Exchanges(candidates)
        self.remarks = Remarks(candidates)
        self._places: dict[int, str] = {}
        self._owners: dict[int, dict[str, str]] = {}
        for name, module in candidates.items():
            for path, parameter in module.named_parameters():
                self._owners.setdefault(id(parameter), {})[name] = path
        self._used: dict[str, set[int]] = {name: set() for name in candidates}
        self._used_outside: dict[str, set[int]] = {name: set() for name in candidates}
        self._running: list[str] = []
        self._inside: dict[int, str] = {}  # made in a candidate and, so far, not returned by it
        self._sources: dict[int, frozenset[str]] = {}
        self._alive: list[torch.Tensor] = []  # so that an id is never given out twice

    def sources(self, value: Any) -> frozenset[str]:
        """Returns the modules that the tensors in ``value`` stem from."""
        found = (self._sources.get(id(tensor), frozenset()) for tensor in tensors_in(value))
        return frozenset().union(*found)

    def bytes_from(self, value: Any) -> Counter[str]:
        """Returns the bytes of the tensors in ``value`` that stem from each module; of several, for each."""
        found: Counter[str] = Counter()
        for tensor in tensors_in(value):
            for source in self._sources.get(id(tensor), ()):
                found[source] += tensor.numel() * tensor.element_size()
        return found

    def mark(self, value: Any, sources: frozenset[str]) -> None:
        """Says where the tensors in ``value`` stem from."""
        for tensor in tensors_in(value):
            self._sources[id(tensor)] = sources
            self._alive.append(tensor)

    def enter(self, name: str, arguments: Any) -> None:
        """A candidate begins to run."""
        given = tensors_in(arguments)
        self._note_opaque(name, "takes", arguments)
        self._running.append(name)
        self.exchanges.enter(name, given)
        self.remarks.enter(name, given, self.sources(arguments))

    def leave(self, name: str, result: Any) -> None:
        """A candidate has returned ``result``."""
        self._note_opaque(name, "returns", result)
        self._running.remove(name)
        self.exchanges.leave(name)
        for tensor in tensors_in(result):
            self._inside.pop(id(tensor), None)
            self._owners.pop(id(tensor), None)  # a parameter that it returns is a result like others
        self.mark(result, frozenset({name}))

    def _note_opaque(self, name: str, verb: str, value: Any) -> None:
        hidden = next((leaf for leaf in flatten(value)[0] if is_opaque(leaf)), None)
        if hidden is not None:
            self.obstacles[name] = hides_tensors(verb, hidden)

    def parted(self, shared: Mapping[str, Collection[int]], *, may_share: bool) -> dict[str, frozenset[int]]:
        """Returns for each candidate the ids of its parameters that others alone use; an obstacle if it uses one, too.

        Args:
            shared: For each candidate the ids of parameters that belong to something outside of it as well.
            may_share: Whether using such a parameter is no obstacle.
        """
        for key, owners in self._owners.items():
            for name, path in owners.items():
                if may_share or key not in self._used[name]:
                    continue
                place = f" ({self._places[key]})" if key in self._places else ""
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

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Passes marks on from an operator's inputs to its results, and to what it writes into."""
        kwargs = kwargs or {}
        does = look_up(func)
        if does.reads:
            return func(*args, **kwargs)
        inputs, here = tensors_in((args, kwargs)), self._running[-1] if self._running else None
        ran = self.remarks.watching(here, args, inputs, self.sources((args, kwargs)))
        result = func(*args, **kwargs)
        ran(func, kwargs)
        results = tensors_in(result) if isinstance(result, _RESULTS) else []
        self._check(inputs, results)
        self.exchanges.note(here, func, args, kwargs, results, stems=lambda tensor: bool(self._sources.get(id(tensor))))
        sources = self.sources((args, kwargs))
        self.remarks.note_read(func, sources, here)
        if sources and isinstance(result, _RESULTS):
            self.mark(result, sources | self.sources(result))
        if sources and does.name == "__setitem__":
            self.mark(args[0], sources)
        return result

    def _check(self, inputs: list[torch.Tensor], results: list[torch.Tensor]) -> None:
        here = self._running[-1] if self._running else None
        for tensor in inputs:
            name = self._inside.get(id(tensor), here)
            if name is not None and name != here:
                self.obstacles[name] = Obstacle(
                    f"a tensor made inside of it is used outside ({caller()}), other than as its result; return it",
                    todo="let the module return it",
                )
            for owner in self._owners.get(id(tensor), ()):
                if owner == here:
                    self._used[owner].add(id(tensor))
                elif any(result.requires_grad for result in results):
                    self._used_outside[owner].add(id(tensor))
                    self._places.setdefault(id(tensor), caller())
        if here is not None:
            came = {id(tensor) for tensor in inputs}
            for tensor in results:
                if id(tensor) not in came:
                    self._inside[id(tensor)] = here
                    self._alive.append(tensor)


@dataclass(frozen=True, slots=True)
class Followed:
    """What one run showed."""

    calls: dict[str, Subject]
    """The candidates' calls, in order."""
    edges: tuple[Edge, ...]
    """Which feeds which."""
    obstacles: dict[str, Obstacle]
    """Who cannot be placed, with the reason."""
    exchanges: Exchanges
    """What they exchange with the operations between them, other than by arguments and results."""
    parted: dict[str, frozenset[int]]
    """For each candidate the ids of its parameters that others alone use, such as an embedding table."""
    remarks: tuple[Remark, ...]
    """What the user should know about who can be placed."""
    places: dict[str, str]
    """For each candidate the line that calls it."""


def follow(
    candidates: dict[str, nn.Module],
    run: Callable[[], Any],
    shared: Mapping[str, Collection[int]] | None = None,
    *,
    may_share: bool = False,
) -> Followed:
    """Runs the model and follows what its candidates get and give.

    Args:
        candidates: Modules by name.
        run: Runs the model once.
        shared: For each candidate the ids of parameters that belong to something outside of it as well.
        may_share: Whether using such a parameter is no obstacle.
    """
    calls: dict[str, Subject] = {}
    places: dict[str, str] = {}
    edges: dict[tuple[str, str], Edge] = {}
    follower = _Follower(candidates)

    def before(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            for source, num_bytes in sorted(follower.bytes_from((args, kwargs)).items()):
                edges.setdefault((source, name), Edge(source=source, target=name, num_bytes=num_bytes))
            places[name] = caller()
            calls[name] = Subject(name, module, args, kwargs, ThreadState.capture().applied)
            follower.enter(name, (args, kwargs))

        return hook

    def after(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, result: Any) -> None:
            follower.leave(name, result)

        return hook

    with _hooked(candidates, before, after), follower:
        run()
    calls = _cut_off(calls)
    parted = follower.parted(shared or {}, may_share=may_share)
    return Followed(
        calls,
        tuple(edges.values()),
        follower.obstacles | follower.remarks.obstacles,
        follower.exchanges,
        parted,
        follower.remarks.found,
        places,
    )


def _cut_off(calls: Mapping[str, Subject]) -> dict[str, Subject]:
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
