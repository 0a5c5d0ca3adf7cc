"""Failures: one line that names the rank at fault and says where each rank was.

torchrun ends and restarts ranks, and torch's timeouts and closed connections end waits for a rank that is gone. Each
rank writes its place to torch.distributed's store as a heartbeat. A rank whose wait ends in an error of communication
reads all heartbeats and raises ``RankFailedError``. The fault that reaches the store first is that of all ranks.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from types import TracebackType
from typing import Any, NamedTuple, Self, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from mosaic.engine.options import RankSettings
from mosaic.errors import MosaicError, RankFailedError
from mosaic.ranks.world.progress import Place, RankProgress

_T = TypeVar("_T")
_COMMUNICATION = ("gloo", "nccl", "timed out", "timeout", "connection", "socket", "closed", "aborted")
_TAG = 0x6D6F73  # of messages that no rank sends


class Member(NamedTuple):
    """The process of one rank."""

    rank: int
    host: str
    pid: int
    kind: str = "cpu"
    """The type of its device."""

    def __str__(self) -> str:
        return f"rank {self.rank} ({self.host}, process {self.pid})"


class Heartbeat(NamedTuple):
    """The last known place of a rank."""

    time_s: float = 0.0
    """The rank's ``time.time()`` at the heartbeat."""
    place: Place = Place("unknown", False, 0.0)
    calls: int = 0
    """Calls of the model that have begun."""
    has_left: bool = False

    def __str__(self) -> str:
        if self.has_left:
            return f"it left the loop after {self.calls} calls of the model"
        age_s = time.time() - self.time_s
        return f"{self.place.text} for {self.place.for_s:.0f} s" + (f", as of {age_s:.0f} s ago" if age_s > 5 else "")


class Heartbeats:
    """Writes this rank's heartbeats, and explains errors of communication by those of all ranks.

    Attributes:
        groups: Communicators that are aborted when this rank ends with an error.
        tokens: Those of work that any rank may cancel.
    """

    def __init__(
        self, members: Sequence[Member], store: Store, rank: int, progress: RankProgress, settings: RankSettings
    ) -> None:
        self.groups: list[dist.ProcessGroup] = []
        self.tokens: list[CancelToken] = []
        self._store, self._members, self._me = store, members, members[rank]
        self.rank, self.progress, self.settings = rank, progress, settings
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
        self.progress.explain, self.progress.fail = (lambda failure: failure), (lambda failure, groups: None)
        # A thread inside of the store ends the process by SIGABRT when the interpreter exits.
        self._thread.join(self.settings.grace_s)
        self._write(has_left=True)

    def declare_own(self, error: BaseException) -> str:
        """Declares the fault behind an error if it is this rank's; returns its text, or nothing if the error has it."""
        if isinstance(error, RankFailedError):
            return ""
        for cause in (error, error.__cause__):
            if isinstance(cause, RuntimeError) and is_communication_error(cause):
                return str(self._explain(cause))
        what = f"failed: {type(error).__name__}"
        self._write()
        text: str = json.loads(self._declare([self._me], f"{what}{f': {error}' if str(error) else ''}"))[1]
        return text

    def _beat(self) -> None:
        while not self._stopped.wait(self.settings.heartbeat_s):
            self._write()
            for token in [*self.tokens]:
                token.look()

    def _write(self, *, has_left: bool = False) -> None:
        beat = Heartbeat(time.time(), self.progress.now, self.progress.calls, has_left)
        self.request(lambda store: store.set(f"heartbeat/{self.rank}", json.dumps(beat)), None)

    def _read(self) -> list[Heartbeat]:
        """Returns the last heartbeat of each rank; none where the store is gone."""
        beats = []
        for member in self._members:
            time_s, place, *rest = json.loads(self.text(f"heartbeat/{member.rank}") or json.dumps(Heartbeat()))
            beats.append(Heartbeat(time_s, Place(*place), *rest))
        return beats if beats[self.rank].time_s else []

    def request(self, request: Callable[[Store], _T], otherwise: _T) -> _T:
        """Makes a request of the store, unless the process that holds it is gone, which may be in order at the end."""
        try:
            return request(self._store)
        except (RuntimeError, OSError):
            return otherwise

    def text(self, key: str) -> str:
        return self.request(lambda store: store.get(key).decode() if store.check([key]) else "", "")

    def _explain(self, error: RuntimeError) -> BaseException:
        """Returns RankFailedError for an error of communication that ended a wait, and other errors themselves."""
        if isinstance(error, RankFailedError) or not is_communication_error(error):
            return error
        # Another rank may know why a connection was closed.
        deadline = time.monotonic() + 2.5 * self.settings.heartbeat_s
        while not (fault := self.text("fault")):
            if time.monotonic() > deadline:
                fault = self._declare(*self._guess(timed_out="time" in str(error).lower()))
                break
            time.sleep(self.settings.heartbeat_s / 10)
        ranks, text = json.loads(fault)
        return RankFailedError(text, ranks=tuple(ranks))

    def _fail(self, error: BaseException, groups: Sequence[dist.ProcessGroup]) -> None:
        """Declares an error of this rank, and ends its calls and the others' in communicators of no more use."""
        self.declare_own(error)
        abort_within(groups, self.settings.grace_s)

    def _guess(self, *, timed_out: bool) -> tuple[list[Member], str]:
        """Returns the ranks behind a wait that a timeout or a closed connection has ended, and what they did."""
        beats = self._read()
        if not beats:
            return [], "the store cannot be reached: rank 0, or torchrun's agent where there is one, has ended"
        others = [(member, beats[member.rank]) for member in self._members if member != self._me]
        reason = f"after {self.settings.timeout_s:g} s of waiting" if timed_out else "after a connection was closed"
        for member, beat in others:
            if beat.has_left:
                return [member], (
                    f"has left the loop after {beat.calls} calls of the model, and others go on; give all ranks the "
                    "same number of batches, and have all of them call what needs all ranks"
                )
        silent_since_s = time.time() - 2 * self.settings.heartbeat_s
        if silent := [member for member, beat in others if beat.time_s < silent_since_s]:
            return silent, f"is not heard of {reason}: it was killed, crashed, is stopped or cut off"
        if busy := [member for member, beat in others if not beat.place.is_waiting]:
            return busy, f"has not come {reason}; if that is in order, raise timeout_s"
        return [], (
            f"{reason} the ranks wait for each other; call the modules, and their backwards, in the same order on all "
            "ranks, or raise timeout_s if the network is slow"
        )

    def _declare(self, at_fault: Sequence[Member], what: str) -> str:
        """Writes a fault to the store: ranks and a sentence, as JSON; returns the one that was first."""
        where = "; ".join(f"rank {rank}: {beat}" for rank, beat in enumerate(self._read()))
        text = f"{', '.join(map(str, at_fault))} {what}{f'. Last seen: {where}' if where else ''}".lstrip()
        fault = json.dumps([[member.rank for member in at_fault], text])
        return self.request(lambda store: store.compare_set("fault", "", fault).decode(), fault)

    def _on_uncaught(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """Declares the fault of an error that ends this program, prints it, and ends waits in its other threads."""
        self._hook_before(kind, error, trace)
        if os.getpid() != self._me.pid or len(self._members) == 1:  # a forked worker of the loop's, or one rank
            return
        text = self.declare_own(error)
        if text:
            sys.stderr.write(f"mosaic: {text}\n")
        abort_within(self.groups, self.settings.grace_s)
        if self.rank == 0:  # which may hold the store that the others read the fault from
            time.sleep(3 * self.settings.heartbeat_s)
        faulthandler.dump_traceback_later(self.settings.grace_s, exit=True)  # teardown may wait for connections


class CancelledError(MosaicError):
    """Another rank has cancelled what all ranks do together."""

    def __init__(self, message: str, *, rank: int) -> None:
        super().__init__(message)
        self.rank = rank


class CancelToken:
    """A block of work, such as the trial of a plan, that any rank may cancel: calls in its groups then raise.

    The thread of the heartbeats looks for another rank's reason. ``name`` is the same on all ranks, and used once. The
    list of groups may grow.
    """

    def __init__(self, heartbeats: Heartbeats, name: str, groups: list[dist.ProcessGroup]) -> None:
        self._heartbeats, self._progress = heartbeats, heartbeats.progress
        self._key, self._groups = f"cancel/{name}", groups
        self._hooks = self._progress.explain, self._progress.fail
        self._lock = threading.Lock()
        self._is_over = False

    def cancel(self, reason: str) -> bool:
        """Cancels the work on all ranks; returns whether this rank was the first, whose reason counts."""
        mark = f"{self._heartbeats.rank} {reason}"
        first = self._heartbeats.request(lambda store: store.compare_set(self._key, "", mark).decode(), mark)
        self.abort()
        return first == mark

    def abort(self) -> None:
        with self._lock:
            if not self._is_over:
                self._is_over = True
                abort_within(self._groups, self._heartbeats.settings.grace_s)

    def look(self) -> None:
        """Aborts the work here if any rank has cancelled it."""
        if self._heartbeats.text(self._key):
            self.abort()

    def _explained(self, error: RuntimeError) -> BaseException:
        reason = self._heartbeats.text(self._key) if is_communication_error(error) else ""
        if not reason:
            return self._hooks[0](error)
        return CancelledError(f"rank {reason}", rank=int(reason.partition(" ")[0]))

    def __enter__(self) -> Self:
        self._progress.explain = self._explained
        self._progress.fail = lambda error, groups: None  # the rank that failed cancels
        self._heartbeats.tokens.append(self)
        return self

    def __exit__(self, *raised: object) -> None:
        with contextlib.suppress(ValueError):  # left already
            self._heartbeats.tokens.remove(self)
        with self._lock:
            self._is_over = True
        self._progress.explain, self._progress.fail = self._hooks


def abort_within(groups: Sequence[dist.ProcessGroup], limit_s: float) -> None:
    """Makes calls that are blocked in some groups raise, or ends the process if that takes longer than ``limit_s``."""
    faulthandler.dump_traceback_later(limit_s, exit=True, file=sys.__stderr__ or 2)
    # In a thread of its own, where torch modes of the caller do not apply.
    thread = threading.Thread(target=abort_groups, args=(groups,), name="mosaic-abort", daemon=True)
    thread.start()
    thread.join()
    faulthandler.cancel_dump_traceback_later()


def abort_groups(groups: Sequence[dist.ProcessGroup]) -> None:
    """Makes every call that is blocked in some groups raise an error; the groups are of no use afterwards.

    NCCL's are aborted in one NCCL group call: kernels of one communicator may wait for another's, and aborts one by one
    then wait forever (pytorch#119797).
    """
    backends: list[tuple[dist.ProcessGroup, str]] = []
    for group in groups:
        with contextlib.suppress(RuntimeError, ValueError):  # destroyed by the loop
            backends.append((group, dist.get_backend(group)))
    if nccl := [group for group, backend in backends if "nccl" in backend]:
        backend: Any = nccl[0]._get_backend(torch.device("cuda"))
        backend._group_start()
        for group in nccl:
            with contextlib.suppress(RuntimeError, ValueError):  # closed already
                group.abort()
        with contextlib.suppress(RuntimeError):
            backend._group_end()
    for group in [group for group, backend in backends if "gloo" in backend or "nccl" not in backend]:
        with contextlib.suppress(RuntimeError, ValueError):
            _close_connections(group)


def _close_connections(group: dist.ProcessGroup) -> None:
    """Ends the calls of a gloo group, whose ``abort`` does not reach those that are blocked (torch 2.13).

    A receive that times out closes all connections of its group at once.
    """
    for peer in range(group.size()):
        if peer == group.rank():
            continue
        try:
            group.recv([torch.zeros(1)], peer, _TAG).wait(timedelta(milliseconds=1))
        except RuntimeError as error:
            if "timed out" in str(error).lower():
                return
            # This connection is closed already: nothing timed out, and others may still be open.


def is_communication_error(error: BaseException) -> bool:
    """Returns whether an error comes from torch.distributed's connections, rather than from a computation."""
    words = str(error).lower()
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and any(word in words for word in _COMMUNICATION)
    )
