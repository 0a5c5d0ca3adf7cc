"""Partitions of a model's layers over all ranks: separated by module, or mixed (PipeWeaver, section 5).

Separated, each module is by itself over all ranks, in segments. With four ranks, a vision encoder ``v`` in one segment
and a text model ``t`` in two::

    rank      0    1    2    3
    v         vv   vv   vv   vv
    t         tt   tt   tt   tt
    t         tt   tt   tt   tt

Mixed, all modules' layers are one chain, cut without regard to modules. With two chunks a rank::

    chunk     0    1    2    3    4    5    6    7
    layers    vvv  vvv  vt   ttt  ttt  ttt  ttt  ttt
    rank      0    1    2    3    0    1    2    3
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import accumulate

from mosaic.graph import Part
from mosaic.pipelining.partition.partition import Chunk, Partition, parts_of
from mosaic.pipelining.partition.request import Request, backbone_of, layer_times


def segments_of(times_ms: Mapping[str, float], max_segments: Mapping[str, int]) -> Mapping[str, int]:
    """Returns the segments of each module, floor(T_i / T_1) with T_1 the shortest positive time of a piece.

    ``max_segments``, which the paper does not have, is the upper limit: a tiny module beside a large one would need
    more segments than layers.
    """
    shortest = min((time for time in times_ms.values() if time > 0), default=1.0)
    return {
        name: max(1, min(max_segments[name], math.floor(time * (1 + 1e-12) / shortest)))
        for name, time in times_ms.items()
    }


def separate(
    request: Request, *, cut: Callable[[Sequence[float], int], Sequence[int]], max_segments: int | None = None
) -> Partition:
    """Spreads each module over all ranks, cut by ``cut`` into chunks by the times of its layers.

    Raises:
        ValueError: A module has fewer layers than ranks.
    """
    sizes = request.piece_sizes()
    times = layer_times(request, sizes=sizes)
    for name, own in times.items():
        if len(own) < request.num_ranks:
            raise ValueError(
                f"{name!r} has {len(own)} layers for {request.num_ranks} ranks; a separated partition puts some "
                "of each module on each rank: use fewer ranks, or a mixed or a parallel partition"
            )
    most = {name: min(len(own) // request.num_ranks, max_segments or len(own)) for name, own in times.items()}
    segments = segments_of({name: math.fsum(own) for name, own in times.items()}, most)
    chunks = []
    for name, own in times.items():
        ends = cut(own, request.num_ranks * segments[name])
        for index, part in enumerate(parts_of(name, ends)):
            segment, rank = divmod(index, request.num_ranks)
            chunks.append(Chunk(parts=(part,), rank=rank, segment=segment))
    return Partition(num_ranks=request.num_ranks, chunks=tuple(chunks), sizes=sizes)


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


def by_parameters(request: Request) -> Partition:
    """Balances parameters, as in Megatron's interleaved schedule."""
    return in_a_loop(request, _ends_by_parameters(request))


def by_time(request: Request) -> Partition:
    """Balances the mean time of the representative microbatches, exactly."""
    return in_a_loop(request, _ends_by_time(request, request.num_ranks * request.chunks_per_rank))


def in_a_v(request: Request) -> Partition:
    """Balances time over two chunks a rank that go down all ranks and back up again (zero bubble's V)."""
    ranks = [*range(request.num_ranks), *reversed(range(request.num_ranks))]
    return _on_ranks(request, _ends_by_time(request, len(ranks)), ranks)


def encoders_first(request: Request) -> Partition:
    """Puts everything before the backbone into the first chunk, and divides the backbone evenly over all chunks.

    Torchtitan does so: a vision encoder belongs to the first part of the model
    (https://github.com/pytorch/torchtitan). Modules behind the backbone are in the last chunk.
    """
    names = [module.name for module in request.model.modules]
    layers = [len(module.trains) for module in request.model.modules]
    place = names.index(backbone_of(request.model))
    before = sum(layers[:place])
    ends = [before + end for end in even_ends(layers[place], request.num_ranks * request.chunks_per_rank)]
    return in_a_loop(request, [*ends[:-1], sum(layers)])


def in_a_loop(request: Request, ends: Sequence[int]) -> Partition:
    """Returns the chunks that end at these layers of the chain, cycling over all ranks."""
    return _on_ranks(request, ends, [index % request.num_ranks for index in range(len(ends))])


def _ends_by_parameters(request: Request) -> tuple[int, ...]:
    sizes = [
        float(module.num_parameters(layer, 1))
        for module in request.model.modules
        for layer in range(len(module.trains))
    ]
    return balanced_ends(sizes, request.num_ranks * request.chunks_per_rank)


def _ends_by_time(request: Request, count: int) -> tuple[int, ...]:
    times = layer_times(request)
    return balanced_ends([time for module in request.model.modules for time in times[module.name]], count)


def _on_ranks(request: Request, ends: Sequence[int], ranks: Iterable[int]) -> Partition:
    chunks = []
    start = 0
    for index, (end, rank) in enumerate(zip(ends, ranks, strict=True)):
        parts = _parts_between(request, start, end)
        chunks.append(Chunk(parts=parts, rank=rank, segment=index // request.num_ranks))
        start = end
    return Partition(num_ranks=request.num_ranks, chunks=tuple(chunks))


def _parts_between(request: Request, start: int, end: int) -> tuple[Part, ...]:
    """Returns the parts of a range of the chain of all layers."""
    parts = []
    before = 0
    for module in request.model.modules:
        total = len(module.trains)
        first, last = max(start - before, 0), min(end - before, total)
        if first < last:
            parts.append(Part(module=module.name, first=first, count=last - first, total=total))
        before += total
    return tuple(parts)


def _evenly(times: Sequence[float], count: int) -> tuple[int, ...]:
    return even_ends(len(times), count)


separate_evenly = partial(separate, cut=_evenly)
"""Chunks of equally many layers, as in the paper."""

separate_by_time = partial(separate, cut=balanced_ends)
"""Chunks with the shortest longest one."""
