"""Operators that follow a branch, handed to its lane together.

One small operator costs a lane's thread more to wake up for than to run. So operators between modules are collected
and handed over when somebody needs them: the next call on their lane, another lane, or the caller.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from mosaic.backends.base import Lane, Ticket
    from mosaic.engine.host.executor import Executor

_MOST_OPERATORS = 64
_MOST_BYTES = 1 << 20  # results live as long as the batch they are part of


class Batch:
    """Operators of one lane in order; handed over once."""

    def __init__(self, executor: Executor, lane: Lane, module: str) -> None:
        self._executor = executor
        self._lane = lane
        self._module = module
        self._works: list[Callable[[], list[torch.Tensor]]] = []
        self._after: list[Ticket[Any]] = []
        self._bytes = 0
        self._ticket: Ticket[None] | None = None
        self.results: list[list[torch.Tensor] | None] = []

    @property
    def takes_more(self) -> bool:
        """Whether operators can be added."""
        return self._ticket is None and len(self._works) < _MOST_OPERATORS and self._bytes < _MOST_BYTES

    @property
    def ticket(self) -> Ticket[None]:
        """The lane's promise for all of it; hands it over if that has not happened yet."""
        if self._ticket is None:
            works, self._works = self._works, []
            after, self._after = self._after, []
            self._ticket = self._executor.submit_to(self._lane, self._module, "glue", lambda: self._run(works), after)
        return self._ticket

    def add(self, work: Callable[[], list[torch.Tensor]], after: Sequence[Ticket[Any]], num_bytes: int) -> Entry:
        """Adds an operator that waits for ``after``."""
        self._works.append(work)
        self._after += after
        self._bytes += num_bytes
        self.results.append(None)
        return Entry(self, len(self.results) - 1)

    @property
    def is_done(self) -> bool:
        """Whether it was handed over and has ended."""
        return self._ticket is not None and self._ticket.done

    def _run(self, works: list[Callable[[], list[torch.Tensor]]]) -> None:
        works.reverse()
        for index in range(len(works)):
            self.results[index] = works.pop()()


class Entry:
    """One operator's promise; a ticket like any other."""

    def __init__(self, batch: Batch, index: int) -> None:
        self.batch = batch
        self._index = index

    @property
    def done(self) -> bool:
        """Whether its batch has ended."""
        return self.batch.is_done

    @property
    def interval_ns(self) -> tuple[int, int]:
        """Start and end of its batch."""
        return self.batch.ticket.interval_ns

    def wait(self) -> list[torch.Tensor]:
        """Hands its batch over, waits for it, and returns the operator's tensors."""
        found = self.batch.results[self._index]
        if found is None:
            self.batch.ticket.wait()
            found = self.batch.results[self._index]
        assert found is not None, "a batch ended without one of its operators"
        return found
