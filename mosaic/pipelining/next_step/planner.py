"""Has the next step planned while this one runs, and hands over the best schedule so far when it is asked for.

::

    with NextStepPlanner(plan) as planner:          # plan(metadata, search) -> schedule, of an importable module
        planner.start(0, metadata[0])
        for step in range(steps):
            handed = planner.take(step)             # at once: the best so far, or the last one known
            planner.start(step + 1, metadata[step + 1], step_s=last_step_s)
            run(handed.schedule)

Neither ``start`` nor ``take`` waits for planning: threads of their own talk to the worker.
"""

from __future__ import annotations

import math
import os
import pickle
import queue
import threading
import time
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, Self

from mosaic.pipelining.next_step.worker import PlanningFunction
from mosaic.pipelining.next_step.workers import ProcessWorker, ThreadWorker, Worker

BUDGET_SHARE = 0.9
"""Of the time of a step, for planning the next one."""
MAX_DEATHS = 3
"""Processes that end one after the other without an answer, after which no other is started."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HandedOver:
    """What was taken for a step."""

    schedule: Any
    """The best one so far; None where there is none yet, not even for an earlier step."""
    step: int | None
    """The step that it was planned for; an earlier one than asked for where nothing was found in time."""
    is_final: bool
    """Whether the planning function had come to its end; else it was told to stop."""
    error: str
    """What went wrong with this step's planning; empty: nothing."""
    planned_s: float
    """Seconds since planning of the step was asked for."""


@dataclass(slots=True, kw_only=True)
class _Request:
    """Planning of one step."""

    number: int = -1
    step: int = -1
    since: float = 0.0
    best: bytes = b""
    is_final: bool = False
    is_over: bool = True
    error: str = ""


class NextStepPlanner:
    """Plans one step at a time in a worker, on at most half of the cores that this process may use."""

    def __init__(
        self,
        plan: PlanningFunction,
        *,
        kind: Literal["process", "thread"] = "process",
        num_threads: int | None = None,
        grace_s: float = 1.0,
    ) -> None:
        """Starts the worker.

        Args:
            plan: Plans a step: takes its metadata and a ``Search``, which it tells of better schedules and asks whether
                to stop. For a process it is pickled, so it belongs in a module that imports only what planning needs.
            kind: Where it runs. A process is confined to half of the cores, and outlives nothing; a thread shares the
                interpreter, and is for functions that release the GIL.
            num_threads: For the planning function; by default half of the cores. At most that.
            grace_s: How long a planning function may go on after it was told to stop, and the next step waits for it,
                before its process is replaced.

        Raises:
            ValueError: There are not so many cores, or a process could not find the function again.
        """
        cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
        half = max(1, (len(cores) or os.cpu_count() or 2) // 2)
        if num_threads is not None and not 1 <= num_threads <= half:
            raise ValueError(f"num_threads={num_threads}; use 1 to {half}, half of the cores that this process may use")
        self._plan = plan
        self._kind = kind
        self._pickled = _pickled(plan) if kind == "process" else b""
        self._num_threads = num_threads or half
        self._cores = frozenset(cores[-self._num_threads :])
        self._grace_s = grace_s
        self._changed = threading.Condition()
        self._asked = _Request()
        self._known: tuple[int, bytes] | None = None
        self._busy = -1  # number of the request that the worker has; -1: none
        self._deaths = 0
        self._reason = ""  # why a worker could not begin
        self._is_closed = False
        self._outbox: queue.SimpleQueue[tuple[Any, ...] | None] = queue.SimpleQueue()
        self._worker: Worker | None = self._hire()
        self._sender = threading.Thread(target=self._send, daemon=True, name="next-step-sender")
        self._sender.start()

    @property
    def pid(self) -> int | None:
        """The worker's process; None where it is a thread, or has ended."""
        worker = self._worker
        return worker.pid if isinstance(worker, ProcessWorker) else None

    def start(self, step: int, metadata: Any, *, step_s: float | None = None) -> None:
        """Asks for a step to be planned; what is still planned for an earlier one is ended.

        Args:
            step: Its number.
            metadata: What the planning function is given; pickled here and now.
            step_s: How long steps take of late, in seconds; planning takes ``BUDGET_SHARE`` of that, or until it is
                taken, whatever comes first. None: until it is taken.

        Raises:
            ValueError: ``step_s`` is negative or not finite, or the planner is closed.
        """
        if self._is_closed:
            raise ValueError(f"step {step} is asked of a planner that is closed; make another one")
        if step_s is not None and not 0 <= step_s < math.inf:
            raise ValueError(f"step_s={step_s}; use finite seconds, 0 or more")
        content = pickle.dumps(metadata)
        with self._changed:
            before = self._asked
            if before.best:
                self._known = before.step, before.best
            if not before.is_over:
                self._outbox.put(("stop", before.number))
            number = before.number + 1
            self._asked = _Request(number=number, step=step, since=time.monotonic(), is_over=False)
        self._outbox.put(("plan", number, content, None if step_s is None else BUDGET_SHARE * step_s))

    def take(self, step: int, *, wait_s: float = 0.0) -> HandedOver:
        """Returns the best schedule for a step so far, and ends its planning; the last one known where there is none.

        Args:
            step: The one that was asked for last.
            wait_s: How long to wait at most while there is nothing for this step; 0: not at all.

        Raises:
            ValueError: Another step was asked for, or none.
        """
        with self._changed:
            asked = self._asked
            if asked.number < 0 or asked.step != step:
                raise ValueError(f"step {step} is taken; call start({step}, ...) before")
            if wait_s > 0:
                self._changed.wait_for(lambda: bool(asked.best) or asked.is_over, wait_s)
            if not asked.is_over:
                self._outbox.put(("stop", asked.number))
            found = [(step, asked.best)] if asked.best else []
            found += [self._known] if self._known else []
            is_final, error = asked.is_final, asked.error
        for planned_for, content in found:
            try:
                schedule = pickle.loads(content)
            except Exception as problem:  # its class is not here, for instance
                error = f"{error}\nthe schedule of step {planned_for} cannot be read: {problem!r}".strip()
                continue
            return HandedOver(
                schedule=schedule,
                step=planned_for,
                is_final=is_final and planned_for == step,
                error=error,
                planned_s=time.monotonic() - asked.since,
            )
        return HandedOver(
            schedule=None, step=None, is_final=False, error=error, planned_s=time.monotonic() - asked.since
        )

    def close(self) -> None:
        """Ends the worker; waits for it ``grace_s`` at most, and then kills it. Again: does nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        self._outbox.put(("close",))
        self._outbox.put(None)
        self._sender.join()

    def __enter__(self) -> Self:
        """Returns itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Closes."""
        self.close()

    def _hire(self) -> Worker:
        worker: Worker
        if self._kind == "process":
            worker = ProcessWorker(self._pickled, self._num_threads, self._cores)
        else:
            worker = ThreadWorker(self._plan, self._num_threads)
        self._busy = -1
        threading.Thread(target=self._receive, args=(worker,), daemon=True, name="next-step-receiver").start()
        return worker

    def _send(self) -> None:
        """Hands on requests, in a thread of its own: until the worker is free for them, if it must be."""
        while (message := self._outbox.get()) is not None:
            worker = self._free_worker(message[1]) if message[0] == "plan" else self._worker
            if worker is None:
                continue
            try:
                worker.connection.send_bytes(pickle.dumps(message))
            except OSError:  # it has just ended
                if message[0] == "plan":
                    self._fail(message[1], "the planning process ended before it had the request")
        if (worker := self._worker) is not None:
            self._dismiss(worker)

    def _free_worker(self, number: int) -> Worker | None:
        """Waits for a worker that is free; None if the request is not asked for any more or nobody can take it."""
        with self._changed:
            self._changed.wait_for(lambda: self._busy < 0, self._grace_s)
            if number != self._asked.number:
                return None
            is_stuck, worker = self._busy >= 0, self._worker
        if is_stuck and worker is not None:
            if not worker.kill():
                self._fail(number, "the planning function still plans an earlier step; it is to look at should_stop()")
                return None
            self._dismiss(worker)
        worker = self._worker
        if worker is None:
            if self._deaths >= MAX_DEATHS:
                why = f"the planning process ended {self._deaths} times in a row; it is not started again"
                self._fail(number, f"{self._reason}\n{why}".strip())
                return None
            try:
                worker = self._worker = self._hire()
            except OSError as error:  # no memory for another process, for instance
                self._fail(number, f"the planning process cannot be started: {error}")
                return None
        with self._changed:
            self._busy = number
        return worker

    def _dismiss(self, worker: Worker) -> None:
        if not worker.wait(self._grace_s) and worker.kill():
            worker.wait(self._grace_s)
        with self._changed:
            self._changed.wait_for(lambda: self._worker is not worker, self._grace_s)

    def _fail(self, number: int, error: str) -> None:
        with self._changed:
            if number == self._asked.number and not self._asked.is_over:
                self._asked.is_over = True
                self._asked.error = error
            self._changed.notify_all()

    def _receive(self, worker: Worker) -> None:
        """Notes what one worker finds until it ends, in a thread of its own."""
        try:
            while True:
                self._note(*pickle.loads(worker.connection.recv_bytes()))
        except (EOFError, OSError):
            pass
        how = worker.how_it_ended()
        worker.connection.close()
        with self._changed:
            self._deaths += 1
            number, self._busy = self._busy, -1
            self._worker = None if self._worker is worker else self._worker
            self._changed.notify_all()
        self._fail(number, f"{self._reason}\n{how}".strip())

    def _note(self, kind: str, number: int, content: bytes) -> None:
        with self._changed:
            asked = self._asked
            if kind == "broken":  # it could not even begin, and ends now
                self._reason = content.decode()
                return
            self._deaths = 0
            if kind in ("end", "error"):
                self._busy = -1
            if number == asked.number and not asked.is_over:
                if kind == "error":
                    asked.error = content.decode()
                elif content:
                    asked.best = content
                asked.is_over = kind != "offer"
                asked.is_final = kind == "end"
            self._changed.notify_all()


def _pickled(plan: PlanningFunction) -> bytes:
    way_out = "define it at the top of a module that can be imported, or use kind='thread'"
    try:
        content = pickle.dumps(plan)
    except Exception as error:
        raise ValueError(f"the planning function {plan!r} cannot be pickled ({error}); {way_out}") from error
    if b"__main__" in content:
        raise ValueError(
            f"the planning function {plan!r} is of the main script, which a worker does not run; {way_out}"
        )
    return content
