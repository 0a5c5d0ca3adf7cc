"""Methods of cutting a model into chunks of layers on ranks. To add one, write a function and name it at the end.

Separated (PipeWeaver, section 5), each module is by itself over all ranks, in segments. With four ranks, a vision
encoder ``v`` in one segment and a text model ``t`` in two::

    rank      0    1    2    3
    v         vv   vv   vv   vv
    t         tt   tt   tt   tt
    t         tt   tt   tt   tt

Mixed, all modules' layers are one chain, cut without regard to modules. With two chunks a rank::

    chunk     0    1    2    3    4    5    6    7
    layers    vvv  vvv  vt   ttt  ttt  ttt  ttt  ttt
    rank      0    1    2    3    0    1    2    3

Parallel, modules are on ranks of their own (Cornstarch, section 4.1)::

    rank      0    1    2    3    4
    parallel  v    v    a    t    t

Colocated (paper, section 3.5), the backbone is on all ranks and other modules are on lanes beside it, together or on a
lane each. While the backbone runs a microbatch, encoders run the next ones on the remaining SMs, and in its bubbles::

    rank      0          1               0          1
    lane 0    t t t t    t t t t         t t t t    t t t t
    lane 1    v v a a    v v a a         v v v v    v v v v
    lane 2                               a a a a    a a a a
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from types import MappingProxyType
from typing import NamedTuple

from mosaic.errors import unknown
from mosaic.graph import Part
from mosaic.pipelining.partition import (
    Chunk,
    Partition,
    Request,
    backbone_of,
    efficient_sizes,
    layer_times,
    parts_of,
    sources_of,
)
from mosaic.pipelining.task_graph import task_graph
from mosaic.pipelining.tasks import roll_out

MAX_LANES = 4
"""Most lanes of a rank: more would be too small."""
TRIED_SHARES = (1 / 8, 1 / 4, 3 / 8, 1 / 2, 5 / 8, 3 / 4)
"""Shares of a rank for all modules beside the backbone together."""
MAX_SIMULATED = 16
"""Microbatches of a simulated step."""
MAX_SEGMENTS = 2
"""Most passes of a colocated backbone's chunks over all ranks."""


def balanced_ends(times: Sequence[float], count: int) -> tuple[int, ...]:
    """Returns the ends of ``count`` non-empty ranges with the smallest largest sum.

    Exact, by dynamic programming over the ends: with ``best[n]`` the least largest sum of the first n layers in k
    ranges, one more range that begins behind j layers costs ``max(best[j], sum of the rest)``; the first grows with j,
    the second falls, and the best j is where they cross. Of equal cuts the last ranges are the smallest.

    Raises:
        ValueError: Ranges outnumber layers.
    """
    num_layers = len(times)
    if not 1 <= count <= num_layers:
        raise ValueError(f"{num_layers} layers for {count} chunks; each chunk has at least one layer: use fewer chunks")
    sums = list(accumulate(times, initial=0.0))
    best = sums[:]
    cuts: list[list[int]] = []
    for num_ranges in range(1, count):
        following = [0.0] * (num_layers + 1)
        cut = [0] * (num_layers + 1)
        for layers in range(num_ranges + 1, num_layers + 1):
            # the first start of the last range that makes it no longer than the others, and the start before
            crossing = bisect_left(
                range(layers - 1), True, num_ranges, key=lambda at: best[at] >= sums[layers] - sums[at]
            )
            before = max(num_ranges, crossing - 1)
            least, place = min((max(best[at], sums[layers] - sums[at]), -at) for at in {before, crossing})
            following[layers], cut[layers] = least, -place
        best = following
        cuts.append(cut)
    ends = [num_layers]
    for cut in reversed(cuts):
        ends.append(cut[ends[-1]])
    return tuple(reversed(ends))


def separated(request: Request, max_segments: int | None = None) -> Partition:
    """Spreads each module over all ranks, in segments whose longest chunk is as short as it can be.

    A module of time T has floor(T / T_1) segments, with T_1 the shortest positive time of a module's piece; it has no
    more than its layers allow, which the paper does not say: a tiny module beside a large one would need more.

    Raises:
        ValueError: A module has fewer layers than ranks.
    """
    sizes = efficient_sizes(request.model, request.microbatches)
    times = layer_times(request, sizes=sizes)
    whole_ms = {name: math.fsum(own) for name, own in times.items()}
    shortest_ms = min((time_ms for time_ms in whole_ms.values() if time_ms > 0), default=1.0)
    chunks: list[Chunk] = []
    for name, own in times.items():
        if len(own) < request.num_ranks:
            raise ValueError(
                f"{name!r} has {len(own)} layers for {request.num_ranks} ranks; a separated partition puts some "
                "of each module on each rank: use fewer ranks, or a mixed or a parallel partition"
            )
        most = min(len(own) // request.num_ranks, max_segments or len(own))
        segments = max(1, min(most, math.floor(whole_ms[name] * (1 + 1e-12) / shortest_ms)))
        ends = balanced_ends(own, request.num_ranks * segments)
        chunks += (Chunk(parts=(part,), rank=at % request.num_ranks) for at, part in enumerate(parts_of(name, ends)))
    return Partition(num_ranks=request.num_ranks, chunks=tuple(chunks), sizes=sizes)


def by_parameters(request: Request) -> Partition:
    """Balances parameters, as in Megatron's interleaved schedule."""
    modules = request.model.modules
    sizes = [float(module.num_parameters(at, 1)) for module in modules for at in range(len(module.trains))]
    return in_a_loop(request, balanced_ends(sizes, request.num_ranks * request.chunks_per_rank))


def by_time(request: Request) -> Partition:
    """Balances the mean time of the representative microbatches, exactly."""
    return in_a_loop(request, balanced_ends(_chain_ms(request), request.num_ranks * request.chunks_per_rank))


def in_a_v(request: Request) -> Partition:
    """Balances time over two chunks a rank that go down all ranks and back up again (zero bubble's V)."""
    ranks = [*range(request.num_ranks), *reversed(range(request.num_ranks))]
    return _on_ranks(request, balanced_ends(_chain_ms(request), len(ranks)), ranks)


def in_a_loop(request: Request, ends: Sequence[int]) -> Partition:
    """Returns the chunks that end at these layers of the chain, cycling over all ranks."""
    return _on_ranks(request, ends, [index % request.num_ranks for index in range(len(ends))])


def _chain_ms(request: Request) -> list[float]:
    times = layer_times(request)
    return [time_ms for module in request.model.modules for time_ms in times[module.name]]


def _on_ranks(request: Request, ends: Sequence[int], ranks: Iterable[int]) -> Partition:
    chunks = []
    for (start, end), rank in zip(pairwise((0, *ends)), ranks, strict=True):
        parts = []
        before = 0
        for module in request.model.modules:
            total = len(module.trains)
            first, last = max(start - before, 0), min(end - before, total)
            if first < last:
                parts.append(Part(module=module.name, first=first, count=last - first, total=total))
            before += total
        chunks.append(Chunk(parts=tuple(parts), rank=rank))
    return Partition(num_ranks=request.num_ranks, chunks=tuple(chunks))


class _ModuleCut(NamedTuple):
    """A module cut into chunks with the shortest longest one: end layers of chunks, and their times of all phases."""

    ends: tuple[int, ...]
    chunk_ms: tuple[float, ...]


def _cut(times: Sequence[float], count: int) -> _ModuleCut:
    ends = balanced_ends(times, count)
    return _ModuleCut(ends, tuple(math.fsum(times[a:b]) for a, b in pairwise((0, *ends))))


def on_own_ranks(request: Request, fixed: Mapping[str, int] = MappingProxyType({})) -> Partition:
    """Assigns each module its own ranks by Cornstarch's Algorithm 1.

    For each number of chunks of the backbone, every other module has the fewest chunks whose longest takes no longer
    than the backbone's longest, as far as ranks allow; the result has the shortest step by ``step_ms``. Modules in
    ``fixed`` have these numbers of ranks.

    Raises:
        ValueError: Modules, or fixed numbers, need more ranks.
    """
    times = layer_times(request)
    backbone = backbone_of(request.model)
    counts = {name: fixed.get(name, 1) for name in times}
    _check_ranks(request, sum(counts.values()))
    free = [name for name in times if name != backbone and name not in fixed]
    most = request.num_ranks - sum(counts.values()) + counts[backbone]
    trials = []
    last = counts[backbone] if backbone in fixed else min(most, len(times[backbone]))
    for count in range(counts[backbone], last + 1):
        cuts = {name: _cut(own, count if name == backbone else counts[name]) for name, own in times.items()}
        for _ in range(most - count):
            longest = max(
                (name for name in free if len(cuts[name].ends) < len(times[name])),
                key=lambda name: max(cuts[name].chunk_ms),
                default=backbone,
            )
            if longest == backbone or max(cuts[longest].chunk_ms) <= max(cuts[backbone].chunk_ms):
                break
            cuts[longest] = _cut(times[longest], len(cuts[longest].ends) + 1)
        trials.append((step_ms(request, {name: cut.chunk_ms for name, cut in cuts.items()}), count, cuts))
    _, _, best = min(trials, key=lambda trial: trial[:2])
    parts = (part for name in times for part in parts_of(name, best[name].ends))
    chunks = tuple(Chunk(parts=(part,), rank=rank) for rank, part in enumerate(parts))
    return Partition(num_ranks=request.num_ranks, chunks=chunks)


def step_ms(request: Request, chunk_ms: Mapping[str, Sequence[float]]) -> float:
    """Estimates a step: the longest path through all chunks, and the longest chunk for each further microbatch.

    Alpa's formula (https://arxiv.org/abs/2201.12023, section 5), over a graph of modules instead of a chain.
    """
    sources = sources_of(request.model, chunk_ms)
    ends: dict[str, float] = {}
    for name, before in sources.items():
        ends[name] = math.fsum(chunk_ms[name]) + max((ends[source] for source in before), default=0.0)
    longest = max(time for times in chunk_ms.values() for time in times)
    return max(ends.values()) + (len(request.microbatches) - 1) * longest


def _check_ranks(request: Request, needed: int) -> None:
    if request.num_ranks < needed:
        raise ValueError(
            f"num_ranks={request.num_ranks}; modules on ranks of their own need {needed} or more: use more"
        )


def beside_backbone(request: Request) -> Partition:
    """Spreads the backbone over all ranks, and every other module over lanes beside it.

    It tries several shares, with one lane for all other modules or one for each, and returns the one with the shortest
    simulated step, without message times and interference of lanes, in natural order.

    Raises:
        ValueError: Ranks have one slot each, the backbone is the only module, or it has fewer layers than ranks.
    """
    times = layer_times(request)
    backbone = backbone_of(request.model)
    if request.slots_per_rank < 2:
        raise ValueError("ranks have one slot each, and lanes need one each; use a partition without lanes")
    if len(times) < 2:
        raise ValueError(f"there is nothing beside the backbone {backbone!r}; use a partition without lanes")
    if len(times[backbone]) < request.num_ranks:
        raise ValueError(
            f"{backbone!r} has {len(times[backbone])} layers for {request.num_ranks} ranks; use fewer ranks, or a "
            "parallel partition"
        )

    def step_ns(partition: Partition) -> int:
        rolled = roll_out(task_graph(request.model, partition, request.microbatches[:MAX_SIMULATED]))
        assert isinstance(rolled, tuple)  # nothing waits for memory without limits
        return rolled[1].makespan_ns

    return min(_lane_layouts(request, times, backbone), key=step_ns)


def _lane_layouts(request: Request, times: Mapping[str, tuple[float, ...]], backbone: str) -> Iterator[Partition]:
    """Yields partitions with other numbers of slots for the modules beside the backbone, on one lane or several."""
    others = {name: math.fsum(own) for name, own in times.items() if name != backbone}
    slots = request.slots_per_rank
    totals = dict.fromkeys(min(slots - 1, max(1, round(share * slots))) for share in TRIED_SHARES)
    most = min(MAX_SEGMENTS, len(times[backbone]) // request.num_ranks) if request.num_ranks > 1 else 1
    for segments in range(1, most + 1):
        for total in totals:
            quotas = dict.fromkeys(others, (1, total)) | {backbone: (0, slots - total)}
            yield _beside(request, times, quotas, {backbone: segments})
            if 1 < len(others) <= min(total, MAX_LANES - 1):
                counts = dict.fromkeys(others, 1)
                for _ in range(total - len(others)):  # the next slot goes to the module with the most time a slot
                    counts[max(others, key=lambda name: others[name] / counts[name])] += 1
                quotas |= {name: (lane, counts[name]) for lane, name in enumerate(others, start=1)}
                yield _beside(request, times, quotas, {backbone: segments})


def _beside(
    request: Request,
    times: Mapping[str, tuple[float, ...]],
    quotas: Mapping[str, tuple[int, int]],
    segments: Mapping[str, int],
) -> Partition:
    chunks = []
    for name, own in times.items():
        lane, slots = quotas[name]
        over = min(request.num_ranks, len(own))
        for at, part in enumerate(parts_of(name, balanced_ends(own, over * segments.get(name, 1)))):
            chunks.append(Chunk(parts=(part,), rank=at % over, lane=lane, share=slots / request.slots_per_rank))
    return Partition(
        num_ranks=request.num_ranks, chunks=tuple(chunks), sizes=efficient_sizes(request.model, request.microbatches)
    )


PARTITION_METHODS: Mapping[str, tuple[str, Callable[[Request], Partition]]] = MappingProxyType(
    {
        "separated": (
            "each module over all ranks, in segments whose longest chunk is as short as it can be",
            separated,
        ),
        "mixed-parameters": ("one chain of all layers, balanced by parameters", by_parameters),
        "mixed-time": ("one chain of all layers, balanced by time", by_time),
        "mixed-v": ("one chain down all ranks and back up, balanced by time", in_a_v),
        "parallel": ("each module on ranks of its own (Cornstarch's Algorithm 1)", on_own_ranks),
        "colocated": ("the backbone over all ranks, all other modules beside it on shares of them", beside_backbone),
    }
)
"""Descriptions and functions by name; a function raises ValueError if the model has too few layers."""


def partition_by(name: str, request: Request) -> Partition:
    """Cuts a model by the method of that name.

    Raises:
        ValueError: The name is unknown (lists all), or the model has too few layers.
    """
    if name not in PARTITION_METHODS:
        raise ValueError(unknown("partition", name, PARTITION_METHODS))
    _, cut = PARTITION_METHODS[name]
    return cut(request)
