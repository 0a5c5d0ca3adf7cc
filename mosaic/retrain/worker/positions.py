"""The position stream: the n-th sample of a day is a function of the seed, the frozen sources, and n.

The order of a whole day is computed at once. Every pass over a source has each row once, in an order of its own, and
the samples of a source are spread evenly over the day. The state of a run is therefore one integer, the number of
positions consumed. No torch: the launcher reads the list of sources.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

MAX_REPEATS = 4
"""Most draws of a replayed row per draw of a new one."""
Words = NDArray[np.uint64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    name: str
    """Such as ``new 2026-11-22``."""
    rows: int
    samples: int
    """Samples of the day that come from it."""


class PositionStream:
    """The samples of a day, in order.

    Attributes:
        source: Index of the source of each position.
        row: Row of each position, within its source.
    """

    def __init__(self, sources: Sequence[Source], seed: int) -> None:
        for each in sources:
            if each.rows < 1 or each.samples < 1:
                raise ValueError(f"source {each.name!r} has rows={each.rows}, samples={each.samples}; both must be > 0")
        self.sources = tuple(sources)
        self.seed = seed
        # Sample k of a source with n falls at a random place within the k-th of n equal parts of the day.
        places = []
        for each in sources:
            index = np.arange(each.samples, dtype=np.uint64)
            words = words_at(words_of("order", seed, each.name)[0], index)
            places.append((index + (words >> np.uint64(11)) * 2.0**-53) / each.samples)
        order = np.argsort(np.concatenate(places), kind="stable")
        self.source = np.repeat(np.arange(len(sources)), [each.samples for each in sources])[order]
        self.row = np.concatenate([_rows(each, seed) for each in sources])[order]


def _rows(source: Source, seed: int) -> NDArray[np.int64]:
    """Returns the rows of a source, pass after pass; the last pass may be cut."""
    passes = -(-source.samples // source.rows)
    key = words_of("rows", seed, source.name)[0]
    words = words_at(key, np.arange(passes * source.rows, dtype=np.uint64)).reshape(passes, source.rows)
    return np.argsort(words, axis=1, kind="stable").ravel()[: source.samples]


def replayed_share(new: Mapping[str, int], replay: Mapping[str, int], share: float) -> float:
    """Returns the share of replayed samples, which is smaller than ``share`` if few rows would repeat too often."""
    often = MAX_REPEATS * sum(replay.values()) / sum(new.values())
    return min(share, often / (1 + often))


def samples_of(new: Mapping[str, int], replay: Mapping[str, int], share: float, total: int) -> dict[str, int]:
    """Splits a day's samples over folders by their rows: every new row comes equally often, and every replayed one.

    Args:
        new: Rows of each new folder; one or more.
        replay: Rows of each folder of earlier days.
        share: Wanted part of replayed samples, from 0 to below 1.
        total: Samples of the day.
    """
    replayed = round(total * replayed_share(new, replay, share))
    return {**_split(new, total - replayed), **_split(replay, replayed)}


def _split(rows: Mapping[str, int], samples: int) -> dict[str, int]:
    """Splits samples by rows, by the largest remainders."""
    total = max(1, sum(rows.values()))
    split = {name: samples * count // total for name, count in rows.items()}
    largest_first = sorted(rows, key=lambda name: -(samples * rows[name] % total))
    for name in largest_first[: samples - sum(split.values())]:
        split[name] += 1
    return split


# Random words in integer arithmetic. NumPy promises the streams of its bit generators and not the results of
# ``permutation``, and the order of a day must survive an update of NumPy.

_STEP = np.uint64(0x9E3779B97F4A7C15)
"""2 to the power of 64 over the golden ratio, the increment of SplitMix64 (Steele et al., OOPSLA 2014)."""


def words_of(*names: object) -> tuple[int, int, int, int]:
    """Returns four random words of 64 bits that depend on all names."""
    digest = hashlib.blake2b(repr(names).encode(), digest_size=32).digest()
    return struct.unpack("<4Q", digest)  # type: ignore[return-value]  # four of them


def words_at(key: int, indices: Words) -> Words:
    """Returns a random word for each index, by SplitMix64."""
    words: Words = np.array(key, dtype=np.uint64) + indices * _STEP
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    words ^= words >> np.uint64(31)
    return words
