"""The plan of one sequence's attention over ranks: computation and communication of each rank. Needs no torch."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from mosaic.context.distribute import Distribution, distribute
from mosaic.context.tiles import MaskBlocks, Tiles, Work
from mosaic.context.words import MaskWords

MAX_TILED_BLOCKS = 1024
"""Maximum number of blocks for counting tiles, which takes a few milliseconds."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ContextPlan:
    """Assignment of blocks to ranks, the places of their tokens, and the keys and values that each rank needs.

    A rank's blocks are in sequence order, and all ranks have the same number of places. A rank with fewer blocks ends
    with empty places, as does a short last block.
    """

    blocks: MaskBlocks
    load: Work
    """Balanced load of each block: its visible pairs, or those of its whole tiles."""
    distribution: Distribution
    windows: tuple[int | None, ...] = (None,)
    """Sliding window of each layer; others are also allowed."""

    @property
    def mask(self) -> MaskWords:
        return self.blocks.mask

    @property
    def ranks(self) -> int:
        return self.distribution.ranks

    @property
    def local_tokens(self) -> int:
        """Number of places of each rank, including empty ones."""
        return self.distribution.slots * self.blocks.block

    def windowed(self, window: int | None) -> ContextPlan:
        """Returns the plan of layers with a sliding window, with the same assignment."""
        if window is None or window >= self.mask.num_tokens:
            return self
        return replace(self, blocks=replace(self.blocks, window=window))

    def column_of(self) -> npt.NDArray[np.int32]:
        """Returns the place of each block among the blocks of all ranks; shape (blocks,)."""
        columns = np.empty(len(self.distribution.rank_of), np.int32)
        for rank in range(self.ranks):
            own = self.distribution.blocks_of(rank)
            columns[own] = rank * self.distribution.slots + np.arange(len(own))
        return columns

    def order_of(self, rank: int) -> npt.NDArray[np.int64]:
        """Returns the position in the sequence of each place of a rank, -1 if empty; shape (local_tokens,)."""
        own = self.distribution.blocks_of(rank)
        starts = np.full((self.distribution.slots, 1), -self.blocks.block, np.int64)
        starts[: len(own), 0] = own * self.blocks.block
        positions = (starts + np.arange(self.blocks.block)).ravel()
        return np.where((positions < 0) | (positions >= self.mask.num_tokens), -1, positions)

    @property
    def pairs(self) -> npt.NDArray[np.int64]:
        """Visible pairs of each rank; shape (ranks,)."""
        return self.distribution.sums(self.blocks.work())

    @property
    def loads(self) -> npt.NDArray[np.int64]:
        """Balanced load of each rank; shape (ranks,)."""
        return self.distribution.sums(self.load)

    @property
    def imbalance(self) -> float:
        return self.distribution.imbalance(self.load)

    def tiles(self, rank: int) -> Tiles:
        """Returns the tiles of a rank: a row per block of the rank, a column per block of the sequence."""
        return self.blocks.tiles(self.distribution.blocks_of(rank))

    def needed(self) -> npt.NDArray[np.bool_]:
        """Returns the blocks whose keys and values each rank reads, including its own; shape (ranks, blocks)."""
        return np.stack([self.blocks.seen(self.distribution.blocks_of(rank)) for rank in range(self.ranks)])

    def received_blocks(self, needed: npt.NDArray[np.bool_] | None = None) -> npt.NDArray[np.int64]:
        """Returns the number of remote blocks that each rank receives, by default of all; shape (ranks,)."""
        if needed is None:
            return np.full(self.ranks, (self.ranks - 1) * self.distribution.slots)
        remote = self.distribution.rank_of[None, :] != np.arange(self.ranks)[:, None]
        received: npt.NDArray[np.int64] = (needed & remote).sum(axis=1)
        return received

    def digest(self) -> str:
        """Returns a hash of mask, block size and assignment."""
        sha = hashlib.sha256(f"{self.blocks.block} {self.ranks} ".encode())
        sha.update(self.mask.words.data)
        sha.update(self.mask.documents.data)
        sha.update(np.ascontiguousarray(self.distribution.rank_of).data)
        return sha.hexdigest()


def plan_context(
    mask: MaskWords,
    ranks: int,
    *,
    block: int = 128,
    method: str = "lpt",
    seed: int = 0,
    windows: Sequence[int | None] = (None,),
) -> ContextPlan:
    """Plans the attention of a sequence; the same on every rank.

    Up to 1,024 blocks the balanced load is pairs of whole tiles, which a kernel computes. For more blocks it is visible
    pairs, which are faster to count and differ little.

    Args:
        mask: The attention mask.
        ranks: Size of the context group.
        block: Tokens per block, a multiple of the kernel's tile.
        method: Name in ``CONTEXT_METHODS``.
        seed: Seed of random methods.
        windows: Sliding window of each layer (None without one), whose loads are summed; see
            ``mosaic.context.attention.layer_windows``.

    Raises:
        ValueError: Ranks outnumber blocks, or ``distribute`` rejects another argument.
    """
    blocks = MaskBlocks(mask=mask, block=block)
    load = np.zeros(blocks.num_blocks, np.int64)
    for window, count in Counter(windows).items():
        own = replace(blocks, window=window)
        load += count * (own.tile_pairs() if blocks.num_blocks <= MAX_TILED_BLOCKS else own.work())
    distribution = distribute(load, ranks, method, seed=seed)
    return ContextPlan(blocks=blocks, load=load, distribution=distribution, windows=tuple(windows))


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextSettings:
    """Context parallelism of a pipeline's language model."""

    ranks: int
    mask: Callable[[Mapping[str, Any]], MaskWords]
    """Returns the mask of a microbatch, common to all rows, such as ``lambda microbatch:
    causal(microbatch["input_ids"].shape[1])``; ``Pipeline.ahead`` calls it in a thread."""
    method: str = "lpt"
    """Name in ``CONTEXT_METHODS``."""
    block: int = 128
    """Tokens per block."""
    windows: tuple[int | None, ...] | None = None
    """Sliding window of each layer, for load balancing; None: the language model's."""

    def __post_init__(self) -> None:
        for name in ("ranks", "block"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}; use 1 or more")

    def plan(self, microbatch: Mapping[str, Any]) -> ContextPlan:
        """Plans a microbatch's attention; raises ValueError if its sequence has fewer blocks than ranks."""
        windows = self.windows or (None,)
        return plan_context(self.mask(microbatch), self.ranks, block=self.block, method=self.method, windows=windows)
