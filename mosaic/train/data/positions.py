"""The position stream: the n-th sample of a day is a function of the seed and n, over a frozen list of sources.

Positions come in blocks of 1024. How many of a block each source has is fixed by its share; which of the block's
positions they are, and which rows, by permutations that can be computed at any point. The state of a run is therefore
one integer, the number of positions consumed. No torch: the launcher makes the list.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from mosaic.train.data.permutation import mixed, permuted, words_at, words_of

BLOCK = 1024
"""Positions of a block."""
BLOCKS_IN_CYCLE = 1000
"""After so many blocks each source has had exactly its share."""
CYCLE = BLOCK * BLOCKS_IN_CYCLE
"""Denominator of every share: 0.3 is exact, and a day among many can have one sample in a million."""
MAX_REPEATS = 4
"""A replayed row comes at most so many times as often as a new one, however few rows are replayed."""

Counts = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """One frozen list of rows."""

    name: str
    """Such as ``new/2026-11-22``."""
    rows: int
    """Rows that it has."""
    share: Fraction
    """Of all samples; a multiple of ``1 / CYCLE``. Shares of all sources make 1."""
    digest: str
    """Of what the rows are read from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """What stands at one position."""

    source: int
    """Index into the sources."""
    row: int
    """Of that source."""
    pass_number: int
    """How many times all rows of the source had come before this pass over them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Draws:
    """What stands at consecutive positions."""

    sources: Counts
    """Index into the sources, for each position."""
    rows: Counts
    """Rows of these sources."""
    passes: Counts
    """Passes over these sources."""


class PositionStream:
    """The samples of a day, without an end.

    Args:
        sources: In an order that is part of the stream.
        seed: Of the order.

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

    @cached_property
    def digest(self) -> str:
        """Of the seed and all that is known of the sources: streams with equal digests have equal samples."""
        of_sources = [[source.name, source.rows, str(source.share), source.digest] for source in self.sources]
        return hashlib.sha256(json.dumps(["position stream 1", self.seed, of_sources]).encode()).hexdigest()

    def at(self, position: int) -> Draw:
        """Returns what stands at one position."""
        one = self.span(position, position + 1)
        return Draw(source=int(one.sources[0]), row=int(one.rows[0]), pass_number=int(one.passes[0]))

    def span(self, first: int, last: int) -> Draws:
        """Returns what stands at the positions from ``first`` up to, and not with, ``last``.

        Raises:
            ValueError: There are no such positions.
        """
        if not 0 <= first < last:
            raise ValueError(f"first={first}, last={last}; positions begin at 0 and a span has one or more")
        found = []
        for number in range(first // BLOCK, (last - 1) // BLOCK + 1):
            block, begin = self._block(number), number * BLOCK
            part = slice(max(first - begin, 0), last - begin)
            found.append((block.sources[part], block.rows[part], block.passes[part]))
        sources, rows, passes = found[0] if len(found) == 1 else map(np.concatenate, zip(*found, strict=True))
        return Draws(sources=sources, rows=rows, passes=passes)

    def drawn(self, positions: int) -> tuple[int, ...]:
        """Returns how many of the first so many positions each source has."""
        block, more = divmod(positions, BLOCK)
        counts = self._counts(block)
        if more:
            counts = counts + np.bincount(self._block(block).sources[:more], minlength=len(self.sources))
        return tuple(counts.tolist())

    def _counts(self, block: int) -> Counts:
        """Samples of each source in all blocks before this one."""
        cycles, rest = divmod(block, BLOCKS_IN_CYCLE)
        counts: Counts = cycles * self._before[-1] + self._before[rest]
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
        came = np.empty(BLOCK, dtype=np.int64)  # how many of its source came before each position
        came[by_source] = np.arange(BLOCK) - np.concatenate(([0], ends))[sources[by_source]]
        came += before[sources]
        rows = self._rows[sources]
        passes, index = np.divmod(came, rows.astype(np.int64))
        keys = words_at(self._key, sources.astype(np.uint64), 1)[:, 0]
        keys = mixed(keys + passes.astype(np.uint64))
        chosen = permuted(index.astype(np.uint64), rows, keys)
        return Draws(sources=sources, rows=chosen.astype(np.int64), passes=passes)


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
    """Returns how many samples each source has had at each end of a block, in a cycle.

    Each is its exact due, rounded down or up; rounded up are those whose next sample is due first. That this always
    comes out is Tijdeman's chairman assignment (Discrete Mathematics 32, 1980).

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

    Within the new rows, and within the replayed ones, every row comes equally often: a folder has its share by its
    rows. With few replayed rows, they come ``MAX_REPEATS`` times as often as new ones and have a smaller share than
    was asked for.

    Args:
        new: Rows of each new folder.
        replay: Rows of each folder of days before.
        replay_share: Of all samples, 0 or more and below 1.

    Raises:
        ValueError: There are no new rows, or there is no such share.
    """
    asked = Fraction(str(replay_share))
    new, replay = ({name: rows for name, rows in part.items() if rows > 0} for part in (new, replay))
    if not 0 <= asked < 1 or not new or new.keys() & replay.keys():
        raise ValueError(
            f"replay_share={replay_share}, new={new}, replay={replay}; a share is 0 or more and below 1, there is a "
            "new row or more, and no folder is both"
        )
    often = Fraction(MAX_REPEATS * sum(replay.values()), sum(new.values()))
    units = int(min(asked, often / (1 + often)) * CYCLE)
    units = max(units, len(replay)) if asked else 0
    found = _split(new, CYCLE - units)
    if units and replay:
        found |= _split(replay, units)
    elif units:
        found = _split(new, CYCLE)
    return {name: Fraction(count, CYCLE) for name, count in found.items()}


def _split(rows: Mapping[str, int], units: int) -> dict[str, int]:
    """Splits units by rows, by the largest remainders; each has one at least."""
    if units < len(rows):
        raise ValueError(f"{len(rows)} folders share {units} of {CYCLE} samples, fewer than one each; name fewer days")
    total = sum(rows.values())
    found = {name: max(1, units * count // total) for name, count in rows.items()}
    rest = units - sum(found.values())
    for name in sorted(rows, key=lambda name: -(units * rows[name] % total))[: max(0, rest)]:
        found[name] += 1
    for _ in range(-rest):  # given to folders of less than one
        found[max(found, key=lambda name: found[name])] -= 1
    return found
