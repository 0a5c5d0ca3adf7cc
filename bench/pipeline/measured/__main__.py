"""The study of pipelines that run: steps, memory and host time, measured on gloo ranks with a core each.

``python -m bench.pipeline.measured [--quick] [--json FILE]``

Models are Hugging Face's from configurations; their parts take 5 to 50 ms. Our plan, 1F1B on a mixed partition,
interleaved 1F1B and GPipe take turns on one executor, step by step. Simulations were fitted to another step. Every part
runs in processes of its own that are ended in time.
``--quick``: one small model, within a minute on two quiet cores; the full study takes eight.
"""

from __future__ import annotations

import os

# OpenMP reads this once, when torch is loaded; a rank has one thread, and idle ones that spin would take its core.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import statistics
import time
from collections.abc import Iterator, Mapping
from functools import partial
from itertools import pairwise

import torch

from bench.harness import PartedStudy, StudyPart
from bench.pipeline.in_process import InProcess
from bench.pipeline.measured.models import MODELS
from bench.pipeline.measured.steps import Sizes, cores, memory, steps
from bench.ranks.launch import Work, on_ranks
from bench.record import Figure
from mosaic.pipelining.schedule import PipelineSchedule, TaskName
from mosaic.ranks.pipeline.executor import Edge, Executor, RankTask
from mosaic.ranks.pipeline.transport import Tensors, TensorSpec

CHUNKS, MICROBATCHES, ROUNDS = 4, 32, 15
"""Of the executor's own time: 256 forwards and backwards on one rank."""
SMALL = Sizes(width=128, layers=4, microbatches=4, steps=1, rounds=2, plan_s=0.2)
FULL = Sizes()
MORE_RANKS = 4
"""Run too where each rank has a core."""


class _Nothing:
    """Work that computes nothing, in the place of a rank's chunks."""

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
        times_us.append(1e6 * (time.perf_counter() - began) / (2 * CHUNKS * MICROBATCHES))
    yield Figure(
        name="an action that computes nothing, executor, us (goal: 25)",
        source="measured",
        value=statistics.median(times_us[1:]),
        samples=tuple(times_us[1:]),
    )


def _ranks(name: str, seconds: float, size: int, work: Work) -> StudyPart:
    return StudyPart(name=name, make=lambda left: on_ranks(work, size, left), seconds=seconds)


def _actions() -> StudyPart:
    return StudyPart.alone("actions", 30, empty_action_cost)


def quick() -> tuple[StudyPart, ...]:
    """Returns the parts of the quick form."""
    return (
        _actions(),
        _ranks("steps, llama", 40, 2, partial(steps, name="llama", sizes=SMALL)),
        _ranks("memory, llama", 20, 2, partial(memory, name="llama", sizes=SMALL)),
    )


def full() -> tuple[StudyPart, ...]:
    """Returns all parts."""
    parts = [_actions()]
    for name in MODELS:
        parts.append(_ranks(f"steps, {name}", 150, 2, partial(steps, name=name, sizes=FULL)))
        if cores() >= MORE_RANKS:
            parts.append(_ranks(f"steps, {name}, {MORE_RANKS}", 150, MORE_RANKS, partial(steps, name=name, sizes=FULL)))
        parts.append(_ranks(f"memory, {name}", 60, 2, partial(memory, name=name, sizes=FULL)))
    return tuple(parts)


STUDY = PartedStudy(
    name="bench_pipeline_measured",
    quick=quick,
    quick_seconds=56.0,
    full=full,
    full_seconds=480.0,
)

if __name__ == "__main__":
    STUDY.main(__doc__, "one small model; within a minute on two cores")
