"""Assigns whole images, or other items of an encoder, to the ranks of a sequence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mosaic import _search


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemShare:
    """Assignment of items to ranks, and the places of their gathered rows."""

    rank_of: tuple[int, ...]
    """Rank of each item, in sequence order; a rank may have none."""
    rows: tuple[int, ...]
    """Number of encoder outputs of each item, its tokens in the sequence."""
    ranks: int

    def items_of(self, rank: int) -> tuple[int, ...]:
        return tuple(item for item, owner in enumerate(self.rank_of) if owner == rank)

    def places_of(self, rank: int) -> npt.NDArray[np.int64]:
        """Returns the places of a rank's rows among those of all items, for inputs with one row each."""
        return np.flatnonzero(np.repeat(self.rank_of, self.rows) == rank)

    def rows_of(self, rank: int) -> int:
        return len(self.places_of(rank))

    @property
    def room(self) -> int:
        """Largest number of rows of a rank, the size of each rank's part of the gathered rows."""
        return max(map(self.rows_of, range(self.ranks)))

    def order(self) -> npt.NDArray[np.int64]:
        """Returns the place of each row, in item order, among the gathered rows of all ranks."""
        order = np.empty(sum(self.rows), np.int64)
        for rank in range(self.ranks):
            own = self.places_of(rank)
            order[own] = rank * self.room + np.arange(len(own))
        return order


def share_items(rows: Sequence[int], ranks: int) -> ItemShare:
    """Assigns items to ranks, the largest first to the rank with the fewest rows; the same result on all ranks."""
    if ranks < 1 or min(rows, default=0) < 0:
        raise ValueError(f"items of {list(rows)} rows for {ranks} ranks; use rows of 0 or more and at least 1 rank")
    if not rows:
        return ItemShare(rank_of=(), rows=(), ranks=ranks)
    owners = _search.longest_first(np.array(rows, np.int64), ranks=ranks, cap=len(rows))
    return ItemShare(rank_of=tuple(owners.tolist()), rows=tuple(rows), ranks=ranks)
