"""A chain's schedule on the executor and on torch's own runtime of schedules, which judges it.

torch's runtime takes the losses of microbatches to be made in their order, so that the last chunk's forwards have to be
in that order; the others may be in any.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path

import torch
from executor_cases import order
from pipeline_cases import chain, images
from torch import nn
from torch.distributed.pipelining import PipelineStage, schedules
from torch.distributed.pipelining.schedules import _Action, _PipelineScheduleRuntime

from mosaic.graph import Part
from mosaic.pipelining.compiled import ActionKind
from mosaic.pipelining.partition.partition import Chunk, Partition
from mosaic.pipelining.schedule.action import TaskName, Verb
from mosaic.pipelining.schedule.lower import lower
from mosaic.pipelining.schedule.schedule import PipelineSchedule
from mosaic.pipelining.task_graph import task_graph
from mosaic.ranks.pipeline.executing.executor import Executor
from mosaic.ranks.pipeline.executing.program import Edge
from mosaic.ranks.pipeline.transports.distributed import DistributedTransport
from mosaic.ranks.pipeline.transports.transport import Tensors, TensorSpec
from mosaic.ranks.world.world import World
from ranks.begun import TIMEOUT_S, join

SEGMENTS, MICROBATCHES, ROWS, WIDTH = 2, 3, 5, 4


def lowered(size: int, seed: int, *, weights_apart: bool) -> PipelineSchedule:
    """A random order of a chain that goes around the ranks twice."""
    total = size * SEGMENTS
    chunks = tuple(
        Chunk(parts=(Part(module="text", first=index, count=1, total=total),), rank=index % size)
        for index in range(total)
    )
    partition = Partition(chunks=chunks, num_ranks=size)
    graph = task_graph(chain(total), partition, images(*[1] * MICROBATCHES), weights_apart=weights_apart)
    chance = random.Random(seed)
    while True:
        drawn = order(graph, chance)
        last = [graph.tasks[task] for task in drawn[-1] if graph.tasks[task].chunk == total - 1]
        forwards = [task.microbatch for task in last if task.kind is ActionKind.FORWARD]
        if forwards == sorted(forwards):
            return lower(partition, graph, drawn, training=range(total))


def in_torchs_words(schedule: PipelineSchedule) -> dict[int, list[_Action]]:
    """The actions of a chain, each chunk a stage; torch's runtime waits and frees by itself."""
    posts = {Verb.SEND: "SEND", Verb.RECEIVE: "RECV"}
    if hasattr(schedules, "WAIT_SEND_F"):  # from torch 2.15 on
        posts[Verb.AWAIT_SENT] = "WAIT_SEND"
    has_weights = any("W" in cell for row in schedule.rows for cell in row)
    computes = {ActionKind.FORWARD: "F", ActionKind.BACKWARD: "I" if has_weights else "B", ActionKind.WEIGHTS: "W"}
    found: dict[int, list[_Action]] = {}
    for rank in schedule.rank_of:
        found[rank] = []
        for action in schedule.actions(rank):
            task = action.target if action.verb is Verb.RECEIVE else action.task
            if action.verb is None:
                text = f"{task.chunk}{computes[task.kind]}{task.microbatch}"
            elif action.verb in posts:
                text = f"{task.chunk}{posts[action.verb]}_{task.kind.value}{task.microbatch}"
            else:
                continue
            found[rank].append(_Action.from_str(text))
    return found


class ChainWork:
    """Linear layers, one a chunk; the loss of a microbatch is the sum of its squares."""

    def __init__(
        self, layers: Mapping[int, nn.Module], inputs: list[torch.Tensor], *, last: int, is_apart: bool
    ) -> None:
        self.layers, self.inputs, self.last = layers, inputs, last
        self.kept: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}
        self.late: dict[tuple[int, int], Tensors] = {}
        self.is_apart = is_apart

    def forward(self, task: TaskName, inputs: Mapping[TaskName, Tensors]) -> Tensors:
        given = next(iter(inputs.values()))[0] if inputs else self.inputs[task.microbatch]
        given = given.detach().requires_grad_()
        made = self.layers[task.chunk](given)
        self.kept[task.chunk, task.microbatch] = given, made.square().sum() if task.chunk == self.last else made
        return (made.detach(),)

    def backward(self, task: TaskName, gradients: Mapping[TaskName, Tensors]) -> dict[TaskName, Tensors]:
        given, made = self.kept[task.chunk, task.microbatch]
        taken = next(iter(gradients.values())) if gradients else None
        weights = tuple(self.layers[task.chunk].parameters())
        gradient, *of_weights = torch.autograd.grad(made, (given, *weights), taken)
        self.late[task.chunk, task.microbatch] = tuple(of_weights)
        if not self.is_apart:
            self.weights(task)
        before = TaskName(task.chunk - 1, ActionKind.BACKWARD, task.microbatch)
        return {before: (gradient,)} if task.chunk else {}

    def weights(self, task: TaskName) -> None:
        for weight, gradient in zip(
            self.layers[task.chunk].parameters(), self.late.pop((task.chunk, task.microbatch)), strict=True
        ):
            weight.grad = gradient if weight.grad is None else weight.grad + gradient

    def free(self, task: TaskName) -> None:
        del self.kept[task.chunk, task.microbatch]

    def reduce(self, chunk: int) -> None:
        assert not [key for key in self.late if key[0] == chunk]

    def specs(self, edge: Edge) -> tuple[TensorSpec, ...]:
        return (TensorSpec((ROWS, WIDTH), torch.float64),)


def gradients(layers: Mapping[int, nn.Module]) -> dict[int, list[torch.Tensor]]:
    found = {index: [weight.grad for weight in layer.parameters()] for index, layer in layers.items()}
    for layer in layers.values():
        layer.zero_grad()
    return found


def equal_gradients(rank: int, size: int, place: Path) -> None:
    """Ours, torch's and one process's gradients of the same chain; torch's bit for bit."""
    join(rank, size, place)
    torch.manual_seed(0)
    every = [nn.Linear(WIDTH, WIDTH, dtype=torch.float64) for _ in range(size * SEGMENTS)]
    inputs = [torch.randn(ROWS, WIDTH, dtype=torch.float64) for _ in range(MICROBATCHES)]
    nn.Sequential(*every)(torch.cat(inputs)).square().sum().backward()
    plain = gradients(dict(enumerate(every)))
    layers = {index: every[index] for index in range(rank, len(every), size)}
    transport = DistributedTransport(World(timeout_s=TIMEOUT_S))
    executor = Executor(transport)
    for seed in range(4):
        weights_apart = seed % 2 == 1
        schedule = lowered(size, seed, weights_apart=weights_apart)
        executor.run(schedule, ChainWork(layers, inputs, last=len(every) - 1, is_apart=weights_apart))
        ours = gradients(layers)
        by_torch(schedule, layers, len(every), inputs, is_first=rank == 0, is_last=len(every) - 1 in layers)
        judged = gradients(layers)
        for index in layers:
            for one, other, whole in zip(ours[index], judged[index], plain[index], strict=True):
                assert torch.equal(one, other), index
                assert torch.allclose(one, whole, rtol=1e-12), index
    transport.close()
    print("equal")


def by_torch(
    schedule: PipelineSchedule,
    layers: Mapping[int, nn.Module],
    total: int,
    inputs: list[torch.Tensor],
    *,
    is_first: bool,
    is_last: bool,
) -> None:
    """Runs a schedule on torch's runtime; gradients are in the layers afterwards."""
    made = torch.zeros(ROWS, WIDTH, dtype=torch.float64, requires_grad=True)
    cpu = torch.device("cpu")
    stages = [
        PipelineStage(layer, index, total, cpu, input_args=(made if index else inputs[0],), output_args=(made,))
        for index, layer in layers.items()
    ]
    runtime = _PipelineScheduleRuntime(
        stages, MICROBATCHES, loss_fn=lambda made, target: made.square().sum(), scale_grads=False
    )
    runtime._prepare_schedule_with_comms(in_torchs_words(schedule), format="compute_comms")
    whole = torch.cat(inputs)
    runtime.step(*([whole] if is_first else []), **({"target": whole} if is_last else {}))
