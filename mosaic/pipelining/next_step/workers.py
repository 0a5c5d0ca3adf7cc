"""Workers as the one who asks has them: a process, or a thread of this one, behind one connection."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import threading
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Protocol

from mosaic.pipelining.next_step.worker import Desk, PlanningFunction

MODULE = "mosaic.pipelining.next_step.worker"


class Worker(Protocol):
    """Somebody who plans."""

    connection: Connection

    def kill(self) -> bool:
        """Ends it at once; False where that cannot be done."""

    def wait(self, seconds: float) -> bool:
        """Waits for its end; False if it goes on."""

    def how_it_ended(self) -> str:
        """Says how, once its connection is closed."""


class ProcessWorker:
    """A process that has imported neither this one's main module nor torch, and uses some cores only."""

    def __init__(self, plan: bytes, num_threads: int, cores: frozenset[int]) -> None:
        """Starts it; ``plan`` is the pickled planning function."""
        self.connection, theirs = Pipe()
        by_main_thread = threading.current_thread() is threading.main_thread()
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", MODULE, str(theirs.fileno()), str(os.getpid()), str(int(by_main_thread))],
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                start_new_session=True,  # an interrupt is for this process, which ends the worker
            )
        finally:
            theirs.close()
        self.connection.send_bytes(pickle.dumps((plan, num_threads, cores)))

    @property
    def pid(self) -> int:
        """Its process."""
        return self._process.pid

    def kill(self) -> bool:
        """Ends it at once."""
        self._process.kill()
        return True

    def wait(self, seconds: float) -> bool:
        """Waits for its end; False if it goes on."""
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True

    def how_it_ended(self) -> str:
        """Says how, once its connection is closed."""
        code = self._process.wait()
        ended = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        return f"the planning process ended with {ended}"


class ThreadWorker:
    """A thread of this process; it shares its cores and its interpreter."""

    def __init__(self, plan: PlanningFunction, num_threads: int) -> None:
        """Starts it."""
        self.connection, theirs = Pipe()
        desk = Desk(theirs, plan, num_threads)
        threading.Thread(target=desk.read, args=(None,), daemon=True, name="next-step-reader").start()
        self._thread = threading.Thread(target=desk.work, daemon=True, name="next-step-planner")
        self._thread.start()

    def kill(self) -> bool:
        """No thread can be ended from outside."""
        return False

    def wait(self, seconds: float) -> bool:
        """Waits for its end; False if it goes on."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def how_it_ended(self) -> str:
        """Says how, once its connection is closed."""
        return "the planning thread ended"
