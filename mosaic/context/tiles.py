"""A mask in blocks of tokens: how much each block has to do, and which tiles of the matrix have anything in them.

Both follow from runs of equal tokens, prefix counts and interval arithmetic; no matrix is made.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from mosaic.context.words import MaskWords
from mosaic.search_extension import load_search

if TYPE_CHECKING:
    from mosaic import _search

Work = npt.NDArray[np.int64]
"""Visible pairs of each block; shape (blocks,)."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Tiles:
    """Tiles with a visible pair, row by row: those of row i from ``offsets[i]`` to ``offsets[i + 1]``."""

    offsets: npt.NDArray[np.int64]
    """Shape (rows + 1,)."""
    columns: npt.NDArray[np.int32]
    """Block of keys of each tile; rising within a row that stands for queries."""
    is_full: npt.NDArray[np.uint8]
    """1 where every query of the tile sees every key."""

    @property
    def num_rows(self) -> int:
        """Rows, those without tiles too."""
        return len(self.offsets) - 1

    def turned(self, num_columns: int) -> Tiles:
        """Returns for each column, as a row, its rows, as columns: what the backward pass walks over."""
        offsets, rows, is_full = load_search().turn_tiles(self.offsets, self.columns, self.is_full, num_columns)
        return Tiles(offsets=offsets, columns=rows, is_full=is_full)

    def in_columns(self, place: npt.NDArray[np.int32]) -> Tiles:
        """Returns the same tiles with each column at another place, in the order in which they were."""
        return Tiles(offsets=self.offsets, columns=place[self.columns], is_full=self.is_full)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MaskBlocks:
    """A mask cut into blocks of tokens; the last may be shorter.

    Raises:
        ValueError: A block has no tokens.
    """

    mask: MaskWords
    """Who sees whom."""
    block: int = 128
    """Tokens of a block, of queries and of keys; a multiple of what the kernel works on at once."""
    runs: _search.MaskRuns = field(init=False, repr=False)
    """The mask in runs, as the extension has it."""

    def __post_init__(self) -> None:
        if self.block < 1:
            raise ValueError(f"block={self.block}; a block has 1 token or more, 128 for compiled FlexAttention")
        object.__setattr__(self, "runs", load_search().MaskRuns(self.mask.words, self.mask.documents))

    def __reduce__(self) -> tuple[Callable[..., MaskBlocks], tuple[MaskWords, int]]:
        """Has a loader's workers hand it over: runs are found again."""
        return _again, (self.mask, self.block)

    @property
    def num_blocks(self) -> int:
        """Blocks of the sequence."""
        return -(-self.mask.num_tokens // self.block)

    def work(self) -> Work:
        """Returns the visible pairs of each block of queries, in time by runs and blocks."""
        return self.runs.work(self.block)

    def tiles(self, rows: npt.ArrayLike) -> Tiles:
        """Returns the tiles of some blocks of queries, in the given order.

        Raises:
            ValueError: A row is not in the sequence.
        """
        offsets, columns, is_full, _ = self.runs.tiles(np.asarray(rows, np.int64), self.block, self.block)
        return Tiles(offsets=offsets, columns=columns, is_full=is_full)

    def tile_pairs(self, at_once: int = 512) -> Work:
        """Returns for each block of queries the pairs of all its tiles, hidden ones too: what a kernel works on."""
        parts = [
            np.diff(self.tiles(np.arange(begin, min(begin + at_once, self.num_blocks))).offsets)
            for begin in range(0, self.num_blocks, at_once)
        ]
        return np.concatenate(parts) * self.block**2

    def seen(self, rows: npt.ArrayLike, at_once: int = 512) -> npt.NDArray[np.bool_]:
        """Tells which blocks of keys some blocks of queries see; shape (blocks,). Looks at so many rows at once."""
        asked = np.asarray(rows, np.int64)
        seen = np.zeros(self.num_blocks, bool)
        for begin in range(0, len(asked), at_once):
            seen[self.tiles(asked[begin : begin + at_once]).columns] = True
        return seen


def _again(mask: MaskWords, block: int) -> MaskBlocks:
    return MaskBlocks(mask=mask, block=block)
