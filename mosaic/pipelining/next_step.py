"""Plans the next step of a pipeline in a process of its own while the present step runs.

``python -m mosaic.pipelining.next_step FD PARENT`` is the process. It imports what the planning function needs, but
not the main script as a process pool does, and it ends with its parent.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

from mosaic.pipelining.orders import OrderLimits

BUDGET_SHARE = 0.9
"""Share of the last step's time in which the next one is planned."""
STOP_SHARE = 0.1
"""Share of it in which a search that is stopped has to return its best so far."""
FIRST_STEP_S = 1.0
"""Seconds of a step before any has run."""
_WATCH_S = 0.5
"""Seconds between two checks of the process that its parent is still there."""


class NextStepPlanner:
    """Plans one step at a time in another process, on at most half of the cores that this process may use.

    Args:
        plan: Maps a step's metadata and the limits of a search to a schedule. It is pickled, so it belongs in a module
            that imports only what planning needs.
    """

    def __init__(self, plan: Callable[[Any, OrderLimits], Any]) -> None:
        cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
        half = max(1, (len(cores) or os.cpu_count() or 2) // 2)
        self._changed = threading.Condition()
        self._step, self._step_s = -1, FIRST_STEP_S
        self._answer: tuple[bytes, str] | None = None
        self._has_died = False
        self._connection, theirs = Pipe()
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "mosaic.pipelining.next_step", str(theirs.fileno()), str(os.getpid())],
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

    def start(self, step: int, metadata: Any, *, step_s: float | None = None) -> None:
        """Requests the schedule of a step and ends the search for an earlier one.

        Args:
            step: Its number.
            metadata: The planning function's argument; pickled.
            step_s: Seconds of a recent step, of which planning takes ``BUDGET_SHARE`` at most.
        """
        step_s = FIRST_STEP_S if step_s is None else step_s
        with self._changed:
            self._step, self._step_s, self._answer = step, step_s, None
        self._send((step, pickle.dumps(metadata), BUDGET_SHARE * step_s))

    def take(self, step: int, *, wait_s: float = 0.0) -> tuple[Any, str]:
        """Returns the best schedule so far of the step that was started last, or None, and the reason of a failure.

        A search that still runs after ``wait_s`` is stopped and has ``STOP_SHARE`` for its best.
        """
        assert step == self._step
        with self._changed:
            if not self._changed.wait_for(self._has_ended, wait_s):
                self._send(None)
                self._changed.wait_for(self._has_ended, STOP_SHARE * self._step_s)
            answer = self._answer
        if answer is None:
            has_died = self._has_died
            return None, f"the planning process ended with exit code {self._process.wait()}" if has_died else ""
        content, error = answer
        try:
            return pickle.loads(content), error
        except Exception as problem:  # of any kind: its class may not be here
            return None, f"the schedule of step {step} cannot be read: {problem!r}"

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._reader.join()
        self._connection.close()

    def _send(self, request: object) -> None:
        with suppress(OSError):  # ``take`` reports a process that has ended
            self._connection.send(request)

    def _has_ended(self) -> bool:
        return self._answer is not None or self._has_died

    def _read(self) -> None:
        """Receives answers until the process ends; a thread, so that neither process waits while both send."""
        with suppress(EOFError, OSError):
            while True:
                step, content, error = self._connection.recv()
                with self._changed:
                    if step == self._step:
                        self._answer = content, error
                        self._changed.notify_all()
        with self._changed:
            self._has_died = True
            self._changed.notify_all()


def main(handle: int, parent: int) -> None:
    """Plans one request after the other; the process."""
    connection = Connection(handle)

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_WATCH_S)
        os._exit(0)

    threading.Thread(target=watch, daemon=True).start()
    with suppress(EOFError, OSError):
        content, num_threads, cores = connection.recv()
        if hasattr(os, "sched_setaffinity") and cores:
            os.sched_setaffinity(0, cores)
        if hasattr(os, "nice"):
            os.nice(10)  # training goes first
        while True:
            if (request := connection.recv()) is None:  # a stop that came after the answer
                continue
            step, metadata, seconds = request
            limits = OrderLimits(seconds=seconds, threads=num_threads, should_stop=connection.poll)
            answer, error = pickle.dumps(None), ""
            try:
                answer = pickle.dumps(pickle.loads(content)(pickle.loads(metadata), limits))
            except BaseException:  # also SystemExit: the parent reports it, and the next request is answered
                error = traceback.format_exc()
            connection.send((step, answer, error))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
