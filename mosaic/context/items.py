"""Whole images, or other items of an encoder, shared out over the ranks of a sequence: none is encoded twice."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mosaic.search_extension import load_search


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemShare:
    """Which rank encodes which items, and where their rows lie once they are gathered."""

    rank_of: tuple[int, ...]
    """Of each item, in the order in which items stand in the sequence."""
    rows: tuple[int, ...]
    """Rows that the encoder makes of each item: its tokens in the sequence."""
    ranks: int
    """Ranks; one may have no items."""

    def items_of(self, rank: int) -> tuple[int, ...]:
        """Returns the items of a rank, rising."""
        return tuple(item for item, owner in enumerate(self.rank_of) if owner == rank)

    def rows_of(self, rank: int) -> int:
        """Returns the rows that a rank makes."""
        return sum(self.rows[item] for item in self.items_of(rank))

    def places_of(self, rank: int) -> npt.NDArray[np.int64]:
        """Returns where a rank's rows lie among those of all items, for inputs with a row for each of them."""
        starts = np.cumsum([0, *self.rows])
        return np.concatenate(
            [np.zeros(0, np.int64), *(np.arange(starts[i], starts[i + 1]) for i in self.items_of(rank))]
        )

    @property
    def room(self) -> int:
        """Rows of the rank that makes most: what each rank's part of the gathered rows holds."""
        return max(map(self.rows_of, range(self.ranks)))

    def order(self) -> npt.NDArray[np.int64]:
        """Returns for each row, items in their order, its place among the gathered rows of all ranks."""
        next_place = [rank * self.room for rank in range(self.ranks)]
        places = []
        for owner, count in zip(self.rank_of, self.rows, strict=True):
            places.append(next_place[owner] + np.arange(count))
            next_place[owner] += count
        return np.concatenate([np.zeros(0, np.int64), *places])


def share_items(rows: Sequence[int], ranks: int, *, work: Sequence[int] | None = None) -> ItemShare:
    """Shares items out, the one with most work first to the rank with least; the same on every rank.

    Args:
        rows: Rows that the encoder makes of each item.
        ranks: Ranks that share the sequence.
        work: What each item takes, such as its patches; None: its rows.

    Raises:
        ValueError: There is no rank, or rows and work are not one number >= 0 for each item.
    """
    counted = list(rows if work is None else work)
    if ranks < 1 or len(counted) != len(rows) or min([*counted, *rows], default=0) < 0:
        raise ValueError(
            f"{len(rows)} rows and {len(counted)} numbers of work for {ranks} ranks; "
            "give one of each >= 0 for each item"
        )
    if not counted:
        return ItemShare(rank_of=(), rows=(), ranks=ranks)
    owners = load_search().longest_first(np.array(counted, np.int64), ranks=ranks, cap=len(counted))
    return ItemShare(rank_of=tuple(owners.tolist()), rows=tuple(rows), ranks=ranks)
