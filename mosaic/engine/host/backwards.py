"""The caller's backward: what it launched on the lanes, and waiting for it before it returns."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from mosaic.engine.host.gradients import LeafGradients
from mosaic.engine.host.lane_tensor import LaneTensor

if TYPE_CHECKING:
    from mosaic.backends.base import Ticket
    from mosaic.engine.calls.placed_module import PlacedModule
    from mosaic.engine.host.lane_work import LaneWork


class Backwards:
    """The backwards that are running in the caller's threads, the inner ones of reentrant autograd included.

    Attributes:
        gradients: Leaves whose gradients lanes compute.
        num_failed: How many an error cut short.
    """

    def __init__(self, work: LaneWork) -> None:
        self.gradients = LeafGradients(self.current)
        self.num_failed = 0
        self._work = work
        self._begun: list[weakref.ref[RunningBackward]] = []

    def current(self) -> RunningBackward:
        """Returns the running backward; makes it wait for the lanes before it returns."""
        task = torch._C._current_graph_task_id()
        alive = [running for ref in self._begun if (running := ref()) is not None]
        for running in alive:
            if running.task == task:
                return running
        if not alive:
            self.forget_failed()
        running = RunningBackward(self, task)
        self._begun.append(weakref.ref(running, self._let_go))
        torch.autograd.Variable._execution_engine.queue_callback(running)  # type: ignore[attr-defined]
        return running

    def _let_go(self, _: weakref.ref[RunningBackward]) -> None:
        """Autograd has let go of a backward that did not end, before its error reaches the loop."""
        self.forget_failed()

    def forget_failed(self) -> None:
        """Cleans up after a backward that an error cut short; the lanes come to rest first."""
        if self._begun and all(ref() is None for ref in self._begun):
            self.num_failed += 1
            self._work.drain()
            self._begun.clear()
            self.gradients.settle()

    def end(self, ended: RunningBackward) -> None:
        """Waits for what one backward launched; once the outermost ends, makes gradients plain."""
        self._begun = [ref for ref in self._begun if ref() is not None and ref() is not ended]
        self._work.hand_over_all()
        try:
            for ticket in ended.launched:
                self._work.wait(ticket)
            self._work.check_forwards()
        except BaseException:
            self._work.drain()
            raise
        finally:
            if not self._begun:
                self._work.num_backwards += 1
                self.gradients.settle()

    def reach(self, site: PlacedModule) -> None:
        """Keeps gradient sums in the plain order when a parameter gets several gradients in one backward.

        They may be those of several calls of its module, or the loop's own, such as a penalty's. The engine would add
        all of them before it adds them to what a parameter has from earlier backwards. So what is there is set aside
        and added at the end.
        """
        several = site.num_pending > 1
        for parameter in site.parameters:
            if several or (parameter.grad is not None and not self.gradients.is_hooked_by_others(parameter)):
                self.gradients.set_aside(parameter)

    def follow_in_place(self, site: PlacedModule, outputs: Sequence[torch.Tensor]) -> None:
        """Follows the results of a module's call that ran in place until its backward.

        Its backward runs in the caller's graph. If later calls of the same backward ran on the lane, both would add
        to the same gradients at once; so until then they run in place too. And gradients that a lane computed, for
        operations on these results, become plain here, so that none gets into the module.
        """
        call = _InPlaceCall()

        def arrived(grad: torch.Tensor) -> torch.Tensor:
            if site.is_in_flight:
                self.current()
                self.reach(site)
            if not torch._C._autograd._get_current_graph_task_keep_graph():
                site.in_place.discard(call)
            return grad.value() if isinstance(grad, LaneTensor) else grad

        for tensor in outputs:
            if tensor.requires_grad and not tensor.is_leaf:
                tensor.register_hook(arrived)
                site.in_place.add(call)  # its life is that of the hooks


class RunningBackward:
    """Called by autograd at the end of one backward; autograd lets go of it when that backward fails.

    Attributes:
        task: Autograd's number of it.
        launched: What it handed to lanes.
    """

    def __init__(self, backwards: Backwards, task: int) -> None:
        self._backwards = backwards
        self.task = task
        self.launched: list[Ticket[Any]] = []

    def __call__(self) -> None:
        """The backward has ended."""
        self._backwards.end(self)


class _InPlaceCall:
    """Stands for one call that ran in place."""
