"""The caller's backward: what it launched on the lanes, and waiting for it before it returns."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from mosaic.backends.base import Ticket
    from mosaic.engine.host.executor import Executor


class Backwards:
    """The backwards that are running in the caller's threads, the inner ones of reentrant autograd included.

    Attributes:
        ended: How many have ended; backwards inside of others are not counted.
        failed: How many an error cut short.
    """

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._begun: list[weakref.ref[_End]] = []
        self.ended = 0
        self.failed = 0

    def current(self) -> _End:
        """Returns the running backward; makes it wait for the lanes before it returns."""
        task = torch._C._current_graph_task_id()
        alive = [end for ref in self._begun if (end := ref()) is not None]
        for end in alive:
            if end.task == task:
                return end
        if not alive:
            self.forget_failed()
        end = _End(self, task)
        self._begun.append(weakref.ref(end))
        torch.autograd.Variable._execution_engine.queue_callback(end)  # type: ignore[attr-defined]
        return end

    def forget_failed(self) -> None:
        """Cleans up after a backward that an error cut short; the lanes come to rest first."""
        if self._begun and all(ref() is None for ref in self._begun):
            self.failed += 1
            self._executor.drain()
            self._begun.clear()
            self._executor.gradients.settle()

    def end(self, ended: _End) -> None:
        """Waits for what one backward launched; once the outermost ends, makes gradients plain."""
        self._begun = [ref for ref in self._begun if ref() is not None and ref() is not ended]
        self._executor.hand_over_all()
        try:
            for ticket in ended.launched:
                self._executor.wait(ticket)
            self._executor.check_forwards()
        except BaseException:
            self._executor.drain()
            raise
        finally:
            if not self._begun:
                self.ended += 1
                self._executor.gradients.settle()


class _End:
    """Called by autograd at the end of one backward; autograd lets go of it when that backward fails."""

    def __init__(self, backwards: Backwards, task: int) -> None:
        self._backwards = backwards
        self.task = task
        self.launched: list[Ticket[Any]] = []

    def __call__(self) -> None:
        self._backwards.end(self)
