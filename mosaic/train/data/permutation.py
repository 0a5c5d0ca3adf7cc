"""Permutations and random words by integer arithmetic alone: any element at once, the same in any version of NumPy.

NumPy promises the streams of its bit generators and not what ``permutation`` makes of them; a day's order of samples
has to outlive an update.
"""

from __future__ import annotations

import hashlib
import struct

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint64]

_STEP = np.uint64(0x9E3779B97F4A7C15)
"""2 to the power of 64 over the golden ratio, the increment of SplitMix64 (Steele et al., OOPSLA 2014)."""
_ROUNDS = 24
"""Of the Feistel network. 8 are enough for a dozen rows; the 720 orders of 6 rows are equally likely from 24 on."""


def words_of(*names: object) -> tuple[int, int, int, int]:
    """Returns four random words of 64 bits that depend on all of the names."""
    digest = hashlib.blake2b(repr(names).encode(), digest_size=32).digest()
    return struct.unpack("<4Q", digest)  # type: ignore[return-value]  # four of them


def mixed(values: Words) -> Words:
    """Returns a random-looking word for each, by the finaliser of SplitMix64."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def words_at(key: int, indices: Words, count: int) -> Words:
    """Returns ``count`` random words for each index, as rows."""
    places: Words = np.add.outer(indices * np.uint64(count), np.arange(count, dtype=np.uint64))
    return mixed(np.array(key, dtype=np.uint64) + places * _STEP)


def permuted(indices: Words, sizes: Words, keys: Words) -> Words:
    """Returns where a permutation takes each index; each has a size and a key of its own.

    A Feistel network on a grid of ``height`` by ``width`` cells, hardly more than the size; what lands beyond the size
    goes on until it lands within ("cycle walking", Black & Rogaway, CT-RSA 2002).

    Args:
        indices: Below their sizes.
        sizes: 1 or more.
        keys: Which permutation of that size.
    """
    found = indices.copy()
    todo = np.arange(len(indices))
    while len(todo):
        found[todo] = _once(found[todo], sizes[todo], keys[todo])
        todo = todo[found[todo] >= sizes[todo]]
    return found


def _once(indices: Words, sizes: Words, keys: Words) -> Words:
    height = np.ceil(np.sqrt(sizes.astype(np.float64))).astype(np.uint64)
    width = (sizes + height - np.uint64(1)) // height
    row, column = indices // width, indices % width
    for _ in range(_ROUNDS // 2):
        keys = keys + _STEP
        row = (row + (mixed(column * _STEP ^ keys) >> np.uint64(1))) % height  # a bit less, so that no sum wraps
        keys = keys + _STEP
        column = (column + (mixed(row * _STEP ^ keys) >> np.uint64(1))) % width
    found: Words = row * width + column
    return found
