"""The plan of one sequence's attention over ranks: what each computes, and what it has to receive. Needs no torch."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from mosaic.context.distribute import Distribution, distribute
from mosaic.context.layout import Layout
from mosaic.context.tiles import MaskBlocks, Tiles, Work
from mosaic.context.words import MaskWords

MAX_TILED_BLOCKS = 1024
"""Blocks of a sequence up to which its tiles are counted, in a few milliseconds."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ContextPlan:
    """Who computes the attention of which blocks, and who needs the keys and values of which."""

    blocks: MaskBlocks
    """The mask in blocks."""
    work: Work
    """Visible pairs of each block."""
    load: Work
    """What each block was counted as when it was shared out: its visible pairs, or those of its whole tiles."""
    distribution: Distribution
    """Which rank has which blocks."""

    @property
    def mask(self) -> MaskWords:
        """Who sees whom."""
        return self.blocks.mask

    @property
    def ranks(self) -> int:
        """Ranks of the context group."""
        return self.distribution.ranks

    @property
    def layout(self) -> Layout:
        """Where tokens lie."""
        return Layout(num_tokens=self.mask.num_tokens, block=self.blocks.block, distribution=self.distribution)

    @property
    def pairs(self) -> npt.NDArray[np.int64]:
        """Visible pairs of each rank; shape (ranks,)."""
        return self.distribution.sums(self.work)

    @property
    def loads(self) -> npt.NDArray[np.int64]:
        """What each rank's blocks were counted as: what its attention takes time by; shape (ranks,)."""
        return self.distribution.sums(self.load)

    @property
    def imbalance(self) -> float:
        """Load of the rank with most over the mean."""
        return self.distribution.imbalance(self.load)

    def tiles(self, rank: int) -> Tiles:
        """Returns the tiles of a rank, a row for each of its blocks, columns as blocks of the sequence."""
        return self.blocks.tiles(self.distribution.blocks_of(rank))

    def needed(self) -> npt.NDArray[np.bool_]:
        """Tells which blocks' keys and values each rank reads, its own among them; shape (ranks, blocks)."""
        return np.stack([self.blocks.seen(self.distribution.blocks_of(rank)) for rank in range(self.ranks)])

    def received_blocks(self, needed: npt.NDArray[np.bool_] | None = None) -> npt.NDArray[np.int64]:
        """Returns how many blocks of other ranks each rank receives; shape (ranks,).

        Args:
            needed: What ``needed`` says; None: all blocks are gathered, empty ones too.
        """
        if needed is None:
            return np.full(self.ranks, (self.ranks - 1) * self.distribution.slots)
        remote = self.distribution.rank_of[None, :] != np.arange(self.ranks)[:, None]
        received: npt.NDArray[np.int64] = (needed & remote).sum(axis=1)
        return received

    def received_bytes(self, token_bytes: int, needed: npt.NDArray[np.bool_] | None = None) -> npt.NDArray[np.int64]:
        """Returns the bytes of keys and values that each rank receives in a forward of one layer; shape (ranks,).

        The backward pass receives as many again, and sends back gradients of as many numbers, in 32 bits.

        Args:
            token_bytes: Of a token's keys and values together, of all heads.
            needed: As of ``received_blocks``.
        """
        return self.received_blocks(needed) * self.blocks.block * token_bytes

    def digest(self) -> str:
        """Returns a hash that only equal plans share: of mask, block and distribution."""
        made = hashlib.sha256(self.mask.digest().encode())
        made.update(f" {self.blocks.block} {self.ranks} ".encode())
        made.update(np.ascontiguousarray(self.distribution.rank_of).data)
        return made.hexdigest()


def plan_context(
    mask: MaskWords,
    ranks: int,
    *,
    block: int = 128,
    method: str = "lpt",
    chunk: int | None = None,
    balance: Literal["pairs", "tiles"] | None = None,
    seed: int = 0,
) -> ContextPlan:
    """Plans the attention of a sequence; every rank that calls it gets the same plan.

    Args:
        mask: Who sees whom.
        ranks: Ranks of the context group.
        block: Tokens given out together at least: what the kernel works on at once, or a multiple.
        method: Name in ``CONTEXT_METHODS``.
        chunk: Blocks given out together; None chooses, as ``distribute`` says.
        balance: What is shared out evenly: visible pairs, or pairs of whole tiles, which a kernel works on. They
            differ in short sequences, and tiles take longer to count. None: tiles up to 1,024 blocks.
        seed: Of what is drawn.

    Raises:
        ValueError: There are fewer blocks than ranks, or ``distribute`` refuses something else.
    """
    blocks = MaskBlocks(mask=mask, block=block)
    work = blocks.work()
    by_tiles = blocks.num_blocks <= MAX_TILED_BLOCKS if balance is None else balance == "tiles"
    load = blocks.tile_pairs() if by_tiles else work
    shared = distribute(load, ranks, method, chunk=chunk, seed=seed)
    return ContextPlan(blocks=blocks, work=work, load=load, distribution=shared)
