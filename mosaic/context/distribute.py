"""Assignment of the blocks of a sequence to ranks: one table of methods.

Every rank computes the same distribution from the mask, without communication.
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
"""The rank of each block, or of each chunk of them."""

IMBALANCE_KEPT = 1.01
"""Largest ratio of the highest load to the mean that coarse chunks may have to save bytes."""
FINENESS = 10_000
"""Ranks trade until the highest load is within this part of the mean."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Distribution:
    """Assignment of blocks to ranks, each of which has at least one."""

    rank_of: RankOf
    """Rank of each block; shape (blocks,)."""
    ranks: int
    chunk: int
    """Blocks assigned together."""
    method: str
    """Name in ``CONTEXT_METHODS``."""

    def blocks_of(self, rank: int) -> npt.NDArray[np.int64]:
        """Returns the blocks of a rank in ascending order."""
        return np.flatnonzero(self.rank_of == rank)

    @property
    def slots(self) -> int:
        """Blocks of the rank with most, the size of every rank's tensors."""
        return int(np.bincount(self.rank_of, minlength=self.ranks).max())

    def sums(self, work: Work) -> npt.NDArray[np.int64]:
        """Returns the work of each rank; shape (ranks,)."""
        return sums_by_rank(work, self.rank_of, self.ranks)

    def imbalance(self, work: Work) -> float:
        """Returns the highest load over the mean, 1 without work."""
        sums = self.sums(work)
        total = int(sums.sum())
        return int(sums.max()) * self.ranks / total if total else 1.0


def longest_first(work: Work, ranks: int, seed: int) -> RankOf:
    """Assigns the largest piece first to the rank with the least load, with equal counts; then trades pieces."""
    assigned = _search.longest_first(work, ranks=ranks, cap=math.ceil(len(work) / ranks))
    return _search.traded(work, assigned, ranks=ranks, fineness=FINENESS)


def ring(work: Work, ranks: int, seed: int) -> RankOf:
    """Assigns each rank a contiguous range."""
    return np.repeat(np.arange(ranks, dtype=np.int32), np.diff(np.arange(ranks + 1) * len(work) // ranks))


def headtail(work: Work, ranks: int, seed: int) -> RankOf:
    """Assigns each rank a contiguous range from the front and its mirror from the back.

    With fewer blocks than ranges the last ranges are empty, and every rank still has a block.
    """
    count = len(work)
    stretch = np.arange(count, dtype=np.int32) if count < 2 * ranks else ring(work, 2 * ranks, seed)
    return np.minimum(stretch, 2 * ranks - 1 - stretch)


def random(work: Work, ranks: int, seed: int) -> RankOf:
    """Assigns random blocks, as many to each rank (section 5.3)."""
    order = np.random.RandomState(seed).permutation(len(work))  # the same in every version of numpy
    rank_of = np.empty(len(order), np.int32)
    rank_of[order] = np.arange(len(order)) % ranks
    return rank_of


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextMethod:
    """A load balancer of blocks."""

    name: str
    description: str
    share: Callable[[Work, int, int], RankOf]
    """Assigns each piece of work a rank, given the number of ranks and a seed."""


_LPT = "longest first with equal counts, then trades; the coarsest chunks that keep ranks even"
_ALL = (
    ContextMethod(name="lpt", description=_LPT, share=longest_first),
    ContextMethod(name="headtail", description="a stretch from the front and its mirror from the back", share=headtail),
    ContextMethod(name="ring", description="a stretch each", share=ring),
    ContextMethod(name="random", description="blocks drawn, equal counts", share=random),
)

CONTEXT_METHODS = {method.name: method for method in _ALL}


def distribute(
    work: npt.ArrayLike, ranks: int, method: str = "lpt", *, chunk: int | None = None, seed: int = 0
) -> Distribution:
    """Assigns blocks to ranks; the same input gives the same distribution on any machine.

    Args:
        work: Work of each block: visible pairs, or another whole number; shape (blocks,).
        ranks: Ranks of the context group.
        method: Name in ``CONTEXT_METHODS``.
        chunk: Blocks assigned together; ranks with coarse chunks see fewer blocks of others. None: the largest
            power of two that costs no padding and keeps the imbalance at 1.01 for ``lpt``, 1 for others.
        seed: Seed of random methods.

    Raises:
        ValueError: Ranks outnumber blocks or chunks, the method is unknown, or work is negative.
    """
    loads = np.asarray(work)
    if loads.size and (loads.ndim != 1 or loads.dtype.kind not in "iu" or loads.min() < 0):
        raise ValueError(f"work has {loads.dtype} from {loads.min()} on; give one whole number >= 0 a block")
    loads = np.ascontiguousarray(loads, np.int64)
    if method not in CONTEXT_METHODS:
        raise ValueError(unknown("method", method, CONTEXT_METHODS))
    if ranks < 1 or math.ceil(len(loads) / (chunk or 1)) < ranks:
        raise ValueError(
            f"{len(loads)} blocks for {ranks} ranks; each rank needs one: use fewer ranks, smaller blocks or chunks, "
            "or more tokens"
        )
    chunks = _chunks(len(loads), ranks) if chunk is None and method == "lpt" else (chunk or 1,)
    for size in chunks:  # from coarse to fine; the last always counts
        sums = np.add.reduceat(loads, np.arange(0, len(loads), size)) if size > 1 else loads
        rank_of = np.repeat(CONTEXT_METHODS[method].share(sums, ranks, seed), size)[: len(loads)]
        distribution = Distribution(rank_of=rank_of, ranks=ranks, chunk=size, method=method)
        if size == chunks[-1] or distribution.imbalance(loads) <= IMBALANCE_KEPT:
            break
    return distribution


def sums_by_rank(work: Work, rank_of: RankOf, ranks: int) -> npt.NDArray[np.int64]:
    """Returns the work of each rank, in whole numbers; shape (ranks,)."""
    sums = np.zeros(ranks, np.int64)
    np.add.at(sums, rank_of, work)
    return sums


def _chunks(blocks: int, ranks: int) -> tuple[int, ...]:
    """Returns the chunk sizes that need no more padding than single blocks, from coarse to fine."""
    slots = math.ceil(blocks / ranks)
    sizes = [1 << power for power in range(slots.bit_length())]
    return tuple(size for size in reversed(sizes) if math.ceil(math.ceil(blocks / size) / ranks) * size == slots)
