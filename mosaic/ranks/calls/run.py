"""Runs a model's placed calls on several ranks: every rank calls every module, and takes part where it does not.

Where all modules run on all ranks, each with the devices to itself, there is nothing to route: calls are plain ones,
and gradients are summed up in buckets while the backward runs, as in DistributedDataParallel.

A rank whose batch lacks a modality does not call that modality's module. Others wait for it there, so it takes part
with no rows before its next call in the order of the sample's step, or at the end of the model's call; and every
backward goes through all of these calls, whatever a rank's loss is made of.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.hooks import RemovableHandle

from mosaic.engine.calls.structure import map_tensors, tensors_in
from mosaic.engine.calls.thread_state import on_lane
from mosaic.engine.placing import PendingBackwards
from mosaic.errors import ModuleContractError
from mosaic.ranks.calls.exchange import split_routed_kwargs
from mosaic.ranks.calls.host_calls import HostCalls
from mosaic.ranks.calls.ranked import Ranked
from mosaic.ranks.calls.stream_calls import StreamCalls
from mosaic.ranks.parameters.gradients import GradientReducer, SumPlace
from mosaic.ranks.parameters.tied import Compute, running
from mosaic.ranks.world.progress import RankProgress, Traffic

if TYPE_CHECKING:
    from mosaic.backends.base import Lanes
    from mosaic.engine.calls.placed_module import PlacedModule
    from mosaic.timeline import Span


class RankedRuns:
    """The placed calls of one rank.

    Attributes:
        lanes: Of this rank; a module computes on the one of its quota.
        in_place: For each module and reason, how many of its calls were waited for where they were made.
        places: For each module and reason, the line of the first such call.
        in_order: Modules that keep to the order of the caller's stream, and why.
        closed: Whether the lanes were given back.
        traffic: What this rank sent to others.
        progress: Where this rank is.
        calls_again: A call of the whole model is never made again, which would take all ranks.
    """

    calls_again = False

    def __init__(self, lanes: Lanes, progress: RankProgress, *, in_order: Mapping[str, str] | None = None) -> None:
        self.lanes = lanes
        self.closed = False
        self.traffic = Traffic()
        self.progress = progress
        self._calls = self._calls_on(lanes, in_order or {})
        self.in_place = self._calls.executor.in_place
        self.places = self._calls.executor.places
        self.in_order = self._calls.executor.in_order
        self._ranked: dict[str, Ranked] = {}
        self._order: dict[str, int] = {}
        self._shared: tuple[GradientReducer, ...] = ()
        self._hooks: list[RemovableHandle] = []
        self._called: set[str] | None = None
        self._passed_over: set[str] = set()
        self._tokens: list[torch.Tensor] = []
        self._reduced: dict[str, int] = {}
        self._pending = PendingBackwards()
        self._task = -1
        self.progress.step = 0

    def begin(
        self, ranked: Mapping[str, Ranked], shared: Sequence[GradientReducer], hooks: Iterable[RemovableHandle] = ()
    ) -> None:
        """Takes modules in the order of the sample's step, reducers of what they share, and hooks to remove."""
        self._hooks.extend(hooks)
        self._ranked = dict(ranked)
        self._order = {name: index for index, name in enumerate(ranked)}
        self._shared = tuple(shared)
        for reducer in shared:
            reducer.watch(self._arrived)
        self._calls.begin(ranked)

    def begin_alike(self, reducer: GradientReducer, reduced: Mapping[str, int]) -> None:
        """Takes modules that all run on all ranks, one after the other: data-parallel training, without any routing."""
        self._reduced = dict(reduced)
        self.begin({}, [reducer])

    def call(self, site: PlacedModule, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Calls a placed module on this rank's rows, wherever it runs.

        Raises:
            ModuleContractError: This rank calls modules in another order than the sample's step.
        """
        if on_lane():
            return run(*args, **kwargs)
        if not self._ranked:
            with self.progress.computing(site.name, "forward"):
                return self._calls.executor.run_alone(site, run, args, kwargs)
        if site.name in self._passed_over:
            raise ModuleContractError(
                f"{site.name!r} is called after a module that the sample's step called later, and the other ranks were "
                "told that this one has no rows for it; call the modules in one order on all ranks and in all steps"
            )
        self._take_part(self._order[site.name])
        if self._called is not None:
            self._called.add(site.name)
        # Outside of the model's own call nobody looks, at its end, for what was raised.
        waits = self._called is None
        ranked = self._ranked[site.name]
        run, kwargs = split_routed_kwargs(run, kwargs, ranked.keywords)
        return self._noted(
            self._calls.call(ranked, run, args, kwargs, is_there=True, waits=waits, obstacle=site.obstacle)
        )

    def _calls_on(self, lanes: Lanes, in_order: Mapping[str, str]) -> HostCalls | StreamCalls:
        if lanes.streams is None:
            return HostCalls(lanes, self.backward_begins, self.progress)
        return StreamCalls(lanes.streams, self.backward_begins, self.progress, in_order=in_order)

    def place(self, slots: tuple[int, ...]) -> SumPlace:
        return self._calls.place(slots)

    def compute(self, site_name: str, slots: tuple[int, ...]) -> Compute:
        return self._calls.compute(site_name, slots)

    def whole(self, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs the model's own call, and takes part in the calls of modules that this rank had nothing for."""
        if self._called is not None:  # a model inside of itself
            return run(*args, **kwargs)
        self._called, self._tokens = set(), []
        self.progress.calls += 1
        try:
            with self._calls.whole_call():
                result = self._calls.executor.whole(partial(self._inside, run), args, kwargs)
            return self._with_all_backwards(result)
        finally:
            self._called, self._tokens = None, []
            self._passed_over = set()

    def _inside(self, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        result = run(*args, **kwargs)
        self._take_part(len(self._order))
        return result

    def _take_part(self, until: int) -> None:
        """Takes part in calls that come before one, if this rank has left them out."""
        if self._called is None:
            return
        for name, index in self._order.items():
            if index < until and name not in self._called:
                self._called.add(name)
                self._passed_over.add(name)
                ranked = self._ranked[name]
                args, kwargs = ranked.without_rows()
                self._noted(self._calls.call(ranked, ranked.plain, args, kwargs, is_there=False, waits=False))

    def _noted(self, made: tuple[Any, torch.Tensor | None]) -> Any:
        result, token = made
        if token is not None and self._called is not None:
            self._tokens.append(token)
        return result

    def _with_all_backwards(self, result: Any) -> Any:
        """Ties the backward of every call to that of the model's results."""
        made = {id(t): t for t in tensors_in(result) if t.requires_grad}
        if not made:
            return result
        tied = Tied.apply(self, len(self._tokens), *self._tokens, *made.values())
        instead = dict(zip(made, tied, strict=True))
        self._pending.note(tied)
        return map_tensors(lambda tensor: instead.get(id(tensor), tensor), result)

    def backward_begins(self) -> None:
        """Called from within a backward: what is shared is reduced at its end, when lanes have come to rest."""
        task = torch._C._current_graph_task_id()
        if task != self._task:
            self._task = task
            self._calls.begin_backward(self._shared if self._ranked else ())
            torch.autograd.Variable._execution_engine.queue_callback(self._backward_ends)  # type: ignore[attr-defined]

    def _arrived(self) -> None:
        if running() is None:  # else it is within the backward of a module, which has begun a whole one
            self.backward_begins()

    def _backward_ends(self) -> None:
        self._calls.end_backward()
        for reducer in self._shared:
            reducer.finish()
        for name, num_bytes in self._reduced.items():
            self.traffic.add(name, "reduce", num_bytes)
        self.progress.step += 1

    def route_all(self) -> None:
        """Evens out the rows of modules on all ranks, too: ranks load different numbers of rows from now on."""
        for ranked in self._ranked.values():
            ranked.routes = True

    # The rest of what a handle asks for.

    def reach(self, site: PlacedModule) -> None:
        self._calls.reach(site)

    def settle(self) -> None:
        self._calls.executor.settle()

    def pause(self) -> None:
        """Comes to rest; on several ranks plans are tried before a loop begins or is planned anew."""
        self._calls.executor.pause()

    def resume(self) -> None:
        self._calls.executor.resume()

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self._calls.executor.close()
            for ranked in self._ranked.values():
                ranked.close()
            for reducer in self._shared:
                reducer.close()
            for hook in self._hooks:
                hook.remove()

    @property
    def is_in_flight(self) -> bool:
        """True if something that it alone can do has yet to be done for a backward."""
        return bool(self._pending) or self._calls.executor.is_in_flight

    def forget_calls(self) -> None:
        self._calls.executor.forget_calls()

    @property
    def num_failed(self) -> int:
        return self._calls.executor.num_failed

    @property
    def num_learned(self) -> int:
        return self._calls.executor.num_learned

    @property
    def num_backwards(self) -> int:
        return self.progress.step

    @property
    def origin_ns(self) -> int:
        return self._calls.origin_ns

    def spans(self, origin_ns: int) -> tuple[Span, ...]:
        return self._calls.spans(origin_ns)

    def clear_spans(self) -> None:
        """Forgets what ran, what was waited for and what was sent so far."""
        self._calls.clear_spans()
        self.progress.clear_waits()
        self.traffic.clear()

    @property
    def notes(self) -> tuple[str, ...]:
        here = [name for name, ranked in self._ranked.items() if ranked.rank in ranked.members] or list(self._reduced)
        return (f"this rank runs {', '.join(here) or 'no placed module'}", *self._calls.executor.notes)


class Tied(torch.autograd.Function):
    """The model's results, whose backward also goes through every call that was made."""

    @staticmethod
    def forward(ctx: Any, runs: RankedRuns, num_tokens: int, *tensors: torch.Tensor) -> Any:
        ctx.runs = runs
        ctx.tokens = [(tensor.dtype, tensor.device) for tensor in tensors[:num_tokens]]
        ctx.set_materialize_grads(False)
        return tuple(tensor.detach() for tensor in tensors[num_tokens:])  # views could not be changed in place

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        ctx.runs.backward_begins()
        empty = (torch.zeros(0, dtype=dtype, device=device) for dtype, device in ctx.tokens)
        return None, None, *empty, *grads
