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

Modules on their own ranks, encoders side by side (Cornstarch, 4.1), with numbers of ranks by its Algorithm 1.

Two encoders ``v`` and ``a`` before a text model ``t``, on their own ranks, or on lanes of one, which is our own::

    rank      0    1    2    3    4         rank      0     1    2    3    4
    parallel  v    v    a    t    t         lanes     v a   t    t    t    t

Modules beside the backbone on lanes of the same ranks, each with a share of its rank's SMs (paper, section 3.5).

Two encoders ``v`` and ``a`` before a text model ``t`` on two ranks, on one lane together or on a lane each::

    rank      0          1               0          1
    lane 0    t t t t    t t t t         t t t t    t t t t
    lane 1    v v a a    v v a a         v v v v    v v v v
    lane 2                               a a a a    a a a a

While the backbone runs a microbatch, encoders run the next ones on the remaining SMs, and in its bubbles.

The methods of partitioning, one line each. To add one, write a function from a ``Request`` and name it here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from types import MappingProxyType

from mosaic.errors import unknown
from mosaic.graph import Part
from mosaic.pipelining.partition import Chunk, Partition, Request, backbone_of, layer_times, parts_of, sources_of
from mosaic.pipelining.task_graph import task_graph
from mosaic.pipelining.tasks import Timed, roll_out


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


MAX_LANES = 4
"""Most lanes of a rank: more would be too small."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cut:
    """A module cut into chunks."""

    ends: tuple[int, ...]
    """End layer of each chunk."""
    chunk_ms: tuple[float, ...]
    """Time of all phases of each chunk."""

    @classmethod
    def of(cls, times: Sequence[float], count: int) -> _Cut:
        """Cuts with the shortest longest chunk."""
        ends = balanced_ends(times, count)
        starts = (0, *ends[:-1])
        return cls(ends=ends, chunk_ms=tuple(math.fsum(times[a:b]) for a, b in zip(starts, ends, strict=True)))


def on_own_ranks(request: Request, fixed: Mapping[str, int] = MappingProxyType({})) -> Partition:
    """Assigns each module its own ranks by Algorithm 1.

    For each number of chunks of the backbone, every other module has the fewest chunks whose longest takes no longer
    than the backbone's longest, as far as ranks allow; the result has the shortest step by ``step_ms``.

    Args:
        request: Model, ranks and microbatches.
        fixed: Numbers of ranks of modules that are not chosen.

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
        cuts = {name: _Cut.of(own, count if name == backbone else counts[name]) for name, own in times.items()}
        for _ in range(most - count):
            longest = max(
                (name for name in free if len(cuts[name].ends) < len(times[name])),
                key=lambda name: max(cuts[name].chunk_ms),
                default=backbone,
            )
            if longest == backbone or max(cuts[longest].chunk_ms) <= max(cuts[backbone].chunk_ms):
                break
            cuts[longest] = _Cut.of(times[longest], len(cuts[longest].ends) + 1)
        trials.append((step_ms(request, {name: cut.chunk_ms for name, cut in cuts.items()}), count, cuts))
    _, _, best = min(trials, key=lambda trial: trial[:2])
    return on_given_ranks(request, {name: len(cut.ends) for name, cut in best.items()})


def on_given_ranks(request: Request, counts: Mapping[str, int]) -> Partition:
    """Assigns each module its own ``counts`` of ranks, one module after the other.

    Raises:
        ValueError: A module has no ranks or more than layers, or the sum exceeds the request.
    """
    times = layer_times(request)
    _check_ranks(request, sum(counts.values()))
    chunks: list[Chunk] = []
    for name, own in times.items():
        for part in parts_of(name, balanced_ends(own, counts.get(name, 0))):
            chunks.append(Chunk(parts=(part,), rank=len(chunks)))
    return Partition(num_ranks=request.num_ranks, chunks=tuple(chunks))


def encoders_colocated(request: Request, num_front: int) -> Partition:
    """Puts all encoders on the same ``num_front`` ranks, one after the other, and the backbone on the others.

    All encoders have as many chunks, as in the comparison of Cornstarch's Table 2 for two encoders or more.

    Raises:
        ValueError: No ranks are left, a module has fewer layers than ranks, or an encoder feeds another.
    """
    times = layer_times(request)
    backbone = backbone_of(request.model)
    encoders = [name for name in times if name != backbone]
    _check_encoders(request, encoders, backbone)
    _check_ranks(request, num_front + 1)
    fronts = zip(*(parts_of(name, balanced_ends(times[name], num_front)) for name in encoders), strict=True)
    chunks = [Chunk(parts=parts, rank=rank) for rank, parts in enumerate(fronts)]
    ends = balanced_ends(times[backbone], request.num_ranks - num_front)
    chunks += (Chunk(parts=(part,), rank=num_front + at) for at, part in enumerate(parts_of(backbone, ends)))
    return Partition(num_ranks=request.num_ranks, chunks=tuple(chunks))


def on_lanes(request: Request) -> Partition:
    """Puts the backbone on its own ranks, and all encoders side by side on lanes of the ranks before.

    Each encoder is cut into as many chunks as such ranks, or as it has layers; its lane's share is its part of the
    encoders' time. The number of ranks follows Algorithm 1, with encoders slowed by their shares.

    Raises:
        ValueError: The request has one rank, encoders feed each other, or outnumber the lanes of a rank.
    """
    times = layer_times(request)
    backbone = backbone_of(request.model)
    encoders = [name for name in times if name != backbone]
    _check_encoders(request, encoders, backbone)
    if len(encoders) > MAX_LANES:
        raise ValueError(f"{len(encoders)} encoders; a rank has at most {MAX_LANES} lanes: use another partition")
    _check_ranks(request, 2)
    whole = {name: math.fsum(times[name]) for name in encoders}
    total = math.fsum(whole.values())
    shares = {name: whole[name] / total if total and whole[name] else 1 / len(encoders) for name in encoders}
    scale = max(1.0, math.fsum(shares.values()))
    shares = {name: share / scale for name, share in shares.items()}
    trials = []
    for count in range(1, min(request.num_ranks - 1, len(times[backbone])) + 1):
        front = min(request.num_ranks - count, max(len(times[name]) for name in encoders))
        cuts = {name: _Cut.of(times[name], min(front, len(times[name]))) for name in encoders}
        cuts[backbone] = _Cut.of(times[backbone], count)
        slowed = {name: tuple(time / shares.get(name, 1.0) for time in cut.chunk_ms) for name, cut in cuts.items()}
        trials.append((step_ms(request, slowed), count, front, cuts))
    _, _, front, best = min(trials, key=lambda trial: trial[:2])
    chunks = []
    for name in times:
        is_lane = name != backbone
        for at, part in enumerate(parts_of(name, best[name].ends)):
            rank = at + front - len(best[name].ends) if is_lane else at + front
            lane = encoders.index(name) if is_lane else 0
            chunks.append(Chunk(parts=(part,), rank=rank, lane=lane, share=shares[name] if is_lane else 1.0))
    return Partition(num_ranks=request.num_ranks, chunks=tuple(chunks))


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


def _check_encoders(request: Request, encoders: Sequence[str], backbone: str) -> None:
    for feed in request.model.feeds:
        if feed.target != backbone or feed.source not in encoders:
            raise ValueError(
                f"{feed.source!r} feeds {feed.target!r}; on the same ranks stand modules that feed {backbone!r} and "
                "nothing else: use another partition"
            )
    if not encoders:
        raise ValueError(f"0 modules beside the backbone {backbone!r}; use another partition")


TRIED_SHARES = (1 / 8, 1 / 4, 3 / 8, 1 / 2, 5 / 8, 3 / 4)
"""Shares of a rank for all modules beside the backbone together."""
MAX_SIMULATED = 16
"""Microbatches of a simulated step."""
MAX_SEGMENTS = 2
"""Most passes of the backbone's chunks over all ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layout:
    """Assignment of each rank's slots to lanes."""

    lanes: Mapping[str, int]
    """Lane of each module."""
    quotas: tuple[int, ...]
    """Slots of each lane."""
    segments: int
    """Segments of the backbone."""


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
    partitions = (_cut(request, times, layout, backbone) for layout in _layouts(request, times, backbone))
    return min(partitions, key=lambda partition: _step_ns(request, partition))


def _layouts(request: Request, times: Mapping[str, tuple[float, ...]], backbone: str) -> Iterator[_Layout]:
    others = {name: math.fsum(own) for name, own in times.items() if name != backbone}
    slots = request.slots_per_rank
    totals = dict.fromkeys(min(slots - 1, max(1, round(share * slots))) for share in TRIED_SHARES)
    most = min(MAX_SEGMENTS, len(times[backbone]) // request.num_ranks) if request.num_ranks > 1 else 1
    for segments in range(1, most + 1):
        for total in totals:
            lanes = {name: int(name != backbone) for name in times}
            yield _Layout(lanes=lanes, quotas=(slots - total, total), segments=segments)
            if 1 < len(others) <= min(total, MAX_LANES - 1):
                lanes = {backbone: 0} | {name: lane for lane, name in enumerate(others, start=1)}
                yield _Layout(
                    lanes=lanes,
                    quotas=(slots - total, *_in_proportion(total, tuple(others.values()))),
                    segments=segments,
                )


def _in_proportion(total: int, times: tuple[float, ...]) -> tuple[int, ...]:
    """Divides slots, at least one each: the next goes to the module with the most time a slot."""
    quotas = [1] * len(times)
    for _ in range(total - len(times)):
        quotas[max(range(len(times)), key=lambda at: times[at] / quotas[at])] += 1
    return tuple(quotas)


def _cut(request: Request, times: Mapping[str, tuple[float, ...]], layout: _Layout, backbone: str) -> Partition:
    chunks = []
    for name, own in times.items():
        lane = layout.lanes[name]
        over = min(request.num_ranks, len(own))
        ends = balanced_ends(own, over * (layout.segments if name == backbone else 1))
        for at, part in enumerate(parts_of(name, ends)):
            segment, rank = divmod(at, over)
            share = layout.quotas[lane] / request.slots_per_rank
            chunks.append(Chunk(parts=(part,), rank=rank, lane=lane, share=share, segment=segment))
    return Partition(num_ranks=request.num_ranks, chunks=tuple(chunks), sizes=request.piece_sizes())


def _step_ns(request: Request, partition: Partition) -> int:
    rolled = roll_out(task_graph(request.model, partition, request.microbatches[:MAX_SIMULATED]))
    assert isinstance(rolled, tuple)  # nothing waits for memory without limits
    timed: Timed = rolled[1]
    return timed.makespan_ns


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionMethod:
    """A method to cut a model into chunks on ranks."""

    name: str
    phrase: str
    """Description."""
    cut: Callable[[Request], Partition]
    """Makes the partition; raises ValueError if the model has too few layers."""


_ALL = (
    PartitionMethod(
        name="separated",
        phrase="each module over all ranks, in segments whose longest chunk is as short as it can be",
        cut=separate_by_time,
    ),
    PartitionMethod(
        name="separated-even",
        phrase="each module over all ranks, in segments of equally many layers (PipeWeaver)",
        cut=separate_evenly,
    ),
    PartitionMethod(
        name="mixed-parameters", phrase="one chain of all layers, balanced by parameters", cut=by_parameters
    ),
    PartitionMethod(name="mixed-time", phrase="one chain of all layers, balanced by time", cut=by_time),
    PartitionMethod(name="mixed-v", phrase="one chain down all ranks and back up, balanced by time", cut=in_a_v),
    PartitionMethod(
        name="encoders-first",
        phrase="encoders in the first chunk, the backbone's layers evenly",
        cut=encoders_first,
    ),
    PartitionMethod(
        name="parallel", phrase="each module on ranks of its own (Cornstarch's Algorithm 1)", cut=on_own_ranks
    ),
    PartitionMethod(
        name="lanes",
        phrase="encoders side by side on shares of the same ranks, the backbone on others",
        cut=on_lanes,
    ),
    PartitionMethod(
        name="colocated",
        phrase="the backbone over all ranks, all other modules beside it on shares of the same ranks",
        cut=beside_backbone,
    ),
)

PARTITION_METHODS = {method.name: method for method in _ALL}
"""By name."""


def partition_by(name: str, request: Request) -> Partition:
    """Cuts a model by the method of that name.

    Raises:
        ValueError: The name is unknown (lists all), or the model has too few layers.
    """
    if name not in PARTITION_METHODS:
        raise ValueError(unknown("partition", name, PARTITION_METHODS))
    return PARTITION_METHODS[name].cut(request)
