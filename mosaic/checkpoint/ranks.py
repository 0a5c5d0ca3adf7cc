"""The group of processes that saves and loads: one process, or the ranks of a run."""

from __future__ import annotations

from typing import Protocol, TypeVar

import torch.distributed as dist

Told = TypeVar("Told")


class Ranks(Protocol):
    """The processes that save or load one checkpoint."""

    @property
    def rank(self) -> int:
        """Rank of this process."""

    @property
    def size(self) -> int:
        """Number of ranks."""

    def all_gather(self, value: Told) -> list[Told]:
        """Returns the values of all ranks."""

    def broadcast(self, value: Told) -> Told:
        """Returns the value of rank 0."""

    def raise_if_any_failed(self, error: BaseException | None) -> None:
        """Raises on all ranks if one failed."""

    def background_group(self) -> dist.ProcessGroup | None:
        """Returns a CPU group reserved for checkpoints, the same at each call; None for one process."""


class OneRank:
    """A process that saves and loads alone."""

    rank = 0
    size = 1

    def all_gather(self, value: Told) -> list[Told]:
        return [value]

    def broadcast(self, value: Told) -> Told:
        return value

    def raise_if_any_failed(self, error: BaseException | None) -> None:
        if error is not None:
            raise error

    def background_group(self) -> None:
        """Returns None: a single process has no group."""


def tell_in(group: dist.ProcessGroup | None, value: Told) -> list[Told]:
    """Returns the value of each rank of a group, or of the only process."""
    if group is None:
        return [value]
    values: list[Told] = [value] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values
