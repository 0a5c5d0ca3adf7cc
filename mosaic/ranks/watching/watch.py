"""Watching the other ranks: one that is killed, fails or leaves ends the others soon, with a message that names it.

Every rank writes a *beat* to torch.distributed's store each second: where it is. Beats are for messages and never prove
a death, since a rank whose interpreter is held for long sends none. What proves it:

* its process is gone, which ranks on the same machine look up;
* the connection of a *standing receive* is closed. Each rank has one from either neighbour in the ring of ranks, which
  is never answered but by a goodbye. The kernel closes the connections of a process that dies, however it dies, and
  keeps those of one that is stopped or busy. Waiting for that costs nothing.

Who finds somebody at fault writes a *verdict* to the store; the first one counts, and all ranks read it at their next
beat. A rank that learns of one prints it, frees its threads from calls that wait for others, so that they raise
``RankFailedError``, and ends its process if it is still there after ``grace_s``.
"""

from __future__ import annotations

import atexit
import datetime
import faulthandler
import os
import sys
import threading
import time
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from mosaic.errors import RankFailedError
from mosaic.ranks.meeting import faults as verdicts
from mosaic.ranks.meeting.faults import Beat, Departure, Verdict
from mosaic.ranks.meeting.freeing import free_all
from mosaic.ranks.meeting.progress import Progress
from mosaic.ranks.meeting.roll import Identity

EXIT_CODE = 75
"""Of a process that had to be ended: a temporary failure, in the words of sysexits.h."""

_FOREVER = datetime.timedelta(days=3650)
_GOODBYE_BYTES = 1024
_TAG = 0x6D6F74
_OF_MESSAGES = ("gloo", "nccl", "timed out", "timeout", "connection", "socket", "closed", "aborted")


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchSettings:
    """How ranks watch each other."""

    beat_s: float = 1.0
    """Seconds from one beat to the next; a rank that is not a neighbour learns of a failure at its next beat."""
    grace_s: float = 10.0
    """Seconds that a rank has to end by itself once another one has failed, before its process is ended."""

    def __post_init__(self) -> None:
        if not self.beat_s > 0 or not self.grace_s > 0:
            raise ValueError(f"beat_s={self.beat_s}, grace_s={self.grace_s}; both have to be above 0 s")


class Watch:
    """Watches the other ranks, and tells them of this one.

    Args:
        store: Shared by the ranks and used for nothing else.
        ranks: All of them, in order.
        me: This one.
        progress: Where this one is.
        settings: How often and how patiently.
        timeout_s: How long an exchange may take, for messages.
        holder: The rank whose process holds the store; None if it is none of them.

    Attributes:
        verdict: Why the ranks cannot go on; None while they can.
    """

    def __init__(
        self,
        store: Store,
        ranks: tuple[Identity, ...],
        me: Identity,
        progress: Progress,
        settings: WatchSettings,
        *,
        timeout_s: float,
        holder: Identity | None = None,
    ) -> None:
        self.verdict: Verdict | None = None
        self._store = store
        self._ranks = ranks
        self._me = me
        self._progress = progress
        self._settings = settings
        self._timeout_s = timeout_s
        self._holder = holder
        self._has_store = True
        self._groups: list[dist.ProcessGroup] = []
        self._ring: dist.ProcessGroup | None = None
        self._left: dict[int, Departure] = {}
        self._num_beats = 0
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._judged = threading.Event()
        self._threads: list[threading.Thread] = []
        self._hook_before = sys.excepthook
        self._is_failing = False

    # Its life.

    def start(self) -> None:
        """Begins to send beats and to look for processes that are gone; needs no group."""
        self._send_beat()
        self._progress.explain, self._progress.refuses = self.explain, self.check
        self._hook_before, sys.excepthook = sys.excepthook, self._on_uncaught
        atexit.register(self._at_exit)
        self._begin(self._beat_on)

    def stand_in(self, ring: dist.ProcessGroup) -> None:
        """Begins to wait for neighbours' goodbyes.

        Args:
            ring: A gloo group of all ranks that is used for nothing else.
        """
        self._ring = ring
        for peer in self._neighbours:
            self._begin(self._stand, peer)

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
        atexit.unregister(self._at_exit)
        if sys.excepthook == self._on_uncaught:
            sys.excepthook = self._hook_before
        self._progress.explain, self._progress.refuses = (lambda failure: failure), (lambda: None)
        self._say_goodbye("" if error is None else f"{type(error).__name__}: {error}")
        if self._ring is not None:
            free_all([self._ring])  # ends its standing receives: no thread may be inside of them at exit
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()

    def _at_exit(self) -> None:
        self.stop()
        if self.verdict is not None:  # what is torn down after this may hang on connections, too
            faulthandler.dump_traceback_later(self._settings.grace_s, exit=True)

    # What threads that wait ask.

    def check(self) -> None:
        """Raises RankFailedError if the ranks cannot go on."""
        if self.verdict is not None:
            raise RankFailedError(self.verdict.text, ranks=self.verdict.ranks)

    def explain(self, error: RuntimeError) -> BaseException:
        """Returns what is behind an error that ended a wait: itself, unless it comes from messages.

        Takes up to some beats: where a connection was closed, whoever watches the rank at its other end finds out what
        became of it; where a wait took too long, ranks are asked twice where they are.
        """
        if isinstance(error, RankFailedError) or not is_of_messages(error):
            return error
        found = self._awaited_verdict()
        if found is None:
            found = self._declare(self._judge())
            self._end(found)
        return RankFailedError(found.text, ranks=found.ranks)

    # Beats.

    def _beat_on(self) -> None:
        while not self._stopping.wait(self._settings.beat_s) and self.verdict is None:
            found = self._look_in_store() if self._has_store else self._look_without_store()
            found = found or self._look_at_processes() or self._look_at_departures()
            if found is not None:
                self._end(self._declare(found))

    def _send_beat(self) -> None:
        self._num_beats += 1
        beat = Beat(number=self._num_beats, time_s=time.time(), where=self._progress.now)
        self._store.set(f"beat/{self._me.rank}", beat.to_json())

    def _look_in_store(self) -> Verdict | None:
        """Sends a beat; returns the verdict that there is."""
        try:
            self._send_beat()
            return self._verdict_in_store()
        except (RuntimeError, OSError):  # whoever holds the store is gone, which may be in order at the end
            self._has_store = False
            return None

    def _look_without_store(self) -> Verdict | None:
        where = self._progress.now
        return (
            verdicts.store_gone(self._holder)
            if where.doing == "waiting" and where.for_s > self._settings.grace_s
            else None
        )

    def _look_at_processes(self) -> Verdict | None:
        for one in self._ranks:
            if one.rank == self._me.rank or one.home != self._me.home or not one.is_gone:
                continue
            # Whoever holds the store takes it along, be it killed or done: without one nothing is known here.
            if not self._has_left(one.rank) and self._has_store:
                return verdicts.killed(one, self._beat_of(one.rank), time.time())
        return None

    def _look_at_departures(self) -> Verdict | None:
        """Returns a verdict where this rank waits in a call that one which has left has not begun."""
        where = self._progress.now
        if where.doing != "waiting":
            return None
        for rank, left in self._left.items():
            if where.calls > left.calls or (left.error and where.for_s > 2 * self._settings.beat_s):
                return verdicts.departed(self._ranks[rank], left)
        return None

    # The ring.

    @property
    def _neighbours(self) -> tuple[int, ...]:
        me, size = self._me.rank, len(self._ranks)
        return tuple(sorted({(me - 1) % size, (me + 1) % size} - {me}))

    def _stand(self, peer: int) -> None:
        assert self._ring is not None
        goodbye = torch.zeros(_GOODBYE_BYTES, dtype=torch.uint8)
        try:
            self._ring.recv([goodbye], peer, _TAG).wait(_FOREVER)
        except RuntimeError:
            if not self._stopping.is_set():
                self._lost(peer)
        else:
            self._left[peer] = Departure.parse(bytes(goodbye.tolist()))

    def _lost(self, peer: int) -> None:
        """Finds out about a rank whose connection was closed without a goodbye: is it gone, or only the connection?"""
        one = self._ranks[peer]
        seen = self._beat_of(peer)
        deadline = time.monotonic() + 3 * self._settings.beat_s
        while time.monotonic() < deadline and not self._stopping.is_set() and self.verdict is None:
            if one.home == self._me.home and one.is_gone:
                break
            if self._verdict_in_store() is not None or self._has_left(peer):
                return  # the beats take it from here
            if self._has_store and self._beat_of(peer).number > seen.number + 1:
                return  # it lives
            self._judged.wait(0.02)
        if not self._stopping.is_set():
            self._end(self._declare(verdicts.killed(one, seen, time.time())))

    def _say_goodbye(self, error: str) -> None:
        left = Departure(calls=self._progress.calls, steps=self._progress.step, error=error)
        content = left.to_bytes(_GOODBYE_BYTES)
        try:
            self._store.set(f"left/{self._me.rank}", content.decode())
        except (RuntimeError, OSError):
            self._has_store = False
        for peer in self._neighbours if self._ring is not None else ():
            try:
                told = torch.frombuffer(bytearray(content), dtype=torch.uint8)
                self._ring.send([told], peer, _TAG).wait(datetime.timedelta(seconds=1))  # type: ignore[union-attr]
            except RuntimeError:
                continue  # it has gone before: nobody is left to be told

    # Verdicts.

    def _declare(self, found: Verdict) -> Verdict:
        """Writes a verdict to the store, and returns the one that was first."""
        try:
            return Verdict.parse(self._store.compare_set("verdict", "", found.to_json()).decode())
        except (RuntimeError, OSError):
            self._has_store = False
            return found

    def _verdict_in_store(self) -> Verdict | None:
        if not self._has_store:
            return None
        try:
            return Verdict.parse(self._store.get("verdict").decode()) if self._store.check(["verdict"]) else None
        except (RuntimeError, OSError):
            self._has_store = False
            return None

    def _awaited_verdict(self) -> Verdict | None:
        """Returns the verdict that is there, or comes within four beats."""
        self._judged.wait(4 * self._settings.beat_s)
        return self.verdict or self._verdict_in_store()

    def _judge(self) -> Verdict:
        """Finds who is at fault where no process is gone."""
        for one in self._ranks:
            if self._has_left(one.rank):
                return verdicts.departed(one, self._left[one.rank])
        before = {one.rank: self._beat_of(one.rank) for one in self._ranks}
        self._judged.wait(5 * self._settings.beat_s)
        after = {one.rank: self._beat_of(one.rank) for one in self._ranks}
        if not self._has_store:
            return verdicts.store_gone(self._holder)
        return verdicts.late(self._ranks, before, after, timeout_s=self._timeout_s)

    def _beat_of(self, rank: int) -> Beat:
        name = f"beat/{rank}"
        try:
            if self._has_store and self._store.check([name]):
                return Beat.parse(self._store.get(name).decode())
        except (RuntimeError, OSError):
            self._has_store = False
        return Beat(number=0, time_s=time.time(), where=Progress().now)

    def _has_left(self, rank: int) -> bool:
        if rank not in self._left and self._has_store:
            try:
                if self._store.check([f"left/{rank}"]):
                    self._left[rank] = Departure.parse(self._store.get(f"left/{rank}"))
            except (RuntimeError, OSError):
                self._has_store = False
        return rank in self._left

    def _end(self, found: Verdict) -> None:
        """Prints a verdict, frees this rank's threads, and sees to it that the process ends."""
        with self._lock:
            if self.verdict is not None or self._stopping.is_set():
                return
            self.verdict = found
        if not (self._is_failing and self._me.rank in found.ranks):  # its own traceback says more
            _print(f"mosaic: {self._me} cannot go on: {found.text}")
        self._judged.set()
        self._begin(self._see_to_the_end)
        free_all(self._groups)

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
        found: Verdict | None = self.verdict
        if found is None and is_of_messages(error):
            found = self._awaited_verdict()  # of a rank that broke a connection: this one is not at fault
        if found is None and not isinstance(error, RankFailedError):
            self._is_failing = True
            where = self._progress.now
            is_interrupt = isinstance(error, KeyboardInterrupt)
            text = f"{kind.__name__}: {error}"
            self._declare(
                verdicts.interrupted(self._me, where) if is_interrupt else verdicts.failed(self._me, text, where)
            )
        self._hook_before(kind, error, trace)

    def _begin(self, work: Any, *args: Any) -> None:
        thread = threading.Thread(target=work, args=args, name="mosaic-watch", daemon=True)
        self._threads.append(thread)
        thread.start()


def is_of_messages(error: BaseException) -> bool:
    """Whether an error comes from torch.distributed's connections, rather than from what was computed."""
    if isinstance(error, dist.DistError):
        return True
    return isinstance(error, RuntimeError) and any(word in str(error).lower() for word in _OF_MESSAGES)


def _print(line: str) -> None:
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()
