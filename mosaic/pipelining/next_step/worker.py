"""The worker's side: runs a planning function for one request after another, and sends what it finds as it finds it.

Run as ``python -m mosaic.pipelining.next_step.worker FD PARENT BY_MAIN_THREAD``; it imports what the planning function
needs and nothing else.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import queue
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

LOOK_S = 0.5
"""Seconds between two looks at whether the parent is still there."""
_PR_SET_PDEATHSIG = 1


class Search:
    """What a planning function is given beside the metadata.

    Attributes:
        num_threads: How many threads it may use.
    """

    def __init__(
        self, *, num_threads: int, seconds: float | None, offer: Callable[[Any], None], is_asked: Callable[[], bool]
    ) -> None:
        """Begins now; ``seconds`` is None where only a request ends the search."""
        self.num_threads = num_threads
        self._end = None if seconds is None else time.monotonic() + seconds
        self._offer = offer
        self._is_asked = is_asked

    @property
    def seconds_left(self) -> float | None:
        """Until its time is over, never negative; None: it ends when it is asked to."""
        return None if self._end is None else max(0.0, self._end - time.monotonic())

    def should_stop(self) -> bool:
        """Tells whether to come back: its time is over, or the schedule has been taken."""
        return self._is_asked() or self.seconds_left == 0

    def offer(self, schedule: Any) -> None:
        """Puts the best schedule so far where it can be taken; from any thread."""
        self._offer(schedule)


PlanningFunction = Callable[[Any, Search], Any]
"""Takes a step's metadata; returns its schedule, or None for the last one that it offered."""


class Desk:
    """Answers requests that come over a connection, one at a time."""

    def __init__(self, connection: Connection, plan: PlanningFunction, num_threads: int) -> None:
        """Starts to read; ``work`` answers."""
        self._connection = connection
        self._plan = plan
        self._num_threads = num_threads
        self._requests: queue.SimpleQueue[tuple[int, bytes, float | None] | None] = queue.SimpleQueue()
        self._sending = threading.Lock()
        self._stopped = -1
        """Requests up to this one are to stop."""

    def read(self, parent: int | None) -> None:
        """Reads until the other side closes or has gone; in a process of its own, ends that process then.

        Args:
            parent: The process that must be there still; None in a thread of it.
        """
        with suppress(EOFError, OSError):
            while True:
                if parent is not None and not self._connection.poll(LOOK_S):
                    if os.getppid() != parent:
                        break
                    continue
                message = pickle.loads(self._connection.recv_bytes())
                if message[0] == "close":
                    break
                if message[0] == "stop":
                    self._stopped = max(self._stopped, message[1])
                else:
                    self._requests.put(message[1:])
        self._stopped = sys.maxsize
        self._requests.put(None)
        if parent is not None:
            os._exit(0)  # whatever the planning function is at: nobody asks for it any more

    def work(self) -> None:
        """Answers until there is nobody who asks; returns then."""
        with suppress(OSError):
            while (request := self._requests.get()) is not None:
                self._answer(*request)
        self._connection.close()

    def _answer(self, number: int, metadata: bytes, seconds: float | None) -> None:
        try:
            search = Search(
                num_threads=self._num_threads,
                seconds=seconds,
                offer=lambda schedule: self._send("offer", number, pickle.dumps(schedule)),
                is_asked=lambda: self._stopped >= number,
            )
            found = self._plan(pickle.loads(metadata), search)
            self._send("end", number, b"" if found is None else pickle.dumps(found))
        except BaseException:  # also SystemExit: it is reported, and the next request is answered
            self._send("error", number, traceback.format_exc().encode())

    def _send(self, kind: str, number: int, content: bytes) -> None:
        with self._sending:
            self._connection.send_bytes(pickle.dumps((kind, number, content)))


def keep_to(cores: frozenset[int]) -> None:
    """Lets this process, and all threads that it starts, use these cores only, and what others leave of them."""
    if hasattr(os, "sched_setaffinity") and cores:
        os.sched_setaffinity(0, cores)
    if hasattr(os, "nice"):
        os.nice(10)  # whoever trains goes first


def end_with(parent: int, *, by_main_thread: bool) -> None:
    """Lets the kernel end this process with its parent, where it can.

    The signal is sent when the *thread* ends that started this process, hence not where that was another than the main
    one. ``Desk.read`` finds the end of the parent in any case, a little later.
    """
    if sys.platform == "linux" and by_main_thread:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it was killed before the kernel knew
        os._exit(1)


def main(handle: int, parent: int, by_main_thread: bool) -> None:
    """Answers the parent until it closes or ends."""
    end_with(parent, by_main_thread=by_main_thread)
    connection = Connection(handle)
    try:
        pickled, num_threads, cores = pickle.loads(connection.recv_bytes())
        keep_to(cores)
        plan = pickle.loads(pickled)
    except EOFError:  # the parent had gone already
        return
    except BaseException:  # the planning function's module cannot be imported, for instance
        connection.send_bytes(pickle.dumps(("broken", -1, traceback.format_exc().encode())))
        return
    desk = Desk(connection, plan, num_threads)
    threading.Thread(target=desk.read, args=(parent,), daemon=True).start()
    desk.work()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "1")
