"""Routed calls on the host: each module's on a lane of its own, so that the loop and other modules go on meanwhile.

Such a lane holds no slots. What waits for messages runs there; the module's own work is handed to the lane of its
slots and awaited. A call's kind is known beforehand from its template and its rows, so no shapes have to be learnt.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextvars import copy_context
from functools import partial
from typing import Any

import torch

from mosaic.backends.base import Lanes
from mosaic.engine.calls.caller import caller, note_in_place
from mosaic.engine.calls.hidden import ModuleState, modes_of
from mosaic.engine.calls.placed_module import PlacedModule
from mosaic.engine.calls.ranges import ProfilerRange
from mosaic.engine.calls.signature import Arguments, OutputInfo, Signature
from mosaic.engine.calls.structure import flatten, map_tensors
from mosaic.engine.calls.thread_state import as_lane, interception, on_lane
from mosaic.engine.host.call import Call
from mosaic.engine.host.executor import Executor
from mosaic.engine.host.lane_tensor import LaneTensor, join_joined, joined
from mosaic.engine.host.lane_work import SpanLog
from mosaic.errors import UnsupportedModelError
from mosaic.find.random_numbers import CPU, LaneRandomness, count_draws, torch_state
from mosaic.ranks.calls.exchange import error_of
from mosaic.ranks.calls.passing import ForwardPass
from mosaic.ranks.calls.ranked import Ranked
from mosaic.ranks.calls.routed_calls import RoutedCalls
from mosaic.ranks.parameters.gradients import GradientReducer
from mosaic.ranks.parameters.tied import Compute
from mosaic.ranks.world.progress import RankProgress, SentPhase
from mosaic.timeline import Span

_MAX_SIGNATURES = 256


class HostCalls(RoutedCalls):
    """Runs routed calls over an ``Executor``.

    Attributes:
        executor: The engine of one rank.
    """

    executor: Executor

    def __init__(self, lanes: Lanes, backward_begins: Callable[[], None], progress: RankProgress) -> None:
        super().__init__(backward_begins, progress)
        self.executor = Executor(lanes)
        self._lanes = lanes
        self._log = SpanLog()
        self.executor.looks_early = False  # or ranks would stop at different calls, as it comes
        self._draws: dict[Hashable, int] = {}
        self._modes: dict[str, tuple[bool, ...]] = {}
        self._signatures: dict[tuple[str, int, int, bool], Signature] = {}

    def begin(self, ranked: Mapping[str, Ranked]) -> None:
        self.ranked = dict(ranked)
        for name, one in ranked.items():
            site = PlacedModule(name, one.module, self._lanes.aside(f"routing {name}"), awaited=one.awaited)
            self._sites[name] = site
            self._modes[name] = modes_of(site.module)
            one.after_backward = self._after_backward
            if one.is_member:
                site.obstacle = one.learned.obstacle

    def compute(self, name: str, slots: tuple[int, ...]) -> Compute:
        lane = self._lanes.lane(slots)

        def run(work: Callable[[], Any], phase: SentPhase) -> Any:
            start = 0

            def timed() -> Any:
                nonlocal start
                start = time.perf_counter_ns()
                with as_lane(), self.progress.computing(name, phase), ProfilerRange(name, phase):
                    return work()

            try:
                if on_lane() and not self.executor.closed:
                    return lane.submit(timed).wait()
                start = time.perf_counter_ns()
                with self.progress.computing(name, phase), ProfilerRange(name, phase):
                    return work()
            finally:
                self._log.note(name, phase, slots, self.progress.step, start)

        return run

    def call(
        self,
        ranked: Ranked,
        run: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        is_there: bool,
        waits: bool,
        obstacle: str | None = None,
    ) -> tuple[Any, torch.Tensor | None]:
        arguments = Arguments.take(args, kwargs, join_joined)
        error, routes = error_of(ranked, arguments.spec, arguments.leaves), ranked.routes
        site = self._sites[ranked.name]
        attributes = ranked.set_since()
        reason = str(error) if error is not None else interception() or obstacle or site.obstacle
        if reason is None and arguments.opaque is not None:
            reason = f"it takes a {arguments.opaque}, which may hide tensors"
        if reason is None and self.executor.closed:
            reason = "its lanes are closed"
        if reason is not None:
            is_refused = error is not None and routes
            going = partial(
                ForwardPass,
                ranked,
                run,
                is_there=is_there,
                attributes=attributes,
                routes=routes,
                error=error if is_refused else None,
                spec=arguments.spec if error is not None and not routes else None,
            )
            return self._run_here(ranked, going, [] if is_refused else arguments.leaves, reason)
        state = ModuleState.take(site.module)
        # What was set is likely to be set back right after the call; nobody can while the loop's thread waits.
        waits = self.executor.awaits(site, state) or waits or bool(attributes) or ranked.is_new or ranked.writes
        held = state if ranked.is_member and not waits else None
        going = partial(ForwardPass, ranked, is_there=is_there, attributes=attributes, routes=routes)
        made = self._launch(ranked, run, arguments, held, going)
        last = site.last_forward
        if waits and last is not None:
            self.executor.wait(last)
        return made

    def reach(self, site: PlacedModule) -> None:
        """Lets a module's forward end here before somebody else reaches into it; where it does not run it has none."""
        own = self._sites.get(site.name)
        if own is not None and self.ranked[site.name].is_member:
            self.executor.reach(own)

    def begin_backward(self, shared: Sequence[GradientReducer]) -> None:
        """Sees to it that the lanes' work of this backward is awaited at its end, before anything is reduced there."""
        self.executor.backwards.current()
        for reducer in shared:  # what comes from now on is added up before it is added to what was there
            for parameter in reducer.parameters:
                self.executor.backwards.set_aside(parameter)

    def spans(self, origin_ns: int) -> tuple[Span, ...]:
        return self._record.spans(origin_ns)

    @property
    def _record(self) -> SpanLog:
        return self._log if self.ranked else self.executor.log  # without routed calls nothing but the engine's own

    @property
    def origin_ns(self) -> int:
        return self._record.origin_ns

    def clear_spans(self) -> None:
        self._record.clear()

    # Parts.

    def _launch(
        self,
        ranked: Ranked,
        run: Callable[..., Any],
        arguments: Arguments,
        held: ModuleState | None,
        going: Callable[..., ForwardPass],
    ) -> tuple[Any, torch.Tensor | None]:
        executor, site = self.executor, self._sites[ranked.name]
        key, draws = self._draws_of(ranked, site, arguments)
        if draws:
            run = partial(_drawing, run, executor.lane_generator(draws)[0])
        before = torch_state(CPU)
        kind = (ranked.name, ranked.rows_of(arguments.leaves), len(arguments.differentiable), arguments.state.grad)
        if kind not in self._signatures:
            if len(self._signatures) >= _MAX_SIGNATURES:  # numbers of rows that never repeat
                self._signatures.clear()
            self._signatures[kind] = signature_of(ranked, *kind[1:])
        signature = self._signatures[kind]
        call = RoutedCall(self, ranked, site, partial(going, run), arguments, signature, held)
        made = executor.launch(site, call, arguments)
        assert site.last_forward is not None
        if draws is None:
            executor.wait(site.last_forward)
            drawn = count_draws(before, torch_state(CPU))
            self._draws[key] = drawn or 0
            if drawn is None:
                site.obstacle = "it draws random numbers in a way that cannot be foreseen"
        token = made.pop() if len(made) > len(ranked.template.leaves) else None
        return ranked.result_of(made), token

    def _draws_of(self, ranked: Ranked, site: PlacedModule, arguments: Arguments) -> tuple[Hashable, int | None]:
        """Returns a call's kind and how many random numbers calls of that kind draw here; None if that is not known.

        A call that is known to draw gets a generator of its own, in the state of the default one, which is moved on as
        if the call had been made here. The first call of each kind draws from the default one and is waited for. A
        kind is one of this rank's rows: where every rank runs its own, what is drawn is what a plain loop draws.
        """
        if not ranked.is_member:
            return None, 0
        modes = modes_of(site.module)
        if ranked.learned.draws == 0 and modes == self._modes[site.name]:
            return None, 0
        key = (site.name, arguments.key(modes))
        return key, self._draws.get(key)

    def _run_here(
        self,
        ranked: Ranked,
        going: Callable[[list[Any]], ForwardPass],
        leaves: list[Any],
        reason: str,
    ) -> tuple[Any, torch.Tensor | None]:
        """Makes a call where it is made, in the caller's own graph, with nothing else of this rank running."""
        note_in_place(self.executor, ranked.name, reason)
        self.executor.drain()
        leaves = map_tensors(joined, leaves)
        with self.in_step():
            passed = going(leaves).go()

        def arrived(grad: torch.Tensor) -> torch.Tensor:
            self.backward_begins()
            self.executor.drain()
            return grad.value() if isinstance(grad, LaneTensor) else grad

        for tensor in [*flatten(passed.made)[0], passed.token]:
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                tensor.register_hook(arrived)
        return passed.nested(passed.made), passed.token

    @staticmethod
    def _after_backward(ranked: Ranked) -> None:
        if not on_lane():  # on a lane it is a piece of work of its own behind the backward
            ranked.reduce()


def _drawing(run: Callable[..., Any], generator: torch.Generator, *args: Any, **kwargs: Any) -> Any:
    with LaneRandomness(generator):
        return run(*args, **kwargs)


class RoutedCall(Call):
    """State of one call from its launch to the end of its backward."""

    def __init__(
        self,
        calls: HostCalls,
        ranked: Ranked,
        site: PlacedModule,
        going: Callable[[list[Any]], ForwardPass],
        arguments: Arguments,
        signature: Signature,
        state: ModuleState | None,
    ) -> None:
        context = copy_context()

        def passing(*args: Any, **kwargs: Any) -> list[Any]:
            passed = context.run(going(flatten((args, kwargs))[0]).go)
            made = [leaf.contiguous() if isinstance(leaf, torch.Tensor) else leaf for leaf in passed.made]
            return made if passed.token is None else [*made, passed.token]

        super().__init__(calls.executor, site, passing, arguments, signature, None, origin=caller(), state=state)
        self.parameters = []
        self._calls = calls
        self._ranked = ranked

    def forward(self) -> list[torch.Tensor | None]:
        """Runs on the module's lane: takes all steps of the forward."""
        with self._calls.in_step():
            return super().forward()

    def backward(
        self, grads: Sequence[torch.Tensor | None], *, keep: bool, by_caller: bool
    ) -> list[torch.Tensor | None]:
        """Runs on the module's lane: takes all steps of the backward.

        All ranks return every gradient: this one may have none of the rows, and no rank waits for another here.
        """
        with self._calls.in_step():
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
        self._calls.backward_begins()
        executor, site = self.executor, self.site
        pending = super().launch_backward(grads)
        running = executor.backwards.current()
        if self._ranked.reducer is not None:
            running.launched.append(executor.submit(site, "reduction", self._reduce, ()))
        return pending

    def _reduce(self) -> None:
        with self._calls.in_step():
            self._ranked.reduce()


def signature_of(ranked: Ranked, rows: int, num_edges: int, grad: bool) -> Signature:
    """Returns the signature of a call on this rank: the leaves of its result in a list, and its token behind them."""
    wanted = [index for index, flag in enumerate(ranked.template.differentiable) if flag and grad]
    outputs: list[OutputInfo] = []
    leaves: list[Any] = []

    def add(like: torch.Tensor, differentiable: bool) -> None:
        leaves.append(len(outputs))
        outputs.append(OutputInfo(like=like, differentiable=differentiable, same_input=None))

    for index, leaf in enumerate(ranked.template.leaves):
        if isinstance(leaf, torch.Tensor):
            add(torch.empty((rows, *leaf.shape[1:]), dtype=leaf.dtype, device="meta"), index in wanted)
        else:
            leaves.append((leaf,))
    if wanted:
        add(torch.empty(0, dtype=ranked.template.leaves[wanted[0]].dtype, device="meta"), True)
    return Signature(
        outputs=tuple(outputs),
        spec=flatten([None] * len(leaves))[1],
        leaves=tuple(leaves),
        edges=tuple(range(num_edges)),
        writes_buffers=ranked.learned.writes_buffers,
    )
