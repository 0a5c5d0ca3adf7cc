"""Who gets which blocks of a sequence: one table of methods.

Every rank computes the distribution from the mask, and all get the same; nothing is sent. To add a method, write a
function from ``Pieces`` to the rank of each piece, and name it in the table.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mosaic.context.tiles import Work
from mosaic.search_extension import load_search

RankOf = npt.NDArray[np.int32]
"""The rank of each block, or of each chunk of them."""

IMBALANCE_KEPT = 1.01
"""How much more than the mean the rank with most may have, where coarse chunks save bytes."""
FINENESS = 10_000
"""Ranks trade until the one with most is within this part of the mean."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pieces:
    """Pieces of work, and how many ranks share them."""

    work: Work
    """Visible pairs of each, at least as many pieces as ranks."""
    ranks: int
    """Ranks of the context group."""
    seed: int = 0
    """Of what is drawn."""

    @property
    def cap(self) -> int:
        """Pieces that a rank has at most where all have as many."""
        return math.ceil(len(self.work) / self.ranks)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Distribution:
    """Which rank has which blocks."""

    rank_of: RankOf
    """Of each block; shape (blocks,)."""
    ranks: int
    """Ranks; each has a block at least."""
    chunk: int
    """Blocks that were given out together."""
    method: str
    """Name of who shared them out."""

    def blocks_of(self, rank: int) -> npt.NDArray[np.int64]:
        """Returns the blocks of a rank, rising."""
        return np.flatnonzero(self.rank_of == rank)

    @property
    def slots(self) -> int:
        """Blocks of the rank that has most: what every rank's tensors hold."""
        return int(np.bincount(self.rank_of, minlength=self.ranks).max())

    def sums(self, work: Work) -> npt.NDArray[np.int64]:
        """Returns the work of each rank; shape (ranks,)."""
        return sums_by_rank(work, self.rank_of, self.ranks)

    def imbalance(self, work: Work) -> float:
        """Returns the most that a rank has over the mean, 1 where there is no work."""
        return _imbalance(self.sums(work))


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextMethod:
    """Who shares blocks out, and what it can do."""

    name: str
    """As people give it."""
    phrase: str
    """What it does."""
    share: Callable[[Pieces], RankOf]
    """Gives each piece its rank."""
    chooses_chunk: bool = False
    """Whether it takes the coarsest chunks that keep ranks even, where nobody says how coarse they are."""


def longest_first(pieces: Pieces) -> RankOf:
    """Largest piece first to the rank with least, each rank at most its share of the number; then trades pieces."""
    search = load_search()
    given = search.longest_first(pieces.work, ranks=pieces.ranks, cap=pieces.cap)
    traded: RankOf = search.traded(pieces.work, given, ranks=pieces.ranks, fineness=FINENESS)
    return traded


def longest_first_with_equal_counts(pieces: Pieces) -> RankOf:
    """The same without trades."""
    given: RankOf = load_search().longest_first(pieces.work, ranks=pieces.ranks, cap=pieces.cap)
    return given


def longest_first_as_printed(pieces: Pieces) -> RankOf:
    """The paper's Algorithm 2: the largest piece first to the rank with least, whatever number that has."""
    given: RankOf = load_search().longest_first(pieces.work, ranks=pieces.ranks, cap=len(pieces.work))
    return given


def ring(pieces: Pieces) -> RankOf:
    """Each rank a stretch of the sequence."""
    return _stretches(len(pieces.work), pieces.ranks)


def zigzag(pieces: Pieces) -> RankOf:
    """Twice as many stretches as ranks, each rank one from the front and its mirror from the back.

    Where there are fewer blocks than stretches, the last stretches have none, so that every rank has a block.
    """
    count = len(pieces.work)
    stretch = np.arange(count) if count < 2 * pieces.ranks else _stretches(count, 2 * pieces.ranks)
    return np.minimum(stretch, 2 * pieces.ranks - 1 - stretch).astype(np.int32)


def striped(pieces: Pieces) -> RankOf:
    """Blocks in turn."""
    return (np.arange(len(pieces.work)) % pieces.ranks).astype(np.int32)


def random(pieces: Pieces) -> RankOf:
    """Blocks drawn, as many for each rank (section 5.3)."""
    order = np.random.RandomState(pieces.seed).permutation(len(pieces.work))  # the same in every version of numpy
    rank_of = np.empty(len(order), np.int32)
    rank_of[order] = striped(pieces)
    return rank_of


_ALL = (
    ContextMethod(
        name="lpt",
        phrase="longest first with equal counts, then trades; the coarsest chunks that keep ranks even",
        share=longest_first,
        chooses_chunk=True,
    ),
    ContextMethod(
        name="lpt-equal", phrase="longest first with equal counts, no trades", share=longest_first_with_equal_counts
    ),
    ContextMethod(
        name="lpt-paper", phrase="longest first as Cornstarch prints it, counts unequal", share=longest_first_as_printed
    ),
    ContextMethod(name="zigzag", phrase="a stretch from the front and its mirror from the back", share=zigzag),
    ContextMethod(name="ring", phrase="a stretch each", share=ring),
    ContextMethod(name="striped", phrase="blocks in turn", share=striped),
    ContextMethod(name="random", phrase="blocks drawn, equal counts", share=random),
)

CONTEXT_METHODS = {method.name: method for method in _ALL}
"""By name."""


def distribute(
    work: npt.ArrayLike, ranks: int, method: str = "lpt", *, chunk: int | None = None, seed: int = 0
) -> Distribution:
    """Shares blocks out; the same input gives the same distribution on any machine.

    Args:
        work: What each block takes: visible pairs, or another whole number; shape (blocks,).
        ranks: Ranks of the context group.
        method: Name in ``CONTEXT_METHODS``.
        chunk: Blocks given out together. Coarse chunks have ranks see fewer blocks of others. None: the largest
            power of two that costs no padding and keeps the imbalance at 1.01 for ``lpt``, 1 for others.
        seed: Of what is drawn.

    Raises:
        ValueError: There are fewer blocks or chunks than ranks, no such method, or work is negative.
    """
    given = np.asarray(work)
    if given.size and (given.ndim != 1 or given.dtype.kind not in "iu" or (given < 0).any()):
        raise ValueError(
            f"work has numbers of {given.dtype} from {given.min()} on in shape {given.shape}; "
            "give one whole number >= 0 a block"
        )
    given = np.ascontiguousarray(given, np.int64)
    if method not in CONTEXT_METHODS:
        raise ValueError(f"method={method!r} shares no blocks out; use one of {', '.join(CONTEXT_METHODS)}")
    if ranks < 1 or len(given) < ranks:
        raise ValueError(
            f"{len(given)} blocks for {ranks} ranks; each rank needs one: "
            "use fewer ranks, smaller blocks, or more tokens"
        )
    if chunk is not None and (chunk < 1 or math.ceil(len(given) / chunk) < ranks):
        most = next(size for size in range(len(given), 0, -1) if math.ceil(len(given) / size) >= ranks)
        raise ValueError(
            f"chunk={chunk} does not cut {len(given)} blocks into a chunk for each of {ranks} ranks; use 1 to {most}"
        )
    how = CONTEXT_METHODS[method]
    chunks = _chunks(len(given), ranks) if chunk is None and how.chooses_chunk else (chunk or 1,)
    for size in chunks:  # from coarse to fine; the last is kept whatever it is
        found = _in_chunks(how, given, ranks, size, seed)
        if size == chunks[-1] or found.imbalance(given) <= IMBALANCE_KEPT:
            break
    return found


def sums_by_rank(work: Work, rank_of: RankOf, ranks: int) -> npt.NDArray[np.int64]:
    """Returns the work of each rank, in whole numbers; shape (ranks,)."""
    sums = np.zeros(ranks, np.int64)
    np.add.at(sums, rank_of, work)
    return sums


def _imbalance(sums: npt.NDArray[np.int64]) -> float:
    total = int(sums.sum())
    return int(sums.max()) * len(sums) / total if total else 1.0


def _chunks(blocks: int, ranks: int) -> tuple[int, ...]:
    """Sizes of chunks with which no rank has more room than with single blocks, from coarse to fine."""
    slots = math.ceil(blocks / ranks)
    sizes = [1 << power for power in range(slots.bit_length())]
    return tuple(size for size in reversed(sizes) if math.ceil(math.ceil(blocks / size) / ranks) * size == slots)


def _in_chunks(how: ContextMethod, work: Work, ranks: int, chunk: int, seed: int) -> Distribution:
    sums = np.add.reduceat(work, np.arange(0, len(work), chunk)) if chunk > 1 else work
    rank_of = how.share(Pieces(work=sums, ranks=ranks, seed=seed))
    return Distribution(rank_of=np.repeat(rank_of, chunk)[: len(work)], ranks=ranks, chunk=chunk, method=how.name)


def _stretches(pieces: int, count: int) -> RankOf:
    edges = np.arange(count + 1) * pieces // count
    return np.repeat(np.arange(count, dtype=np.int32), np.diff(edges))
