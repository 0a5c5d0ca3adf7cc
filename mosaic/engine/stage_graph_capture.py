"""Capturing a stage: trial runs off the lanes, one graph for all forwards, one for each branch's backward.

::

    capture stream  --o---------------------------o--
                   fork                          join
    lane of vision    `--- run(vision) ----------'
    lane of text      `--- run(text) ------------'

Kernels keep the SMs of the stream on which they were captured, so one graph spans several partitions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any

import torch

from mosaic.backends.sm_target import sm_target
from mosaic.backends.stream_api import StreamApi
from mosaic.engine.branch_graph import survey
from mosaic.engine.stage_graph_branch import BackwardGraph, GraphedBranch, Output
from mosaic.engine.stage_graph_call import TakenCall
from mosaic.engine.stage_graph_module import ModuleState, RefusalError, storages, without_trace
from mosaic.engine.stage_graph_trial import try_out
from mosaic.engine.structure import flatten
from mosaic.engine.thread_state import as_lane


class CulpritError(Exception):
    """One branch could not be captured.

    Attributes:
        index: Its place among the calls.
        refusal: Why.
    """

    def __init__(self, index: int, refusal: RefusalError) -> None:
        super().__init__(refusal.reason)
        self.index = index
        self.refusal = refusal


class Capturing:
    """Captures branches on one runtime.

    Attributes:
        origin: The stream that captures start from.
    """

    def __init__(self, api: StreamApi, *, warmup: int, confine_libraries: bool) -> None:
        self.api = api
        self.origin = api.new_stream()
        self._side = api.new_stream()
        self._warmup = warmup
        self._confine_libraries = confine_libraries

    def capture(self, calls: Sequence[TakenCall], *, alias: bool) -> tuple[Any, list[GraphedBranch]]:
        """Captures the forward of all calls in one graph and the backward of each in one of its own.

        Raises:
            CulpritError: One of the calls cannot be captured. Nothing is left behind.
        """
        branches: list[GraphedBranch] = []
        for index, call in enumerate(calls):
            with _blaming(index):
                branches.append(self._prepare(call, alias=alias))
        with without_trace([branch.state for branch in branches], self.api.device), self._at_rest():
            with self.api.use_stream(self._side):
                for index, branch in enumerate(branches):
                    with _blaming(index, "trying it", lasting=False):
                        try_out(branch, self.api.device, self._warmup, self._as_captured)
            self.api.synchronize()
            self.api.release_workspaces()  # made outside of the pool, they would be used inside of it, and vice versa
            pool = self.api.new_graph_pool()
            forward = self._capture_forward(branches, pool)
            for index, branch in enumerate(branches):
                branch.pool = pool
                with _blaming(index):
                    self._capture_backward(branch, branch.every_output)
            self.api.release_workspaces()
        return forward, branches

    def learn_patterns(self, branch: GraphedBranch) -> None:
        """Captures backwards for those sets of outputs that had gradients in an earlier backward of a branch."""
        while branch.wanted:
            pattern = branch.wanted.pop()
            branch.seen.add(pattern)
            with without_trace([], self.api.device), self._at_rest(), suppress(Exception):
                self._capture_backward(branch, pattern)  # without it the one from all outputs does, with zeros

    @contextmanager
    def _at_rest(self) -> Iterator[None]:
        """Lets the device come to rest before and after the block."""
        self.api.synchronize()
        try:
            yield
        finally:
            self.api.synchronize()

    def _prepare(self, call: TakenCall, *, alias: bool) -> GraphedBranch:
        state = ModuleState(call.branch.module)
        reason = state.obstacle(self.api.device)
        if reason is not None:
            raise RefusalError(reason)
        lane = call.branch.lane
        lane.order_after_caller()
        with self.api.use_stream(lane.stream):
            static = call.static_inputs()
        for tensor in call.tensors:
            self.api.record_use(tensor, lane.stream)
        return GraphedBranch(self.api, call.without_tensors(), state, static, alias=alias)

    @contextmanager
    def _as_captured(self, branch: GraphedBranch) -> Iterator[None]:
        """Puts stand-ins for parameters in place, and keeps autocast from keeping cast weights for later calls."""
        cached = torch.is_autocast_cache_enabled()
        torch.set_autocast_cache_enabled(False)
        try:
            with branch.state.with_aliases(), as_lane(), self._libraries_confined(branch):
                yield
        finally:
            torch.set_autocast_cache_enabled(cached)

    def _libraries_confined(self, branch: GraphedBranch) -> AbstractContextManager[Any]:
        return sm_target(branch.lane.num_sms, self.api.device) if self._confine_libraries else nullcontext()

    # Captures.

    def _capture_forward(self, branches: Sequence[GraphedBranch], pool: Any) -> Any:
        culprit: list[CulpritError] = []

        def launch() -> None:
            fork = self.api.new_event()
            fork.record(self.origin)
            ends: list[Any] = []
            for index, branch in enumerate(branches):
                fork.wait(branch.lane.stream)
                for earlier, end in zip(branches[:index], ends, strict=True):
                    if _exclude(earlier, branch):
                        end.wait(branch.lane.stream)
                with self.api.use_stream(branch.lane.stream):
                    try:
                        with _blaming(index), self._as_captured(branch):
                            _take_outputs(branch, branch.call.run_on(branch.static))
                    except CulpritError as error:
                        culprit.append(error)
                        raise
                end = self.api.new_event()
                end.record(branch.lane.stream)
                ends.append(end)
            for end in ends:
                end.wait(self.origin)

        try:
            return self._captured(launch, stream=self.origin, pool=pool)
        except BaseException as error:
            raise (culprit[0] if culprit else error) from None

    def _capture_backward(self, branch: GraphedBranch, pattern: tuple[bool, ...]) -> None:
        """Captures a branch's backward for gradients of those differentiable outputs that ``pattern`` names."""
        if not any(pattern) or not branch.targets:
            return
        if not branch.static_grads:
            with self.api.use_stream(branch.lane.stream):
                branch.static_grads = [torch.zeros_like(branch.made[index].detach()) for index in branch.differentiable]
            self.api.synchronize()
        chosen = [number for number, given in enumerate(pattern) if given]
        found: list[torch.Tensor | None] = []

        def launch() -> None:
            outputs = [branch.made[branch.differentiable[number]] for number in chosen]
            given = [branch.static_grads[number] for number in chosen]
            with torch.autocast(self.api.device.type, enabled=False), self._libraries_confined(branch):
                found.extend(torch.autograd.grad(outputs, branch.targets, given, allow_unused=True, retain_graph=True))

        graph = self._captured(launch, stream=branch.lane.stream, pool=branch.pool)
        branch.backwards[pattern] = BackwardGraph(graph, tuple(found))

    def _captured(self, launch: Callable[[], None], *, stream: Any, pool: Any) -> Any:
        graph = self.api.new_graph()
        with (
            self.api.use_stream(self.api.current_stream()),  # a capture that fails may leave another one behind
            self.api.capture(graph, stream=stream, pool=pool),
        ):
            launch()
        return graph


@contextmanager
def _blaming(index: int, doing: str = "capturing it", *, lasting: bool = True) -> Iterator[None]:
    """Turns errors inside the block into one that names the call at ``index``."""
    try:
        yield
    except RefusalError as refusal:
        raise CulpritError(index, refusal) from refusal
    except CulpritError:
        raise
    except Exception as error:
        first = (str(error).splitlines() or [""])[0]
        reason = f"{doing} failed: {type(error).__name__}: {first}"
        raise CulpritError(index, RefusalError(reason, lasting=lasting)) from error


def _exclude(one: GraphedBranch, other: GraphedBranch) -> bool:
    """Whether two branches must not run at once: their lanes share slots, or their modules share buffers."""
    shared = storages(one.state.tensors.values()) & storages(other.state.tensors.values())
    return one.lane is not other.lane and bool(set(one.lane.slots) & set(other.lane.slots) or shared)


def _take_outputs(branch: GraphedBranch, result: Any) -> None:
    """Notes what a captured call returned and which leaves its gradients reach."""
    leaves, branch.spec = flatten(result)
    inputs = {id(static): number for number, static in enumerate(branch.static)}
    own: dict[int, torch.Tensor] = dict(branch.state.tensors)
    own |= {id(alias): branch.state.parameters[key] for key, alias in branch.state.aliases().items()}
    numbers: dict[int, int] = {}
    outputs: list[Output] = []
    for leaf in leaves:
        if not isinstance(leaf, torch.Tensor):
            outputs.append(Output("value", leaf))
        elif id(leaf) in inputs:
            outputs.append(Output("input", inputs[id(leaf)]))
        elif id(leaf) in own:
            outputs.append(Output("own", own[id(leaf)]))
        else:
            number = numbers.setdefault(id(leaf), len(branch.made))
            if number == len(branch.made):
                branch.made.append(leaf)
            outputs.append(Output("made", number))
    branch.outputs = tuple(outputs)
    branch.differentiable = tuple(index for index, tensor in enumerate(branch.made) if tensor.requires_grad)
    branch.take_targets([survey([branch.made[index]]).leaves for index in branch.differentiable])
