"""Stages as CUDA graphs: the calls of a stage captured once, in several partitions, and launched as one from then on.

A forward by replay copies the inputs to where the graph reads them, replays the graph of the whole stage, and returns
copies of what it left. Results hang in the caller's autograd graph by one node for each branch, whose inputs are the
branch's differentiable inputs and its parameters: hooks, accumulation, clipping and ``torch.autograd.grad`` see nothing
unusual. Each branch has a backward graph of its own, on its lane: a backward can start when its own gradients are
there, where one graph for the stage would wait for the last of them and would compute zeros for a branch that has none.
The price is one launch for each branch instead of one in all.

What differs from an eager call: a gradient of an input or a parameter that a branch uses several times is summed inside
of the branch first; and under autocast a weight is cast at each of its uses. Both are within rounding.
"""

from __future__ import annotations

import os
import weakref
from collections import Counter, OrderedDict
from collections.abc import Hashable, Sequence
from typing import Any

import torch

from mosaic.backends.stream_api import StreamApi
from mosaic.engine.stage_graph_call import Branch, Eager, TakenCall
from mosaic.engine.stage_graph_capture import Capturing, CulpritError
from mosaic.engine.stage_graph_module import Change, RefusalError
from mosaic.engine.stage_graph_refusals import Refusals
from mosaic.engine.stage_graph_replay import CapturedStage
from mosaic.errors import MosaicError

__all__ = ["Branch", "Eager", "StageGraphs"]


class StageGraphs:
    """The captured stages of one device, by what has to be equal for a replay to be right.

    That is: the stage; for each branch its lane, function, nesting and shapes, strides and dtypes of all inputs, values
    of other arguments; gradient mode, autocast and precision settings; and for each module the training modes and plain
    attributes of its parts, its parameters and where they lie, and which of them are trained. Calls that differ are
    captured apart, and what was not used for longest is let go.

    Args:
        api: The runtime.
        alias: Hand out static memory instead of copies. Results are valid until the next call of the same kind, and
            must not be written to; gradients that ``torch.autograd.grad`` returns for parameters likewise.
        max_graphs: How many stages to keep.
        warmup: Trial runs before a capture.
        sm_target: Capture each branch with libraries told to size their grids for its partition.

    Attributes:
        refused: For each branch that ran eagerly for good, why.
        eager_calls: How often each branch was left to its caller, by name and reason.
        num_captures: Stages captured so far.
        num_replays: Forwards by replay so far.
    """

    def __init__(
        self, api: StreamApi, *, alias: bool = False, max_graphs: int = 32, warmup: int = 3, sm_target: bool = False
    ) -> None:
        if max_graphs < 1:
            raise ValueError(f"max_graphs={max_graphs}; keep at least one")
        self.refused: dict[str, str] = {}
        self.eager_calls: Counter[tuple[str, str]] = Counter()
        self.num_captures = 0
        self.num_replays = 0
        self._api = api
        self._alias = alias
        self._max_graphs = max_graphs
        self._capturing = Capturing(api, warmup=warmup, confine_libraries=sm_target)
        self._stages: OrderedDict[int, CapturedStage] = OrderedDict()
        self._by_key: dict[Hashable, list[int]] = {}
        self._memory = Refusals()
        self._closed = False
        self._finalizer = weakref.finalize(self, _end, self._stages, os.getpid())  # runs before that of the lanes

    def run(self, stage: Hashable, branches: Sequence[Branch]) -> list[Any]:
        """Runs the branches of a stage at once, each on its lane; captures them where that was not done before.

        Starts after what the caller's current stream was given so far, and orders that stream after the results. The
        graph itself is launched on the caller's stream, or on the lane's where there is one branch; so a caller that
        does not want to wait for a branch calls this inside of ``lane.launch``.

        Returns:
            For each branch its result, or ``Eager`` where the caller has to launch it: because it was refused (see
            ``refused``), or because for this once a replay would not be right. Such a branch draws its random numbers
            after the others, and its gradients for what they share are added in another order.
        """
        if self._closed:
            raise MosaicError("these stage graphs are closed; colocate the model again to make new ones")
        results: list[Any] = [None] * len(branches)
        calls: dict[int, TakenCall] = {}
        reason = self._interception()
        for index, branch in enumerate(branches):
            taken = Eager(reason=reason) if reason is not None else self._take(branch)
            if isinstance(taken, Eager):
                results[index] = taken
            else:
                calls[index] = taken
        if calls:
            self._run(stage, calls, results)
        for branch, result in zip(branches, results, strict=True):
            if isinstance(result, Eager):
                self.eager_calls[branch.name, result.reason] += 1
        return results

    @property
    def is_in_flight(self) -> bool:
        """Whether a forward by replay waits for its backward."""
        return any(stage.in_flight for stage in self._stages.values())

    def close(self) -> None:
        """Lets all graphs go, after the device has come to rest; to be called before the streams end."""
        if not self._closed:
            self._closed = True
            self._api.synchronize()
            self._finalizer()
            self._by_key.clear()

    # Finding.

    def _interception(self) -> str | None:
        if torch.is_inference_mode_enabled():
            return "inference mode is active"
        if torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None:
            return "it is being traced"
        if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
            return "hooks on saved tensors are active, such as activation checkpointing around it"
        if torch._C._current_graph_task_id() != -1:
            return "it is called in the middle of a backward, such as by activation checkpointing"
        if self._api.is_capturing():
            return "it is being captured by somebody else"
        return None

    def _take(self, branch: Branch) -> TakenCall | Eager:
        try:
            call = TakenCall.take(branch, self._api.device)
        except RefusalError as refusal:
            self.refused[branch.name] = refusal.reason
            return Eager(reason=refusal.reason)
        reason = self._memory.reason(call)
        return call if reason is None else Eager(reason=reason)

    def _run(self, stage: Hashable, calls: dict[int, TakenCall], results: list[Any]) -> None:
        while calls:
            key = (stage, self._settings(), tuple(call.key for call in calls.values()))
            found, change = self._find(key)
            if found is None:
                found = self._capture(key, calls, results, change)
            if found is not None:
                break
        else:
            return
        if found.in_flight:
            reason = "an earlier call of the same kind has not gone backward yet, and a replay would overwrite it"
            for index in calls:
                results[index] = Eager(reason=reason)
            return
        for branch in found.branches:
            self._capturing.learn_patterns(branch)
        self.num_replays += 1
        for index, result in zip(calls, found.replay(list(calls.values())), strict=True):
            results[index] = result

    def _settings(self) -> Hashable:
        kind = self._api.device.type
        autocast = torch.is_autocast_enabled(kind)
        return (
            torch.is_grad_enabled(),
            torch.get_autocast_dtype(kind) if autocast else None,
            torch.get_float32_matmul_precision(),
            torch.are_deterministic_algorithms_enabled(),
        )

    def _find(self, key: Hashable) -> tuple[CapturedStage | None, Change | None]:
        first: Change | None = None
        for number in list(self._by_key.get(key, ())):
            change = self._stages[number].change()
            if change is None:
                self._stages.move_to_end(number)
                self._memory.used(key)
                return self._stages[number], None
            first = first or change
            if change.lasting:
                self._drop(number)
        return None, first

    # Capturing.

    def _capture(
        self, key: Hashable, calls: dict[int, TakenCall], results: list[Any], change: Change | None
    ) -> CapturedStage | None:
        """Captures a stage; takes those calls away that cannot be captured, and returns None for another try."""
        if self._memory.is_vain(key):
            text = change.text if change is not None else "no graph of the last ones was used twice"
            for index in list(calls):
                self._refuse(calls, index, f"it changes from call to call: {text}", results)
            return None
        try:
            forward, branches = self._capturing.capture(list(calls.values()), alias=self._alias)
        except CulpritError as error:
            self._refuse(calls, list(calls)[error.index], error.refusal.reason, results, lasting=error.refusal.lasting)
            return None
        except Exception as error:
            self._find_culprits(calls, results, error)
            return None
        self.num_captures += 1
        self._memory.captured(key)
        while len(self._stages) >= self._max_graphs:
            self._drop(next(iter(self._stages)))
        number = self.num_captures
        self._stages[number] = CapturedStage(key, forward, branches)
        self._by_key.setdefault(key, []).append(number)
        return self._stages[number]

    def _find_culprits(self, calls: dict[int, TakenCall], results: list[Any], error: Exception) -> None:
        """Captures each call alone, to find out whose fault it was that all of them could not be captured together."""
        before = len(calls)
        first = (str(error).splitlines() or [""])[0]
        text = f"capturing it failed: {type(error).__name__}: {first}"
        if before > 1:
            for index, call in list(calls.items()):
                try:
                    forward, branches = self._capturing.capture([call], alias=self._alias)
                    CapturedStage(None, forward, branches).close()
                except CulpritError as alone:
                    self._refuse(calls, index, alone.refusal.reason, results, lasting=alone.refusal.lasting)
                except Exception as alone:
                    self._refuse(calls, index, f"capturing it failed: {type(alone).__name__}: {alone}", results)
        if len(calls) == before:
            for index in list(calls):
                self._refuse(calls, index, text, results)

    def _refuse(
        self, calls: dict[int, TakenCall], index: int, reason: str, results: list[Any], *, lasting: bool = True
    ) -> None:
        call = calls.pop(index)
        if self._memory.refuse(call, reason, lasting=lasting):
            self.refused[call.branch.name] = reason
        results[index] = Eager(reason=reason)

    def _drop(self, number: int) -> None:
        stage = self._stages.pop(number)
        self._by_key[stage.key].remove(number)
        self._api.synchronize()  # it may still be running
        if not stage.in_flight:
            stage.close()


def _end(stages: dict[int, CapturedStage], process: int) -> None:
    if os.getpid() == process:  # the child of a fork has no driver
        for stage in stages.values():
            stage.close()
    stages.clear()
