"""Plans the next step of a pipeline in a process of its own while the present step runs.

::

    with NextStepPlanner(StepPlanning(...)) as planner:
        planner.start(0, microbatches[0])
        for step in range(num_steps):
            schedule = planner.take(step).schedule   # the best so far, or None
            planner.start(step + 1, microbatches[step + 1], step_s=last_step_s)
            run(schedule)

``python -m mosaic.pipelining.next_step FD PARENT`` is the process. It imports what the planning function needs, but
not the main script, and it ends with its parent.
"""

from __future__ import annotations

import math
import os
import pickle
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, Self

from mosaic.pipelining.layers import Microbatch
from mosaic.pipelining.orders import OrderLimits
from mosaic.pipelining.partition import Partition, Request
from mosaic.pipelining.planner import PlannerOptions, SharedStep, plan_shares, plan_step, shares_of
from mosaic.pipelining.schedule import PipelineSchedule
from mosaic.pipelining.task_graph import RankSpace

BUDGET_SHARE = 0.9
"""Share of the last step's time in which the next one is planned."""
FIRST_STEP_S = 1.0
"""Seconds of a step before any has run."""
_LOOK_S = 0.5
"""Seconds between two checks of the process that its parent is still there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """The limits of one search, and the receiver of its results."""

    num_threads: int
    """Threads for the planning function."""
    end_s: float
    """End of the search on the monotonic clock."""
    is_stopped: Callable[[], bool]
    """Returns True if another step has been requested."""
    offer: Callable[[Any], None]
    """Publishes the best schedule so far."""

    @property
    def seconds_left(self) -> float:
        """Seconds left, never negative."""
        return max(0.0, self.end_s - time.monotonic())

    def should_stop(self) -> bool:
        """Returns True if the time is over or another step has been requested."""
        return self.seconds_left == 0 or self.is_stopped()


@dataclass(frozen=True, kw_only=True)
class StepPlanning:
    """Plans a step on replicas of a pipeline: the natural order of all within milliseconds, then a search for each."""

    request: Request
    """Model and ranks."""
    partition: Partition
    """Layers of each rank."""
    space: RankSpace = field(default_factory=RankSpace)
    """The ranks."""
    options: PlannerOptions = field(default_factory=PlannerOptions)
    """Options; the search has its own limits."""
    num_replicas: int = 1
    """Replicas that share the step."""

    def __call__(self, microbatches: Sequence[Microbatch], search: Search) -> SharedStep:
        """Returns the best schedules at the end of the search.

        Raises:
            InfeasibleError, ValueError: See ``plan_step``.
        """
        shares = shares_of(self.request, microbatches, self.num_replicas)
        natural = OrderLimits(effort=0.0)
        search.offer(plan_shares(shares, microbatches, lambda own: self._plan(own, natural, "natural")))
        left = sum(map(bool, shares))

        def searched(own: Sequence[Microbatch]) -> PipelineSchedule:
            nonlocal left
            left -= 1
            limits = replace(
                self.options.limits,
                seconds=search.seconds_left,
                threads=search.num_threads,
                should_stop=search.should_stop,
            )
            return self._plan(own, limits.share(1 / (left + 1)), self.options.method)

        return plan_shares(shares, microbatches, searched)

    def _plan(self, microbatches: Sequence[Microbatch], limits: OrderLimits, method: str) -> PipelineSchedule:
        options = replace(self.options, limits=limits, method=method)
        planned = plan_step(self.request, microbatches, space=self.space, options=options, partition=self.partition)
        return planned.schedule()


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """The answer for one step."""

    schedule: Any = None
    """The best schedule so far, if any."""
    error: str = ""
    """The reason of a failure, otherwise empty."""


class NextStepPlanner:
    """Plans one step at a time in another process, on at most half of the cores that this process may use.

    Args:
        plan: Maps a step's metadata and a search to a schedule. It is pickled, so it belongs in a module that imports
            only what planning needs.
    """

    def __init__(self, plan: Callable[[Any, Search], Any]) -> None:
        cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
        half = max(1, (len(cores) or os.cpu_count() or 2) // 2)
        self._changed = threading.Condition()
        self._step, self._best, self._error, self._is_over = -1, b"", "", False
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
        self._connection.send((pickle.dumps(plan), half, frozenset(cores[-half:])))
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        """The process."""
        return self._process.pid

    def start(self, step: int, metadata: Any, *, step_s: float | None = None) -> None:
        """Requests the schedule of a step and ends the search for an earlier one.

        Args:
            step: Its number.
            metadata: The planning function's argument; pickled.
            step_s: Seconds of a recent step, of which planning takes ``BUDGET_SHARE`` at most.

        Raises:
            ValueError: ``step_s`` is negative or not finite.
        """
        step_s = FIRST_STEP_S if step_s is None else step_s
        if not 0 <= step_s < math.inf:
            raise ValueError(f"step_s={step_s}; use finite seconds, 0 or more")
        with self._changed:
            self._step, self._best, self._error, self._is_over = step, b"", "", False
        with suppress(OSError):  # ``take`` reports a process that has ended
            self._connection.send((step, pickle.dumps(metadata), BUDGET_SHARE * step_s))

    def take(self, step: int, *, wait_s: float = 0.0) -> Planned:
        """Returns the best schedule for a step so far.

        Args:
            step: The step that was started last.
            wait_s: Seconds to wait at most for a first schedule.

        Raises:
            ValueError: Another step was started, or none.
        """
        if step != self._step:
            raise ValueError(f"step {step} is taken; call start({step}, ...) before")
        with self._changed:
            self._changed.wait_for(lambda: self._best or self._is_over or not self._reader.is_alive(), wait_s)
            best, error = self._best, self._error
        if not self._reader.is_alive() and not error:
            error = f"the planning process ended with exit code {self._process.wait()}"
        try:
            return Planned(schedule=pickle.loads(best) if best else None, error=error)
        except Exception as problem:  # of any kind: its class may not be here
            return Planned(error=f"{error}\nthe schedule of step {step} cannot be read: {problem!r}".strip())

    def close(self) -> None:
        """Ends the process; calling it again does nothing."""
        self._process.kill()
        self._process.wait()
        self._reader.join()
        self._connection.close()

    def __enter__(self) -> Self:
        """Returns itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Closes."""
        self.close()

    def _read(self) -> None:
        """Receives answers until the process ends; a thread, so that neither process waits while both send."""
        with suppress(EOFError, OSError):
            while True:
                step, best, error, is_over = self._connection.recv()
                with self._changed:
                    if step == self._step:
                        self._best, self._error, self._is_over = best or self._best, error, is_over
                        self._changed.notify_all()
        with self._changed:
            self._is_over = True
            self._changed.notify_all()


def main(handle: int, parent: int) -> None:
    """Plans one request after the other; the process."""
    connection = Connection(handle)

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_LOOK_S)
        os._exit(0)

    threading.Thread(target=watch, daemon=True).start()
    with suppress(EOFError, OSError):
        content, num_threads, cores = connection.recv()
        if hasattr(os, "sched_setaffinity") and cores:
            os.sched_setaffinity(0, cores)
        if hasattr(os, "nice"):
            os.nice(10)  # training goes first
        while True:
            step, metadata, seconds = connection.recv()

            def send(schedule: Any, error: str = "", *, is_over: bool = False, step: int = step) -> None:
                connection.send((step, b"" if schedule is None else pickle.dumps(schedule), error, is_over))

            schedule, error = None, ""
            try:
                plan = pickle.loads(content)
                end_s = time.monotonic() + seconds
                search = Search(num_threads=num_threads, end_s=end_s, is_stopped=connection.poll, offer=send)
                schedule = plan(pickle.loads(metadata), search)
            except BaseException:  # also SystemExit: the parent reports it, and the next request is answered
                error = traceback.format_exc()
            send(schedule, error, is_over=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
