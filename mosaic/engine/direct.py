"""Calls of modules that have the whole device to themselves: they run in the caller's own thread.

No other module may run beside such a module, so handing it to a lane would cost time and gain nothing. What the lanes
were given before ends first; then the call is the plain one, forward and backward.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from mosaic.engine.calls.structure import map_tensors, tensors_in
from mosaic.engine.host.lane_tensor import LaneTensor, join_all

if TYPE_CHECKING:
    from mosaic.engine.calls.placed_module import Site
    from mosaic.engine.host.executor import Executor


class DirectCalls:
    """Runs and records such calls for one executor on the host."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._last: dict[str, _Last] = {}

    def run(self, site: Site, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Calls the module; its inputs are waited for, and so are the lanes."""
        executor = self._executor
        if executor.num_launched:
            args, kwargs = map_tensors(join_all, args), map_tensors(join_all, kwargs)
            executor.drain()
        start = time.perf_counter_ns()
        result = run(*args, **kwargs)
        executor.record(site, "forward", start)
        if torch.is_grad_enabled():
            self._watch(site, result)
            if executor.num_launched:
                for parameter in site.parts()[1]:  # what the module left lying about may be used beside its results
                    executor.gradients.expect(parameter)
        return result

    def close(self) -> None:
        """Takes its hooks off the parameters."""
        for last in self._last.values():
            last.hook.remove()
        self._last.clear()

    def _watch(self, site: Site, result: Any) -> None:
        """Follows a call's results until their gradients arrive.

        A gradient that a lane computed, for an operation on one of these results, becomes plain: none gets into the
        module.
        """
        executor, started = self._executor, self._last_of(site)

        def arrived(grad: torch.Tensor) -> torch.Tensor:
            executor.backwards.current()  # counts this backward
            plain = grad.value() if isinstance(grad, LaneTensor) else grad
            if started is not None and started.began_ns == 0:
                started.began_ns = time.perf_counter_ns()
            return plain

        for tensor in (result,) if isinstance(result, torch.Tensor) else tensors_in(result):
            if tensor.requires_grad and not tensor.is_leaf:
                tensor.register_hook(arrived)

    def _last_of(self, site: Site) -> _Last | None:
        """Returns what sees the end of a module's backward: its first parameter, which gets its gradient last."""
        known = self._last.get(site.name)
        if known is not None and known.parameter.requires_grad:
            return known
        module = site.module
        first = next((p for p in module.parameters() if p.requires_grad), None) if module is not None else None
        if first is None:
            return None
        if known is not None:
            known.hook.remove()
        last = self._last[site.name] = _Last(first)
        executor = self._executor

        def ended(_: torch.Tensor) -> None:
            if last.began_ns:
                executor.record(site, "backward", last.began_ns)
                last.began_ns = 0

        last.hook = first.register_post_accumulate_grad_hook(ended)
        return last


class _Last:
    """The parameter whose gradient ends a module's backward, and when the backward began."""

    def __init__(self, parameter: torch.nn.Parameter) -> None:
        self.parameter = parameter
        self.began_ns = 0
        self.hook: Any = None
