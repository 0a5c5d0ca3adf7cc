"""Calls of modules that have the whole device to themselves: they run in the caller's own thread.

No other module may run beside such a module, so handing it to a lane would cost time and gain nothing. What the lanes
were given before ends first; then the call is the plain one, forward and backward.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from mosaic.engine.calls.last_gradients import LastGradients
from mosaic.engine.calls.ranges import ProfilerRange
from mosaic.engine.calls.structure import map_tensors, tensors_in
from mosaic.engine.host.lane_tensor import LaneTensor, join_all

if TYPE_CHECKING:
    from mosaic.engine.calls.placed_module import PlacedModule
    from mosaic.engine.host.backwards import Backwards
    from mosaic.engine.host.lane_work import LaneWork


class DirectCalls:
    """Runs and records such calls for one executor on the host."""

    def __init__(self, work: LaneWork, backwards: Backwards) -> None:
        self._work = work
        self._backwards = backwards
        self._ends = LastGradients()
        self._began: dict[str, tuple[int, ProfilerRange]] = {}

    def run(self, site: PlacedModule, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Calls the module; its inputs are waited for, and so are the lanes."""
        work = self._work
        if work.num_launched:
            args, kwargs = map_tensors(join_all, args), map_tensors(join_all, kwargs)
            work.drain()
        start = time.perf_counter_ns()
        with ProfilerRange(site.name, "forward"):
            result = run(*args, **kwargs)
        work.record(site, "forward", start)
        if torch.is_grad_enabled():
            self._watch(site, result)
            if work.num_launched:
                for parameter in site.parameters:  # what the module left lying about may be used beside its results
                    self._backwards.gradients.expect(parameter)
        return result

    def close(self) -> None:
        """Takes its hooks off the parameters."""
        self._ends.close()

    def _watch(self, site: PlacedModule, result: Any) -> None:
        """Follows a call's results until their gradients arrive.

        A gradient that a lane computed, for an operation on one of these results, becomes plain: none gets into the
        module.
        """
        sees_end = self._ends.watch(site, partial(self._ended, site))

        def arrived(grad: torch.Tensor) -> torch.Tensor:
            self._backwards.current()  # counts this backward
            plain = grad.value() if isinstance(grad, LaneTensor) else grad
            if sees_end and site.name not in self._began:
                self._began[site.name] = time.perf_counter_ns(), ProfilerRange(site.name, "backward")
            return plain

        for tensor in (result,) if isinstance(result, torch.Tensor) else tensors_in(result):
            if tensor.requires_grad and not tensor.is_leaf:
                tensor.register_hook(arrived)

    def _ended(self, site: PlacedModule) -> None:
        began = self._began.pop(site.name, None)
        if began is not None:
            began_ns, shown = began
            shown.close()
            self._work.record(site, "backward", began_ns)
