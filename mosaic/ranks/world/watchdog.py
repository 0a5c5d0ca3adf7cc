"""The end of all ranks soon after one has failed, with one line that names it and says where each rank was.

Each rank writes a heartbeat to torch.distributed's store: where it is. A late heartbeat proves no death, because other
code may hold the interpreter. A rank is dead when its process is gone, which ranks on the same machine look up; a rank
on another machine closes its connections. The first fault in the store counts. A rank that reads it prints it, aborts
its groups, so that calls that wait for others raise ``RankFailedError``, and ends its process after ``grace_s``.
"""

from __future__ import annotations

import atexit
import faulthandler
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import TypeVar

import torch.distributed as dist

from mosaic.engine.options import RankSettings
from mosaic.errors import RankFailedError
from mosaic.ranks.world.abort import EXIT_CODE, abort_groups, is_communication_error
from mosaic.ranks.world.progress import RankProgress
from mosaic.ranks.world.rendezvous import Member, Members

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """Where a rank was."""

    time_s: float
    """Its clock's ``time.time()`` then."""
    place: str
    """Step, module and phase."""
    doing: str
    """What ``Whereabouts.doing`` says."""
    for_s: float
    """Seconds that it had been doing this."""
    calls: int
    """Calls of the model that it had begun."""
    has_left: bool = False
    """Whether it has removed its handle, or its program has ended."""
    error: str = ""
    """Why it left before it could begin."""

    def __str__(self) -> str:
        if self.has_left:
            return f"it left the loop after {self.calls} calls of the model"
        age_s = time.time() - self.time_s
        return f"{self.place} for {self.for_s:.0f} s" + (f", as of {age_s:.0f} s ago" if age_s > 5 else "")


_NO_HEARTBEAT = Heartbeat(time_s=0.0, place="unknown", doing="starting", for_s=0.0, calls=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """The reason why a run of several ranks ends."""

    ranks: tuple[int, ...]
    """The ranks at fault; none where it is none of them in particular."""
    text: str
    """A sentence without a full stop."""


class Watchdog:
    """Watches the other ranks, and writes this rank's heartbeats.

    Args:
        members: All ranks.
        rank: This one.
        progress: Where this one is.
        settings: How often and how patiently.
        store_rank: The rank whose process holds the store; None where torchrun's agent does.

    Attributes:
        fault: Why the ranks cannot go on; None while they can.
        groups: Communicators that are aborted when a rank has failed.
    """

    def __init__(
        self,
        members: Members,
        rank: int,
        progress: RankProgress,
        settings: RankSettings,
        *,
        store_rank: int | None = None,
    ) -> None:
        self.fault: Fault | None = None
        self.groups: list[dist.ProcessGroup] = []
        self._store = members.store
        self._members = members.ranks
        self._me = members.ranks[rank]
        self._progress = progress
        self._settings = settings
        self._store_rank = store_rank
        self._has_store = True
        self._lock = threading.Lock()
        self._stopping, self._ended = threading.Event(), threading.Event()
        self._threads: list[threading.Thread] = []
        self._hook_before = sys.excepthook
        self._is_failing = False

    def start(self) -> None:
        """Begins to write heartbeats and to look for ranks that have failed."""
        self._write_heartbeat()
        self._progress.explain, self._progress.refuses = self.explain, self.check
        self._hook_before, sys.excepthook = sys.excepthook, self._on_uncaught
        atexit.register(self._at_exit)
        self._start_thread(self._watch)

    def stop(self, error: BaseException | None = None) -> None:
        """Tells the other ranks that this one leaves. Calling it again does nothing.

        Args:
            error: Why this rank could not begin; None in the ordinary way.
        """
        with self._lock:
            if self._stopping.is_set():
                return
            self._stopping.set()
        if self._store_rank == self._me.rank and (self.fault is not None or self._is_failing):
            time.sleep(2 * self._settings.beat_s)  # until the others have read the fault
        atexit.unregister(self._at_exit)
        if sys.excepthook == self._on_uncaught:
            sys.excepthook = self._hook_before
        self._progress.explain, self._progress.refuses = (lambda failure: failure), (lambda: None)
        self._write_heartbeat(has_left=True, error="" if error is None else f"{type(error).__name__}: {error}")
        self._request(lambda: self._store.add("num_left", 1), 0)
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()

    def check(self) -> None:
        """Raises RankFailedError if a rank has failed."""
        if self.fault is not None:
            raise RankFailedError(self.fault.text, ranks=self.fault.ranks)

    def explain(self, error: RuntimeError) -> BaseException:
        """Returns RankFailedError for an error of communication that ended a wait, and other errors themselves.

        It waits for four heartbeats: another rank may know why a connection was closed.
        """
        if isinstance(error, RankFailedError) or not is_communication_error(error):
            return error
        fault = self._awaited_fault()
        if fault is None:
            fault = self._declare(self._waited_in_vain(timed_out="time" in str(error).lower()))
            self._end(fault)
        return RankFailedError(fault.text, ranks=fault.ranks)

    def _watch(self) -> None:
        while not self._stopping.wait(self._settings.beat_s) and self.fault is None:
            self._write_heartbeat()
            fault = self._fault_in_store() or self._killed() or self._missed()
            if fault is not None:
                self._end(self._declare(fault))

    # Faults.

    def _killed(self) -> Fault | None:
        """Returns a fault where a rank on this machine has ended without leaving."""
        gone = [one for one in self._members if one.machine == self._me.machine and one != self._me and one.is_gone]
        beats = self._heartbeats() if gone else []
        for one in gone:
            # The store ends with the rank that holds it, which may be in order. Nothing is known without it.
            if self._has_store and not beats[one.rank].has_left:
                return self._fault(one, "has ended without a word: it was killed, or it crashed", beats)
        return None

    def _missed(self) -> Fault | None:
        """Returns a fault where this rank waits for one that has left, or has lost the store."""
        where = self._progress.now
        if where.doing != "waiting":
            return None
        if not self._has_store:
            return self._store_gone() if where.for_s > self._settings.grace_s else None
        beats = self._heartbeats() if self._request(lambda: self._store.add("num_left", 0), 0) else []
        for one, beat in zip(self._members, beats, strict=False):
            is_late = where.calls > beat.calls or (beat.error and where.for_s > 2 * self._settings.beat_s)
            if one != self._me and beat.has_left and is_late:
                return self._departed(one, beats)
        return None

    def _waited_in_vain(self, *, timed_out: bool) -> Fault:
        """Returns the fault behind a wait that a timeout or a closed connection has ended."""
        beats = self._heartbeats()
        if not self._has_store:
            return self._store_gone()
        others = [one for one in self._members if one != self._me]
        for one in others:
            if beats[one.rank].has_left:
                return self._departed(one, beats)
        reason = f"after {self._settings.timeout_s:g} s of waiting" if timed_out else "after a connection was closed"
        silent_s = 4 * self._settings.beat_s
        silent = [one for one in others if time.time() - beats[one.rank].time_s > silent_s]
        if silent:
            what = f"is not heard of {reason}: it is stopped, cut off, or keeps its interpreter to itself"
            return self._fault(silent, what, beats)
        busy = [one for one in others if beats[one.rank].doing != "waiting"]
        if busy:
            return self._fault(busy, f"has not come {reason}; if that is in order, raise timeout_s", beats)
        places = {beat.place for beat in beats}
        what = (
            "the ranks wait for each other in different places; call the modules, and their backwards, in the same "
            "order on all ranks"
            if len(places) > 1
            else "all ranks wait in one place: the network between them is slow or cut; raise timeout_s if it is slow"
        )
        return self._fault((), f"{reason} {what}", beats)

    def _departed(self, member: Member, beats: Sequence[Heartbeat]) -> Fault:
        left = beats[member.rank]
        if left.error:
            return Fault(ranks=(member.rank,), text=f"{member} could not begin: {left.error}")
        what = (
            f"has left the loop after {left.calls} calls of the model, and others go on; give all ranks the same "
            "number of batches, and have all of them call what needs all ranks"
        )
        return self._fault(member, what, beats)

    def _store_gone(self) -> Fault:
        if self._store_rank is None:
            return Fault(ranks=(), text="torchrun's agent, which holds the store, cannot be reached: it has ended")
        holder = self._members[self._store_rank]
        return Fault(ranks=(holder.rank,), text=f"{holder}, which holds the store, cannot be reached: it has ended")

    def _fault(self, at_fault: Member | Sequence[Member], what: str, beats: Sequence[Heartbeat]) -> Fault:
        """Returns a fault whose text says where all ranks were."""
        members = [at_fault] if isinstance(at_fault, Member) else at_fault
        names = ", ".join(map(str, members))
        where = "; ".join(f"rank {rank}: {beat}" for rank, beat in enumerate(beats))
        return Fault(ranks=tuple(one.rank for one in members), text=f"{names} {what}. Last seen: {where}".lstrip())

    # The store.

    def _request(self, request: Callable[[], _T], otherwise: _T) -> _T:
        """Makes a request of the store, unless the process that holds it is gone, which may be in order at the end."""
        if self._has_store:
            try:
                return request()
            except (RuntimeError, OSError):
                self._has_store = False
        return otherwise

    def _write_heartbeat(self, *, has_left: bool = False, error: str = "") -> None:
        where = self._progress.now
        beat = Heartbeat(
            time_s=time.time(),
            place=str(where),
            doing=where.doing,
            for_s=where.for_s,
            calls=where.calls,
            has_left=has_left,
            error=error,
        )
        self._request(lambda: self._store.set(f"heartbeat/{self._me.rank}", json.dumps(asdict(beat))), None)

    def _heartbeats(self) -> list[Heartbeat]:
        def read() -> list[Heartbeat]:
            keys = [f"heartbeat/{one.rank}" for one in self._members]
            return [
                Heartbeat(**json.loads(self._store.get(key))) if self._store.check([key]) else _NO_HEARTBEAT
                for key in keys
            ]

        return self._request(read, [_NO_HEARTBEAT] * len(self._members))

    def _declare(self, fault: Fault) -> Fault:
        """Writes a fault to the store, and returns the one that was first."""
        text = json.dumps(asdict(fault))
        return _parsed(self._request(lambda: self._store.compare_set("fault", "", text).decode(), text))

    def _fault_in_store(self) -> Fault | None:
        text = self._request(lambda: self._store.get("fault").decode() if self._store.check(["fault"]) else "", "")
        return _parsed(text) if text else None

    def _awaited_fault(self) -> Fault | None:
        """Returns the fault that is there, or comes within four heartbeats."""
        self._ended.wait(4 * self._settings.beat_s)
        return self.fault or self._fault_in_store()

    # The end.

    def _end(self, fault: Fault) -> None:
        """Prints a fault, aborts this rank's groups, and sees to it that the process ends."""
        with self._lock:
            if self.fault is not None or self._stopping.is_set():
                return
            self.fault = fault
        if not (self._is_failing and self._me.rank in fault.ranks):  # its own traceback says more
            _print(f"{self._me} cannot go on: {fault.text}")
        self._ended.set()
        self._start_thread(self._exit_after_grace)
        abort_groups(self.groups)

    def _exit_after_grace(self) -> None:
        if not self._stopping.wait(self._settings.grace_s):
            _print(
                f"{self._me} has not ended by itself within {self._settings.grace_s:g} s; its process is ended now, "
                f"with exit code {EXIT_CODE}"
            )
            os._exit(EXIT_CODE)

    def _at_exit(self) -> None:
        self.stop()
        if self.fault is not None:  # the rest of the teardown may hang on connections, too
            # It would print the stacks of threads behind the fault.
            nowhere = os.open(os.devnull, os.O_WRONLY)
            faulthandler.dump_traceback_later(self._settings.grace_s, exit=True, file=nowhere)

    def _on_uncaught(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """Declares the fault of an error that ends this program."""
        if os.getpid() != self._me.pid:  # a forked worker of the loop's
            self._hook_before(kind, error, trace)
            return
        fault = self.fault
        if fault is None and any(is_communication_error(one) for one in (error, error.__cause__) if one is not None):
            fault = self._awaited_fault()  # of a rank that broke a connection: this one is not at fault
        if fault is None and not isinstance(error, RankFailedError):
            self._is_failing = True
            what = "was interrupted (Ctrl-C)" if isinstance(error, KeyboardInterrupt) else f"failed: {kind.__name__}"
            message = f": {error}" if str(error) else ""
            self._write_heartbeat()
            fault = self._declare(self._fault(self._me, f"{what}{message}", self._heartbeats()))
        self._hook_before(kind, error, trace)
        if self._is_failing and fault is not None:
            _print(f"{fault.text}; all ranks end")
        elif fault is not None:  # printed before, but torch's traceback follows there
            _print(f"{self._me} cannot go on: {fault.text}")

    def _start_thread(self, work: Callable[[], None]) -> None:
        thread = threading.Thread(target=work, name="mosaic-watchdog", daemon=True)
        self._threads.append(thread)
        thread.start()


def _parsed(text: str) -> Fault:
    raw = json.loads(text)
    return Fault(ranks=tuple(raw["ranks"]), text=raw["text"])


def _print(line: str) -> None:
    sys.stderr.write(f"mosaic: {line}\n")
    sys.stderr.flush()
