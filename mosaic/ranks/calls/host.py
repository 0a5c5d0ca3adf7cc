"""Routed calls on the host: each module's on a lane of its own, so that the loop and other modules go on meanwhile.

Such a lane holds no slots. Waits for messages run there; the module's own work runs on the lane of its slots. A call's
kind is known beforehand from its template and its rows, so no shapes have to be learned.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextvars import copy_context
from typing import Any

import torch

from mosaic.backends.base import Lanes
from mosaic.engine.calls.caller import caller, note_in_place
from mosaic.engine.calls.hidden import ModuleState
from mosaic.engine.calls.placed_module import PlacedModule
from mosaic.engine.calls.ranges import ProfilerRange
from mosaic.engine.calls.signature import Arguments, OutputInfo, Signature
from mosaic.engine.calls.thread_state import as_lane, interception, on_lane
from mosaic.engine.host.call import Call
from mosaic.engine.host.executor import Executor
from mosaic.engine.host.lane_tensor import LaneTensor, join_joined, joined
from mosaic.errors import UnsupportedModelError
from mosaic.find.random_numbers import LaneRandomness
from mosaic.find.structure import flatten, map_tensors
from mosaic.ranks.calls.call import RoutedCall
from mosaic.ranks.calls.executor import RankExecutor
from mosaic.ranks.calls.routed import CallRequest, RoutedModule
from mosaic.ranks.parameters.gradients import GradientReducer
from mosaic.ranks.parameters.tied import marked
from mosaic.ranks.world.progress import RankProgress, SentPhase
from mosaic.timeline import Span

_MAX_SIGNATURES = 256


class HostRankExecutor(RankExecutor):
    """Runs routed calls on the host's lanes.

    Attributes:
        engine: The executor of one rank.
    """

    engine: Executor

    def __init__(self, lanes: Lanes, progress: RankProgress) -> None:
        super().__init__(lanes, Executor(lanes), progress)
        self.engine.looks_early = False  # or ranks would stop at different calls, as it comes
        self._signatures: dict[tuple[str, int, int, bool], Signature] = {}

    def _prepare(self, routed: RoutedModule) -> None:
        lane = self.lanes.aside(f"routing {routed.name}")
        site = self._sites[routed.name] = PlacedModule(routed.name, routed.module, lane, awaited=routed.awaited)
        if routed.is_member:
            site.obstacle = routed.learned.obstacle

    def compute(self, routed: RoutedModule, work: Callable[[], Any], phase: SentPhase) -> Any:
        name, lane, start = routed.name, self.lanes.lane(routed.slots), time.perf_counter_ns()

        def timed() -> Any:
            nonlocal start
            start = time.perf_counter_ns()
            with self.progress.computing(name, phase), ProfilerRange(name, phase), marked(name):
                return work()

        def on_its_lane() -> Any:
            with as_lane():
                return timed()

        try:
            if on_lane() and not self.engine.closed:
                return lane.submit(on_its_lane).wait()
            return timed()
        finally:
            self.engine.log.note(name, phase, routed.slots, self.progress.step, start)

    def _launch(self, request: CallRequest) -> tuple[Any, torch.Tensor | None]:
        routed, arguments = request.routed, Arguments.take(request.args, request.kwargs, join_joined)
        request.check(arguments.spec, arguments.leaves)
        site, call = self._sites[routed.name], RoutedCall(self, request, arguments.spec)
        opaque = f"it takes a {arguments.opaque}, which may hide tensors" if arguments.opaque is not None else None
        reason = self._reason(request, interception(), site.obstacle, opaque)
        if reason is not None:
            return self._run_here(call, arguments.leaves, site, reason)
        state = ModuleState.take(site.module)
        # What was set is likely to be set back right after the call; it cannot while the loop's thread waits.
        waits = (
            self.engine.awaits(site, state)
            or request.waits
            or bool(request.attributes)
            or routed.is_new
            or routed.writes
        )
        if routed.draws():
            request.run = _drawing_anew(request.run)
        kind = (routed.name, routed.rows_of(arguments.leaves), len(arguments.differentiable), arguments.grad)
        if kind not in self._signatures:
            if len(self._signatures) >= _MAX_SIGNATURES:  # numbers of rows that never repeat
                self._signatures.clear()
            self._signatures[kind] = _signature_of(routed, *kind[1:])
        held = state if routed.is_member and not waits else None
        lane_call = _LaneCall(self, site, call, arguments, self._signatures[kind], held)
        results = self.engine.launch(site, lane_call, arguments)
        if waits and site.last_forward is not None:
            self.engine.wait(site.last_forward)
        token = results.pop() if len(results) > len(routed.template.leaves) else None
        return call.nested(results), token

    def _run_here(
        self, call: RoutedCall, leaves: list[Any], site: PlacedModule, reason: str
    ) -> tuple[Any, torch.Tensor | None]:
        """Makes a call where it is made, in the caller's own graph, with nothing else of this rank running."""
        note_in_place(self.engine, site.name, reason)
        self.engine.drain()
        with self.in_step():
            results = call.forward(map_tensors(joined, leaves))

        def arrived(grad: torch.Tensor) -> torch.Tensor:
            self.backward_begins()
            self.engine.drain()
            return grad.value() if isinstance(grad, LaneTensor) else grad

        for tensor in [*results, call.token]:
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                tensor.register_hook(arrived)
        return call.nested(results), call.token

    def backward_done(self, routed: RoutedModule) -> None:
        if not on_lane():  # on a lane it is a piece of work of its own behind the backward
            routed.reduce()

    def _begin_backward(self, shared: Sequence[GradientReducer]) -> None:
        """Makes the end of this backward wait for its work on lanes, before anything is reduced there."""
        self.engine.backwards.current()
        for reducer in shared:  # what comes from now on is added up before it is added to what was there
            for parameter in reducer.parameters:
                self.engine.backwards.set_aside(parameter)

    def reach(self, site: PlacedModule) -> None:
        """Lets a module's forward end here before others reach into it; where it does not run it has none."""
        own = self._sites.get(site.name)
        if own is not None and self.routed[site.name].is_member:
            self.engine.reach(own)

    def spans(self) -> tuple[Span, ...]:
        """Returns what ran on slots; routing holds none."""
        return tuple(span for span in self.engine.spans() if span.slots)


class _LaneCall(Call):
    """A routed call on its module's lane, from its launch to the end of its backward."""

    def __init__(
        self,
        executor: HostRankExecutor,
        site: PlacedModule,
        call: RoutedCall,
        arguments: Arguments,
        signature: Signature,
        state: ModuleState | None,
    ) -> None:
        context = copy_context()

        def forward(*args: Any, **kwargs: Any) -> list[Any]:
            results = context.run(call.forward, flatten((args, kwargs))[0])
            results = [leaf.contiguous() if isinstance(leaf, torch.Tensor) else leaf for leaf in results]
            return results if call.token is None else [*results, call.token]

        super().__init__(executor.engine, site, forward, arguments, signature, None, origin=caller(), state=state)
        self.parameters = []
        self._on_ranks = executor
        self._routed = call.routed

    def forward(self) -> list[torch.Tensor | None]:
        with self._on_ranks.in_step():
            return super().forward()

    def backward(
        self, grads: Sequence[torch.Tensor | None], *, keep: bool, by_caller: bool
    ) -> list[torch.Tensor | None]:
        """Runs on the module's lane.

        All ranks return every gradient: this one may have none of the rows, and no rank waits for another here.
        """
        with self._on_ranks.in_step():
            computed = super().backward(grads, keep=keep, by_caller=by_caller)
        return [
            torch.zeros(size, dtype=dtype) if grad is None else grad.contiguous()
            for grad, (size, dtype) in zip(computed, self._likes, strict=True)
        ]

    def launch_backward(self, grads: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Hands the backward to the lane, and behind it the end of the reduction, for which no other work waits."""
        if not torch._C._will_engine_execute_node(self.site.anchor_node):
            raise UnsupportedModelError(
                f"torch.autograd.grad or backward(inputs=...) through {self.site.name!r} on several ranks: all ranks "
                "take part in a whole backward; call backward() and read .grad"
            )
        self._on_ranks.backward_begins()
        engine = self._on_ranks.engine
        pending = super().launch_backward(grads)
        if self._routed.reducer is not None:
            engine.backwards.current().launched.append(engine.submit(self.site, "reduction", self._reduce, ()))
        return pending

    def _reduce(self) -> None:
        with self._on_ranks.in_step():
            self._routed.reduce()


def _drawing_anew(run: Callable[..., Any]) -> Callable[..., Any]:
    """Has a call draw from a generator of its own, so that its numbers do not depend on what runs beside it."""
    generator = torch.Generator().manual_seed(int(torch.randint(1 << 62, ())))

    def drawing(*args: Any, **kwargs: Any) -> Any:
        with LaneRandomness(generator):
            return run(*args, **kwargs)

    return drawing


def _signature_of(routed: RoutedModule, rows: int, num_edges: int, grad: bool) -> Signature:
    """Returns the signature of a call on this rank: the leaves of its result in a list, and its token behind them."""
    template, leaves = routed.template, list[Any]()
    wanted = [flag and grad for flag in template.differentiable]
    outputs: list[OutputInfo] = []
    for leaf, is_wanted in zip(template.of_rows(rows, torch.device("meta")), wanted, strict=True):
        leaves.append(len(outputs) if isinstance(leaf, torch.Tensor) else (leaf,))
        if isinstance(leaf, torch.Tensor):
            outputs.append(OutputInfo(like=leaf, differentiable=is_wanted, same_input=None))
    if any(wanted):
        leaves.append(len(outputs))
        outputs.append(OutputInfo(like=torch.empty(0, device="meta"), differentiable=True, same_input=None))
    return Signature(
        outputs=tuple(outputs),
        spec=flatten([None] * len(leaves))[1],
        leaves=tuple(leaves),
        edges=tuple(range(num_edges)),
        writes_buffers=routed.learned.writes_buffers,
    )
