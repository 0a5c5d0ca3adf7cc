"""Failures: one line that names the rank at fault and says where each rank was, and the end of waits for it.

torchrun ends and restarts ranks, and torch's timeouts and closed connections end waits for a rank that is gone. Each
rank writes a heartbeat with its place to torch.distributed's store. A rank whose wait ends in an error of communication
reads all heartbeats and raises ``RankFailedError``. The fault that reaches the store first is that of all ranks.

Work that any rank may cancel, such as the trial of a plan, has a ``CancelToken``: the thread of the heartbeats looks
for a reason of another rank, and aborts the work's communicators.
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
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from types import TracebackType
from typing import Any, NamedTuple, Self, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from mosaic.engine.options import RankSettings
from mosaic.errors import MosaicError, RankFailedError
from mosaic.ranks.world.progress import Place, RankProgress
from mosaic.ranks.world.rendezvous import Member

_T = TypeVar("_T")
_COMMUNICATION = ("gloo", "nccl", "timed out", "timeout", "connection", "socket", "closed", "aborted")
_TAG = 0x6D6F73  # of messages that no rank sends


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
        tokens: Those of work that any rank may cancel.
    """

    def __init__(
        self, members: Sequence[Member], store: Store, rank: int, progress: RankProgress, settings: RankSettings
    ) -> None:
        self.groups: list[dist.ProcessGroup] = []
        self.tokens: list[CancelToken] = []
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
            for token in [*self.tokens]:
                token.look()

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


class CancelledError(MosaicError):
    """Another rank has cancelled what all ranks do together."""

    def __init__(self, message: str, *, rank: int) -> None:
        super().__init__(message)
        self.rank = rank


class CancelToken:
    """A block of work that any rank may cancel: the others' calls in its groups then raise.

    A rank that is killed cancels nothing; its heartbeats end. ``name`` is the same on all ranks, and used once. The
    list of groups may grow. ``tokens`` are those that the heartbeats look at.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        progress: RankProgress,
        tokens: list[CancelToken],
        *,
        grace_s: float,
        name: str,
        groups: list[dist.ProcessGroup],
    ) -> None:
        self._store, self._rank, self._progress, self._tokens = store, rank, progress, tokens
        self._key, self._groups, self._grace_s = f"cancel/{name}", groups, grace_s
        self._hooks = progress.explain, progress.fail
        self._lock = threading.Lock()
        self._is_over = False

    def cancel(self, reason: str) -> bool:
        """Cancels the work on all ranks; returns whether this rank was the first, whose reason counts."""
        mark = f"{self._rank} {reason}"
        is_first = self._store.compare_set(self._key, "", mark).decode() == mark
        self.abort()
        return is_first

    def abort(self) -> None:
        with self._lock:
            if not self._is_over:
                self._is_over = True
                abort_within(self._groups, self._grace_s)

    def look(self) -> None:
        """Aborts the work here if any rank has cancelled it."""
        if self._reason():
            self.abort()

    def _reason(self) -> str:
        try:
            return self._store.get(self._key).decode() if self._store.check([self._key]) else ""
        except (RuntimeError, OSError):  # the process that holds the store is gone
            return ""

    def _explained(self, error: RuntimeError) -> BaseException:
        reason = self._reason() if is_communication_error(error) else ""
        if not reason:
            return self._hooks[0](error)
        return CancelledError(f"rank {reason}", rank=int(reason.partition(" ")[0]))

    def __enter__(self) -> Self:
        self._progress.explain = self._explained
        self._progress.fail = lambda error, groups: None  # the rank that failed cancels
        self._tokens.append(self)
        return self

    def __exit__(self, *raised: object) -> None:
        with contextlib.suppress(ValueError):  # left already
            self._tokens.remove(self)
        with self._lock:
            self._is_over = True
        self._progress.explain, self._progress.fail = self._hooks


def abort_within(groups: Sequence[dist.ProcessGroup], limit_s: float) -> None:
    """Makes calls that are blocked in some groups raise.

    The process ends, with exit code 1 and the tracebacks of its threads, if that takes longer than ``limit_s``.
    """
    faulthandler.dump_traceback_later(limit_s, exit=True, file=sys.__stderr__ or 2)
    # In a thread of its own, where torch modes of the caller do not apply.
    thread = threading.Thread(target=abort_groups, args=(groups,), name="mosaic-abort", daemon=True)
    thread.start()
    thread.join()
    faulthandler.cancel_dump_traceback_later()


def abort_groups(groups: Sequence[dist.ProcessGroup]) -> None:
    """Makes every call that is blocked in some groups raise an error; the groups are of no use afterwards.

    NCCL's groups, and NCCL's part of mixed groups, are aborted in one NCCL group call: kernels of one communicator may
    wait for another's, and aborts one by one then wait forever (pytorch#119797).
    """
    backends: list[tuple[dist.ProcessGroup, str]] = []
    for group in groups:
        with contextlib.suppress(RuntimeError, ValueError):  # destroyed by the loop
            backends.append((group, dist.get_backend(group)))
    nccl = [group for group, backend in backends if "nccl" in backend]
    with _one_abort(nccl):
        for group in nccl:
            with contextlib.suppress(RuntimeError, ValueError):  # closed already
                group.abort()
    for group, backend in backends:
        if "gloo" in backend or "nccl" not in backend:
            with contextlib.suppress(RuntimeError, ValueError):
                _close_connections(group)


@contextlib.contextmanager
def _one_abort(groups: Sequence[dist.ProcessGroup]) -> Iterator[None]:
    """A block whose aborts NCCL begins together."""
    backend: Any = None
    for group in groups:
        with contextlib.suppress(RuntimeError):  # this group has no NCCL communicator
            backend = group._get_backend(torch.device("cuda"))
            break
    start = getattr(backend, "_group_start", None) or getattr(backend, "_start_coalescing", None)
    if start is None:
        yield
        return
    start()
    try:
        yield
    finally:
        with contextlib.suppress(RuntimeError):  # nccl2 ends its group on a communicator that is aborted by then
            (getattr(backend, "_group_end", None) or backend._end_coalescing)()


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
    if isinstance(error, dist.DistError):
        return True
    return isinstance(error, RuntimeError) and any(word in str(error).lower() for word in _COMMUNICATION)
