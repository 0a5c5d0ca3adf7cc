"""Routed calls on the host: each module's on a lane of its own, so that the loop and other modules go on meanwhile.

Such a lane holds no slots. Waits for messages run there; the module's own work runs on the lane of its slots.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch

from mosaic.backends.base import Lanes
from mosaic.engine.calls.hidden import ModuleState
from mosaic.engine.calls.placed_module import PlacedModule
from mosaic.engine.calls.ranges import profiler_range
from mosaic.engine.calls.signature import Arguments, OutputInfo, Signature
from mosaic.engine.calls.thread_state import Applied, AsLane, interception, on_lane
from mosaic.engine.host.call import Call, add_place
from mosaic.engine.host.executor import HostExecutor
from mosaic.engine.host.lane_tensor import LaneTensor, join_joined, joined
from mosaic.errors import UnsupportedModelError
from mosaic.find.random_numbers import LaneRandomness
from mosaic.find.structure import flatten, map_tensors
from mosaic.find.trace import caller
from mosaic.ranks.calls.call import RoutedCall
from mosaic.ranks.calls.executor import RankExecutor
from mosaic.ranks.calls.routed import RoutedModule
from mosaic.ranks.parameters.tied import marked
from mosaic.ranks.world.progress import RankProgress, SentPhase


class HostRankExecutor(RankExecutor):
    """Runs routed calls on the host's lanes."""

    engine: HostExecutor

    def __init__(self, lanes: Lanes, progress: RankProgress) -> None:
        super().__init__(lanes, HostExecutor(lanes), progress)
        self._signature_of = lru_cache(maxsize=256)(_signature_of)  # numbers of rows may never repeat

    def _prepare(self, routed: RoutedModule) -> None:
        lane = self.lanes.aside(f"routing {routed.name}")
        site = self._sites[routed.name] = PlacedModule(routed.name, routed.module, lane)
        if routed.is_member:
            site.obstacle = routed.learned.obstacle

    def compute(self, routed: RoutedModule, work: Callable[[], Any], phase: SentPhase) -> Any:
        name, lane, start = routed.name, self.lanes.lane(routed.slots), time.perf_counter_ns()

        def timed() -> Any:
            nonlocal start
            start = time.perf_counter_ns()
            with self.progress.computing(name, phase), profiler_range(name, phase), marked(name):
                return work()

        def on_its_lane() -> Any:
            with AsLane():
                return timed()

        try:
            if on_lane() and not self.engine.closed:
                return lane.submit(on_its_lane).wait()
            return timed()
        finally:
            end = time.perf_counter_ns()
            self.engine.log.add(name, phase, routed.slots, self.progress.step, start / 1e6, end / 1e6)

    def _launch(self, call: RoutedCall) -> Any:
        routed, arguments = call.routed, Arguments.take(call.args, call.kwargs, join_joined)
        call.validate(arguments.nesting.spec, arguments.leaves)
        site = self._sites[routed.name]
        opaque = f"it takes a {arguments.opaque}, which may hide tensors" if arguments.opaque is not None else None
        reason = self._reason(call, interception(), site.obstacle, opaque)
        if reason is not None:
            self.engine.note_in_place(site.name, reason)
            self.engine.drain()  # nothing else of this rank is running
            with self.in_step():
                return call.nested(call.forward(map_tensors(joined, arguments.leaves)))
        state = site.state()
        # What was set is likely to be set back right after the call; it cannot while the loop's thread waits.
        waits = self.engine.awaits(site, state) or call.waits or bool(call.attributes)
        waits = waits or routed.is_new(call.mode) or routed.writes
        if routed.draws(call.mode):
            assert call.run is not None
            call.run = _drawing_anew(call.run)
        signature = self._signature_of(
            routed, routed.rows_of(arguments.leaves), len(arguments.differentiable), arguments.grad
        )
        held = state if routed.is_member and not waits else None
        lane_call = _LaneCall(self, site, call, arguments, signature, held)
        results = self.engine.launch(site, lane_call, arguments)
        if waits and site.last_forward is not None:
            self.engine.wait(site.last_forward)
        if len(results) > len(routed.template.leaves):
            call.token = results.pop()
        return call.nested(results)

    def backward_reached(self, routed: RoutedModule) -> None:
        self.backward_begins()
        self.engine.drain()

    def backward_done(self, routed: RoutedModule) -> None:
        routed.reduce()

    def _begin_backward(self) -> None:
        """Makes the end of this backward wait for its work on lanes, before anything is reduced there."""
        self.engine.backwards.begin()
        for reducer in self._shared if self.routed else ():
            for parameter in reducer.parameters:  # what comes is added up before it is added to what was there
                self.engine.backwards.set_aside(parameter)

    def reach(self, site: PlacedModule) -> None:
        """Lets a module's forward end here before others reach into it; where it does not run it has none."""
        own = self._sites.get(site.name)
        if own is not None and self.routed[site.name].is_member:
            self.engine.reach(own)


class _LaneCall(Call):
    """A routed call on its module's lane, from its launch to the end of its backward.

    The lane has no graph of it: the call's own backward gives the gradients of its inputs.
    """

    def __init__(
        self,
        executor: HostRankExecutor,
        site: PlacedModule,
        call: RoutedCall,
        arguments: Arguments,
        signature: Signature,
        state: ModuleState | None,
    ) -> None:
        super().__init__(executor.engine, site, None, arguments, signature, None, origin=caller(), state=state)
        self.parameters = []
        self._on_ranks = executor
        self._call = call
        self._edges: list[int | None] = []  # for each of the call's inputs, its place among the differentiable ones

    def forward(self) -> list[torch.Tensor | None]:
        """Runs on the module's lane; returns the tensors of the result, and the token behind them."""
        arguments, self.arguments = self.arguments, None
        assert arguments is not None, "a call ran twice"
        call = self._call
        with self._on_ranks.in_step(), self._placing("in module"):
            leaves = [leaf.value() if isinstance(leaf, LaneTensor) else leaf for leaf in arguments.leaves]
            try:
                with Applied(arguments.state):
                    results = arguments.context.run(call.compute, leaves)
            finally:  # an error, too, may come of what is another than it was
                self._check_hidden(arguments)
        places = {id(tensor): place for place, tensor in enumerate(arguments.differentiable)}
        self._edges = [places.get(id(arguments.leaves[index])) for index in call.inputs]
        tensors = [leaf.contiguous() for leaf in results if isinstance(leaf, torch.Tensor)]
        return [*tensors, torch.empty(0)] if call.wanted else list(tensors)

    def backward(
        self, grads: Sequence[torch.Tensor | None], *, keep: bool, by_caller: bool
    ) -> list[torch.Tensor | None]:
        """Runs on the module's lane; returns the gradients of all differentiable inputs.

        Each result has one, as on the other ranks, which do not know where this rank's loss comes from.
        """
        values = []
        with self._on_ranks.in_step(), self._placing("in the backward of module"):
            for grad, info in zip(grads[:-1], self.signature.new_outputs[:-1], strict=True):
                if info.differentiable:
                    plain = grad.value() if isinstance(grad, LaneTensor) else grad
                    zeros = torch.zeros(info.like.shape, dtype=info.like.dtype) if plain is None else plain
                    values.append(zeros)
            input_grads = self._call.backward(values, keep=keep)
        results: list[torch.Tensor | None] = [None] * len(self._likes)
        for edge, grad in zip(self._edges, input_grads, strict=True):
            if edge is not None:
                earlier = results[edge]
                results[edge] = grad.contiguous() if earlier is None else earlier + grad
        return results

    @contextmanager
    def _placing(self, where: str) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            add_place(error, where, self)
            raise

    def launch_backward(self, grads: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Hands the backward to the lane, and behind it the end of the reduction, for which no other work waits."""
        if not torch._C._will_engine_execute_node(self.site.anchor_node):
            raise UnsupportedModelError(
                f"torch.autograd.grad or backward(inputs=...) through {self.site.name!r} on several ranks: all ranks "
                "take part in a whole backward; call backward() and read .grad"
            )
        self._on_ranks.backward_begins()
        engine, routed = self._on_ranks.engine, self._call.routed

        def reduce() -> None:
            with self._on_ranks.in_step():
                routed.reduce()

        pending = super().launch_backward(grads)
        if routed.reducer is not None:
            engine.submit(self.site, "reduction", reduce, ())
        return pending


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
