"""Permutations and random words in integer arithmetic: random access, and equal in every version of NumPy.

NumPy promises the streams of its bit generators, but not the results of ``permutation``. A day's order of samples
must survive an update.
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
