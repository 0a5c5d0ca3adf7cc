"""Where a rank is: what it computes, waits for and sends, noted as it happens so that others can be told."""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import TracebackType
from typing import Literal

SentPhase = Literal["forward", "backward", "reduce"]
"""Rows of arguments and results, their gradients, or gradients of parameters."""


class Traffic:
    """Counts what is sent; threads may count at the same time.

    What a rank keeps for itself is not sent and not counted. Of a reduction the gradients that are handed to it are
    counted, not what the library makes of them.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_bytes: Counter[tuple[str, SentPhase]] = Counter()

    def add(self, module: str, phase: SentPhase, num_bytes: int) -> None:
        """Counts bytes."""
        with self._lock:
            self._num_bytes[module, phase] += num_bytes

    def metrics(self) -> dict[str, float]:
        """Returns all of it as ``sent_bytes/PHASE/MODULE``, for a flat dict of metrics."""
        with self._lock:
            return {f"sent_bytes/{phase}/{name}": float(n) for (name, phase), n in sorted(self._num_bytes.items())}

    def clear(self) -> None:
        """Starts again from zero."""
        with self._lock:
            self._num_bytes.clear()


WaitedPhase = SentPhase | Literal["agreement"]
"""What of a step others are waited for; an agreement is anything that all ranks decide or collect together."""
Waiting = Callable[[SentPhase], AbstractContextManager[None]]
"""Returns a block in which a thread waits for other ranks, in a phase of one module."""

_MAX_WAITS = 20_000
THE_LOOP = "the loop"
"""Stands for a module where no placed module is meant: the model's own parameters, norms, checkpoints."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Whereabouts:
    """What a rank was doing at some moment."""

    step: int
    """Backwards that had ended before."""
    calls: int
    """Calls of the model that had begun."""
    doing: Literal["starting", "computing", "waiting", "elsewhere"]
    """``elsewhere`` is any code but that of placed modules: the loop's own."""
    module: str
    """Module that it computed or waited in; the last one it was in, if it is elsewhere; empty at the start."""
    phase: str
    """``forward``, ``backward``, ``reduce`` or ``agreement``; empty at the start."""
    for_s: float
    """Seconds that it had been doing this."""

    @property
    def is_start(self) -> bool:
        """Whether it had not come to any module."""
        return not self.calls and self.module in ("", THE_LOOP)

    def __str__(self) -> str:
        if self.is_start:
            return "before its first step" + (", waiting for all ranks to agree" if self.doing == "waiting" else "")
        phase = {"reduce": "reduction of gradients", "agreement": "agreement of all ranks"}.get(self.phase, self.phase)
        where = f"the {phase} of {'the model' if self.module == THE_LOOP else repr(self.module)}"
        doing = {"computing": "computing", "waiting": "waiting in", "elsewhere": "in the loop's own code after"}
        return f"step {self.step}, {doing[self.doing]} {where}"


@dataclass(frozen=True, slots=True)
class Wait:
    """Time for which a thread waited for other ranks."""

    module: str
    """Module whose rows or gradients it waited for."""
    phase: WaitedPhase
    """Which part of the step."""
    step: int
    """Backwards that had ended before."""
    start_ns: int
    """On ``time.perf_counter_ns``."""
    end_ns: int
    """On ``time.perf_counter_ns``."""


class RankProgress:
    """Where this rank is; any thread may note.

    Noting costs two dictionary entries, and nothing is sent: others are told by a thread that reads this now and then.

    Args:
        explain: Makes of an error of torch.distributed one that says which rank is at fault.

    Attributes:
        step: Backwards that have ended.
        calls: Calls of the model that have begun.
        refuses: Raises if there is no use in waiting for other ranks, since one has failed.
    """

    def __init__(self) -> None:
        self.step = 0
        self.calls = 0
        self.explain: Callable[[RuntimeError], BaseException] = lambda error: error
        self.refuses: Callable[[], None] = lambda: None
        self._waiting: dict[int, tuple[str, WaitedPhase, int]] = {}
        self._computing: dict[int, tuple[str, WaitedPhase, int]] = {}
        self._last: tuple[str, str, int] = ("", "", time.perf_counter_ns())
        self._waits: deque[Wait] = deque(maxlen=_MAX_WAITS)

    def waiting(self, module: str, phase: WaitedPhase) -> AbstractContextManager[None]:
        """Returns a block in which this thread waits for other ranks; errors that end it name the rank at fault."""
        return _Waiting(self, module, phase)

    def computing(self, module: str, phase: SentPhase) -> AbstractContextManager[None]:
        """Returns a block in which this rank computes a module."""
        return _Computing(self, module, phase)

    @property
    def now(self) -> Whereabouts:
        """Where it is; of several threads, what computes counts before what waits, and long before short."""
        for doing, table in (("computing", self._computing), ("waiting", self._waiting)):
            found = sorted(table.values(), key=lambda entry: entry[2])
            if found:
                return self._whereabouts(doing, *found[0])
        return self._whereabouts("elsewhere" if self._last[0] else "starting", *self._last)

    @property
    def waits(self) -> tuple[Wait, ...]:
        """The last 20,000 waits, in the order in which they ended."""
        return tuple(self._waits)

    def clear_waits(self) -> None:
        """Forgets them."""
        self._waits.clear()

    def _whereabouts(self, doing: str, module: str, phase: str, since_ns: int) -> Whereabouts:
        return Whereabouts(
            step=self.step,
            calls=self.calls,
            doing=doing,  # type: ignore[arg-type]
            module=module,
            phase=phase,
            for_s=(time.perf_counter_ns() - since_ns) / 1e9,
        )


class _Waiting:
    __slots__ = ("_entry", "_progress")

    def __init__(self, progress: RankProgress, module: str, phase: WaitedPhase) -> None:
        self._progress = progress
        self._entry = (module, phase, time.perf_counter_ns())

    def __enter__(self) -> None:
        self._progress.refuses()
        self._progress._waiting[threading.get_ident()] = self._entry

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        progress, (module, phase, start) = self._progress, self._entry
        end = time.perf_counter_ns()
        progress._waits.append(Wait(module, phase, progress.step, start, end))
        try:
            if isinstance(error, RuntimeError):
                explained = progress.explain(error)
                if explained is not error:
                    raise explained from error
        finally:
            progress._waiting.pop(threading.get_ident(), None)
            progress._last = (module, phase, end)


class _Computing:
    __slots__ = ("_entry", "_progress")

    def __init__(self, progress: RankProgress, module: str, phase: SentPhase) -> None:
        self._progress = progress
        self._entry = (module, phase, time.perf_counter_ns())

    def __enter__(self) -> None:
        self._progress._computing[threading.get_ident()] = self._entry

    def __exit__(self, *_: object) -> None:
        self._progress._computing.pop(threading.get_ident(), None)
        self._progress._last = (*self._entry[:2], time.perf_counter_ns())
