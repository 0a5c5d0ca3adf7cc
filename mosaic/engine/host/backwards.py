"""The caller's backward: waiting for what it launched on the lanes, and sums of gradients in the plain loop's order."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from mosaic.engine.host.lane_tensor import to_plain

if TYPE_CHECKING:
    from mosaic.backends.base import Ticket
    from mosaic.engine.calls.placed_module import PlacedModule
    from mosaic.engine.host.lane_work import LaneWork


class Backwards:
    """The backwards that are running in the caller's threads, the inner ones of reentrant autograd included.

    Attributes:
        num_failed: How many an error cut short.
    """

    def __init__(self, work: LaneWork) -> None:
        self.num_failed = 0
        self._work = work
        self._begun: list[weakref.ref[RunningBackward]] = []
        self._aside: dict[int, tuple[torch.Tensor, torch.Tensor | None]] = {}

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
            self._settle()

    def end(self, ended: RunningBackward) -> None:
        """Waits for what one backward launched; once the outermost ends, makes gradients whole."""
        self._begun = [ref for ref in self._begun if ref() is not None and ref() is not ended]
        try:
            for ticket in ended.launched:
                self._work.wait(ticket)
            self._work.check_unseen()
        except BaseException:
            self._work.drain()
            raise
        finally:
            if not self._begun:
                self._work.num_backwards += 1
                self._settle()

    def reach(self, site: PlacedModule, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Keeps gradient sums in the plain order when a parameter gets several gradients in one backward.

        They may be those of several calls of its module, or the loop's own, such as a penalty's. The engine would add
        all of them before it adds them to what a parameter has from earlier backwards. So what is there is set aside
        and added at the end.
        """
        several = site.num_pending > 1
        for parameter in parameters:
            if several or (parameter.grad is not None and not has_hooks(parameter)):
                self.set_aside(parameter)

    def set_aside(self, leaf: torch.Tensor) -> None:
        """Keeps what ``leaf.grad`` has from earlier backwards out of the way until this one has ended.

        Doing it again during the same backward does nothing.
        """
        if id(leaf) not in self._aside:
            self._aside[id(leaf)] = (leaf, leaf.grad)
            leaf.grad = None

    def _settle(self) -> None:
        aside, self._aside = self._aside, {}
        for leaf, earlier in aside.values():
            if earlier is None:
                continue
            if leaf.grad is not None:
                with (
                    torch.no_grad()
                ):  # as autograd adds: in place, unless that would make a dense gradient of a sparse one
                    later = leaf.grad
                    earlier = later + earlier if earlier.is_sparse and not later.is_sparse else earlier.add_(later)
            leaf.grad = earlier

    def follow_in_place(self, site: PlacedModule, outputs: Sequence[torch.Tensor]) -> None:
        """Follows the results of a module's call that ran in place until its backward.

        Its backward runs in the caller's graph. If later calls of the same backward ran on the lane, both would add
        to the same gradients at once; so until then they run in place too.
        """
        call = _InPlaceCall()

        def arrived(grad: torch.Tensor) -> Any:
            if site.is_in_flight:
                self.current()
                self.reach(site, site.parameters)
            if not torch._C._autograd._get_current_graph_task_keep_graph():
                site.in_place.discard(call)
            return to_plain(grad)

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


def has_hooks(leaf: torch.Tensor) -> bool:
    """Whether somebody hangs on a leaf's gradient."""
    return bool(leaf._backward_hooks) or bool(getattr(leaf, "_post_accumulate_grad_hooks", None))
