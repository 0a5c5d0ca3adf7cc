"""One line that names the rank that failed and says where each rank was, when a run of several ranks ends.

torchrun ends and restarts ranks, and torch's timeouts and closed connections end waits for a rank that is gone. Each
rank writes a heartbeat with its place to torch.distributed's store. A rank whose wait ends in an error of communication
reads all heartbeats and raises ``RankFailedError``. The fault that reaches the store first is that of all ranks.
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
from types import TracebackType
from typing import NamedTuple, TypeVar

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from mosaic.engine.options import RankSettings
from mosaic.errors import RankFailedError
from mosaic.ranks.world.cancel import abort_within, is_communication_error
from mosaic.ranks.world.progress import Place, RankProgress
from mosaic.ranks.world.rendezvous import Member

_T = TypeVar("_T")


class Heartbeat(NamedTuple):
    """The last known place of a rank."""

    time_s: float = 0.0
    """The rank's ``time.time()`` at the heartbeat."""
    place: Place = Place("unknown", False, 0.0)
    calls: int = 0
    """Calls of the model that it had begun."""
    has_left: bool = False
    """True if its handle was removed or its program has ended."""

    def __str__(self) -> str:
        if self.has_left:
            return f"it left the loop after {self.calls} calls of the model"
        age_s = time.time() - self.time_s
        return f"{self.place.text} for {self.place.for_s:.0f} s" + (f", as of {age_s:.0f} s ago" if age_s > 5 else "")


class Heartbeats:
    """Writes this rank's heartbeats, and explains errors of communication by those of all ranks.

    Attributes:
        groups: Communicators that are aborted when this rank ends with an error.
    """

    def __init__(
        self, members: Sequence[Member], store: Store, rank: int, progress: RankProgress, settings: RankSettings
    ) -> None:
        self.groups: list[dist.ProcessGroup] = []
        self._store = store
        self._members = members
        self._me = members[rank]
        self._progress = progress
        self._settings = settings
        self._stopped = threading.Event()
        self._write()
        progress.explain, progress.fail = self._explain, self._fail
        self._hook_before, sys.excepthook = sys.excepthook, self._on_uncaught
        atexit.register(self.stop)
        self._thread = threading.Thread(target=self._beat, name="mosaic-heartbeat", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Records for the other ranks that this one leaves; calling it again does nothing."""
        if self._stopped.is_set():
            return
        self._stopped.set()
        atexit.unregister(self.stop)
        if sys.excepthook == self._on_uncaught:
            sys.excepthook = self._hook_before
        self._progress.explain, self._progress.fail = (lambda failure: failure), (lambda failure, groups: None)
        if self._thread is not threading.current_thread():
            # A thread inside of the store ends the process by SIGABRT when the interpreter exits, and a last heartbeat
            # would follow the one that says that this rank has left.
            self._thread.join(self._settings.grace_s)
        self._write(has_left=True)

    def _beat(self) -> None:
        while not self._stopped.wait(self._settings.beat_s):
            self._write()

    def _write(self, *, has_left: bool = False) -> None:
        beat = Heartbeat(time.time(), self._progress.now, self._progress.calls, has_left)
        self._request(lambda: self._store.set(f"heartbeat/{self._me.rank}", json.dumps(beat)), None)

    def _read(self) -> list[Heartbeat]:
        def read(key: str) -> Heartbeat:
            if not self._store.check([key]):
                return Heartbeat()
            time_s, place, *rest = json.loads(self._store.get(key))
            return Heartbeat(time_s, Place(*place), *rest)

        return self._request(lambda: [read(f"heartbeat/{member.rank}") for member in self._members], [])

    def _request(self, request: Callable[[], _T], otherwise: _T) -> _T:
        """Makes a request of the store, unless the process that holds it is gone, which may be in order at the end."""
        try:
            return request()
        except (RuntimeError, OSError):
            return otherwise

    # Faults: the ranks at fault, none where no single rank is, and a sentence without a full stop, as JSON.

    def _explain(self, error: RuntimeError) -> BaseException:
        """Returns RankFailedError for an error of communication that ended a wait, and other errors themselves.

        Another rank may know why a connection was closed, so it waits for two heartbeats first.
        """
        if isinstance(error, RankFailedError) or not is_communication_error(error):
            return error
        deadline = time.monotonic() + 2.5 * self._settings.beat_s
        while not (fault := self._request(self._first_fault, "")):
            if time.monotonic() > deadline:
                fault = self._declare(*self._guess(timed_out="time" in str(error).lower()))
                break
            time.sleep(self._settings.beat_s / 10)
        ranks, text = json.loads(fault)
        return RankFailedError(text, ranks=tuple(ranks))

    def _first_fault(self) -> str:
        return self._store.get("fault").decode() if self._store.check(["fault"]) else ""

    def _fail(self, error: BaseException, groups: Sequence[dist.ProcessGroup]) -> None:
        """Declares an error of this rank, and ends its calls and the others' in communicators of no more use."""
        self.declare_own(error)
        abort_within(groups, self._settings.grace_s)

    def _guess(self, *, timed_out: bool) -> tuple[Sequence[Member], str]:
        """Returns the fault behind a wait that a timeout or a closed connection has ended."""
        beats = self._read()
        if not beats:
            return (), "the store cannot be reached: rank 0, or torchrun's agent where there is one, has ended"
        where = f". Last seen: {'; '.join(f'rank {rank}: {beat}' for rank, beat in enumerate(beats))}"
        others = [(member, beats[member.rank]) for member in self._members if member != self._me]
        for member, beat in others:
            if beat.has_left:
                what = (
                    f"has left the loop after {beat.calls} calls of the model, and others go on; give all ranks the "
                    "same number of batches, and have all of them call what needs all ranks"
                )
                return [member], what + where
        reason = f"after {self._settings.timeout_s:g} s of waiting" if timed_out else "after a connection was closed"
        silent_since_s = time.time() - 2 * self._settings.beat_s
        silent = [member for member, beat in others if beat.time_s < silent_since_s]
        if silent:
            return silent, f"is not heard of {reason}: it was killed, crashed, is stopped or cut off{where}"
        busy = [member for member, beat in others if not beat.place.is_waiting]
        if busy:
            return busy, f"has not come {reason}; if that is in order, raise timeout_s{where}"
        what = (
            "the ranks wait for each other in different places; call the modules, and their backwards, in the same "
            "order on all ranks"
            if len({beat.place.text for beat in beats}) > 1
            else "all ranks wait in one place: the network between them is slow or cut; raise timeout_s if it is slow"
        )
        return (), f"{reason} {what}{where}"

    def _declare(self, at_fault: Sequence[Member], what: str) -> str:
        """Writes a fault to the store; returns the one that was first."""
        text = f"{', '.join(map(str, at_fault))} {what}".lstrip()
        fault = json.dumps([[member.rank for member in at_fault], text])
        return self._request(lambda: self._store.compare_set("fault", "", fault).decode(), fault)

    def declare_own(self, error: BaseException) -> str:
        """Declares the fault behind an error if it is this rank's; returns its text, or nothing if the error has it."""
        if isinstance(error, RankFailedError):
            return ""
        for cause in (error, error.__cause__):
            if isinstance(cause, RuntimeError) and is_communication_error(cause):
                return str(self._explain(cause))
        what = "was interrupted (Ctrl-C)" if isinstance(error, KeyboardInterrupt) else f"failed: {type(error).__name__}"
        message = f": {error}" if str(error) else ""
        self._write()
        where = "; ".join(f"rank {rank}: {beat}" for rank, beat in enumerate(self._read()))
        text: str = json.loads(self._declare([self._me], f"{what}{message}. Last seen: {where}"))[1]
        return text

    def _on_uncaught(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """Declares the fault of an error that ends this program, prints it, and ends waits in its other threads."""
        self._hook_before(kind, error, trace)
        if os.getpid() != self._me.pid:  # a forked worker of the loop's
            return
        text = self.declare_own(error)
        if text:
            sys.stderr.write(f"mosaic: {text}\n")
        abort_within(self.groups, self._settings.grace_s)
        if self._me.rank == 0:  # which may hold the store that the others read the fault from
            time.sleep(3 * self._settings.beat_s)
        faulthandler.dump_traceback_later(self._settings.grace_s, exit=True)  # teardown may wait for connections
