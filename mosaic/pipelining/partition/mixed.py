"""Mixed partitions: all modules' layers in one chain, cut without regard to modules (PipeWeaver, section 5).

With four ranks and two chunks a rank, of a vision encoder ``v`` and a text model ``t``::

    chunk     0    1    2    3    4    5    6    7
    layers    vvv  vvv  vt   ttt  ttt  ttt  ttt  ttt
    rank      0    1    2    3    0    1    2    3
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from mosaic.graph import Part
from mosaic.pipelining.partition.partition import Chunk, Partition
from mosaic.pipelining.partition.ranges import balanced_ends, even_ends
from mosaic.pipelining.partition.request import Request, backbone_of, layer_times


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
