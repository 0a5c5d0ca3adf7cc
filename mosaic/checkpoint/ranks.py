"""Who saves and loads together: one process, or the ranks of a run."""

from __future__ import annotations

from typing import Any, Protocol

import torch.distributed as dist


class Ranks(Protocol):
    """The processes that save or load one checkpoint."""

    @property
    def rank(self) -> int:
        """This one."""

    @property
    def size(self) -> int:
        """How many there are."""

    def tell(self, value: Any) -> list[Any]:
        """Returns what each one told: data that JSON could hold."""

    def first_says(self, value: Any) -> Any:
        """Returns what the first one told."""

    def all_or_none(self, error: BaseException | None) -> None:
        """Raises on all if one of them failed."""

    def background_group(self) -> dist.ProcessGroup | None:
        """Returns a group on CPUs that nothing else uses, the same at each call; None for one process."""


class OneRank:
    """A process that saves and loads alone."""

    rank = 0
    size = 1

    def tell(self, value: Any) -> list[Any]:
        """Returns it."""
        return [value]

    def first_says(self, value: Any) -> Any:
        """Returns it."""
        return value

    def all_or_none(self, error: BaseException | None) -> None:
        """Raises it."""
        if error is not None:
            raise error

    def background_group(self) -> dist.ProcessGroup | None:
        """Returns None: there is nobody to talk to."""
        return None
