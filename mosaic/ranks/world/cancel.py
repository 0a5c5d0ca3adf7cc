"""Cancelling what all ranks do together, such as the trial of a plan, and aborting its communicators."""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import sys
import threading
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any, Self

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from mosaic.errors import MosaicError
from mosaic.ranks.world.progress import RankProgress

_COMMUNICATION = ("gloo", "nccl", "timed out", "timeout", "connection", "socket", "closed", "aborted")
_POLL_S = 0.1
_TAG = 0x6D6F73  # of messages that no rank sends


class CancelledError(MosaicError):
    """Another rank has cancelled what all ranks do together."""

    def __init__(self, message: str, *, rank: int) -> None:
        super().__init__(message)
        self.rank = rank


class CancelToken:
    """A block of work that any rank may cancel: the others' calls in its groups then raise.

    A rank that is killed cancels nothing; its heartbeats end. ``name`` is the same on all ranks, and used once. The
    list of groups may grow.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        progress: RankProgress,
        *,
        grace_s: float,
        name: str,
        groups: list[dist.ProcessGroup],
    ) -> None:
        self._store = store
        self._rank = rank
        self._key = f"cancel/{name}"
        self._groups = groups
        self._grace_s = grace_s
        self._progress = progress
        self._hooks = progress.explain, progress.fail
        self._over = threading.Event()
        self._lock = threading.Lock()
        self._is_aborted = False
        self._thread = threading.Thread(target=self._poll, name="mosaic-cancel", daemon=True)

    def cancel(self, reason: str) -> bool:
        """Cancels the work on all ranks; returns whether this rank was the first, whose reason counts."""
        mark = f"{self._rank} {reason}"
        is_first = self._store.compare_set(self._key, "", mark).decode() == mark
        self.abort()
        return is_first

    def abort(self) -> None:
        with self._lock:
            if not self._is_aborted:
                self._is_aborted = True
                abort_within(self._groups, self._grace_s)

    def _reason(self) -> str:
        try:
            return self._store.get(self._key).decode() if self._store.check([self._key]) else ""
        except (RuntimeError, OSError):  # the process that holds the store is gone
            return ""

    def _poll(self) -> None:
        while not self._over.wait(_POLL_S):
            if self._reason():
                self.abort()
                return

    def _explained(self, error: RuntimeError) -> BaseException:
        reason = self._reason() if is_communication_error(error) else ""
        if not reason:
            return self._hooks[0](error)
        return CancelledError(f"rank {reason}", rank=int(reason.partition(" ")[0]))

    def __enter__(self) -> Self:
        self._progress.explain = self._explained
        self._progress.fail = lambda error, groups: None  # the rank that failed cancels
        self._thread.start()
        # A thread that is inside of the store when the interpreter exits ends the process by SIGABRT.
        atexit.register(self._stop)
        return self

    def _stop(self) -> None:
        self._over.set()
        self._thread.join(self._grace_s)

    def __exit__(self, *raised: object) -> None:
        atexit.unregister(self._stop)
        self._stop()
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
