"""The position stream: the n-th sample of a day is a function of the seed and n, over a frozen list of sources.

Positions come in blocks of 1024. A source's share fixes its number of positions in a block; permutations with random
access fix which positions and rows these are. The state of a run is therefore one integer, the number of positions
consumed. No torch: the launcher makes the list.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

BLOCK = 1024
"""Positions of a block."""
BLOCKS_IN_CYCLE = 1000
"""Blocks after which each source has exactly its share."""
CYCLE = BLOCK * BLOCKS_IN_CYCLE
"""Denominator of every share: 0.3 is exact, and a day among many can have one sample in a million."""
MAX_REPEATS = 4
"""Most draws of a replayed row per draw of a new one."""

Counts = NDArray[np.int64]
Words = NDArray[np.uint64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """One frozen list of rows."""

    name: str
    """Such as ``new/2026-11-22``."""
    rows: int
    share: Fraction
    """Part of all samples; a multiple of ``1 / CYCLE``. The shares of all sources sum to 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Draws:
    sources: Counts
    rows: Counts
    passes: Counts


class PositionStream:
    """The endless samples of a day.

    Args:
        sources: Sources; their order is part of the stream.
        seed: Seed of the order.

    Raises:
        ValueError: A source has no rows, a name comes twice, or shares are no multiples of ``1 / CYCLE`` or do not
            make 1.
    """

    def __init__(self, sources: Sequence[Source], seed: int) -> None:
        self.sources = tuple(sources)
        self.seed = seed
        _check(self.sources)
        self._rows = np.array([source.rows for source in self.sources], dtype=np.uint64)
        self._before = _counts_before([int(source.share * CYCLE) for source in self.sources])
        self._key = words_of("rows", seed)[0]
        self._last: tuple[int, Draws] | None = None

    def span(self, first: int, last: int) -> Draws:
        """Returns the rows at the positions from ``first`` to before ``last``.

        Raises:
            ValueError: There are no such positions.
        """
        if not 0 <= first < last:
            raise ValueError(f"first={first}, last={last}; positions begin at 0 and a span has one or more")
        pieces = []
        for number in range(first // BLOCK, (last - 1) // BLOCK + 1):
            block, begin = self._block(number), number * BLOCK
            part = slice(max(first - begin, 0), last - begin)
            pieces.append((block.sources[part], block.rows[part], block.passes[part]))
        sources, rows, passes = pieces[0] if len(pieces) == 1 else map(np.concatenate, zip(*pieces, strict=True))
        return Draws(sources=sources, rows=rows, passes=passes)

    def drawn(self, positions: int) -> tuple[int, ...]:
        """Returns each source's number of samples in the first ``positions``."""
        block, more = divmod(positions, BLOCK)
        counts = self._counts(block)
        if more:
            counts = counts + np.bincount(self._block(block).sources[:more], minlength=len(self.sources))
        return tuple(counts.tolist())

    def _counts(self, block: int) -> Counts:
        """Samples of each source in all blocks before this one."""
        cycles, blocks = divmod(block, BLOCKS_IN_CYCLE)
        counts: Counts = cycles * self._before[-1] + self._before[blocks]
        return counts

    def _block(self, number: int) -> Draws:
        if self._last is None or self._last[0] != number:
            self._last = number, self._draw(number)
        return self._last[1]

    def _draw(self, number: int) -> Draws:
        before = self._counts(number)
        ends = np.cumsum(self._counts(number + 1) - before)
        words = words_at(words_of("order", self.seed, number)[0], np.arange(BLOCK, dtype=np.uint64), 1)[:, 0]
        sources = np.searchsorted(ends, np.argsort(words, kind="stable"), side="right")
        by_source = np.argsort(sources, kind="stable")
        earlier = np.empty(BLOCK, dtype=np.int64)  # earlier positions of the same source
        earlier[by_source] = np.arange(BLOCK) - np.concatenate(([0], ends))[sources[by_source]]
        earlier += before[sources]
        rows = self._rows[sources]
        passes, index = np.divmod(earlier, rows.astype(np.int64))
        keys = words_at(self._key, sources.astype(np.uint64), 1)[:, 0]
        keys = mixed(keys + passes.astype(np.uint64))
        permuted_rows = permuted(index.astype(np.uint64), rows, keys)
        return Draws(sources=sources, rows=permuted_rows.astype(np.int64), passes=passes)


def _check(sources: tuple[Source, ...]) -> None:
    names = [source.name for source in sources]
    if not names or len(set(names)) < len(names):
        raise ValueError(f"sources={names}; a stream has one or more, each of a name of its own")
    for source in sources:
        if source.rows < 1 or source.share <= 0 or CYCLE % source.share.denominator:
            raise ValueError(
                f"source {source.name!r} has rows={source.rows}, share={source.share}; it needs a row or more and a "
                f"share that is a multiple of 1/{CYCLE}, as shares_of makes them"
            )
    if sum(source.share for source in sources) != 1:
        raise ValueError(f"shares={[str(source.share) for source in sources]}; together they have to make 1")


def _counts_before(units: list[int]) -> Counts:
    """Returns each source's number of samples at each end of a block, in a cycle.

    Each count is the exact due, rounded down, or up for the sources whose next sample is due first. Tijdeman's chairman
    assignment (Discrete Mathematics 32, 1980) proves that this always works.

    Args:
        units: Samples of each source in a cycle.
    """
    due = np.array(units, dtype=np.int64)
    counts = np.zeros((BLOCKS_IN_CYCLE + 1, len(units)), dtype=np.int64)
    for block in range(1, BLOCKS_IN_CYCLE + 1):
        now = np.maximum(counts[block - 1], block * due // BLOCKS_IN_CYCLE)
        more = block * BLOCK - int(now.sum())
        deadline = -((now + 1) * -BLOCKS_IN_CYCLE // due)
        deadline[-(block * -due // BLOCKS_IN_CYCLE) <= now] = np.iinfo(np.int64).max  # not begun: not in this block
        now[np.argsort(deadline, kind="stable")[:more]] += 1
        counts[block] = now
    return counts


def shares_of(new: Mapping[str, int], replay: Mapping[str, int], replay_share: float | Fraction) -> dict[str, Fraction]:
    """Returns the share of each folder that has rows: new ones first, in the order given.

    Within the new rows, and within the replayed ones, every row comes equally often: a folder's share follows from its
    rows. Few replayed rows come ``MAX_REPEATS`` times as often as new ones and get a smaller share than requested.

    Args:
        new: Rows of each new folder.
        replay: Rows of each folder of earlier days.
        replay_share: Part of all samples, 0 or more and below 1.

    Raises:
        ValueError: There are no new rows, or there is no such share.
    """
    requested = Fraction(str(replay_share))
    new, replay = ({name: rows for name, rows in part.items() if rows > 0} for part in (new, replay))
    if not 0 <= requested < 1 or not new or new.keys() & replay.keys():
        raise ValueError(
            f"replay_share={replay_share}, new={new}, replay={replay}; a share is 0 or more and below 1, there is a "
            "new row or more, and no folder is both"
        )
    often = Fraction(MAX_REPEATS * sum(replay.values()), sum(new.values()))
    units = int(min(requested, often / (1 + often)) * CYCLE)
    units = max(units, len(replay)) if requested else 0
    units_of = _split(new, CYCLE - units)
    if units and replay:
        units_of |= _split(replay, units)
    elif units:
        units_of = _split(new, CYCLE)
    return {name: Fraction(count, CYCLE) for name, count in units_of.items()}


def _split(rows: Mapping[str, int], units: int) -> dict[str, int]:
    """Splits units by rows, by the largest remainders; each gets at least one."""
    if units < len(rows):
        raise ValueError(f"{len(rows)} folders share {units} of {CYCLE} samples, fewer than one each; name fewer days")
    total = sum(rows.values())
    units_of = {name: max(1, units * count // total) for name, count in rows.items()}
    remaining = units - sum(units_of.values())
    for name in sorted(rows, key=lambda name: -(units * rows[name] % total))[: max(0, remaining)]:
        units_of[name] += 1
    for _ in range(-remaining):  # units that folders of less than one got
        units_of[max(units_of, key=lambda name: units_of[name])] -= 1
    return units_of


# Permutations and random words in integer arithmetic. NumPy promises the streams of its bit generators and not the
# results of ``permutation``, and a day's order must survive an update of it.

_STEP = np.uint64(0x9E3779B97F4A7C15)
"""2 to the power of 64 over the golden ratio, the increment of SplitMix64 (Steele et al., OOPSLA 2014)."""
_ROUNDS = 24
"""Rounds of the Feistel network. 8 suffice for a dozen rows; 24 make the 720 orders of 6 rows equally likely."""


def words_of(*names: object) -> tuple[int, int, int, int]:
    """Returns four random words of 64 bits that depend on all names."""
    digest = hashlib.blake2b(repr(names).encode(), digest_size=32).digest()
    return struct.unpack("<4Q", digest)  # type: ignore[return-value]  # four of them


def mixed(values: Words) -> Words:
    """Returns a random-looking word for each value, by the finaliser of SplitMix64."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def words_at(key: int, indices: Words, count: int) -> Words:
    """Returns ``count`` random words for each index, as rows."""
    places: Words = np.add.outer(indices * np.uint64(count), np.arange(count, dtype=np.uint64))
    return mixed(np.array(key, dtype=np.uint64) + places * _STEP)


def permuted(indices: Words, sizes: Words, keys: Words) -> Words:
    """Returns the image of each index under a permutation with its own size and key.

    A Feistel network on a grid of ``height`` by ``width`` cells, hardly more than the size; an index beyond the size
    takes more rounds until it is within ("cycle walking", Black & Rogaway, CT-RSA 2002).

    Args:
        indices: Below their sizes.
        sizes: 1 or more.
        keys: Select the permutation of that size.
    """
    images = indices.copy()
    todo = np.arange(len(indices))
    while len(todo):
        images[todo] = _once(images[todo], sizes[todo], keys[todo])
        todo = todo[images[todo] >= sizes[todo]]
    return images


def _once(indices: Words, sizes: Words, keys: Words) -> Words:
    height = np.ceil(np.sqrt(sizes.astype(np.float64))).astype(np.uint64)
    width = (sizes + height - np.uint64(1)) // height
    row, column = indices // width, indices % width
    for _ in range(_ROUNDS // 2):
        keys = keys + _STEP
        row = (row + (mixed(column * _STEP ^ keys) >> np.uint64(1))) % height  # a bit less, so that no sum wraps
        keys = keys + _STEP
        column = (column + (mixed(row * _STEP ^ keys) >> np.uint64(1))) % width
    cell: Words = row * width + column
    return cell
