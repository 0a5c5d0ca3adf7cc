"""Cancelling what all ranks do together, such as the trial of a plan, when one rank cannot go on."""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Self

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from mosaic.errors import MosaicError
from mosaic.ranks.world.abort import abort_within, is_communication_error
from mosaic.ranks.world.progress import RankProgress

_POLL_S = 0.1


class CancelledError(MosaicError):
    """Another rank has cancelled what all ranks do together.

    Attributes:
        rank: The rank that did.
    """

    def __init__(self, message: str, *, rank: int) -> None:
        super().__init__(message)
        self.rank = rank


class CancelToken:
    """A block of work that any rank may cancel: the others' calls in its groups then raise.

    A rank that is killed cancels nothing: the watchdog names it, as anywhere else.

    Args:
        store: Shared by the ranks.
        rank: This one.
        progress: Where this rank is; cancelling explains errors that end its waits.
        grace_s: How long aborting may take before this process is ended.
        name: Of the work; no other token of the run has it.
        groups: The communicators of the work that this rank is in.
    """

    def __init__(
        self,
        *,
        store: Store,
        rank: int,
        progress: RankProgress,
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
        self._explain = progress.explain
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
        """Aborts this rank's groups, which are of no use afterwards."""
        with self._lock:
            if not self._is_aborted:
                self._is_aborted = True
                abort_within(self._groups, self._grace_s)

    def _reason(self) -> str | None:
        try:
            return self._store.get(self._key).decode() if self._store.check([self._key]) else None
        except (RuntimeError, OSError):  # the process that holds the store is gone, which the watchdog reports
            return None

    def _poll(self) -> None:
        while not self._over.wait(_POLL_S):
            if self._reason() is not None:
                self.abort()
                return

    def _explained(self, error: RuntimeError) -> BaseException:
        reason = self._reason() if is_communication_error(error) else None
        if reason is None:
            return self._explain(error)
        return CancelledError(f"rank {reason}", rank=int(reason.partition(" ")[0]))

    def __enter__(self) -> Self:
        """Begins to poll the store."""
        self._progress.explain = self._explained
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Polls no more."""
        self._over.set()
        self._thread.join()
        self._progress.explain = self._explain
