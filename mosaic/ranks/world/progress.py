"""The place of a rank in its step, and its waits for other ranks."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Literal, NamedTuple

import torch.distributed as dist

SentPhase = Literal["forward", "backward", "reduce"]
"""Rows of arguments and results, their gradients, or gradients of parameters."""
WaitedPhase = SentPhase | Literal["agreement"]
"""Part of a step in which a rank waits for others; an agreement is anything that all decide or collect together."""
Waiting = Callable[[SentPhase], AbstractContextManager[None]]
"""Returns a block in which a thread waits for other ranks, in a phase of one module."""

_Entry = tuple[str, str, int]
"""Module, phase, and when it began on ``time.perf_counter_ns``."""
_MAX_WAITS = 20_000
THE_LOOP = "the loop"
"""Stands for a module where no placed module is meant: the model's own parameters, norms, checkpoints."""


class Place(NamedTuple):
    """The activity of a rank at some moment."""

    text: str
    """Step, module and phase; "in the loop's own code" is any code but that of placed modules."""
    is_waiting: bool
    for_s: float
    """Seconds that it has been doing this."""


class RankProgress:
    """The place of this rank; any thread may enter blocks.

    Attributes:
        step: Backwards that have ended.
        calls: Calls of the model that have begun.
        waits: The last 20,000 waits for other ranks, as they ended: module, phase, step, start and end in ns.
        explain: Returns an error that names the rank at fault for an error of torch.distributed.
        fail: Called with an error after which this rank sends no more messages in some communicators.
    """

    def __init__(self) -> None:
        self.step = 0
        self.calls = 0
        self.waits: deque[tuple[str, WaitedPhase, int, int, int]] = deque(maxlen=_MAX_WAITS)
        self.explain: Callable[[RuntimeError], BaseException] = lambda error: error
        self.fail: Callable[[BaseException, Sequence[dist.ProcessGroup]], None] = lambda error, groups: None
        self._waiting: dict[int, _Entry] = {}
        self._computing: dict[int, _Entry] = {}
        self._last: _Entry = ("", "", time.perf_counter_ns())

    @contextmanager
    def waiting(self, module: str, phase: WaitedPhase) -> Iterator[None]:
        """A block in which this thread waits for other ranks; errors that end it name the rank at fault."""
        start = time.perf_counter_ns()
        with self._doing(self._waiting, module, phase):
            try:
                with self.explaining():
                    yield
            finally:
                self.waits.append((module, phase, self.step, start, time.perf_counter_ns()))

    @contextmanager
    def explaining(self) -> Iterator[None]:
        """A block whose errors of communication name the rank at fault."""
        try:
            yield
        except RuntimeError as error:
            explained = self.explain(error)
            if explained is error:
                raise
            raise explained from error

    def computing(self, module: str, phase: SentPhase) -> AbstractContextManager[None]:
        """Returns a block in which this rank computes a module."""
        return self._doing(self._computing, module, phase)

    @contextmanager
    def _doing(self, table: dict[int, _Entry], module: str, phase: WaitedPhase) -> Iterator[None]:
        thread = threading.get_ident()
        table[thread] = (module, phase, time.perf_counter_ns())
        try:
            yield
        finally:
            table.pop(thread, None)
            self._last = (module, phase, time.perf_counter_ns())

    @property
    def now(self) -> Place:
        """The present place; of several threads, what computes counts before what waits, and long before short."""
        doing, (module, phase, since_ns) = "in the loop's own code after", self._last
        for activity, table in (("waiting in", self._waiting), ("computing", self._computing)):
            if entries := list(table.values()):
                doing, (module, phase, since_ns) = activity, min(entries, key=lambda entry: entry[2])
        is_waiting, for_s = doing == "waiting in", (time.perf_counter_ns() - since_ns) / 1e9
        if not self.calls and module in ("", THE_LOOP):
            text = "before its first step" + (", waiting for all ranks to agree" if is_waiting else "")
            return Place(text, is_waiting, for_s)
        phase = {"reduce": "reduction of gradients", "agreement": "agreement of all ranks"}.get(phase, phase)
        where = f"the {phase} of {'the model' if module == THE_LOOP else repr(module)}"
        return Place(f"step {self.step}, {doing} {where}", is_waiting, for_s)
