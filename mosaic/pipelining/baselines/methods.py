"""The baselines, one line each: how each cuts a model, and in which order it runs what comes out.

To add one, write a function from a task graph and its partition to orders, and name it here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mosaic.pipelining.baselines import classic, multimodal
from mosaic.pipelining.baselines.slots import Slot, orders_of
from mosaic.pipelining.partition.backward import sources_of
from mosaic.pipelining.partition.methods import partition_by
from mosaic.pipelining.partition.partition import Partition
from mosaic.pipelining.partition.request import Request, backbone_of
from mosaic.pipelining.partition.separated import separate_by_time
from mosaic.pipelining.task_graph import task_graph
from mosaic.pipelining.tasks import Orders, TaskGraph
from mosaic.pipelining.workload.microbatch import Microbatch


@dataclass(frozen=True, slots=True, kw_only=True)
class Baseline:
    """A way to cut a model and to order its tasks."""

    name: str
    """As people give it."""
    phrase: str
    """What it does."""
    cut: Callable[[Request], Partition]
    """Makes the partition, for the request's representative microbatches."""
    order: Callable[[TaskGraph, Partition], tuple[Orders, ...]]
    """Orders the tasks of a step; several orders where the baseline tries them and takes the fastest."""
    weights_apart: bool = False
    """Whether it orders backward for weights by itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """What a baseline makes of a step."""

    partition: Partition
    """Chunks on ranks."""
    graph: TaskGraph
    """The step's tasks."""
    candidates: tuple[Orders, ...]
    """Orders of them, the fastest of which the baseline runs."""


def _cut(
    name: str, *, chunks_per_rank: int | None = None, frozen_aware: bool | None = None
) -> Callable[[Request], Partition]:
    def cut(request: Request) -> Partition:
        if chunks_per_rank is not None:
            request = dataclasses.replace(request, chunks_per_rank=chunks_per_rank)
        if frozen_aware is not None:
            request = dataclasses.replace(request, frozen_aware=frozen_aware)
        return partition_by(name, request)

    return cut


def _cut_interleaved(request: Request) -> Partition:
    return partition_by(
        "mixed-parameters", dataclasses.replace(request, chunks_per_rank=max(2, request.chunks_per_rank))
    )


def _cut_for_optimus(request: Request) -> Partition:
    names = [module.name for module in request.model.modules]
    backbone = backbone_of(request.model)
    if backbone != names[-1] or any(feed.source == backbone for feed in request.model.feeds):
        raise ValueError(
            f"{names[-1]!r} comes after the backbone {backbone!r}; Optimus puts encoders before it and knows no "
            "decoders: use another baseline"
        )
    if unread := set(names[:-1]) - _ancestors(request, backbone):
        raise ValueError(f"{sorted(unread)[0]!r} does not feed {backbone!r}; Optimus orders what does")
    divides = len(request.microbatches) % request.num_ranks == 0
    return separate_by_time(request, max_segments=None if divides else 1)


def _ancestors(request: Request, name: str) -> set[str]:
    sources = sources_of(request.model, {module.name for module in request.model.modules})
    found: set[str] = set()
    todo = [name]
    while todo:
        new = set(sources[todo.pop()]) - found
        found |= new
        todo += new
    return found


def _chain(
    slots: Callable[[int, int, int], Sequence[Sequence[Slot]]],
) -> Callable[[TaskGraph, Partition], tuple[Orders, ...]]:
    """Orders a partition whose chunks pass over all ranks again and again by slots of ranks, microbatches, chunks."""

    def order(graph: TaskGraph, partition: Partition) -> tuple[Orders, ...]:
        count = multimodal.num_microbatches_of(graph)
        rows = slots(partition.num_ranks, count, len(partition.chunks) // partition.num_ranks)
        return (orders_of(graph, rows),)

    return order


def _delayed(num_ranks: int, num_microbatches: int, chunks_per_rank: int) -> list[list[Slot]]:
    return classic.interleaved(num_ranks, num_microbatches, chunks_per_rank, delays_weights=True)


_ALL = (
    Baseline(
        name="gpipe",
        phrase="every forward before every backward",
        cut=_cut("mixed-parameters", chunks_per_rank=1),
        order=_chain(classic.gpipe),
    ),
    Baseline(
        name="1f1b",
        phrase="one forward, one backward, one chunk a rank balanced by parameters",
        cut=_cut("mixed-parameters", chunks_per_rank=1),
        order=multimodal.one_f_one_b,
    ),
    Baseline(
        name="megatron",
        phrase="interleaved 1F1B, two chunks a rank or more balanced by parameters",
        cut=_cut_interleaved,
        order=_chain(classic.interleaved),
    ),
    Baseline(
        name="zb-h1",
        phrase="1F1B with late backward for weights",
        cut=_cut("mixed-parameters", chunks_per_rank=1),
        order=_chain(_delayed),
        weights_apart=True,
    ),
    Baseline(
        name="zb-v",
        phrase="two chunks a rank in a V, backward for weights in bubbles",
        cut=_cut("mixed-v"),
        order=_chain(lambda num_ranks, count, _: classic.zero_bubble_v(num_ranks, count)),
        weights_apart=True,
    ),
    Baseline(
        name="dualpipe-v",
        phrase="DeepSeek's V, without its overlap of two phases",
        cut=_cut("mixed-v"),
        order=_chain(lambda num_ranks, count, _: classic.dual_pipe_v(num_ranks, count)),
        weights_apart=True,
    ),
    Baseline(
        name="nnscaler*",
        phrase="the best mixed partition for a representative step, once and for all, by 1F1B",
        cut=_cut("mixed-time", chunks_per_rank=1),
        order=multimodal.one_f_one_b,
    ),
    Baseline(
        name="optimus-coarse",
        phrase="all encoders before the backbone",
        cut=_cut_for_optimus,
        order=multimodal.encoders_before,
    ),
    Baseline(
        name="dynapipe-order",
        phrase="microbatches of like times together, in the best order of such clusters, by 1F1B",
        cut=_cut("mixed-time", chunks_per_rank=1),
        order=multimodal.in_any_cluster_order,
    ),
    Baseline(
        name="encoders-first",
        phrase="encoders in the first chunk, by 1F1B (torchtitan)",
        cut=_cut("encoders-first", chunks_per_rank=1),
        order=multimodal.one_f_one_b,
    ),
    Baseline(
        name="cornstarch",
        phrase="modules on ranks of their own, by what trains, by 1F1B",
        cut=_cut("parallel", frozen_aware=True),
        order=multimodal.one_f_one_b,
    ),
    Baseline(
        name="cornstarch-unaware",
        phrase="the same with backward taken as twice forward",
        cut=_cut("parallel", frozen_aware=False),
        order=multimodal.one_f_one_b,
    ),
    Baseline(
        name="lanes",
        phrase="encoders on lanes of the same ranks, by 1F1B; no paper's",
        cut=_cut("lanes"),
        order=multimodal.one_f_one_b,
    ),
)

BASELINES = {baseline.name: baseline for baseline in _ALL}
"""By name."""


def draw_baseline(
    name: str,
    request: Request,
    microbatches: Sequence[Microbatch],
    *,
    build: Callable[[Partition, bool], TaskGraph] | None = None,
) -> Drawn:
    """Cuts a model for ``request`` and orders the step ``microbatches`` as the baseline of that name does.

    Args:
        name: One of ``BASELINES``.
        request: Model, ranks, and the microbatches that the partition is made for.
        microbatches: The step's.
        build: Makes the tasks of a partition, backward for weights apart or not; None: without a network or limits.

    Raises:
        ValueError: There is none of that name (lists all), or it does not fit the model, the ranks or the step.
    """
    if name not in BASELINES:
        raise ValueError(f"baseline={name!r} is none; use one of {', '.join(BASELINES)}")
    baseline = BASELINES[name]
    partition = baseline.cut(request)
    if build is None:
        graph = task_graph(request.model, partition, microbatches, weights_apart=baseline.weights_apart)
    else:
        graph = build(partition, baseline.weights_apart)
    return Drawn(partition=partition, graph=graph, candidates=baseline.order(graph, partition))
