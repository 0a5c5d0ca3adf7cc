"""One line that names the rank that failed and says where each rank was, when a run of several ranks ends.

torchrun ends and restarts ranks, and torch's timeouts and closed connections end waits for a rank that is gone. Each
rank writes a heartbeat with its place to torch.distributed's store. A rank whose wait ends in an error of communication
reads all heartbeats and raises ``RankFailedError``; the fault that is written to the store first is that of all ranks.
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
from mosaic.ranks.world.cancel import abort_within, is_communication_error
from mosaic.ranks.world.progress import RankProgress
from mosaic.ranks.world.rendezvous import Member, Members

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """The last known place of a rank."""

    time_s: float = 0.0
    """The rank's ``time.time()`` at the heartbeat."""
    place: str = "unknown"
    """Step, module and phase."""
    is_waiting: bool = False
    """True if it waited for other ranks."""
    for_s: float = 0.0
    """Seconds since it began that."""
    calls: int = 0
    """Calls of the model that it had begun."""
    has_left: bool = False
    """True if its handle was removed or its program has ended."""
    error: str = ""
    """The error with which it left before it began."""

    def __str__(self) -> str:
        if self.has_left:
            return f"it left the loop after {self.calls} calls of the model"
        age_s = time.time() - self.time_s
        return f"{self.place} for {self.for_s:.0f} s" + (f", as of {age_s:.0f} s ago" if age_s > 5 else "")


@dataclass(frozen=True, slots=True)
class Fault:
    """The reason why a run of several ranks ends."""

    ranks: tuple[int, ...]
    """The ranks at fault; empty where no single rank is."""
    text: str
    """A sentence without a full stop."""


class Heartbeats:
    """Writes this rank's heartbeats, and explains errors of communication by those of all ranks.

    Attributes:
        groups: Communicators that are aborted when this rank ends with an error.
    """

    def __init__(self, members: Members, rank: int, progress: RankProgress, settings: RankSettings) -> None:
        self.groups: list[dist.ProcessGroup] = []
        self._store = members.store
        self._members = members.ranks
        self._me = members.ranks[rank]
        self._progress = progress
        self._settings = settings
        self._stopped = threading.Event()
        self._hook_before = sys.excepthook
        self._thread = threading.Thread(target=self._beat, name="mosaic-heartbeat", daemon=True)

    def start(self) -> None:
        self._write()
        self._progress.explain, self._progress.fail = self._explain, self._fail
        self._hook_before, sys.excepthook = sys.excepthook, self._on_uncaught
        atexit.register(self.stop)
        self._thread.start()

    def stop(self, error: BaseException | None = None) -> None:
        """Records for the other ranks that this one leaves, with the error that kept it from beginning, if any.

        Calling it again does nothing.
        """
        if self._stopped.is_set():
            return
        self._stopped.set()
        atexit.unregister(self.stop)
        if sys.excepthook == self._on_uncaught:
            sys.excepthook = self._hook_before
        self._progress.explain, self._progress.fail = (lambda failure: failure), (lambda failure, groups: None)
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            # A thread inside of the store ends the process by SIGABRT when the interpreter exits, and a last heartbeat
            # would follow the one that says that this rank has left.
            self._thread.join(self._settings.grace_s)
        self._write(has_left=True, error="" if error is None else f"{type(error).__name__}: {error}")

    def _beat(self) -> None:
        while not self._stopped.wait(self._settings.beat_s):
            self._write()

    def _write(self, *, has_left: bool = False, error: str = "") -> None:
        place, is_waiting, for_s = self._progress.now
        beat = Heartbeat(
            time_s=time.time(),
            place=place,
            is_waiting=is_waiting,
            for_s=for_s,
            calls=self._progress.calls,
            has_left=has_left,
            error=error,
        )
        self._request(lambda: self._store.set(f"heartbeat/{self._me.rank}", json.dumps(asdict(beat))), None)

    def _read(self) -> list[Heartbeat]:
        keys = [f"heartbeat/{member.rank}" for member in self._members]
        return self._request(
            lambda: [
                Heartbeat(**json.loads(self._store.get(key))) if self._store.check([key]) else Heartbeat()
                for key in keys
            ],
            [],
        )

    def _request(self, request: Callable[[], _T], otherwise: _T) -> _T:
        """Makes a request of the store, unless the process that holds it is gone, which may be in order at the end."""
        try:
            return request()
        except (RuntimeError, OSError):
            return otherwise

    # Faults.

    def _explain(self, error: RuntimeError) -> BaseException:
        """Returns RankFailedError for an error of communication that ended a wait, and other errors themselves.

        Another rank may know why a connection was closed, so it waits for two heartbeats first.
        """
        if isinstance(error, RankFailedError) or not is_communication_error(error):
            return error
        deadline = time.monotonic() + 2.5 * self._settings.beat_s
        while not (text := self._request(self._fault_of_others, "")):
            if time.monotonic() > deadline:
                text = self._declare(self._guess(timed_out="time" in str(error).lower()))
                break
            time.sleep(self._settings.beat_s / 10)
        fault = json.loads(text)
        return RankFailedError(fault["text"], ranks=tuple(fault["ranks"]))

    def _fault_of_others(self) -> str:
        return self._store.get("fault").decode() if self._store.check(["fault"]) else ""

    def _fail(self, error: BaseException, groups: Sequence[dist.ProcessGroup]) -> None:
        """Declares an error of this rank, and ends its calls and the others' in communicators of no more use."""
        self._declare_own(error)
        abort_within(groups, self._settings.grace_s)

    def _guess(self, *, timed_out: bool) -> Fault:
        """Returns the fault behind a wait that a timeout or a closed connection has ended."""
        beats = self._read()
        if not beats:
            return Fault(
                (),
                "the store cannot be reached: rank 0, or torchrun's agent where there is one, holds it and has ended",
            )
        others = [(member, beats[member.rank]) for member in self._members if member != self._me]
        for member, beat in others:
            if beat.error:
                return Fault((member.rank,), f"{member} could not begin: {beat.error}")
            if beat.has_left:
                what = (
                    f"has left the loop after {beat.calls} calls of the model, and others go on; give all ranks the "
                    "same number of batches, and have all of them call what needs all ranks"
                )
                return _fault([member], what, beats)
        reason = f"after {self._settings.timeout_s:g} s of waiting" if timed_out else "after a connection was closed"
        now_s, silent_s = time.time(), 2 * self._settings.beat_s
        silent = [member for member, beat in others if now_s - beat.time_s > silent_s]
        if silent:
            return _fault(silent, f"is not heard of {reason}: it was killed, crashed, is stopped or cut off", beats)
        busy = [member for member, beat in others if not beat.is_waiting]
        if busy:
            return _fault(busy, f"has not come {reason}; if that is in order, raise timeout_s", beats)
        what = (
            "the ranks wait for each other in different places; call the modules, and their backwards, in the same "
            "order on all ranks"
            if len({beat.place for beat in beats}) > 1
            else "all ranks wait in one place: the network between them is slow or cut; raise timeout_s if it is slow"
        )
        return _fault([], f"{reason} {what}", beats)

    def _declare(self, fault: Fault) -> str:
        """Writes a fault to the store, and returns the one that was first, as JSON."""
        text = json.dumps(asdict(fault))
        return self._request(lambda: self._store.compare_set("fault", "", text).decode(), text)

    def _declare_own(self, error: BaseException) -> str:
        """Declares the fault behind an error if it is this rank's; returns its text, or nothing if the error has it."""
        if isinstance(error, RankFailedError):
            return ""
        for each in (error, error.__cause__):
            if isinstance(each, RuntimeError) and is_communication_error(each):
                return str(self._explain(each))
        what = "was interrupted (Ctrl-C)" if isinstance(error, KeyboardInterrupt) else f"failed: {type(error).__name__}"
        message = f": {error}" if str(error) else ""
        self._write()
        return str(json.loads(self._declare(_fault([self._me], f"{what}{message}", self._read())))["text"])

    def _on_uncaught(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """Declares the fault of an error that ends this program, prints it, and ends waits in its other threads."""
        self._hook_before(kind, error, trace)
        if os.getpid() != self._me.pid:  # a forked worker of the loop's
            return
        text = self._declare_own(error)
        if text:
            sys.stderr.write(f"mosaic: {text}\n")
        abort_within(self.groups, self._settings.grace_s)
        if self._me.rank == 0:  # which may hold the store that the others read the fault from
            time.sleep(3 * self._settings.beat_s)
        faulthandler.dump_traceback_later(self._settings.grace_s, exit=True)  # teardown may wait for connections


def _fault(at_fault: Sequence[Member], what: str, beats: Sequence[Heartbeat]) -> Fault:
    where = "; ".join(f"rank {rank}: {beat}" for rank, beat in enumerate(beats))
    text = f"{', '.join(map(str, at_fault))} {what}. Last seen: {where}".lstrip()
    return Fault(tuple(member.rank for member in at_fault), text)
