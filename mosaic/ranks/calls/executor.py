"""Runs a model's placed calls on several ranks: every rank calls every module, and takes part where it does not.

Where all modules run on all ranks, each with the devices to itself, nothing is routed: calls are plain ones, and
gradients are summed in buckets while the backward runs, as in DistributedDataParallel.

A rank whose batch lacks a modality does not call the module of that modality. The others wait for it there, so it
takes part without rows before its next call in the order of the sample's step, or at the end of the model's call.
Every backward goes through all of these calls, whatever a rank's loss is made of.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.hooks import RemovableHandle

from mosaic.engine.calls.placed_module import PendingBackwards
from mosaic.engine.calls.thread_state import on_lane
from mosaic.engine.placing import Executor
from mosaic.errors import ModuleContractError
from mosaic.find.structure import map_tensors, tensors_in
from mosaic.ranks.calls.call import RoutedCall
from mosaic.ranks.calls.routed import RoutedModule
from mosaic.ranks.parameters.gradients import GradientReducer, SumPlace
from mosaic.ranks.parameters.tied import running
from mosaic.ranks.world.progress import RankProgress, SentPhase

if TYPE_CHECKING:
    from mosaic.backends.base import Lanes
    from mosaic.engine.calls.placed_module import PlacedModule
    from mosaic.engine.host.executor import HostExecutor
    from mosaic.engine.streams.executor import StreamExecutor


class RankExecutor(Executor):
    """The placed calls of one rank; a subclass runs them on host lanes or on streams.

    Attributes:
        engine: The executor of one rank.
        routed: The modules by name, in the order of the sample's step; none where nothing is routed.
        sent_bytes: Bytes that this rank sent, by module and phase; of a reduction, the gradients.
    """

    def __init__(self, lanes: Lanes, engine: HostExecutor | StreamExecutor, progress: RankProgress) -> None:
        super().__init__(lanes)
        self.engine, self.progress = engine, progress
        self.in_place, self.places, self.log = engine.in_place, engine.places, engine.log
        self.sent_bytes: Counter[tuple[str, SentPhase]] = Counter()
        self.routed: dict[str, RoutedModule] = {}
        self._sites: dict[str, PlacedModule] = {}  # of routed modules
        self._shared: tuple[GradientReducer, ...] = ()  # of what modules share
        self._hooks: list[RemovableHandle] = []
        self._called: set[str] | None = None
        self._passed_over: set[str] = set()
        self._tokens: list[torch.Tensor] = []
        self._unrouted_bytes: dict[str, int] = {}
        self._pending = PendingBackwards()
        self._task = -1
        self._failure: BaseException | None = None
        self.backward_ended: Callable[[], None] = lambda: None
        self.progress.step = 0

    def begin(
        self,
        routed: Mapping[str, RoutedModule],
        shared: Iterable[GradientReducer],
        hooks: Iterable[RemovableHandle] = (),
        *,
        unrouted_bytes: Mapping[str, int] | None = None,
    ) -> None:
        """Takes the routed modules in the order of the sample's step, and the reducers of what modules share.

        ``unrouted_bytes`` are those of the gradients of modules that are not routed; ``hooks`` are removed at the end.
        """
        self._hooks.extend(hooks)
        self.routed, self._unrouted_bytes = dict(routed), dict(unrouted_bytes or {})
        self._shared = tuple(shared)
        for reducer in self._shared:
            reducer.watch(self._arrived)
        for module in routed.values():
            self._prepare(module)

    # The differences between host lanes and streams.

    @abstractmethod
    def compute(self, routed: RoutedModule, work: Callable[[], Any], phase: SentPhase) -> Any:
        """Runs a module's own work of a phase on the lane of its slots; returns its result."""

    def place(self, slots: tuple[int, ...]) -> SumPlace:
        """Returns where a module's gradients are summed."""
        return SumPlace()

    @abstractmethod
    def backward_reached(self, routed: RoutedModule) -> None:
        """Called in the backward of a call that is a node of the caller's graph, before its own work."""

    def backward_done(self, routed: RoutedModule) -> None:  # optional
        """Called when a backward of a call that is a node of the caller's graph has started its reduction."""

    @abstractmethod
    def _prepare(self, routed: RoutedModule) -> None:
        """Prepares a module's routes before the first step."""

    @abstractmethod
    def _launch(self, call: RoutedCall) -> Any:
        """Makes a call; returns its result."""

    def _reason(self, call: RoutedCall, *obstacles: str | None) -> str | None:
        """Returns why a call has to run where it is made, or None."""
        if call.error is not None:
            return str(call.error)
        closed = "its lanes are closed" if self.engine.closed else None
        return next(filter(None, (call.obstacle, *obstacles, closed)), None)

    def _begin_backward(self) -> None:  # optional
        """Called when a backward begins."""

    def _end_backward(self) -> None:  # optional
        """Called when a backward has ended, before shared gradients are reduced."""

    @abstractmethod
    def reach(self, site: PlacedModule) -> None:
        """Orders what the caller does next behind a module's forward."""

    # Calls.

    def call(self, site: PlacedModule, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Calls a placed module on this rank's rows, wherever it runs."""
        if on_lane():
            return run(*args, **kwargs)
        if not self.routed:
            with self.progress.computing(site.name, "forward"):
                return self.engine.run_alone(site, run, args, kwargs)
        if site.name in self._passed_over:
            raise ModuleContractError(
                f"{site.name!r} is called after a module that the sample's step called later, and the other ranks were "
                "told that this one has no rows for it; call the modules in one order on all ranks and in all steps"
            )
        self._take_part([*self.routed].index(site.name))
        # Outside of the model's own call there is no end of it at which errors are raised.
        waits = self._called is None
        if self._called is not None:
            self._called.add(site.name)
        call = RoutedCall(self, self.routed[site.name], run, args, kwargs, waits=waits, obstacle=site.obstacle)
        return self._made(call)

    def whole(self, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs the model's own call, and takes part in the calls of modules that this rank had nothing for."""
        if self._called is not None:  # a model inside of itself
            return run(*args, **kwargs)
        self._called, self._tokens = set(), []
        self.progress.calls += 1
        try:
            return self._with_all_backwards(self.engine.whole(partial(self._inside, run), args, kwargs))
        finally:
            self._called, self._tokens = None, []
            self._passed_over = set()

    def _inside(self, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        result = run(*args, **kwargs)
        self._take_part(len(self.routed))
        return result

    def _take_part(self, until: int) -> None:
        """Takes part in calls before one, if this rank has left them out."""
        if self._called is None:
            return
        for name, routed in [*self.routed.items()][:until]:
            if name not in self._called:
                self._called.add(name)
                self._passed_over.add(name)
                self._made(RoutedCall(self, routed, routed.plain, *routed.without_rows, is_there=False))

    def _made(self, call: RoutedCall) -> Any:
        """Makes a call, and notes the token of its backward."""
        result = self._launch(call)
        if call.token is not None and self._called is not None:
            self._tokens.append(call.token)
        call.token = None  # which refers to the call
        return result

    def _with_all_backwards(self, result: Any) -> Any:
        """Ties the backward of every call to that of the model's results."""
        results = {id(t): t for t in tensors_in(result) if t.requires_grad}
        if not results:
            return result
        tied = Tied.apply(self, len(self._tokens), *self._tokens, *results.values())
        instead = dict(zip(results, tied, strict=True))
        self._pending.note(tied)
        return map_tensors(lambda tensor: instead.get(id(tensor), tensor), result)

    @contextmanager
    def in_step(self) -> Iterator[None]:
        """A block that exchanges messages; once one has failed, all raise, or messages would meet another call's."""
        if self._failure is not None:
            raise self._failure
        try:
            yield
        except BaseException as error:
            if self._failure is None:
                self._failure = error
                error.add_note("this rank is out of step with the others since; start all of them again")
                self.progress.fail(error, [group for routed in self.routed.values() for group in routed.groups])
            raise

    # Backwards.

    def backward_begins(self) -> None:
        """Called within a backward; shared gradients are reduced at its end."""
        task = torch._C._current_graph_task_id()
        if task != self._task:
            self._task = task
            self._begin_backward()
            torch.autograd.Variable._execution_engine.queue_callback(self._backward_ends)  # type: ignore[attr-defined]

    def _arrived(self) -> None:
        if running() is None:  # else it is within the backward of a module, which has begun a whole one
            self.backward_begins()

    def _backward_ends(self) -> None:
        self._end_backward()
        for reducer in self._shared:
            reducer.finish()
        self.backward_ended()
        for name, num_bytes in self._unrouted_bytes.items():
            self.sent_bytes[name, "reduce"] += num_bytes
        self.progress.step += 1

    def settle(self) -> None:
        self.engine.settle()

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self.engine.close()
            own = [routed.reducer for routed in self.routed.values() if routed.reducer is not None]
            for reducer in (*own, *self._shared):
                reducer.close()
            for hook in self._hooks:
                hook.remove()

    @property
    def is_in_flight(self) -> bool:
        return bool(self._pending) or self.engine.is_in_flight

    @property
    def num_backwards(self) -> int:
        return self.progress.step

    def clear_spans(self) -> None:
        super().clear_spans()
        self.progress.waits.clear()
        self.sent_bytes.clear()

    @property
    def notes(self) -> tuple[str, ...]:
        here = [name for name, routed in self.routed.items() if routed.is_member] or list(self._unrouted_bytes)
        return (f"this rank runs {', '.join(here) or 'no placed module'}", *self.engine.notes)


class Tied(torch.autograd.Function):
    """The model's results, whose backward also goes through every call that was made."""

    @staticmethod
    def forward(ctx: Any, executor: RankExecutor, num_tokens: int, *tensors: torch.Tensor) -> Any:
        ctx.executor = executor
        ctx.tokens = [(tensor.dtype, tensor.device) for tensor in tensors[:num_tokens]]
        ctx.set_materialize_grads(False)
        return tuple(tensor.detach() for tensor in tensors[num_tokens:])  # views could not be changed in place

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        ctx.executor.backward_begins()
        empty = (torch.zeros(0, dtype=dtype, device=device) for dtype, device in ctx.tokens)
        return None, None, *empty, *grads
