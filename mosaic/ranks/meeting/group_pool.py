"""Communicators by what they connect: those of a plan that was only tried are there for the next one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch.distributed as dist


class GroupKey(NamedTuple):
    """What makes two communicators exchangeable."""

    ranks: tuple[int, ...]
    """Its ranks."""
    backend: str
    """``nccl`` or ``gloo``."""
    max_ctas: int | None
    """SMs that its collectives may take; None for as many as they like."""


class Loan(list[tuple[GroupKey, Any]]):
    """Communicators that one user has, in the order in which it asked for them; the same order on all ranks."""

    @property
    def groups(self) -> list[dist.ProcessGroup]:
        """Those that this rank is in."""
        return [group for _, group in self if isinstance(group, dist.ProcessGroup)]


class GroupPool:
    """Makes communicators, and keeps those that were given back. All ranks ask for the same in the same order.

    Args:
        make: Makes one; on ranks that are not in it, what torch returns there.
        forget: Told of one that is to be destroyed.
    """

    def __init__(self, make: Callable[[GroupKey], Any], forget: Callable[[dist.ProcessGroup], None]) -> None:
        self._make = make
        self._forget = forget
        self._spare: defaultdict[GroupKey, Loan] = defaultdict(Loan)
        self._loan: Loan | None = None

    def take(self, key: GroupKey) -> Any:
        """Returns one that nobody has."""
        spare = self._spare[key]
        group = spare.pop(0)[1] if spare else self._make(key)
        if self._loan is not None:
            self._loan.append((key, group))
        return group

    @contextmanager
    def lending(self) -> Iterator[Loan]:
        """A block in which all that is taken goes on a list, to be given back or destroyed."""
        self._loan = loan = Loan()
        try:
            yield loan
        finally:
            self._loan = None

    def give_back(self, loan: Loan) -> None:
        """Takes communicators back on which nothing is under way."""
        for key, group in loan:
            self._spare[key].append((key, group))
        loan.clear()

    def destroy(self, loan: Loan) -> None:
        """Ends communicators; those of which calls were freed are of no use to anybody."""
        for group in loan.groups:
            self._forget(group)
            dist.destroy_process_group(group)
        loan.clear()

    def destroy_spare(self) -> None:
        """Ends those that nobody has."""
        for loan in self._spare.values():
            self.destroy(loan)
