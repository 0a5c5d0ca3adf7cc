"""Ranges of a chain of unequal layers, with equal numbers of layers or the smallest largest range."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate


def even_ends(num_layers: int, count: int) -> tuple[int, ...]:
    """Returns the ends of ``count`` ranges of equally many layers; the first have the remainder."""
    _check_count(num_layers, count)
    size, more = divmod(num_layers, count)
    return tuple(accumulate(size + (index < more) for index in range(count)))


def balanced_ends(times: Sequence[float], count: int) -> tuple[int, ...]:
    """Returns the ends of ``count`` non-empty ranges with the smallest largest sum.

    Exact, by dynamic programming over the ends: with ``best[n]`` the least largest sum of the first n layers in k
    ranges, one more range that begins behind j layers costs ``max(best[j], sum of the rest)``; the first grows with j,
    the second falls, and the best j is where they cross. Of equal cuts the last ranges are the smallest.

    Raises:
        ValueError: Ranges outnumber layers.
    """
    num_layers = len(times)
    _check_count(num_layers, count)
    sums = list(accumulate(times, initial=0.0))
    best = sums[:]
    cuts: list[list[int]] = []
    for num_ranges in range(1, count):
        following = [0.0] * (num_layers + 1)
        cut = [0] * (num_layers + 1)
        for layers in range(num_ranges + 1, num_layers + 1):
            crossing = _crossing(best, sums, num_ranges, layers)
            before = max(num_ranges, crossing - 1)
            least, place = min((max(best[at], sums[layers] - sums[at]), -at) for at in {before, crossing})
            following[layers], cut[layers] = least, -place
        best = following
        cuts.append(cut)
    ends = [num_layers]
    for cut in reversed(cuts):
        ends.append(cut[ends[-1]])
    return tuple(reversed(ends))


def _crossing(best: Sequence[float], sums: Sequence[float], first: int, end: int) -> int:
    """Returns the first start of the last range, ending at ``end``, that makes it no longer than the others."""
    low, high = first, end - 1
    while low < high:
        middle = (low + high) // 2
        if best[middle] >= sums[end] - sums[middle]:
            high = middle
        else:
            low = middle + 1
    return low


def _check_count(num_layers: int, count: int) -> None:
    if not 1 <= count <= num_layers:
        raise ValueError(f"{num_layers} layers for {count} chunks; each chunk has at least one layer: use fewer chunks")
