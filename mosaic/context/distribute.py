"""The table of load balancers, which assign the blocks of a sequence to ranks.

Every rank computes the same assignment from the mask, without communication.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mosaic import _search
from mosaic.context.tiles import Work
from mosaic.errors import unknown

RankOf = npt.NDArray[np.int32]
"""The rank of each block or chunk."""

IMBALANCE_KEPT = 1.01
"""Maximum imbalance (largest over mean load) of coarse chunks, which save bytes."""
FINENESS = 10_000
"""Ranks trade until the largest load is within this share of the mean."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Distribution:
    """Assignment of blocks to ranks, at least one per rank."""

    rank_of: RankOf
    """Rank of each block; shape (blocks,)."""
    ranks: int
    chunk: int
    """Number of blocks assigned together."""
    method: str
    """Name in ``CONTEXT_METHODS``."""

    def blocks_of(self, rank: int) -> npt.NDArray[np.int64]:
        """Returns the blocks of a rank in ascending order."""
        return np.flatnonzero(self.rank_of == rank)

    @property
    def slots(self) -> int:
        """Largest number of blocks of a rank, the size of all ranks' tensors."""
        return int(np.bincount(self.rank_of, minlength=self.ranks).max())

    def sums(self, work: Work) -> npt.NDArray[np.int64]:
        """Returns the work of each rank; shape (ranks,)."""
        return sums_by_rank(work, self.rank_of, self.ranks)

    def imbalance(self, work: Work) -> float:
        """Returns the largest load over the mean; 1 without work."""
        sums = self.sums(work)
        total = int(sums.sum())
        return int(sums.max()) * self.ranks / total if total else 1.0


def longest_first(work: Work, ranks: int, seed: int) -> RankOf:
    """Assigns the largest piece first to the rank with the least load, with equal counts, then trades pieces."""
    assigned = _search.longest_first(work, ranks=ranks, cap=math.ceil(len(work) / ranks))
    return _search.traded(work, assigned, ranks=ranks, fineness=FINENESS)


def ring(work: Work, ranks: int, seed: int) -> RankOf:
    """Assigns each rank a contiguous range."""
    return np.repeat(np.arange(ranks, dtype=np.int32), np.diff(np.arange(ranks + 1) * len(work) // ranks))


def headtail(work: Work, ranks: int, seed: int) -> RankOf:
    """Assigns each rank a contiguous range from the front and its mirror from the back.

    With fewer blocks than ranges the last ranges are empty, but every rank has a block.
    """
    count = len(work)
    stretch = np.arange(count, dtype=np.int32) if count < 2 * ranks else ring(work, 2 * ranks, seed)
    return np.minimum(stretch, 2 * ranks - 1 - stretch)


def random(work: Work, ranks: int, seed: int) -> RankOf:
    """Assigns random blocks, the same number to each rank (section 5.3)."""
    order = np.random.RandomState(seed).permutation(len(work))  # stable across versions of numpy
    rank_of = np.empty(len(order), np.int32)
    rank_of[order] = np.arange(len(order)) % ranks
    return rank_of


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextMethod:
    """A load balancer of blocks."""

    name: str
    description: str
    share: Callable[[Work, int, int], RankOf]
    """Maps work per piece, number of ranks and seed to a rank per piece."""


_LPT = "longest first with equal counts, then trades; the coarsest balanced chunks"
_ALL = (
    ContextMethod(name="lpt", description=_LPT, share=longest_first),
    ContextMethod(name="headtail", description="a range from the front and its mirror from the back", share=headtail),
    ContextMethod(name="ring", description="one range per rank", share=ring),
    ContextMethod(name="random", description="random blocks with equal counts", share=random),
)

CONTEXT_METHODS = {method.name: method for method in _ALL}


def distribute(
    work: npt.ArrayLike, ranks: int, method: str = "lpt", *, chunk: int | None = None, seed: int = 0
) -> Distribution:
    """Assigns blocks to ranks; the result is the same on any machine.

    Args:
        work: Work of each block, such as visible pairs; integers of shape (blocks,).
        ranks: Size of the context group.
        method: Name in ``CONTEXT_METHODS``.
        chunk: Blocks assigned together; with coarse chunks ranks read fewer remote blocks. None: for ``lpt`` the
            largest power of two without padding and with an imbalance of at most 1.01, otherwise 1.
        seed: Seed of random methods.

    Raises:
        ValueError: Ranks outnumber blocks or chunks, the method is unknown, or work is negative.
    """
    loads = np.asarray(work)
    if loads.size and (loads.ndim != 1 or loads.dtype.kind not in "iu" or loads.min() < 0):
        raise ValueError(f"work is {loads.dtype} with minimum {loads.min()}; pass one integer of 0 or more per block")
    loads = np.ascontiguousarray(loads, np.int64)
    if method not in CONTEXT_METHODS:
        raise ValueError(unknown("method", method, CONTEXT_METHODS))
    if ranks < 1 or math.ceil(len(loads) / (chunk or 1)) < ranks:
        raise ValueError(
            f"{len(loads)} blocks for {ranks} ranks; each rank needs one: use fewer ranks, smaller blocks or chunks, "
            "or more tokens"
        )
    chunks = _chunks(len(loads), ranks) if chunk is None and method == "lpt" else (chunk or 1,)
    for size in chunks:  # from coarse to fine; the last one is always accepted
        sums = np.add.reduceat(loads, np.arange(0, len(loads), size)) if size > 1 else loads
        rank_of = np.repeat(CONTEXT_METHODS[method].share(sums, ranks, seed), size)[: len(loads)]
        distribution = Distribution(rank_of=rank_of, ranks=ranks, chunk=size, method=method)
        if size == chunks[-1] or distribution.imbalance(loads) <= IMBALANCE_KEPT:
            break
    return distribution


def sums_by_rank(work: Work, rank_of: RankOf, ranks: int) -> npt.NDArray[np.int64]:
    """Returns the work of each rank, integers of shape (ranks,)."""
    sums = np.zeros(ranks, np.int64)
    np.add.at(sums, rank_of, work)
    return sums


def _chunks(blocks: int, ranks: int) -> tuple[int, ...]:
    """Returns the chunk sizes without extra padding, from coarse to fine."""
    slots = math.ceil(blocks / ranks)
    sizes = [1 << power for power in range(slots.bit_length())]
    return tuple(size for size in reversed(sizes) if math.ceil(math.ceil(blocks / size) / ranks) * size == slots)
