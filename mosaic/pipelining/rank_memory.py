"""Memory of ranks over a step, and time of their gradient sums over data-parallel ranks."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from mosaic.pipelining.partition.partition import Partition
from mosaic.pipelining.rank_hardware import Collective, RankHardware
from mosaic.pipelining.tasks import TaskGraph
from mosaic.pipelining.workload.layers import PipelineModel


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryTimeline:
    """Bytes in use on one rank."""

    at_ns: tuple[int, ...]
    """Times of changes, ascending; the first is 0."""
    in_use_bytes: tuple[int, ...]
    """Bytes from each of these times up to the next."""

    @property
    def peak_bytes(self) -> int:
        """Peak bytes."""
        return max(self.in_use_bytes)

    @property
    def peak_ns(self) -> int:
        """First time of the peak."""
        return self.at_ns[self.in_use_bytes.index(self.peak_bytes)]

    def bytes_at(self, time_ns: int) -> int:
        """Returns the bytes in use at ``time_ns``; 0 before 0."""
        place = bisect.bisect_right(self.at_ns, time_ns)
        return self.in_use_bytes[place - 1] if place else 0


def rank_timelines(graph: TaskGraph, start_ns: Sequence[int]) -> tuple[MemoryTimeline, ...]:
    """Returns the memory of each rank over time, from the bytes that tasks take and free."""
    changes: list[list[tuple[int, int]]] = [[] for _ in range(graph.num_ranks)]
    for task, start in zip(graph.tasks, start_ns, strict=True):
        own = changes[graph.rank_of[task.row]]
        if task.takes_bytes:
            own.append((start, task.takes_bytes))
        if task.frees_bytes:
            own.append((start + task.time_ns, -task.frees_bytes))
    bases = graph.base_bytes or (0,) * graph.num_ranks
    return tuple(_timeline(own, base) for own, base in zip(changes, bases, strict=True))


def _timeline(changes: Iterable[tuple[int, int]], base_bytes: int) -> MemoryTimeline:
    """Returns a timeline from pairs of a time and a change of bytes; changes at one time count together."""
    at_ns, in_use_bytes = [0], [base_bytes]
    for time_ns, group in itertools.groupby(sorted(changes), key=lambda change: change[0]):
        total = in_use_bytes[-1] + sum(change[1] for change in group)
        if time_ns == at_ns[-1]:
            in_use_bytes[-1] = total
        elif total != in_use_bytes[-1]:
            at_ns.append(time_ns)
            in_use_bytes.append(total)
    return MemoryTimeline(at_ns=tuple(at_ns), in_use_bytes=tuple(in_use_bytes))


def gradient_sums_ns(machine: RankHardware, model: PipelineModel, partition: Partition) -> tuple[int, ...]:
    """Returns the time of each rank's gradient sum, as in Megatron's distributed optimizer.

    Gradients in float32 are reduce-scattered over the data and context ranks, and weights in bfloat16 gathered.
    """
    modules = {module.name: module for module in model.modules}
    trained = [0] * partition.num_ranks
    for chunk in partition.chunks:
        for part in chunk.parts:
            module = modules[part.module]
            own = (at for at in range(part.first, part.end) if module.trains[at])
            trained[chunk.rank] += sum(module.num_parameters(at, 1) for at in own)
    times_ns = []
    for count in trained:
        own_count = count // machine.degrees.tensor
        scattered = Collective(name="gradients", num_bytes=4 * own_count, axis="data")
        gathered = Collective(name="weights", num_bytes=2 * own_count, axis="data")
        times_ns.append(machine.time_ns(scattered) + machine.time_ns(gathered))
    return tuple(times_ns)
