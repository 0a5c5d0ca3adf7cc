"""The caller's backward: it waits for what it launched on the lanes, and sums gradients in the plain loop's order."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch

from mosaic.engine.calls.hidden import has_hooks
from mosaic.engine.calls.placed_module import PlacedModule
from mosaic.engine.host.lane_tensor import LaneTensor, to_plain


class Backwards:
    """The backwards that are running in the caller's threads, the inner ones of reentrant autograd included."""

    def __init__(self, executor: Any) -> None:  # see ``HostExecutor``
        self._executor = executor
        self._begun: dict[int, weakref.ref[Any]] = {}  # what autograd calls at their end, by its number of each
        self._aside: dict[int, tuple[torch.Tensor, torch.Tensor | None]] = {}

    def begin(self) -> None:
        """Makes the running backward wait for the lanes before it returns."""
        task = torch._C._current_graph_task_id()
        if task not in self._begun:
            self.forget_failed()
            at_end = partial(self.end, task)
            self._begun[task] = weakref.ref(at_end, self.forget_failed)
            torch.autograd.Variable._execution_engine.queue_callback(at_end)  # type: ignore[attr-defined]

    def forget_failed(self, _: object = None) -> None:
        """Cleans up after a backward that an error cut short; autograd drops it before the error reaches the loop."""
        if self._begun and all(ref() is None for ref in self._begun.values()):
            self._executor.drain()
            self._executor.errors.clear()
            self._begun.clear()
            self._settle()

    def end(self, ended: int) -> None:
        self._begun = {task: ref for task, ref in self._begun.items() if ref() is not None and task != ended}
        try:
            self._executor.check_errors()
        except BaseException:
            self._executor.drain()
            raise
        finally:
            self._executor.errors.clear()
            if not self._begun:
                self._executor.log.num_backwards += 1
                self._settle()

    def reach(self, site: PlacedModule, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Sets a parameter's earlier gradient aside if it may get several in one backward, of calls or of the loop.

        The engine adds the new ones, such as a penalty's, before it adds them to what earlier backwards left.
        """
        several = len(site.in_flight) + len(site.in_place) > 1
        for parameter in parameters:
            if several or (parameter.grad is not None and not has_hooks((parameter,))):
                self.set_aside(parameter)

    def set_aside(self, leaf: torch.Tensor) -> None:
        """Keeps what ``leaf.grad`` has from earlier backwards out of the way until this one has ended."""
        if id(leaf) not in self._aside:
            self._aside[id(leaf)] = (leaf, leaf.grad)
            leaf.grad = None

    def _settle(self) -> None:
        aside, self._aside = self._aside, {}
        for leaf, earlier in aside.values():
            if earlier is None:
                continue
            if (later := leaf.grad) is not None:
                with torch.no_grad():  # in place, as autograd adds, unless a sparse gradient would become dense
                    earlier = later + earlier if earlier.is_sparse and not later.is_sparse else earlier.add_(later)
            leaf.grad = earlier

    def follow_in_place(self, site: PlacedModule, outputs: Iterable[torch.Tensor]) -> None:
        """Keeps later calls of a module in place until the backward of this one: both add to the same gradients."""

        def arrived(grad: torch.Tensor) -> Any:
            if site.in_flight:
                self.begin()
                self.reach(site, site.parameters)
            return to_plain(grad)

        site.in_place.note(outputs, arrived)


class SumTicket:
    """A sum of two gradients, either of which may be missing; computed by the work that needs it first."""

    def __init__(self, first: LaneTensor, second: LaneTensor) -> None:
        self._operands: tuple[LaneTensor, ...] = (first, second)
        self._sum: list[torch.Tensor | None] | None = None

    @property
    def done(self) -> bool:
        return all(tensor._ticket.done for tensor in self._operands)

    def wait(self) -> list[torch.Tensor | None]:
        operands = self._operands
        if self._sum is None:  # two threads may both compute it
            first, second = [tensor._ticket.wait()[tensor._pick] for tensor in operands]
            with torch.no_grad():
                self._sum = [second if first is None else first if second is None else first + second]
            self._operands = ()
        return self._sum
