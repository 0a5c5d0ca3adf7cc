"""Capturing a stage: trial runs off the lanes, one graph for all forwards, one for each branch's backward.

::

    capture stream  --o---------------------------o--
                   fork                          join
    lane of vision    `--- run(vision) ----------'
    lane of text      `--- run(text) ------------'

Kernels keep the SMs of the stream on which they were captured, so one graph spans several partitions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from traceback import clear_frames
from typing import Any

import torch

from mosaic.backends.streams.api import StreamApi
from mosaic.engine.calls.branch_graph import survey
from mosaic.engine.calls.structure import flatten
from mosaic.engine.graphs.branches import RefusalError, TakenCall
from mosaic.engine.graphs.module_state import ModuleState
from mosaic.engine.graphs.rehearsal import as_captured, storages, try_out
from mosaic.engine.graphs.replay import CapturedBranch


class Capturing:
    """Captures branches on one runtime.

    Attributes:
        origin: The stream that captures start from.
    """

    def __init__(self, api: StreamApi) -> None:
        self.api = api
        self.origin = api.new_stream()
        self._side = api.new_stream()

    def close(self) -> None:
        """Gives its streams back."""
        for stream in (self.origin, self._side):
            self.api.give_back(stream)

    def prepare(self, call: TakenCall) -> CapturedBranch:
        """Tries a call out, and makes memory for its inputs.

        Raises:
            RefusalError: It cannot be captured. Nothing is left behind.
        """
        state = ModuleState(call.branch.module, self.api.device)
        reason = state.obstacle()
        if reason is not None:
            raise RefusalError(reason)
        lane = call.branch.lane
        lane.order_after_caller()
        with self.api.use_stream(lane.stream):
            static = call.static_inputs()
        with state.without_trace():
            self.api.synchronize()
            try:
                with self.api.use_stream(self._side):
                    try_out(call, static, state, self.api)
            except Exception as error:
                clear_frames(error.__traceback__)  # in torch 2.11 a checkpoint's hooks stay active as long as its frame
                if isinstance(error, RefusalError):
                    raise
                raise RefusalError(f"trying it failed: {told(error)}", lasting=False) from error
            finally:
                self.api.synchronize()
        return CapturedBranch(self.api, call.without_tensors(), state, static)

    def capture(self, branches: Sequence[CapturedBranch]) -> Any:
        """Captures the forward of all branches in one graph, which it returns, and the backward of each in another.

        Each graph has a memory pool of its own: sharing one is "safe if you know you'll replay those graphs in the
        same order you captured them" (ATen/cuda/CUDAGraph.h), and branches go backward as they like, and at once.
        """
        forward = self._captured(lambda: self._launch(branches), stream=self.origin)
        for branch in branches:
            if branch.targets:
                with self.api.use_stream(branch.lane.stream):
                    branch.make_memory_for_gradients()
                self._capture_backward(branch, branch.every_output)
        return forward

    def learn_patterns(self, branch: CapturedBranch) -> None:
        """Captures backwards for those sets of outputs that had gradients in an earlier backward of a branch."""
        while branch.wanted:
            pattern = branch.wanted.pop()
            branch.backwards[pattern] = branch.backwards[branch.every_output]  # does it too, with zeros
            with suppress(Exception):
                self._capture_backward(branch, pattern)

    def _launch(self, branches: Sequence[CapturedBranch]) -> None:
        fork = self._mark(self.origin)
        for branch in branches:
            fork.wait(branch.lane.stream)
        ends: list[Any] = []
        try:
            for index, branch in enumerate(branches):
                for earlier, end in zip(branches[:index], ends, strict=True):
                    if _exclude(earlier, branch):
                        end.wait(branch.lane.stream)
                lane = branch.lane
                with self.api.use_stream(lane.stream), lane.under_settings(), as_captured(branch.state):
                    _take_outputs(branch, branch.call.run_on(branch.static))
                ends.append(self._mark(branch.lane.stream))
        except Exception:
            with suppress(Exception):  # a capture that is not lost ends as torch expects it
                self._join(branches)
            raise
        self._join(branches)

    def _join(self, branches: Sequence[CapturedBranch]) -> None:
        for branch in branches:
            self._mark(branch.lane.stream).wait(self.origin)

    def _mark(self, stream: Any) -> Any:
        event = self.api.new_event()
        event.record(stream)
        return event

    def _capture_backward(self, branch: CapturedBranch, pattern: tuple[bool, ...]) -> None:
        """Captures a branch's backward for gradients of those differentiable outputs that ``pattern`` names."""
        chosen = [number for number, given in enumerate(pattern) if given]
        found: list[torch.Tensor | None] = []

        def launch() -> None:
            outputs = [branch.made[branch.differentiable[number]] for number in chosen]
            given = [branch.static_grads[number] for number in chosen]
            with branch.lane.under_settings(), torch.autocast(self.api.device.type, enabled=False):
                found.extend(torch.autograd.grad(outputs, branch.targets, given, allow_unused=True, retain_graph=True))

        graph = self._captured(launch, stream=branch.lane.stream)
        branch.backwards[pattern] = (graph, found)

    def _captured(self, launch: Callable[[], None], *, stream: Any) -> Any:
        graph = self.api.new_graph()
        causes: list[Exception] = []
        self.api.synchronize()
        self.api.release_workspaces()  # made outside of the pool, they would be used inside of it, and vice versa
        try:
            with self.api.capture(graph, stream=stream, pool=self.api.new_graph_pool()):
                try:
                    launch()
                except Exception as error:
                    causes.append(error)
                    raise
        except Exception as error:  # of what failed first, not of the end of a capture that failed
            raise (causes[0] if causes else error) from None
        finally:
            self.api.synchronize()
            self.api.release_workspaces()
        return graph


def told(error: Exception) -> str:
    """Returns an error's type and the first line of its text."""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def _exclude(one: CapturedBranch, other: CapturedBranch) -> bool:
    """Whether two branches must not run at once: their lanes share slots, or their modules share buffers."""
    shared = storages(one.state.tensors.values()) & storages(other.state.tensors.values())
    return one.lane is not other.lane and bool(set(one.lane.slots) & set(other.lane.slots) or shared)


def _take_outputs(branch: CapturedBranch, result: Any) -> None:
    """Notes what a captured call returned and which leaves its gradients reach."""
    leaves, branch.spec = flatten(result)
    inputs = {id(static): number for number, static in enumerate(branch.static)}
    own: dict[int, torch.Tensor] = dict(branch.state.tensors)
    own |= {id(alias): branch.state.parameters[key] for key, alias in branch.state.aliases.items()}
    numbers: dict[int, int] = {}
    for leaf in leaves:
        if not isinstance(leaf, torch.Tensor):
            branch.outputs.append(("value", leaf))
        elif id(leaf) in inputs:
            branch.outputs.append(("input", inputs[id(leaf)]))
        elif id(leaf) in own:
            branch.outputs.append(("value", own[id(leaf)]))
        else:
            number = numbers.setdefault(id(leaf), len(branch.made))
            if number == len(branch.made):
                branch.made.append(leaf)
            branch.outputs.append(("made", number))
    branch.differentiable = tuple(index for index, tensor in enumerate(branch.made) if tensor.requires_grad)
    branch.take_targets([survey([branch.made[index]]).leaves for index in branch.differentiable])
