"""Schedules as torch's pipeline CSV, which torchtitan reads: a row per rank, an action per cell.

``0F1`` is stage 0's forward of microbatch 1, ``B`` its whole backward, ``I`` and ``W`` its backward for inputs and for
weights (``torch.distributed.pipelining.schedules``). Torch adds the messages, so stages have to be a chain.
"""

from __future__ import annotations

import csv
import io
import re
from collections import defaultdict
from functools import partial

from mosaic.errors import InvalidScheduleError
from mosaic.pipelining.baselines import Baseline, chain_of, cut_by
from mosaic.pipelining.cuts import partition_by
from mosaic.pipelining.schedule import PipelineSchedule, TaskName
from mosaic.pipelining.tasks import ActionKind

F, B, W = ActionKind.FORWARD, ActionKind.BACKWARD, ActionKind.WEIGHTS


def to_torch_csv(schedule: PipelineSchedule) -> str:
    """Returns the computation of a schedule, whose chunks become torch's stages.

    Raises:
        InvalidScheduleError: Torch's form cannot say it: chunks are no chain, a microbatch skips one or comes in
            pieces, or a rank has several lanes.
    """
    if len(set(schedule.rank_of)) < len(schedule.rank_of):
        raise _unsuitable("a rank has several lanes", "keep encoders in line with the backbone")
    rows = [[TaskName.parse(cell) for cell in row if "(" not in cell] for row in schedule.rows]
    tasks = {task for row in rows for task in row}
    if any(task.piece for task in tasks):
        raise _unsuitable("microbatches come in pieces", "plan without sub-microbatches")
    stages = _chain(schedule)
    for chunk in stages:
        for at in range(schedule.num_microbatches):
            if not {TaskName(chunk, F, at), TaskName(chunk, B, at)} <= tasks:
                raise _unsuitable(
                    f"microbatch {at} has no forward or no backward in chunk {chunk}", "train every chunk"
                )
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    for row in rows:
        cells = []
        for task in row:
            is_split = task.kind is B and TaskName(task.chunk, W, task.microbatch) in tasks
            cells.append(f"{stages[task.chunk]}{'I' if is_split else task.kind.value}{task.microbatch}")
        writer.writerow(cells)
    return text.getvalue()


def _chain(schedule: PipelineSchedule) -> dict[int, int]:
    """Returns the stage of each chunk along the chain."""
    following: dict[int, set[int]] = defaultdict(set)
    for edge in schedule.edges:
        source, target = map(TaskName.parse, edge.split(">"))
        if source.kind is F and target.kind is F and source.chunk != target.chunk:
            following[source.chunk].add(target.chunk)
    chunks = set(range(len(schedule.chunks)))
    firsts = chunks - {target for targets in following.values() for target in targets}
    stages: dict[int, int] = {}
    chunk = min(firsts, default=None)
    while chunk is not None and chunk not in stages:
        stages[chunk] = len(stages)
        chunk = min(following[chunk], default=None)
    if len(firsts) != 1 or len(stages) < len(chunks) or any(len(targets) > 1 for targets in following.values()):
        edges = ", ".join(f"{source} to {sorted(targets)}" for source, targets in sorted(following.items()) if targets)
        raise _unsuitable(f"chunks are no chain ({edges})", "plan with --partition mixed")
    return stages


def _unsuitable(fact: str, remedy: str) -> InvalidScheduleError:
    return InvalidScheduleError(f"{fact}, which torch's CSV cannot say; {remedy}, or write the schedule as .json")


def baseline_of_csv(name: str, text: str) -> Baseline:
    """Returns a baseline, ``name``, that orders tasks as torch's CSV ``text`` does; layers are balanced by parameters.

    Raises:
        InvalidScheduleError: A cell is no computation of torch's, stages lie neither in cycles nor in a V over the
            rows, or only some backwards are apart for weights.
    """
    table = enumerate(csv.reader(io.StringIO(text)))
    tasks = [[_task(cell, f"{name}, row {number}") for cell in map(str.strip, row) if cell] for number, row in table]
    rows, letters = [row for row in tasks if row], set(re.findall("[BIW]", text))
    if letters > {"B"}:
        raise InvalidScheduleError(f"{name} has whole backwards and backwards apart; use 0B1, or 0I1 and 0W1")
    row_of = {task.chunk: row for row, each in enumerate(rows) for task in each}
    stages, down = [row_of.get(stage) for stage in range(max(row_of, default=-1) + 1)], list(range(len(rows)))
    if rows and stages == down * (len(stages) // len(rows)):
        cut = cut_by("mixed-parameters", chunks_per_rank=len(stages) // len(rows))
    elif rows and stages == down + down[::-1]:
        cut = partial(partition_by, "mixed-v")
    else:
        raise InvalidScheduleError(f"{name}: stages of rows are {stages}; put stage s on row s mod ranks, or in a V")

    def order(ranks: int, microbatches: int, chunks_per_rank: int) -> list[list[TaskName]]:
        if ranks != len(rows):
            raise ValueError(f"{name} is for {len(rows)} ranks, and there are {ranks}")
        return rows

    description = f"the order of {name}, layers balanced by parameters"
    return Baseline(name=name, description=description, cut=cut, order=chain_of(order), weights_apart="W" in letters)


def _task(cell: str, where: str) -> TaskName:
    match = re.fullmatch(r"(\d+)([FBIW])(\d+)", cell)
    if match is None:
        raise InvalidScheduleError(f"{where}: {cell!r} is no computation; write 0F1, 0B1, 0I1 or 0W1")
    return TaskName(int(match[1]), B if match[2] == "I" else ActionKind(match[2]), int(match[3]))
