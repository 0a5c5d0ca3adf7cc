"""Pipelines' baselines of papers: ZB-H1, DualPipeV, nnScaler's, Optimus's, DynaPipe's and Cornstarch's orders.

``PAPER_BASELINES`` has them beside those that the product has (``mosaic.pipelining.baselines``).
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from itertools import accumulate, chain, permutations
from types import MappingProxyType

from mosaic.pipelining.baselines import (
    BASELINES,
    B,
    Baseline,
    F,
    Row,
    Slot,
    W,
    by_groups,
    chain_of,
    cut_by,
    in_turn,
    interleaved,
    num_microbatches_of,
    one_f_one_b,
    one_f_one_b_of,
    orders_of,
)
from mosaic.pipelining.cuts import in_a_loop, separated
from mosaic.pipelining.partition import Partition, Request, backbone_of, sources_of
from mosaic.pipelining.tasks import ActionKind, Orders, TaskGraph

MAX_CLUSTERS = 4
"""Of microbatches, whose every order is tried: 24 of them."""


def zb_h1(num_ranks: int, num_microbatches: int, chunks_per_rank: int) -> list[list[Slot]]:
    """Interleaved 1F1B with backward for weights late (https://arxiv.org/abs/2401.10241, section 3.1).

    One forward less at a hop from the end, and backward for weights as many backwards late as there are ranks before,
    so that memory stays that of 1F1B.
    """
    rows = []
    group = num_ranks if chunks_per_rank > 1 else num_microbatches
    for rank in range(num_ranks):
        own = range(rank, num_ranks * chunks_per_rank, num_ranks)
        forward = by_groups(own, F, num_microbatches, group)
        backward = by_groups(own[::-1], B, num_microbatches, group)
        warm_up = min((chunks_per_rank - 1) * group + num_ranks - 1 - rank, len(forward))
        rows.append(_with_late_weights(in_turn(forward, backward, warm_up), rank))
    return rows


def dual_pipe_v(num_ranks: int, num_microbatches: int) -> list[list[Slot]]:
    """DeepSeek's DualPipeV (https://github.com/deepseek-ai/DualPipe), one phase after the other where it overlaps two.

    ``b`` is a backward whose weights come at once; after ``B`` they come with the next ``W``, the oldest first.

    Raises:
        ValueError: There are fewer than two microbatches a rank.
    """
    if num_microbatches < 2 * num_ranks:
        raise ValueError(
            f"{num_microbatches} microbatches on {num_ranks} ranks; DualPipeV starts with two a rank: use at least "
            f"{2 * num_ranks}"
        )
    rows = []
    for rank in range(num_ranks):
        row = _LateRow(down=rank, up=2 * num_ranks - 1 - rank)
        after = num_ranks - 1 - rank
        row.repeat(2 * after, "F0")
        row.repeat(rank + 1, "F0 F1")
        row.repeat(after, "B1 W F1")
        row.repeat(num_microbatches - 2 * num_ranks + rank + 1, "F0 b1 F1 b0")
        row.repeat(after, "b1 F1 b0")
        both = (rank + 1) // 2
        row.repeat(both, "b1 b0")
        row.repeat((rank + 1) % 2, "b1 B0")
        row.repeat(both, "B1 B0")
        row.repeat(after, "W B0")
        row.repeat(rank + 1, "W")
        rows.append(row.slots)
    return rows


class _LateRow(Row):
    """A row in which ``b`` is a backward whose weights come at once, and ``W`` the oldest that is late."""

    def __init__(self, *, down: int, up: int) -> None:
        super().__init__(down=down, up=up)
        self._late = deque[Slot]()

    def write(self, phase: str) -> None:
        """Writes one phase."""
        if phase == "W":
            if self._late:
                self.slots.append(self._late.popleft())
            return
        chunk = self.up if phase[1] == "1" else self.down
        slot = self.put(ActionKind(phase[0].upper()), chunk)
        if phase[0] == "b":
            self.slots.append(Slot(chunk, W, slot.microbatch))
        elif phase[0] == "B":
            self._late.append(Slot(chunk, W, slot.microbatch))


def _with_late_weights(row: Sequence[Slot], late: int) -> list[Slot]:
    """Puts each backward for weights behind the backward that is ``late`` backwards after its own, or at the end."""
    found: list[Slot] = []
    waiting = deque[Slot]()
    for slot in row:
        found.append(slot)
        if slot.kind is B:
            waiting.append(Slot(slot.chunk, W, slot.microbatch))
            if len(waiting) > late:
                found.append(waiting.popleft())
    return found + list(waiting)


def in_any_cluster_order(graph: TaskGraph, partition: Partition) -> tuple[Orders, ...]:
    """1F1B with microbatches in clusters of like times, in every order of the clusters (DynaPipe's reordering).

    DynaPipe (https://arxiv.org/abs/2311.10418) orders clusters in the same way, but runs a schedule of its own, which
    adapts to memory, where this is 1F1B.
    """
    times = Counter[int]()
    for task in graph.tasks:
        times[task.microbatch] += task.time_ns
    ranked = sorted(times, key=lambda one: (times[one], one))
    count = min(MAX_CLUSTERS, len(ranked))
    bounds = [len(ranked) * at // count for at in range(count + 1)]
    clusters = [ranked[bounds[at] : bounds[at + 1]] for at in range(count)]
    orders = [list(chain(*order)) for order in permutations(clusters)]
    return tuple(one_f_one_b_of(graph, partition, order) for order in (range(len(ranked)), *orders))


def encoders_before(graph: TaskGraph, partition: Partition) -> tuple[Orders, ...]:
    """Every forward of every encoder, the backbone by 1F1B, every backward of every encoder (Optimus, coarse-grained).

    The backbone is the last module; it is interleaved where it has several segments.

    Raises:
        ValueError: A module of several does not feed the last, or the microbatches do not divide.
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
        between = [Slot(chunks[backbone][slot.chunk], slot.kind, slot.microbatch) for slot in middle[rank]]
        rows.append([*forward, *between, *backward])
    return (orders_of(graph, rows),)


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
    return separated(request, max_segments=None if divides else 1)


def _cut_after_encoders(request: Request) -> Partition:
    """Puts everything before the backbone into the first chunk, and divides the backbone evenly over the ranks.

    Torchtitan does so: a vision encoder belongs to the first part of the model
    (https://github.com/pytorch/torchtitan). Modules behind the backbone are in the last chunk.

    Raises:
        ValueError: The backbone has fewer layers than ranks.
    """
    names = [module.name for module in request.model.modules]
    layers = [len(module.trains) for module in request.model.modules]
    place, count = names.index(backbone_of(request.model)), request.num_ranks
    if layers[place] < count:
        raise ValueError(f"the backbone has {layers[place]} layers for {count} ranks; use fewer ranks")
    sizes = [layers[place] // count + (rank < layers[place] % count) for rank in range(count)]
    ends = accumulate([sum(layers[:place]) + sizes[0], *sizes[1:-1], sizes[-1] + sum(layers[place + 1 :])])
    return in_a_loop(request, list(ends)) if count > 1 else in_a_loop(request, [sum(layers)])


def _ancestors(request: Request, name: str) -> set[str]:
    sources = sources_of(request.model, {module.name for module in request.model.modules})
    found: set[str] = set()
    todo = [name]
    while todo:
        new = set(sources[todo.pop()]) - found
        found |= new
        todo += new
    return found


PAPER_BASELINES: Mapping[str, Baseline] = MappingProxyType(
    {
        **BASELINES,
        **{
            baseline.name: baseline
            for baseline in (
                Baseline(
                    name="zb-h1",
                    description="1F1B with late backward for weights",
                    cut=cut_by("mixed-parameters", chunks_per_rank=1),
                    order=chain_of(zb_h1),
                    weights_apart=True,
                ),
                Baseline(
                    name="dualpipe-v",
                    description="DeepSeek's V, without its overlap of two phases",
                    cut=cut_by("mixed-v"),
                    order=chain_of(lambda num_ranks, count, _: dual_pipe_v(num_ranks, count)),
                    weights_apart=True,
                ),
                Baseline(
                    name="nnscaler*",
                    description="the best mixed partition for a representative step, once and for all, by 1F1B",
                    cut=cut_by("mixed-time", chunks_per_rank=1),
                    order=one_f_one_b,
                ),
                Baseline(
                    name="optimus-coarse",
                    description="all encoders before the backbone",
                    cut=_cut_for_optimus,
                    order=encoders_before,
                ),
                Baseline(
                    name="dynapipe-order",
                    description="microbatches of like times together, in the best order of such clusters, by 1F1B",
                    cut=cut_by("mixed-time", chunks_per_rank=1),
                    order=in_any_cluster_order,
                ),
                Baseline(
                    name="encoders-first",
                    description="encoders in the first chunk, by 1F1B (torchtitan)",
                    cut=_cut_after_encoders,
                    order=one_f_one_b,
                ),
                Baseline(
                    name="cornstarch",
                    description="modules on ranks of their own, by what trains, by 1F1B",
                    cut=cut_by("parallel", frozen_aware=True),
                    order=one_f_one_b,
                ),
                Baseline(
                    name="cornstarch-unaware",
                    description="the same with backward taken as twice forward",
                    cut=cut_by("parallel", frozen_aware=False),
                    order=one_f_one_b,
                ),
            )
        },
    }
)
"""By name."""
