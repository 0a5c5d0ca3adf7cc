"""Baselines of the papers: the orders of nnScaler and Optimus.

``PAPER_BASELINES`` also has those of ``mosaic.pipelining.baselines``.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from mosaic.pipelining.baselines import (
    BASELINES,
    B,
    Baseline,
    F,
    by_groups,
    cut_by,
    interleaved,
    num_microbatches_of,
    one_f_one_b,
    orders_of,
)
from mosaic.pipelining.cuts import separated
from mosaic.pipelining.partition import Partition, Request, backbone_of
from mosaic.pipelining.schedule import TaskName
from mosaic.pipelining.tasks import Orders, TaskGraph


def encoders_before(graph: TaskGraph, partition: Partition) -> tuple[Orders, ...]:
    """Every forward of every encoder, the backbone by 1F1B, every backward of every encoder (Optimus, coarse-grained).

    The backbone is the last module; it is interleaved if it has several segments.

    Raises:
        ValueError: A module does not feed the last one, or the number of microbatches is not divisible.
    """
    *encoders, backbone = partition.modules
    num_ranks, count = partition.num_ranks, num_microbatches_of(graph)
    chunks = {
        name: [index for index, chunk in enumerate(partition.chunks) if chunk.parts[0].module == name]
        for name in partition.modules
    }
    middle = interleaved(num_ranks, count, len(chunks[backbone]) // num_ranks)
    rows = []
    for rank in range(num_ranks):
        own = {name: [index for index in chunks[name] if partition.chunks[index].rank == rank] for name in encoders}
        forward = [slot for name in encoders for slot in by_groups(own[name], F, count, num_ranks)]
        backward = [slot for name in reversed(encoders) for slot in by_groups(own[name][::-1], B, count, num_ranks)]
        between = [TaskName(chunks[backbone][slot.chunk], slot.kind, slot.microbatch) for slot in middle[rank]]
        rows.append([*forward, *between, *backward])
    return (orders_of(graph, rows),)


def _cut_for_optimus(request: Request) -> Partition:
    names = [module.name for module in request.model.modules]
    backbone = backbone_of(request.model)
    if backbone != names[-1] or any(feed.source == backbone for feed in request.model.feeds):
        raise ValueError(
            f"{names[-1]!r} comes after the backbone {backbone!r}; Optimus places encoders before it and has no "
            "decoders: use another baseline"
        )
    divides = len(request.microbatches) % request.num_ranks == 0
    return separated(request, max_segments=None if divides else 1)


_OWN = (
    Baseline(
        name="nnscaler*",
        description="the best mixed partition for a representative step, with 1F1B",
        cut=cut_by("mixed-time", 1),
        order=one_f_one_b,
    ),
    Baseline(
        name="optimus-coarse",
        description="all encoders before the backbone",
        cut=_cut_for_optimus,
        order=encoders_before,
    ),
)
PAPER_BASELINES: Mapping[str, Baseline] = MappingProxyType({**BASELINES, **{own.name: own for own in _OWN}})
"""By name."""
