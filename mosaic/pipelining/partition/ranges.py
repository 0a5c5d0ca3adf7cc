"""A chain of unequal layers cut into ranges: into equal numbers of layers, or so that the largest range is least."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate


def even_ends(num_layers: int, count: int) -> tuple[int, ...]:
    """Returns where ``count`` ranges of equally many layers end; the first have one more if that does not divide."""
    _check_count(num_layers, count)
    size, more = divmod(num_layers, count)
    return tuple(accumulate(size + (index < more) for index in range(count)))


def balanced_ends(times: Sequence[float], count: int) -> tuple[int, ...]:
    """Returns where ``count`` ranges, none of them empty, end so that the largest sum of one is the least there is.

    Exact, by dynamic programming over the ends: with ``best[n]`` the least largest sum of the first n layers in k
    ranges, one more range that begins behind j layers costs ``max(best[j], sum of the rest)``; the first grows with j,
    the second falls, so that the best j is where they cross. Of equal cuts the one whose last ranges are the smallest.

    Raises:
        ValueError: There are fewer layers than ranges.
    """
    num_layers = len(times)
    _check_count(num_layers, count)
    sums = list(accumulate(times, initial=0.0))
    best = sums[:]
    cuts: list[list[int]] = []
    for made in range(1, count):
        following = [0.0] * (num_layers + 1)
        cut = [0] * (num_layers + 1)
        for layers in range(made + 1, num_layers + 1):
            crossing = _crossing(best, sums, made, layers)
            before = max(made, crossing - 1)
            least, place = min((max(best[at], sums[layers] - sums[at]), -at) for at in {before, crossing})
            following[layers], cut[layers] = least, -place
        best = following
        cuts.append(cut)
    ends = [num_layers]
    for cut in reversed(cuts):
        ends.append(cut[ends[-1]])
    return tuple(reversed(ends))


def _crossing(best: Sequence[float], sums: Sequence[float], first: int, end: int) -> int:
    """Returns the least end of all ranges but the last, that ends at ``end``, from which on the last is not longer."""
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
