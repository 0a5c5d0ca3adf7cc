"""Watching the other ranks: one that is killed, fails or leaves ends the others soon, with a message that names it.

Every rank writes a *beat* to torch.distributed's store each second: where it is. Beats are for messages and never prove
a death, since a rank whose interpreter is held for long sends none. A rank is known to be dead when its process is
gone, which ranks on the same machine look up; of one on another machine a connection closes, and nothing is heard.

Who finds somebody at fault writes a *fault* to the store; the first one counts, and all ranks read it at their next
beat. A rank that learns of one prints it, frees its threads from calls that wait for others, so that they raise
``RankFailedError``, and ends its process if it is still there after ``grace_s``.
"""

from __future__ import annotations

import atexit
import faulthandler
import os
import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import TypeVar

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from mosaic.engine.options import RankSettings
from mosaic.errors import RankFailedError
from mosaic.ranks.meeting import faults
from mosaic.ranks.meeting.faults import Beat, Departure, Fault
from mosaic.ranks.meeting.freeing import EXIT_CODE, free_all, is_of_messages
from mosaic.ranks.meeting.progress import RankProgress
from mosaic.ranks.meeting.roll import Identity

_Found = TypeVar("_Found")


class Watch:
    """Watches the other ranks, and tells them of this one.

    Args:
        store: Shared by the ranks and used for nothing else.
        ranks: All of them, in order.
        me: This one.
        progress: Where this one is.
        settings: How often and how patiently.
        holder: The rank whose process holds the store; None if it is none of them.

    Attributes:
        fault: Why the ranks cannot go on; None while they can.
    """

    def __init__(
        self,
        store: Store,
        ranks: tuple[Identity, ...],
        me: Identity,
        progress: RankProgress,
        settings: RankSettings,
        *,
        holder: Identity | None = None,
    ) -> None:
        self.fault: Fault | None = None
        self._store = store
        self._ranks = ranks
        self._me = me
        self._progress = progress
        self._settings = settings
        self._holder = holder
        self._has_store = True
        self._groups: list[dist.ProcessGroup] = []
        self._num_beats = 0
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._found = threading.Event()
        self._threads: list[threading.Thread] = []
        self._hook_before = sys.excepthook
        self._is_failing = False

    # Its life.

    def start(self) -> None:
        """Begins to send beats and to look for ranks that are gone."""
        self._send_beat()
        self._progress.explain, self._progress.refuses = self.explain, self.check
        self._hook_before, sys.excepthook = sys.excepthook, self._on_uncaught
        atexit.register(self._at_exit)
        self._begin(self._beat_on)

    def cover(self, group: dist.ProcessGroup) -> None:
        """Takes a group whose calls are freed when a rank has failed."""
        self._groups.append(group)

    def uncover(self, group: dist.ProcessGroup) -> None:
        """Forgets a group that is to be destroyed."""
        self._groups = [one for one in self._groups if one is not group]

    def stop(self, error: BaseException | None = None) -> None:
        """Says goodbye and ends; calling it again does nothing.

        Args:
            error: Why this rank could not begin; None in the ordinary way.
        """
        with self._lock:
            if self._stopping.is_set():
                return
            self._stopping.set()
        if self._holder == self._me and (self.fault is not None or self._is_failing):
            self._linger()
        atexit.unregister(self._at_exit)
        if sys.excepthook == self._on_uncaught:
            sys.excepthook = self._hook_before
        self._progress.explain, self._progress.refuses = (lambda failure: failure), (lambda: None)
        left = Departure(
            calls=self._progress.calls,
            steps=self._progress.step,
            error="" if error is None else f"{type(error).__name__}: {error}",
        )
        self._ask(lambda store: store.set(f"left/{self._me.rank}", left.to_json()), None)
        self._ask(lambda store: store.add("num_left", 1), 0)
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()

    def _linger(self) -> None:
        """Waits, as the rank that holds the store, until the others have read what is in it, for some beats."""
        deadline = time.monotonic() + 4 * self._settings.beat_s
        at_fault = self.fault.ranks if self.fault is not None else ()
        keys = [f"heard/{one.rank}" for one in self._ranks if one.rank not in (self._me.rank, *at_fault)]
        while time.monotonic() < deadline and not all(self._read(key) is not None for key in keys):
            time.sleep(self._settings.beat_s / 10)

    def _at_exit(self) -> None:
        self.stop()
        if self.fault is not None:  # what is torn down after this may hang on connections, too
            # It would print the stacks of threads behind what was said.
            nowhere = os.open(os.devnull, os.O_WRONLY)
            faulthandler.dump_traceback_later(self._settings.grace_s, exit=True, file=nowhere)

    # What threads that wait ask.

    def check(self) -> None:
        """Raises RankFailedError if the ranks cannot go on."""
        if self.fault is not None:
            raise RankFailedError(self.fault.text, ranks=self.fault.ranks)

    def explain(self, error: RuntimeError) -> BaseException:
        """Returns what is behind an error that ended a wait: itself, unless it comes from messages.

        Takes up to some beats: where a connection was closed, a rank on the same machine as the one at its other end
        finds out what became of it; where a wait took too long, ranks are asked twice where they are.
        """
        if isinstance(error, RankFailedError) or not is_of_messages(error):
            return error
        found = self._awaited_fault()
        if found is None:
            found = self._declare(self._judge(is_late="time" in str(error).lower()))
            self._end(found)
        return RankFailedError(found.text, ranks=found.ranks)

    # Beats.

    def _beat_on(self) -> None:
        while not self._stopping.wait(self._settings.beat_s) and self.fault is None:
            self._send_beat()
            found = self._fault_in_store() or self._dead() or self._missed()
            if found is not None:
                self._end(self._declare(found))

    def _send_beat(self) -> None:
        self._num_beats += 1
        beat = Beat(number=self._num_beats, time_s=time.time(), where=self._progress.now)
        self._ask(lambda store: store.set(f"beat/{self._me.rank}", beat.to_json()), None)

    def _dead(self) -> Fault | None:
        """Returns a fault where a rank on this machine is gone without a goodbye."""
        for one in self._ranks:
            if one.rank == self._me.rank or one.home != self._me.home or not one.is_gone:
                continue
            # Whoever holds the store takes it along, be it killed or done: without one nothing is known here.
            if self._left(one.rank) is None and self._has_store:
                return faults.killed(one, self._beat_of(one.rank), time.time())
        return None

    def _missed(self) -> Fault | None:
        """Returns a fault where this rank waits for one that has left, or has lost the store while it waits."""
        where = self._progress.now
        if where.doing != "waiting":
            return None
        if not self._has_store:
            return faults.store_gone(self._holder) if where.for_s > self._settings.grace_s else None
        for one in self._ranks if self._ask(lambda store: store.add("num_left", 0), 0) else ():
            left = self._left(one.rank)
            if left is None:
                continue
            if where.calls > left.calls or (left.error and where.for_s > 2 * self._settings.beat_s):
                return faults.departed(one, left)
        return None

    # The store.

    def _ask(self, ask: Callable[[Store], _Found], otherwise: _Found) -> _Found:
        """Asks the store, until whoever holds it is gone, which may be in order at the end."""
        if self._has_store:
            try:
                return ask(self._store)
            except (RuntimeError, OSError):
                self._has_store = False
        return otherwise

    def _read(self, key: str) -> str | None:
        return self._ask(lambda store: store.get(key).decode() if store.check([key]) else None, None)

    def _declare(self, found: Fault) -> Fault:
        """Writes a fault to the store, and returns the one that was first."""
        text = found.to_json()
        return Fault.parse(self._ask(lambda store: store.compare_set("fault", "", text).decode(), text))

    def _fault_in_store(self) -> Fault | None:
        text = self._read("fault")
        return None if text is None else Fault.parse(text)

    def _beat_of(self, rank: int) -> Beat:
        text = self._read(f"beat/{rank}")
        return Beat(number=0, time_s=time.time(), where=RankProgress().now) if text is None else Beat.parse(text)

    def _left(self, rank: int) -> Departure | None:
        text = self._read(f"left/{rank}") if rank != self._me.rank else None
        return None if text is None else Departure.parse(text)

    # Faults.

    def _awaited_fault(self) -> Fault | None:
        """Returns the fault that is there, or comes within four beats."""
        self._found.wait(4 * self._settings.beat_s)
        return self.fault or self._fault_in_store()

    def _judge(self, *, is_late: bool) -> Fault:
        """Finds who is at fault where no process of this machine is gone."""
        for one in self._ranks:
            left = self._left(one.rank)
            if left is not None:
                return faults.departed(one, left)
        before = {one.rank: self._beat_of(one.rank) for one in self._ranks}
        self._found.wait(5 * self._settings.beat_s)
        after = {one.rank: self._beat_of(one.rank) for one in self._ranks}
        if not self._has_store:
            return faults.store_gone(self._holder)
        waited = f"after {self._settings.timeout_s:g} s of waiting" if is_late else "after a connection was closed"
        return faults.late(self._ranks, before, after, waited=waited)

    def _end(self, found: Fault) -> None:
        """Prints a fault, frees this rank's threads, and sees to it that the process ends."""
        with self._lock:
            if self.fault is not None or self._stopping.is_set():
                return
            self.fault = found
        self._ask(lambda store: store.set(f"heard/{self._me.rank}", ""), None)
        if not (self._is_failing and self._me.rank in found.ranks):  # its own traceback says more
            _print(self._cannot_go_on(found))
        self._found.set()
        self._begin(self._see_to_the_end)
        free_all(self._groups)

    def _cannot_go_on(self, found: Fault) -> str:
        return f"mosaic: {self._me} cannot go on: {found.text}"

    def _see_to_the_end(self) -> None:
        if not self._stopping.wait(self._settings.grace_s):
            _print(
                f"mosaic: {self._me} has not ended by itself within {self._settings.grace_s:g} s; "
                f"its process is ended now, with exit code {EXIT_CODE}"
            )
            os._exit(EXIT_CODE)

    def _on_uncaught(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """Tells the others of an error that ends this program."""
        if os.getpid() != self._me.pid:  # a forked worker of the loop's
            self._hook_before(kind, error, trace)
            return
        found: Fault | None = self.fault
        if found is None and any(is_of_messages(one) for one in (error, error.__cause__) if one is not None):
            found = self._awaited_fault()  # of a rank that broke a connection: this one is not at fault
        if found is None and not isinstance(error, RankFailedError):
            self._is_failing = True
            where = self._progress.now
            is_interrupt = isinstance(error, KeyboardInterrupt)
            text = f"{kind.__name__}: {error}"
            found = faults.interrupted(self._me, where) if is_interrupt else faults.failed(self._me, text, where)
            self._declare(found)
        self._hook_before(kind, error, trace)
        if self._is_failing and found is not None:
            _print(f"mosaic: {found.text}; all ranks end")
        elif found is not None:  # said before, but a stack of torch's follows there
            _print(self._cannot_go_on(found))

    def _begin(self, work: Callable[[], None]) -> None:
        thread = threading.Thread(target=work, name="mosaic-watch", daemon=True)
        self._threads.append(thread)
        thread.start()


def _print(line: str) -> None:
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()
