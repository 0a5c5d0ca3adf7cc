"""The processes that save and load together: one process, or the ranks of a run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar, cast

import torch.distributed as dist

T = TypeVar("T")


class Ranks(Protocol):
    """The processes that save or load one checkpoint; each makes the same calls."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def all_gather(self, value: T) -> list[T]: ...

    def broadcast(self, value: T) -> T:
        """Returns the value of rank 0."""

    def raise_if_any_failed(self, error: BaseException | None) -> None:
        """Raises on all ranks if one failed."""

    def background_group(self) -> dist.ProcessGroup | None:
        """Returns a CPU group reserved for checkpoints, the same at each call; None for one process."""


class OneRank:
    """A process that saves and loads alone."""

    rank = 0
    size = 1

    def all_gather(self, value: T) -> list[T]:
        return [value]

    def broadcast(self, value: T) -> T:
        return value

    def raise_if_any_failed(self, error: BaseException | None) -> None:
        if error is not None:
            raise error

    def background_group(self) -> None: ...


def run_on_all(ranks: Ranks, work: Callable[[], T]) -> T:
    """Runs ``work`` on every rank; if it fails on one, all ranks raise."""
    result, error = None, None
    try:
        result = work()
    except Exception as failure:  # of any kind, also from the user's objects: all ranks have to raise
        error = failure
    ranks.raise_if_any_failed(error)
    return cast(T, result)


def gather_objects(group: dist.ProcessGroup | None, value: T) -> list[T]:
    """Returns the value of each rank of a group, or of the only process."""
    values: list[T] = [value] * (1 if group is None else dist.get_world_size(group))
    if group is not None:
        dist.all_gather_object(values, value, group=group)
    return values
