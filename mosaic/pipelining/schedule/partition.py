"""The partition of a schedule, from its chunks and rows."""

from __future__ import annotations

from mosaic.errors import InvalidScheduleError
from mosaic.graph import Part
from mosaic.pipelining.partition.partition import Chunk, Partition
from mosaic.pipelining.partition.request import Request
from mosaic.pipelining.schedule.action import TaskName
from mosaic.pipelining.schedule.schedule import PipelineSchedule


def partition_of_schedule(schedule: PipelineSchedule, request: Request) -> Partition:
    """Returns the partition of a schedule.

    A schedule has no sizes of sub-microbatches: modules that it cuts have the sizes of the request.

    Raises:
        InvalidScheduleError: It is of another model (names both), a chunk has no task and so no rank, or a rank has
            lanes, whose shares a schedule does not have.
    """
    parts = [tuple(Part.parse(text) for text in chunk.split("+")) for chunk in schedule.chunks]
    own = {part.module: part.total for chunk in parts for part in chunk}
    expected = {module.name: len(module.trains) for module in request.model.modules}
    if own != expected:
        raise InvalidScheduleError(
            f"the schedule is of {_named(own)}, and the model is {_named(expected)}; plan for this model"
        )
    if len(set(schedule.rank_of)) < len(schedule.rank_of):
        raise InvalidScheduleError("the schedule has lanes, and does not say how large; give its Partition")
    rank: dict[int, int] = {}
    cut: set[str] = set()
    for row, cells in zip(schedule.rank_of, schedule.rows, strict=True):
        for task in (TaskName.parse(cell) for cell in cells if cell[-1] != ")"):
            rank[task.chunk] = row
            cut |= {part.module for part in parts[task.chunk] if task.piece}
    missing = next((index for index in range(len(parts)) if index not in rank), None)
    if missing is not None:
        raise InvalidScheduleError(
            f"chunk {missing} ({schedule.chunks[missing]}) has no task in the schedule, and so no rank; plan a step in "
            "which every module has something to do"
        )
    sizes = request.piece_sizes() if cut else {}
    return Partition(
        num_ranks=1 + max(schedule.rank_of),
        chunks=tuple(Chunk(parts=own_parts, rank=rank[index]) for index, own_parts in enumerate(parts)),
        sizes={name: size for name, size in sizes.items() if name in cut},
    )


def _named(layers: dict[str, int]) -> str:
    return ", ".join(f"{name} of {count} layers" for name, count in layers.items())
