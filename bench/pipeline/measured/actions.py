"""Host time of a pipeline's actions: the executor's own, with work that computes nothing.

One rank has four chunks and takes 32 microbatches through them: 256 forwards and backwards.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Mapping
from itertools import pairwise

import torch

from bench.pipeline.in_process import InProcess
from bench.record import Figure
from mosaic.pipelining.schedule import PipelineSchedule, TaskName
from mosaic.ranks.pipeline.executor import Executor
from mosaic.ranks.pipeline.program import Edge, RankTask
from mosaic.ranks.pipeline.transport import Tensors, TensorSpec

CHUNKS, MICROBATCHES, ROUNDS = 4, 32, 15
ACTIONS = 2 * CHUNKS * MICROBATCHES


class _Nothing:
    """Work that computes nothing."""

    made = (torch.zeros(4, 8),)

    def forward(self, task: RankTask, inputs: Mapping[TaskName, Tensors]) -> Mapping[TaskName, Tensors]:
        return dict.fromkeys(task.targets, self.made)

    backward = forward

    def free(self, task: TaskName) -> None:
        """Nothing is kept."""

    def reduce(self, chunk: int) -> None:
        """There is one rank."""

    def specs(self, edge: Edge) -> tuple[TensorSpec, ...]:
        return (TensorSpec((4, 8), torch.float32),)


def empty_action_cost() -> Iterator[Figure]:
    """The time that the executor adds to a task."""
    cells, edges = [], {}
    for microbatch in range(MICROBATCHES):
        forward = [f"{chunk}F{microbatch}" for chunk in range(CHUNKS)]
        backward = [f"{chunk}B{microbatch}" for chunk in reversed(range(CHUNKS))]
        cells += forward + backward
        for planner in (forward, backward):
            edges.update({f"{source}>{target}": 1 for source, target in pairwise(planner)})
    schedule = PipelineSchedule(
        plan="layers", num_microbatches=MICROBATCHES, rank_of=(0,), chunks=("layer",) * CHUNKS, rows=(tuple(cells),),
        edges=edges,
    )  # fmt: skip
    executor, work = Executor(InProcess(1).transports[0]), _Nothing()
    times_us = []
    for _ in range(1 + ROUNDS):
        began = time.perf_counter()
        executor.run(schedule, work)
        times_us.append(1e6 * (time.perf_counter() - began) / ACTIONS)
    yield Figure(
        name="an action that computes nothing, executor, us (goal: 25)",
        source="measured",
        value=statistics.median(times_us[1:]),
        samples=tuple(times_us[1:]),
    )
