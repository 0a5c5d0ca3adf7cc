"""``mosaic.parallel`` on streams of a device: each name on its lane, and, where asked for, by CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn

from mosaic.backends.base import Backend
from mosaic.backends.streams.lanes import StreamLane
from mosaic.engine.calls.pieces import Piece, owner_of
from mosaic.engine.calls.placed_module import PlacedModule
from mosaic.engine.calls.structure import map_tensors
from mosaic.engine.graphs import Eager, StageBranch, StageGraphs
from mosaic.engine.graphs.branches import function_key
from mosaic.engine.streams.executor import StreamExecutor
from mosaic.engine.streams.order import HeldState
from mosaic.engine.streams.parallel_sharing import SharedMemory, is_compiled
from mosaic.engine.streams.tensor import join_tensor
from mosaic.errors import InvalidPlanError


class StreamPool:
    """The lanes of a block's names on one device; lives as long as the process.

    Attributes:
        executor: Runs calls on the lanes.
        graphs: The captured calls, or None.
    """

    def __init__(self, backend: Backend, slots: Mapping[str, tuple[int, ...]], *, cuda_graphs: bool) -> None:
        lanes = backend.open_lanes(slots.values())
        if lanes.streams is None:
            raise TypeError(f"the backend {backend.name!r} has no lanes on streams")
        self.executor = StreamExecutor(lanes.streams)
        self.graphs = StageGraphs(lanes.streams.api) if cuda_graphs else None
        self._shared = SharedMemory(self.executor.orders, settle=self.executor.settle)
        self._slots = slots
        self._sites: dict[tuple[str, int], PlacedModule] = {}

    def begin(self) -> None:
        """Opens a block: each piece waits for what the caller's stream was given so far, and for nothing else."""
        self._shared.begin()

    def end(self, *, failed: bool) -> None:
        """Makes the caller's stream wait for the lanes."""
        self._shared.end()
        if failed:
            self.executor.lanes.join()
        else:
            self.executor.settle()

    def call(self, name: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs a piece of work on the lane of its name."""
        if self.graphs is None:
            return self._launch(name, function, args, kwargs)
        site, order = self._site(name, owner_of(function)), self.executor.orders.of(self._lane(name))
        key = (name, function_key(function), torch.is_grad_enabled())
        with self._shared.unwatched(), self._shared.replaying(key, function, order) as used:
            run = partial(self._shared.watched, used, order, function)
            return self.executor.call(site, partial(self._replayed, self.graphs, site, run), args, kwargs)

    def call_all(self, calls: Mapping[str, Piece]) -> dict[str, Any]:
        """Runs pieces of work side by side; as one graph, launched on the caller's stream, if graphs are on."""
        if self.graphs is None:
            return {name: self.call(name, *piece) for name, piece in calls.items()}
        branches = [
            StageBranch(
                name=name,
                run=function,
                args=map_tensors(join_tensor, args),
                kwargs=map_tensors(join_tensor, kwargs),
                lane=self._lane(name),
                module=owner_of(function),
            )
            for name, (function, args, kwargs) in calls.items()
        ]
        self.executor.settle()
        with self._shared.unwatched():
            results = self.graphs.run(tuple(calls), branches)
        return {
            branch.name: self._launch(branch.name, branch.run, branch.args, branch.kwargs)
            if isinstance(result, Eager)
            else result
            for branch, result in zip(branches, results, strict=True)
        }

    def _launch(self, name: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        site, order, run = self._site(name, owner_of(function)), self.executor.orders.of(self._lane(name)), function
        if isinstance(function, nn.Module):
            self._shared.note_module(function, order)
        else:
            run = partial(self._shared.watched, set(), order, function)
        with self._shared.unwatched(), self._shared.alone() if is_compiled(function) else nullcontext():
            return self.executor.call(site, run, args, kwargs)

    def _replayed(
        self, graphs: StageGraphs, site: PlacedModule, run: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> Any:
        lane = self._lane(site.name)
        return graphs.call(
            StageBranch(name=site.name, run=run, args=args, kwargs=kwargs, lane=lane, module=site.module)
        )

    def _site(self, name: str, module: nn.Module | None) -> PlacedModule:
        key = (name, id(module))
        site = self._sites.get(key)
        if site is None or site.module is not module:
            site = self._sites[key] = PlacedModule(name, module, self._lane(name))
            self.executor.held[site] = HeldState(None)  # operations of a block are seen
        return site

    def _lane(self, name: str) -> StreamLane:
        if name not in self._slots:
            raise InvalidPlanError(f"{name!r} is not in the plan of this block; it has {', '.join(self._slots)}")
        return self.executor.lanes.lane(self._slots[name])
