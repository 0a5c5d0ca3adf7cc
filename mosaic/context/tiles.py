"""The work of blocks of tokens under a mask, and the tiles with visible pairs.

Computed from runs of equal tokens, prefix counts and interval arithmetic, without the full matrix.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import numpy.typing as npt

from mosaic import _search
from mosaic.context.words import MaskWords

Work = npt.NDArray[np.int64]
"""Visible pairs of each block; shape (blocks,)."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Tiles:
    """Tiles with a visible pair by row: those of row i are ``offsets[i]`` to ``offsets[i + 1]``."""

    offsets: npt.NDArray[np.int64]
    """Shape (rows + 1,)."""
    columns: npt.NDArray[np.int32]
    """Key block of each tile; ascending within a row."""
    is_full: npt.NDArray[np.uint8]
    """1 if every query of the tile sees every key."""

    @property
    def num_rows(self) -> int:
        return len(self.offsets) - 1


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MaskBlocks:
    """A mask cut into blocks of tokens; the last may be shorter."""

    mask: MaskWords
    block: int = 128
    """Tokens per block of queries and of keys; a multiple of the kernel's tile."""
    window: int | None = None
    """Tokens of a sliding window; see ``MaskWords.sees``."""
    runs: _search.MaskRuns = field(init=False, repr=False)
    """The mask as runs, for the extension."""

    def __post_init__(self) -> None:
        if self.block < 1:
            raise ValueError(f"block={self.block}; use 1 token or more, 128 for compiled FlexAttention")
        object.__setattr__(self, "runs", _search.MaskRuns(self.mask.words, self.mask.documents))

    def __reduce__(self) -> tuple[Callable[[], MaskBlocks], tuple[()]]:
        """Pickles the mask, for a loader's workers; unpickling recomputes the runs."""
        return partial(MaskBlocks, mask=self.mask, block=self.block, window=self.window), ()

    @property
    def num_blocks(self) -> int:
        return -(-self.mask.num_tokens // self.block)

    def work(self) -> Work:
        """Returns the visible pairs of each query block, in time linear in runs and blocks.

        With a window, each query counts at most ``window`` pairs, which is exact for causal documents in long blocks.
        """
        pairs = self.runs.work(self.block)
        return pairs if self.window is None else np.minimum(pairs, self.window * self.block)

    def tiles(self, rows: npt.ArrayLike) -> Tiles:
        """Returns the tiles of some query blocks; with a window and images, a tile may be empty."""
        blocks = np.asarray(rows, np.int64)
        offsets, columns, is_full = self.runs.tiles(blocks, self.block)
        if self.window is not None:
            count = self.mask.num_tokens
            begins = np.arange(0, count, self.block)
            oldest = np.minimum(begins - self.window + 1, np.minimum.reduceat(self.mask.first_ahead(), begins))
            row = np.repeat(blocks, np.diff(offsets))
            is_full = is_full & (columns * self.block > np.minimum((row + 1) * self.block, count) - 1 - self.window)
            is_visible = (columns.astype(np.int64) + 1) * self.block > oldest[row]
            offsets = np.r_[0, np.cumsum(is_visible, dtype=np.int64)][offsets]
            columns, is_full = columns[is_visible], is_full[is_visible].astype(np.uint8)
        return Tiles(offsets=offsets, columns=columns, is_full=is_full)

    def tile_pairs(self) -> Work:
        """Returns the pairs in all tiles of each query block, including the hidden pairs that a kernel computes."""
        return np.diff(self.tiles(np.arange(self.num_blocks)).offsets) * self.block**2

    def seen(self, rows: npt.ArrayLike) -> npt.NDArray[np.bool_]:
        """Returns the key blocks that query blocks see; shape (blocks,)."""
        is_visible = np.zeros(self.num_blocks, bool)
        is_visible[self.tiles(rows).columns] = True
        return is_visible
