"""The processes that save and load together: one process, or the ranks of a run."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

import torch.distributed as dist

T = TypeVar("T")


class Ranks:
    """One process that saves and loads alone; ``World`` overrides this for ranks, which all make the same calls."""

    rank = 0
    size = 1

    def all_gather(self, value: T) -> list[T]:
        return [value]

    def broadcast(self, value: T) -> T:
        """Returns the value of rank 0."""
        return value

    def raise_if_any_failed(self, error: BaseException | None) -> None:
        """Raises on all ranks if one failed: its own error there, one that names it elsewhere."""
        if error is not None:
            raise error

    def run_on_all(self, work: Callable[[], T]) -> T:
        """Returns the result of this rank's work; if any rank fails, all raise as in ``raise_if_any_failed``."""
        result, error = None, None
        try:
            result = work()
        except Exception as failure:  # of any kind, also from the user's objects: all ranks have to raise
            error = failure
        self.raise_if_any_failed(error)
        return cast(T, result)

    def run_on_first(self, work: Callable[[], T]) -> T:
        """Returns the result of rank 0's work on all ranks; if it fails, all raise."""
        return cast(T, self.broadcast(self.run_on_all(lambda: work() if self.rank == 0 else None)))

    def background_group(self) -> dist.ProcessGroup | None:
        """Returns a CPU group reserved for checkpoints, the same at each call; None for one process."""
        return None


def gather_objects(group: dist.ProcessGroup | None, value: T) -> list[T]:
    """Returns the value of each rank of a group, or of the only process."""
    values: list[T] = [value] * (1 if group is None else dist.get_world_size(group))
    if group is not None:
        dist.all_gather_object(values, value, group=group)
    return values
