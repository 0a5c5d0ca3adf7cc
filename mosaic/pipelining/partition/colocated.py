"""Modules beside the backbone on lanes of the same ranks, each with a share of its rank's SMs (paper, section 3.5).

Two encoders ``v`` and ``a`` before a text model ``t`` on two ranks, on one lane together or on a lane each::

    rank      0          1               0          1
    lane 0    t t t t    t t t t         t t t t    t t t t
    lane 1    v v a a    v v a a         v v v v    v v v v
    lane 2                               a a a a    a a a a

While the backbone runs a microbatch, encoders run the next ones on the remaining SMs, and in its bubbles.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from mosaic.pipelining.order.simulate import roll_out
from mosaic.pipelining.partition.mixed import balanced_ends
from mosaic.pipelining.partition.parallel import MAX_LANES
from mosaic.pipelining.partition.partition import Chunk, Partition, parts_of
from mosaic.pipelining.partition.request import Request, backbone_of, layer_times
from mosaic.pipelining.task_graph import task_graph
from mosaic.pipelining.tasks import Timed

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
