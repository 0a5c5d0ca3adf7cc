"""Separated partitions: each module by itself over all ranks, in segments (PipeWeaver, section 5).

With four ranks, a vision encoder ``v`` in one segment and a text model ``t`` in two::

    rank      0    1    2    3
    v         vv   vv   vv   vv
    t         tt   tt   tt   tt
    t         tt   tt   tt   tt
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from mosaic.pipelining.partition.partition import Chunk, Partition, parts_of
from mosaic.pipelining.partition.ranges import balanced_ends, even_ends
from mosaic.pipelining.partition.request import Request, layer_times


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


def _evenly(times: Sequence[float], count: int) -> tuple[int, ...]:
    return even_ends(len(times), count)


separate_evenly = partial(separate, cut=_evenly)
"""Chunks of equally many layers, as in the paper."""

separate_by_time = partial(separate, cut=balanced_ends)
"""Chunks with the shortest longest one."""
