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
from collections import Counter
from collections.abc import Hashable, Sequence
from typing import Any

import torch

from mosaic.backends.streams.api import StreamApi
from mosaic.engine.calls.thread_state import is_traced, surrounding
from mosaic.engine.graphs.branches import Eager, RefusalError, StageBranch, TakenCall
from mosaic.engine.graphs.capture import Capturing, told
from mosaic.engine.graphs.module_state import ModuleChange
from mosaic.engine.graphs.replay import CapturedStage
from mosaic.engine.graphs.settings import has_other_mode, torch_settings
from mosaic.errors import MosaicError

_TWICE = "its gradients are asked for with create_graph=True, and a graph has no gradients of gradients"

_MAX_ATTEMPTS = 3
"""Tries to capture one kind of call, none of them of lasting use, after which it is left alone."""

_MAX_UNUSED = 12
"""Captures of one set of branches in a row, such as with ever new shapes, that mean the same."""


class StageGraphs:
    """The captured stages of one device, by what has to be equal for a replay to be right.

    That is: the stage; for each branch its lane, function, nesting and shapes, strides and dtypes of all inputs, values
    of other arguments; torch's settings (``torch_settings``); and for each module the training modes and attributes of
    its parts and classes, context variables, its parameters and where they lie, and which of them are trained. Calls
    that differ are captured apart, and what was not used for longest is let go.

    Args:
        max_graphs: How many stages to keep.

    Attributes:
        refused: For each branch that ran eagerly for good, why.
        eager_calls: How often each branch was left to its caller, by name and reason.
        num_captures: Stages captured so far.
        num_replays: Forwards by replay so far.
    """

    def __init__(self, api: StreamApi, *, max_graphs: int = 32) -> None:
        if max_graphs < 1:
            raise ValueError(f"max_graphs={max_graphs}; keep at least one")
        self.refused: dict[str, str] = {}
        self.eager_calls: Counter[tuple[str, str]] = Counter()
        self.num_captures = 0
        self.num_replays = 0
        self._api = api
        self._max_graphs = max_graphs
        self._capturing = Capturing(api)
        self._stages: list[CapturedStage] = []  # what was used last stands last
        self._left_alone: dict[Hashable, str] = {}
        self._attempts: Counter[Hashable] = Counter()
        self._unused: Counter[Hashable] = Counter()
        self._closed = False
        # it runs before that of the lanes
        self._finalizer = weakref.finalize(self, _end, self._capturing, self._stages, os.getpid())

    def run(self, stage: Hashable, branches: Sequence[StageBranch]) -> list[Any]:
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
        found: CapturedStage | None = None
        while calls and found is None:
            found = self._find_or_capture(stage, calls, results)
        if found is not None:
            self._replay(found, calls, results)
        for branch, result in zip(branches, results, strict=True):
            if isinstance(result, Eager):
                self.eager_calls[branch.name, result.reason] += 1
        return results

    def call(self, branch: StageBranch) -> Any:
        """Runs a branch that is a stage of its own; launches it in the plain way where a replay would not be right."""
        (result,) = self.run(branch.name, [branch])
        return branch.run(*branch.args, **branch.kwargs) if isinstance(result, Eager) else result

    @property
    def is_in_flight(self) -> bool:
        """Whether a forward by replay waits for its backward."""
        return any(stage.in_flight for stage in self._stages)

    def close(self) -> None:
        """Lets all graphs go, after the device has come to rest; to be called before the streams end."""
        self._closed = True
        self._finalizer()

    # Finding.

    def _interception(self) -> str | None:
        if is_traced():
            return "it is being traced"
        if has_other_mode():
            return "another torch mode is active"
        return surrounding() or ("it is being captured by somebody else" if self._api.is_capturing() else None)

    def _take(self, branch: StageBranch) -> TakenCall | Eager:
        try:
            call = TakenCall.take(branch, self._api.device)
        except RefusalError as refusal:
            self.refused[branch.name] = refusal.reason
            return Eager(reason=refusal.reason)
        reason = self._left_alone.get(_kind(call))
        return call if reason is None else Eager(reason=reason)

    def _find_or_capture(
        self, stage: Hashable, calls: dict[int, TakenCall], results: list[Any]
    ) -> CapturedStage | None:
        """Returns the stage that calls can be replayed by; or takes calls away that cannot be captured."""
        key = (stage, torch_settings(self._api.device.type), tuple(call.key for call in calls.values()))
        names = (stage, tuple(call.branch.name for call in calls.values()))
        change: ModuleChange | None = None
        for found in [one for one in self._stages if one.key == key]:
            twice = [i for i, branch in zip(calls, found.branches, strict=True) if branch.is_differentiated_twice]
            if twice:
                self._drop(found)
                self._refuse(calls, dict.fromkeys(twice, RefusalError(_TWICE)), results)
                return None
            differs = found.change()
            if differs is None:
                self._stages.remove(found)
                self._stages.append(found)
                self._attempts.pop(key, None)
                self._unused.pop(names, None)
                return found
            change = change or differs
            if differs.lasting:
                self._drop(found)
        self._attempts[key] += 1
        if self._attempts[key] > _MAX_ATTEMPTS or self._unused[names] >= _MAX_UNUSED:
            text = change.text if change is not None else "no graph of the last ones was used twice"
            vain = RefusalError(f"it changes from call to call: {text}")
            self._refuse(calls, dict.fromkeys(calls, vain), results)
            return None
        made = self._capture(key, calls, results)
        if made is not None:
            self._unused[names] += 1
            self.num_captures += 1
            while len(self._stages) >= self._max_graphs:
                self._drop(self._stages[0])
            self._stages.append(made)
        return made

    def _replay(self, found: CapturedStage, calls: dict[int, TakenCall], results: list[Any]) -> None:
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

    # Capturing.

    def _capture(self, key: Hashable, calls: dict[int, TakenCall], results: list[Any]) -> CapturedStage | None:
        refusals: dict[int, RefusalError] = {}
        made = self._try(key, calls, refusals)
        self._refuse(calls, refusals, results)
        return made

    def _try(
        self, key: Hashable, calls: dict[int, TakenCall], refusals: dict[int, RefusalError]
    ) -> CapturedStage | None:
        branches = []
        for index, call in calls.items():
            try:
                branches.append(self._capturing.prepare(call))
            except RefusalError as refusal:
                refusals[index] = refusal
        if refusals:
            return None
        try:
            return CapturedStage(key, self._capturing.capture(branches), branches)
        except Exception as error:
            failed = RefusalError(f"capturing it failed: {told(error)}")
        if len(calls) > 1:
            for index, call in calls.items():  # whose fault was it?
                blamed: dict[int, RefusalError] = {}
                alone = self._try(None, {index: call}, blamed)
                refusals |= blamed
                if alone is not None:
                    alone.close()
        if not refusals:
            refusals |= dict.fromkeys(calls, failed)
        return None

    def _refuse(self, calls: dict[int, TakenCall], refusals: dict[int, RefusalError], results: list[Any]) -> None:
        for index, refusal in refusals.items():
            call = calls.pop(index)
            kind = _kind(call)
            self._attempts[kind] += 1
            if refusal.lasting or self._attempts[kind] >= _MAX_ATTEMPTS:
                self._left_alone[kind] = self.refused[call.branch.name] = refusal.reason
            results[index] = Eager(reason=refusal.reason)

    def _drop(self, stage: CapturedStage) -> None:
        self._stages.remove(stage)
        self._api.synchronize()  # it may still be running
        if not stage.in_flight:
            stage.close()


def _kind(call: TakenCall) -> Hashable:
    return (call.key, torch.is_grad_enabled())


def _end(capturing: Capturing, stages: list[CapturedStage], process: int) -> None:
    if os.getpid() == process:  # the child of a fork has no driver
        capturing.api.synchronize()
        for stage in stages:
            stage.close()
        capturing.close()
    stages.clear()
