"""Plans the next step of a pipeline in a process of its own while the present step runs.

::

    with NextStepPlanner(plan) as planner:           # plan(metadata, search) -> schedule, of an importable module
        planner.start(0, metadata[0])
        for step in range(num_steps):
            schedule = planner.take(step).schedule   # the best so far, or None
            planner.start(step + 1, metadata[step + 1], step_s=last_step_s)
            run(schedule)

``python -m mosaic.pipelining.next_step FD PARENT`` is the process. It imports what the planning function needs, but
neither torch nor the main script, and it ends with its parent.
"""

from __future__ import annotations

import math
import os
import pickle
import queue
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, NamedTuple, Self

BUDGET_SHARE = 0.9
"""Share of the last step's time in which the next one is planned."""
MAX_DEATHS = 3
"""Processes that end one after the other without an answer, after which none is started."""
_ANSWER_S = 0.25
"""Seconds that ``take`` waits for the process, which may still be importing."""
_LOOK_S = 0.5
"""Seconds between two checks of the process that its parent is still there."""


class Search:
    """The limits of one search, and the receiver of its results.

    Attributes:
        num_threads: Threads for the planning function.
    """

    def __init__(
        self, *, num_threads: int, seconds: float | None, offer: Callable[[Any], None], is_taken: Callable[[], bool]
    ) -> None:
        """Begins; with ``seconds`` None the search ends when its step is taken."""
        self.num_threads = num_threads
        self._end = None if seconds is None else time.monotonic() + seconds
        self._offer = offer
        self._is_taken = is_taken

    @property
    def seconds_left(self) -> float | None:
        """Seconds left, never negative; None: until the step is taken."""
        return None if self._end is None else max(0.0, self._end - time.monotonic())

    def should_stop(self) -> bool:
        """Returns True if the time is over or the step has been taken."""
        return self._is_taken() or self.seconds_left == 0

    def offer(self, schedule: Any) -> None:
        """Publishes the best schedule so far; from any thread."""
        self._offer(schedule)


PlanningFunction = Callable[[Any, Search], Any]
"""Maps a step's metadata and a search to the schedule, or to None for the last offered one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """The answer for one step."""

    schedule: Any = None
    """The best schedule so far, if any."""
    error: str = ""
    """The reason of a failure, otherwise empty."""


class NextStepPlanner:
    """Plans one step at a time in another process, on at most half of the cores that this process may use."""

    def __init__(self, plan: PlanningFunction, *, num_threads: int | None = None, grace_s: float = 1.0) -> None:
        """Starts the process.

        Args:
            plan: Plans a step. It is pickled, so it belongs in a module that imports only what planning needs.
            num_threads: Threads for the planning function; by default half of the cores, which is also the most.
            grace_s: Seconds that a planning function may go on after it should have stopped, before its process is
                replaced.

        Raises:
            ValueError: ``num_threads`` exceeds half of the cores.
        """
        cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
        half = max(1, (len(cores) or os.cpu_count() or 2) // 2)
        if num_threads is not None and not 1 <= num_threads <= half:
            raise ValueError(f"num_threads={num_threads}; use 1 to {half}, half of the cores that this process may use")
        used = num_threads or half
        self._content = pickle.dumps((pickle.dumps(plan), used, frozenset(cores[-used:])))
        self._grace_s = grace_s
        self._step: int | None = None
        self._error = ""
        self._num_deaths = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection
        self._begin()

    @property
    def pid(self) -> int | None:
        """The process; None after its end."""
        return None if self._process is None else self._process.pid

    def start(self, step: int, metadata: Any, *, step_s: float | None = None) -> None:
        """Requests the schedule of a step and ends the search for an earlier one.

        Args:
            step: Its number.
            metadata: The planning function's argument; pickled.
            step_s: Seconds of a recent step. Planning takes ``BUDGET_SHARE`` of them at most, or until the step is
                taken. None: until it is taken.

        Raises:
            ValueError: ``step_s`` is negative or not finite.
        """
        if step_s is not None and not 0 <= step_s < math.inf:
            raise ValueError(f"step_s={step_s}; use finite seconds, 0 or more")
        self._step, self._error = step, ""
        if self._process is None and self._num_deaths >= MAX_DEATHS:
            self._error = f"the planning process ended {self._num_deaths} times in a row; it is not started again"
            return
        try:
            if self._process is None:
                self._begin()
            seconds = None if step_s is None else BUDGET_SHARE * step_s
            self._connection.send(("plan", step, pickle.dumps(metadata), seconds))
        except OSError as error:  # it has just ended, or there is no memory for another process
            self._error = self._end(str(error))

    def take(self, step: int, *, wait_s: float = 0.0) -> Planned:
        """Returns the best schedule for a step so far, and ends its search.

        Args:
            step: The step that was started last.
            wait_s: Seconds to wait at most for a first schedule.

        Raises:
            ValueError: Another step was started, or none.
        """
        if step != self._step:
            raise ValueError(f"step {step} is taken; call start({step}, ...) before")
        if self._process is None:
            return Planned(error=self._error)
        try:
            self._connection.send(("take", step, wait_s))
            answer = _NO_ANSWER
            while answer.step != step and self._connection.poll(wait_s + _ANSWER_S):
                answer = _Answer(*self._connection.recv())  # an earlier one may have come too late
        except (EOFError, OSError):
            return Planned(error=self._end("the planning process ended"))
        if answer.late_s > self._grace_s:
            why = "the planning function still plans an earlier step: it checks no should_stop()"
            return Planned(error=self._end(why))
        if answer.is_over:
            self._num_deaths = 0
        try:
            return Planned(schedule=pickle.loads(answer.best) if answer.best else None, error=answer.error)
        except Exception as problem:  # of any kind: its class may not be here
            return Planned(error=f"{answer.error}\nthe schedule of step {step} cannot be read: {problem!r}".strip())

    def close(self) -> None:
        """Ends the process."""
        if self._process is not None:
            self._end("")

    def __enter__(self) -> Self:
        """Returns itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Closes."""
        self.close()

    def _begin(self) -> None:
        self._connection, theirs = Pipe()
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "mosaic.pipelining.next_step", str(theirs.fileno()), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                start_new_session=True,  # Ctrl-C is for this process, which ends the other one
            )
        finally:
            theirs.close()
        self._connection.send_bytes(self._content)

    def _end(self, reason: str) -> str:
        """Ends the process and returns the reason, with its exit code if it ended by itself."""
        assert self._process is not None
        process, self._process = self._process, None
        self._num_deaths += 1
        with suppress(subprocess.TimeoutExpired):
            process.wait(0.1)
        code = process.poll()
        process.kill()
        process.wait()
        self._connection.close()
        if code is None:
            return reason
        return f"{reason}: {signal.Signals(-code).name if code < 0 else f'exit code {code}'}"


class _Answer(NamedTuple):
    step: int | None
    best: bytes
    """The pickled schedule; empty: none yet."""
    error: str
    is_over: bool
    late_s: float
    """Seconds for which an earlier search has overrun."""


_NO_ANSWER = _Answer(None, b"", "", False, 0.0)


# The process.


class _Board:
    """The newest request and its best schedule, between the thread that plans and the one that answers."""

    def __init__(self) -> None:
        self.requests: queue.SimpleQueue[tuple[int, bytes, float | None]] = queue.SimpleQueue()
        self.changed = threading.Condition()
        self.step: int | None = None
        self.best, self.error = b"", ""
        self.is_over = False
        self.stop_since = math.inf
        """Time of the first request to stop the present search."""

    def plan(self, plan: PlanningFunction, num_threads: int, step: int, metadata: bytes, seconds: float | None) -> None:
        with self.changed:
            self.step, self.best, self.error, self.is_over = step, b"", "", False
            self.stop_since = math.inf if self.requests.empty() else time.monotonic()
        best, error = None, ""
        try:
            search = Search(
                num_threads=num_threads,
                seconds=seconds,
                offer=lambda schedule: self.publish(pickle.dumps(schedule)),
                is_taken=lambda: self.stop_since < math.inf,
            )
            schedule = plan(pickle.loads(metadata), search)
            best = None if schedule is None else pickle.dumps(schedule)
        except BaseException:  # also SystemExit: the parent reports it, and the next request is answered
            error = traceback.format_exc()
        self.publish(best, error=error, is_over=True)

    def publish(self, best: bytes | None, *, error: str = "", is_over: bool = False) -> None:
        with self.changed:
            self.best, self.error, self.is_over = self.best if best is None else best, error, is_over
            self.changed.notify_all()

    def add(self, step: int, metadata: bytes, seconds: float | None) -> None:
        with self.changed:  # ``plan`` begins behind it
            self.requests.put((step, metadata, seconds))
            self.stop_since = min(self.stop_since, time.monotonic())

    def answer(self, step: int, wait_s: float) -> _Answer:
        with self.changed:
            self.changed.wait_for(lambda: self.step == step and bool(self.best or self.is_over), wait_s)
            if self.step != step:
                late_s = 0.0 if self.is_over else max(0.0, time.monotonic() - self.stop_since)
                return _Answer(step, b"", "", False, late_s)
            self.stop_since = min(self.stop_since, time.monotonic())
            return _Answer(step, self.best, self.error, self.is_over, 0.0)


def _answer(connection: Connection, parent: int, board: _Board) -> None:
    """Answers until the parent closes or ends; then ends this process, whatever the planning function does."""
    with suppress(EOFError, OSError):
        while os.getppid() == parent:
            if not connection.poll(_LOOK_S):
                continue
            kind, *request = connection.recv()
            if kind == "plan":
                board.add(*request)
            else:
                connection.send(tuple(board.answer(*request)))  # the class is another one here, of ``__main__``
    os._exit(0)


def main(handle: int, parent: int) -> None:
    """Plans one request after the other."""
    connection, board = Connection(handle), _Board()
    try:
        content, num_threads, cores = pickle.loads(connection.recv_bytes())
    except EOFError:  # the parent has gone already
        return
    if hasattr(os, "sched_setaffinity") and cores:
        os.sched_setaffinity(0, cores)
    if hasattr(os, "nice"):
        os.nice(10)  # training goes first
    threading.Thread(target=_answer, args=(connection, parent, board), daemon=True).start()

    def broken(metadata: Any, search: Search) -> Any:
        raise ImportError(reason)

    try:
        plan = pickle.loads(content)
    except BaseException:  # the module of the planning function cannot be imported, for instance
        plan, reason = broken, traceback.format_exc()
    while True:
        board.plan(plan, num_threads, *board.requests.get())


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
