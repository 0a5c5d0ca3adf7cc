"""Something that all ranks do together and may all give up, such as trying a plan: one that cannot go on rings.

The others may be waiting for its messages. So it writes to the store why it stops; a thread of each rank looks there
ten times a second, and frees this rank's calls in the communicators that are given up. What these raise then says why.
A rank that is killed rings nothing: it is named as anywhere else (``mosaic.ranks.meeting.watch``).
"""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Self

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from mosaic.engine.options import RankSettings
from mosaic.errors import MosaicError
from mosaic.ranks.meeting.freeing import free_within, is_of_messages
from mosaic.ranks.meeting.progress import RankProgress

_LOOK_S = 0.1


class GivenUpError(MosaicError):
    """Another rank could not go on with what all do together.

    Attributes:
        rank: Which.
    """

    def __init__(self, message: str, *, rank: int) -> None:
        super().__init__(message)
        self.rank = rank


class Alarm:
    """One for each thing that may be given up; a block around it.

    Args:
        store: Shared by the ranks.
        rank: This one.
        name: Of the thing; no other alarm of the run has it.
        groups: Its communicators, of those that this rank is in.
        progress: Where this rank is; errors that end its waits are explained by the alarm, if it rang.
        grace_s: How long freeing this rank's calls may take before its process is ended, in seconds.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        name: str,
        groups: list[dist.ProcessGroup],
        progress: RankProgress,
        *,
        grace_s: float = RankSettings().grace_s,
    ) -> None:
        self._store = store
        self._rank = rank
        self._key = f"alarm/{name}"
        self._groups = groups
        self._grace_s = grace_s
        self._progress = progress
        self._explain = progress.explain
        self._over = threading.Event()
        self._lock = threading.Lock()
        self._freed = False
        self._thread = threading.Thread(target=self._look_on, name="mosaic-alarm", daemon=True)

    def ring(self, why: str) -> bool:
        """Tells all ranks to give up; returns whether this rank was the first to ring, which says why."""
        mark = f"{self._rank} {why}"
        is_first = self._store.compare_set(self._key, "", mark).decode() == mark
        self.free()
        return is_first

    def _heard(self) -> str | None:
        try:
            return self._store.get(self._key).decode() if self._store.check([self._key]) else None
        except (RuntimeError, OSError):  # whoever holds the store is gone, which is for the watch to say
            return None

    def free(self) -> None:
        """Frees this rank's calls in the communicators, which are of no use afterwards."""
        with self._lock:
            if not self._freed:
                self._freed = True
                free_within(self._groups, self._grace_s)

    def _look_on(self) -> None:
        while not self._over.wait(_LOOK_S):
            if self._heard() is not None:
                self.free()
                return

    def _explained(self, error: RuntimeError) -> BaseException:
        why = self._heard() if is_of_messages(error) else None
        if why is None:
            return self._explain(error)
        return GivenUpError(f"rank {why}", rank=int(why.partition(" ")[0]))

    def __enter__(self) -> Self:
        """Begins to listen."""
        self._progress.explain = self._explained
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Listens no more."""
        self._over.set()
        self._thread.join()
        self._progress.explain = self._explain
