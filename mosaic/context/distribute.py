"""Assignment of the blocks of a sequence to ranks: one table of methods.

Every rank computes the same distribution from the mask, without communication. To add a method, write a function from
``Pieces`` to the rank of each piece, and name it in the table.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mosaic.context.tiles import Work
from mosaic.errors import unknown
from mosaic.search_extension import load_search

RankOf = npt.NDArray[np.int32]
"""The rank of each block, or of each chunk of them."""

IMBALANCE_KEPT = 1.01
"""Largest ratio of the highest load to the mean that coarse chunks may have to save bytes."""
FINENESS = 10_000
"""Ranks trade until the highest load is within this part of the mean."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pieces:
    """Pieces of work, and the number of ranks that share them."""

    work: Work
    """Visible pairs of each piece; at least as many pieces as ranks."""
    ranks: int
    """Ranks of the context group."""
    seed: int = 0
    """Seed of random methods."""

    @property
    def cap(self) -> int:
        """Largest number of pieces of a rank with equal counts."""
        return math.ceil(len(self.work) / self.ranks)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Distribution:
    """Assignment of blocks to ranks."""

    rank_of: RankOf
    """Rank of each block; shape (blocks,)."""
    ranks: int
    """Number of ranks; each has at least one block."""
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
        return _imbalance(self.sums(work))


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextMethod:
    """A load balancer of blocks."""

    name: str
    description: str
    share: Callable[[Pieces], RankOf]
    """Assigns each piece a rank."""
    chooses_chunk: bool = False
    """True if it chooses the coarsest chunks that keep ranks even by default."""


def longest_first(pieces: Pieces) -> RankOf:
    """Assigns the largest piece first to the rank with the least load, with equal counts; then trades pieces."""
    search = load_search()
    assigned = search.longest_first(pieces.work, ranks=pieces.ranks, cap=pieces.cap)
    traded: RankOf = search.traded(pieces.work, assigned, ranks=pieces.ranks, fineness=FINENESS)
    return traded


def ring(pieces: Pieces) -> RankOf:
    """Assigns each rank a contiguous range."""
    return _ranges(len(pieces.work), pieces.ranks)


def headtail(pieces: Pieces) -> RankOf:
    """Assigns each rank a contiguous range from the front and its mirror from the back.

    With fewer blocks than ranges the last ranges are empty, and every rank still has a block.
    """
    count = len(pieces.work)
    stretch = np.arange(count) if count < 2 * pieces.ranks else _ranges(count, 2 * pieces.ranks)
    return np.minimum(stretch, 2 * pieces.ranks - 1 - stretch).astype(np.int32)


def random(pieces: Pieces) -> RankOf:
    """Assigns random blocks, as many to each rank (section 5.3)."""
    order = np.random.RandomState(pieces.seed).permutation(len(pieces.work))  # the same in every version of numpy
    rank_of = np.empty(len(order), np.int32)
    rank_of[order] = np.arange(len(order)) % pieces.ranks
    return rank_of


_ALL = (
    ContextMethod(
        name="lpt",
        description="longest first with equal counts, then trades; the coarsest chunks that keep ranks even",
        share=longest_first,
        chooses_chunk=True,
    ),
    ContextMethod(name="headtail", description="a stretch from the front and its mirror from the back", share=headtail),
    ContextMethod(name="ring", description="a stretch each", share=ring),
    ContextMethod(name="random", description="blocks drawn, equal counts", share=random),
)

CONTEXT_METHODS = {method.name: method for method in _ALL}
"""By name."""


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
    if loads.size and (loads.ndim != 1 or loads.dtype.kind not in "iu" or (loads < 0).any()):
        raise ValueError(
            f"work has numbers of {loads.dtype} from {loads.min()} on in shape {loads.shape}; "
            "give one whole number >= 0 a block"
        )
    loads = np.ascontiguousarray(loads, np.int64)
    if method not in CONTEXT_METHODS:
        raise ValueError(unknown("method", method, CONTEXT_METHODS))
    if ranks < 1 or len(loads) < ranks:
        raise ValueError(
            f"{len(loads)} blocks for {ranks} ranks; each rank needs one: "
            "use fewer ranks, smaller blocks, or more tokens"
        )
    if chunk is not None and (chunk < 1 or math.ceil(len(loads) / chunk) < ranks):
        most = next(size for size in range(len(loads), 0, -1) if math.ceil(len(loads) / size) >= ranks)
        raise ValueError(
            f"chunk={chunk} does not cut {len(loads)} blocks into a chunk for each of {ranks} ranks; use 1 to {most}"
        )
    balancer = CONTEXT_METHODS[method]
    chunks = _chunks(len(loads), ranks) if chunk is None and balancer.chooses_chunk else (chunk or 1,)
    for size in chunks:  # from coarse to fine; the last always counts
        distribution = _in_chunks(balancer, loads, ranks, size, seed)
        if size == chunks[-1] or distribution.imbalance(loads) <= IMBALANCE_KEPT:
            break
    return distribution


def sums_by_rank(work: Work, rank_of: RankOf, ranks: int) -> npt.NDArray[np.int64]:
    """Returns the work of each rank, in whole numbers; shape (ranks,)."""
    sums = np.zeros(ranks, np.int64)
    np.add.at(sums, rank_of, work)
    return sums


def _imbalance(sums: npt.NDArray[np.int64]) -> float:
    total = int(sums.sum())
    return int(sums.max()) * len(sums) / total if total else 1.0


def _chunks(blocks: int, ranks: int) -> tuple[int, ...]:
    """Returns the chunk sizes that need no more padding than single blocks, from coarse to fine."""
    slots = math.ceil(blocks / ranks)
    sizes = [1 << power for power in range(slots.bit_length())]
    return tuple(size for size in reversed(sizes) if math.ceil(math.ceil(blocks / size) / ranks) * size == slots)


def _in_chunks(balancer: ContextMethod, work: Work, ranks: int, chunk: int, seed: int) -> Distribution:
    sums = np.add.reduceat(work, np.arange(0, len(work), chunk)) if chunk > 1 else work
    rank_of = balancer.share(Pieces(work=sums, ranks=ranks, seed=seed))
    return Distribution(rank_of=np.repeat(rank_of, chunk)[: len(work)], ranks=ranks, chunk=chunk, method=balancer.name)


def _ranges(pieces: int, count: int) -> RankOf:
    edges = np.arange(count + 1) * pieces // count
    return np.repeat(np.arange(count, dtype=np.int32), np.diff(edges))
