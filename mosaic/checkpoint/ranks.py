"""Who saves and loads together: one process, or the ranks of a run."""

from __future__ import annotations

from typing import Protocol, TypeVar

import torch.distributed as dist

Told = TypeVar("Told")


class Ranks(Protocol):
    """The processes that save or load one checkpoint."""

    @property
    def rank(self) -> int:
        """This one."""

    @property
    def size(self) -> int:
        """How many there are."""

    def all_gather(self, value: Told) -> list[Told]:
        """Returns the values of all."""

    def broadcast(self, value: Told) -> Told:
        """Returns the value of the first."""

    def raise_if_any_failed(self, error: BaseException | None) -> None:
        """Raises on all if one of them failed."""

    def background_group(self) -> dist.ProcessGroup | None:
        """Returns a group on CPUs that nothing else uses, the same at each call; None for one process."""


class OneRank:
    """A process that saves and loads alone."""

    rank = 0
    size = 1

    def all_gather(self, value: Told) -> list[Told]:
        """Returns it."""
        return [value]

    def broadcast(self, value: Told) -> Told:
        """Returns it."""
        return value

    def raise_if_any_failed(self, error: BaseException | None) -> None:
        """Raises it."""
        if error is not None:
            raise error

    def background_group(self) -> None:
        """Returns None: there is nobody to talk to."""


def tell_in(group: dist.ProcessGroup | None, value: Told) -> list[Told]:
    """Returns the value of each rank of a group, or of the only process."""
    if group is None:
        return [value]
    found: list[Told] = [value] * dist.get_world_size(group)
    dist.all_gather_object(found, value, group=group)
    return found
