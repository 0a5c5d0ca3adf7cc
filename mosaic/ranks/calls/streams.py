"""Routed calls on streams: the whole of a call is launched on the stream of its module's lane, by the loop's thread.

Ranks agree on rows in host memory, over one gloo group of all modules. What follows is launched and not awaited: rows
move by collectives of the module's own communicator, whose ``wait`` makes a stream wait and no thread. Autograd
launches the backward on the streams of the forward, so gradients take the same way back. Buckets of gradients start on
the lane's stream while the backward runs. At its end the lanes wait for the sums, and the loop's stream for the lanes.

Why collectives of several communicators cannot block each other. Each rank has one thread that launches at a time: the
loop's, or autograd's while the loop's waits for it. So a rank launches all collectives in one order, the same on all:

1. *Forward.* The program's order of calls, with the calls that a rank has nothing for filled in (``RankExecutor``).
2. *Backward.* Every call hangs on the token of the call before it (the ``anchor`` of ``RoutedCall``), and the last
   token on the model's results (``Tied``). So autograd cannot reach a call before it has been through each later one,
   whatever the loss is made of. Calls outside of the model's own run in the reverse of their order, since autograd
   runs, of all that is ready, what was made last, as long as nothing between them runs on the CPU.
3. *Reductions.* A module's buckets start in one order within its backward (``GradientReducer``); those of shared
   parameters start after the whole backward, in one order.

NCCL starts collectives of different communicators in the order of their launches (``NCCL_LAUNCH_ORDER_IMPLICIT``). Take
the first collective in that order that has not ended on some rank. All before it have ended, so its stream waits only
for work of its own rank, and no later collective has taken its SMs. So it starts on all ranks, and ends.

All of this was tested on a stand-in for CUDA that keeps the order of streams, with gloo for NCCL, not on several GPUs.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from mosaic.backends.streams.lanes import StreamLane, StreamLanes
from mosaic.engine.calls.placed_module import PlacedModule
from mosaic.engine.calls.ranges import profiler_range
from mosaic.engine.calls.thread_state import AsLane
from mosaic.engine.streams.executor import StreamExecutor
from mosaic.engine.streams.tensor import StreamTensor
from mosaic.errors import UnsupportedModelError
from mosaic.find.structure import flatten
from mosaic.ranks.calls.call import RoutedCall
from mosaic.ranks.calls.executor import RankExecutor
from mosaic.ranks.calls.routed import RoutedModule
from mosaic.ranks.parameters.gradients import SumPlace
from mosaic.ranks.parameters.tied import marked
from mosaic.ranks.world.progress import RankProgress, SentPhase


class StreamRankExecutor(RankExecutor):
    """Runs routed calls on streams."""

    engine: StreamExecutor
    lanes: StreamLanes

    def __init__(self, lanes: StreamLanes, progress: RankProgress) -> None:
        super().__init__(lanes, StreamExecutor(lanes), progress)
        self._anchor: torch.Tensor | None = None

    def _prepare(self, routed: RoutedModule) -> None:
        module = routed.module if routed.is_member else None
        self._sites[routed.name] = PlacedModule(routed.name, module, self.lanes.lane(routed.slots))
        if self._anchor is None:
            self._anchor = torch.zeros(0, requires_grad=True, device=routed.template.device)

    def compute(self, routed: RoutedModule, work: Callable[[], Any], phase: SentPhase) -> Any:
        """Launches a module's own work where it is requested: the call is on its lane already."""
        name, site, timeline = routed.name, self._sites[routed.name], self.engine.log
        settings = self.lanes.lane(routed.slots).under_settings()
        with AsLane(), settings, self.progress.computing(name, phase), marked(name):
            start = timeline.mark()
            with profiler_range(name, phase):
                result = work()
        timeline.note(site, phase, start, timeline.mark().event, step=self.progress.step)
        return result

    def reach(self, site: PlacedModule) -> None:
        self.engine.reach(self._sites.get(site.name, site))

    def place(self, slots: tuple[int, ...]) -> LanePlace:
        return LanePlace(self.lanes.lane(slots), self.lanes.api.current_stream())

    def _launch(self, call: RoutedCall) -> Any:
        leaves, spec = flatten((call.args, call.kwargs))
        call.validate(spec, leaves)
        name, anchor = call.routed.name, self._tokens[-1] if self._tokens else self._anchor

        def forward(*own: Any) -> list[Any]:
            return [*call.forward(list(own), anchor), call.token]

        is_traced = torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None
        reason = self._reason(
            call, "it is being traced or compiled; compile the placed modules instead" if is_traced else None
        )
        with self.in_step():
            if reason is not None:
                *results, token = self.engine.run_here(name, forward, tuple(leaves), {}, reason)
            else:
                *results, token = self.engine.launch(self._sites[name], forward, tuple(leaves))
        # The token has no memory to wait for.
        call.token = token.plain() if isinstance(token, StreamTensor) else token
        return call.nested(results)

    def backward_reached(self, routed: RoutedModule) -> None:
        assert self._anchor is not None
        node = torch.autograd.graph.get_gradient_edge(self._anchor).node
        if not torch._C._will_engine_execute_node(node):
            raise UnsupportedModelError(
                "torch.autograd.grad or backward(inputs=...) through a placed module on several ranks: all ranks take "
                "part in a whole backward; call backward() and read .grad"
            )
        self.backward_begins()

    def _end_backward(self) -> None:
        """Ends the reductions, each on its lane's stream, and makes the loop's stream wait for the lanes."""
        for routed in self.routed.values():
            if routed.is_reducing:
                routed.reduce()
        self.lanes.join()


class LanePlace(SumPlace):
    """The stream of a lane, on which a module's gradients are summed."""

    def __init__(self, lane: StreamLane, user: Any) -> None:
        self._lane, self._user = lane, user

    def follow(self) -> None:
        self._lane.order_after_caller()  # autograd may have added on another stream

    def entered(self) -> AbstractContextManager[Any]:
        return self._lane.api.use_stream(self._lane.stream)

    def gave(self, grad: torch.Tensor) -> None:
        self._lane.api.record_use(grad, self._user)  # which the allocator has to know
