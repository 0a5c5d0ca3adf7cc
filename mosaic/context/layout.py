"""Where tokens lie once a sequence is shared out: each rank's blocks one after the other, filled to one length."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from mosaic.context.distribute import Distribution

NOWHERE = -1
"""Position of a place that no token fills."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Layout:
    """Places of tokens: those of rank 0, then those of rank 1, and so on, all ranks of one length.

    A rank's blocks lie in the order of the sequence. A rank with fewer blocks than another ends with empty ones, and
    the last block of a sequence may be short; nothing fills such places.
    """

    num_tokens: int
    """Of the sequence."""
    block: int
    """Tokens of a block."""
    distribution: Distribution
    """Which rank has which blocks."""

    @property
    def local_tokens(self) -> int:
        """Places of each rank."""
        return self.distribution.slots * self.block

    @property
    def padding(self) -> int:
        """Places of all ranks that no token fills."""
        return self.local_tokens * self.distribution.ranks - self.num_tokens

    def column_of(self) -> npt.NDArray[np.int32]:
        """Returns the place of each block among the blocks of all ranks; shape (blocks,)."""
        found = np.empty(len(self.distribution.rank_of), np.int32)
        for rank in range(self.distribution.ranks):
            own = self.distribution.blocks_of(rank)
            found[own] = rank * self.distribution.slots + np.arange(len(own))
        return found

    def order_of(self, rank: int) -> npt.NDArray[np.int64]:
        """Returns the position in the sequence of each of a rank's places, -1 for empty ones; shape (local_tokens,)."""
        own = self.distribution.blocks_of(rank)
        filled = np.full(self.distribution.slots, -1, np.int64)
        filled[: len(own)] = own
        places = filled[:, None] * self.block + np.arange(self.block)
        return np.where((filled[:, None] < 0) | (places >= self.num_tokens), NOWHERE, places).ravel()

    def order(self) -> npt.NDArray[np.int64]:
        """Returns the same for all ranks one after the other."""
        return np.concatenate([self.order_of(rank) for rank in range(self.distribution.ranks)])

    def inverse(self) -> npt.NDArray[np.int64]:
        """Returns the place of each position of the sequence; shape (num_tokens,)."""
        positions = np.arange(self.num_tokens)
        return self.column_of()[positions // self.block].astype(np.int64) * self.block + positions % self.block

    def take(self, values: npt.NDArray[Any], rank: int, *, fill: Any) -> npt.NDArray[Any]:
        """Returns a rank's part of values along the sequence, their first axis, with ``fill`` in empty places."""
        order = self.order_of(rank)
        taken = values[np.maximum(order, 0)]
        taken[order < 0] = fill
        return taken
