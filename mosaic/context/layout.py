"""Layout of the tokens of a distributed sequence: each rank's blocks in order, padded to one length."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from mosaic.context.distribute import Distribution

NOWHERE = -1
"""Position of an empty place."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Layout:
    """Places of tokens, rank after rank, as many on each rank.

    A rank's blocks lie in the order of the sequence. A rank with fewer blocks than another ends with empty ones, and
    the last block of a sequence may be short; such places stay empty.
    """

    num_tokens: int
    """Tokens of the sequence."""
    block: int
    """Tokens of a block."""
    distribution: Distribution
    """Assignment of blocks to ranks."""

    @property
    def local_tokens(self) -> int:
        """Places of each rank."""
        return self.distribution.slots * self.block

    @property
    def padding(self) -> int:
        """Empty places of all ranks."""
        return self.local_tokens * self.distribution.ranks - self.num_tokens

    def column_of(self) -> npt.NDArray[np.int32]:
        """Returns the place of each block among the blocks of all ranks; shape (blocks,)."""
        columns = np.empty(len(self.distribution.rank_of), np.int32)
        for rank in range(self.distribution.ranks):
            own = self.distribution.blocks_of(rank)
            columns[own] = rank * self.distribution.slots + np.arange(len(own))
        return columns

    def order_of(self, rank: int) -> npt.NDArray[np.int64]:
        """Returns the position in the sequence of each place of a rank, -1 if empty; shape (local_tokens,)."""
        own = self.distribution.blocks_of(rank)
        filled = np.full(self.distribution.slots, -1, np.int64)
        filled[: len(own)] = own
        places = filled[:, None] * self.block + np.arange(self.block)
        return np.where((filled[:, None] < 0) | (places >= self.num_tokens), NOWHERE, places).ravel()

    def order(self) -> npt.NDArray[np.int64]:
        """Returns ``order_of`` all ranks, concatenated."""
        return np.concatenate([self.order_of(rank) for rank in range(self.distribution.ranks)])

    def inverse(self) -> npt.NDArray[np.int64]:
        """Returns the place of each position of the sequence; shape (num_tokens,)."""
        positions = np.arange(self.num_tokens)
        return self.column_of()[positions // self.block].astype(np.int64) * self.block + positions % self.block

    def take(self, values: npt.NDArray[Any], rank: int, *, fill: Any) -> npt.NDArray[Any]:
        """Returns a rank's part of values along the sequence, their first axis, with ``fill`` in empty places."""
        order = self.order_of(rank)
        local = values[np.maximum(order, 0)]
        local[order < 0] = fill
        return local
