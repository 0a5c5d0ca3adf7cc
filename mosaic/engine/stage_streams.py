"""``mosaic.stage`` on streams of a device: each name on its lane, and, where asked for, by CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import nn

from mosaic.backends.base import Backend
from mosaic.backends.streams.lanes import StreamLane, StreamLanes
from mosaic.engine.calls.placed_module import Site
from mosaic.engine.calls.torch_functions import replace
from mosaic.engine.graphs import Branch, Eager, StageGraphs
from mosaic.engine.stage import Piece, owner_of
from mosaic.engine.streams.executor import StreamExecutor
from mosaic.engine.streams.tensor import join_tensor
from mosaic.errors import InvalidPlanError


class StreamPool:
    """The lanes of a stage's names on one device; lives as long as the process.

    Attributes:
        executor: What runs calls on the lanes.
        graphs: What was captured, or None.
    """

    def __init__(self, backend: Backend, slots: Mapping[str, tuple[int, ...]], *, graphs: bool) -> None:
        lanes = backend.open_lanes(slots.values())
        if not isinstance(lanes, StreamLanes):
            raise TypeError(f"the backend {backend.name!r} has no lanes on streams")
        self.executor = StreamExecutor(lanes)
        self.graphs = StageGraphs(lanes.api) if graphs else None
        self._slots = slots
        self._sites: dict[tuple[str, int], Site] = {}

    def begin(self) -> None:
        """Opens a block: each piece waits for what the caller's stream was given so far, and for nothing else."""

    def end(self, *, failed: bool) -> None:
        """Makes the caller's stream wait for the lanes."""
        if failed:
            self.executor.lanes.join()
        else:
            self.executor.settle()

    def call(self, name: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs a piece of work on the lane of its name."""
        module = owner_of(function)
        site = self._site(name, module)
        run = function if self.graphs is None else partial(self._by_graph, self.graphs, name, function, module)
        return self.executor.call(site, run, args, kwargs)

    def call_all(self, calls: Mapping[str, Piece]) -> dict[str, Any]:
        """Runs pieces of work side by side; as one graph, launched on the caller's stream, if graphs are on."""
        if self.graphs is None:
            return {name: self.call(name, *piece) for name, piece in calls.items()}
        branches = [
            Branch(
                name=name,
                run=function,
                args=replace(args, join_tensor),
                kwargs=replace(kwargs, join_tensor),
                lane=self._lane(name),
                module=owner_of(function),
            )
            for name, (function, args, kwargs) in calls.items()
        ]
        results = self.graphs.run(tuple(calls), branches)
        found = {}
        for branch, result in zip(branches, results, strict=True):
            if isinstance(result, Eager):
                site = self._site(branch.name, branch.module)
                result = self.executor.call(site, branch.run, branch.args, branch.kwargs)
            found[branch.name] = result
        return found

    def _by_graph(
        self,
        graphs: StageGraphs,
        name: str,
        function: Callable[..., Any],
        module: nn.Module | None,
        /,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        branch = Branch(name=name, run=function, args=args, kwargs=kwargs, lane=self._lane(name), module=module)
        (result,) = graphs.run(name, [branch])
        return function(*args, **kwargs) if isinstance(result, Eager) else result

    def _site(self, name: str, module: nn.Module | None) -> Site:
        key = (name, id(module))
        site = self._sites.get(key)
        if site is None or site.module is not module:
            site = self._sites[key] = Site(name, module, self._lane(name))
        return site

    def _lane(self, name: str) -> StreamLane:
        if name not in self._slots:
            raise InvalidPlanError(f"{name!r} is not in the plan of this stage; it has {', '.join(self._slots)}")
        return self.executor.lanes.lane(self._slots[name])
