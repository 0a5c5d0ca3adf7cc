"""Host time of a pipeline's actions: what the executor, torch's own runtime and a bare loop add to small layers.

One rank has four layers of 8 x 8 and takes 32 microbatches of 4 rows through them: 256 forwards and backwards.
"""

from __future__ import annotations

import datetime
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from itertools import cycle, pairwise

import torch
import torch.distributed as dist
from torch import nn

from bench.pipeline.in_process import InProcess
from bench.pipeline.steps import Job
from bench.record import Figure
from mosaic.pipelining.compiled import ActionKind
from mosaic.pipelining.order.simulate import roll_out
from mosaic.pipelining.partition.methods import partition_by
from mosaic.pipelining.schedule.action import TaskName
from mosaic.pipelining.schedule.lower import lower
from mosaic.pipelining.schedule.schedule import PipelineSchedule
from mosaic.ranks.pipeline.executing.executor import Executor
from mosaic.ranks.pipeline.executing.program import program_of
from mosaic.ranks.pipeline.executing.work import Edge
from mosaic.ranks.pipeline.transports.transport import Tensors, TensorSpec

LAYERS, MICROBATCHES, ROWS, WIDTH = 4, 32, 4, 8
ACTIONS = 2 * LAYERS * MICROBATCHES
ROUNDS = 15


class _Layers:
    """Work whose chunks are linear layers."""

    def __init__(self) -> None:
        self.layers = [nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)]
        self.inputs = [torch.randn(ROWS, WIDTH) for _ in range(MICROBATCHES)]
        self.kept: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}
        self.before = {
            (chunk, microbatch): TaskName(chunk - 1, ActionKind.BACKWARD, microbatch)
            for chunk in range(1, LAYERS)
            for microbatch in range(MICROBATCHES)
        }

    def forward(self, task: TaskName, inputs: Mapping[TaskName, Tensors]) -> Tensors:
        given = next(iter(inputs.values()))[0] if inputs else self.inputs[task.microbatch]
        given = given.detach().requires_grad_()
        made = self.layers[task.chunk](given)
        self.kept[task.chunk, task.microbatch] = given, made
        return (made.detach(),)

    def backward(self, task: TaskName, gradients: Mapping[TaskName, Tensors]) -> Mapping[TaskName, Tensors]:
        given, made = self.kept.pop((task.chunk, task.microbatch))
        (taken,) = next(iter(gradients.values())) if gradients else (made.detach(),)
        torch.autograd.backward(made, taken)
        assert given.grad is not None
        return {self.before[task.chunk, task.microbatch]: (given.grad,)} if task.chunk else {}

    def weights(self, task: TaskName) -> None:
        """Are no task of their own."""

    def free(self, task: TaskName) -> None:
        """Backward does."""

    def reduce(self, chunk: int) -> None:
        """There is one rank."""

    def specs(self, edge: Edge) -> tuple[TensorSpec, ...]:
        return (TensorSpec((ROWS, WIDTH), torch.float32),)


class _Nothing(_Layers):
    """Work that computes nothing: what is left is the executor's own."""

    def __init__(self) -> None:
        super().__init__()
        self.made = (torch.zeros(ROWS, WIDTH),)

    def forward(self, task: TaskName, inputs: Mapping[TaskName, Tensors]) -> Tensors:
        return self.made

    def backward(self, task: TaskName, gradients: Mapping[TaskName, Tensors]) -> Mapping[TaskName, Tensors]:
        return {self.before[task.chunk, task.microbatch]: self.made} if task.chunk else {}


def action_cost() -> Iterator[Figure]:
    """Executor, torch's runtime and a bare loop in turn."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=datetime.timedelta(seconds=60)
    )
    runs = {"executor": _by_executor(_Layers()), "torch's runtime": _by_torch(), "bare loop": _bare()}
    took: dict[str, list[float]] = {name: [] for name in runs}
    for run in runs.values():
        run()
    for name in (name for _, name in zip(range(ROUNDS * len(runs)), cycle(runs), strict=False)):
        began = time.perf_counter()
        runs[name]()
        took[name].append(1e6 * (time.perf_counter() - began) / ACTIONS)
    dist.destroy_process_group()
    for name, times_us in took.items():
        yield _figure(f"an action, Linear(8, 8), {name}, us", times_us, ACTIONS)


def empty_action_cost() -> Iterator[Figure]:
    """What the executor adds to whatever a task computes."""
    run = _by_executor(_Nothing())
    times_us = []
    for _ in range(1 + ROUNDS):
        began = time.perf_counter()
        run()
        times_us.append(1e6 * (time.perf_counter() - began) / ACTIONS)
    yield _figure("an action that computes nothing, executor, us (goal: 25)", times_us[1:], ACTIONS)


def new_schedule(name: str, num_microbatches: int) -> Iterator[Figure]:
    """A schedule that a rank has not seen is made ready, with the names of its tasks known from steps before or not."""
    job = Job(name=name, num_microbatches=num_microbatches, with_memory=False)
    partition = partition_by("separated", job.request)
    graph = job.space.tasks(job.request, partition, job.step(0))
    rolled = roll_out(graph)
    assert isinstance(rolled, tuple)
    schedule, work = lower(partition, graph, rolled[0]), _Layers()
    names: dict[str, TaskName] = {}
    for known in ("first", "later"):
        times_ms = []
        for _ in range(ROUNDS):
            began = time.perf_counter()
            program_of(schedule, 1, work, names=names if known == "later" else {})
            times_ms.append(1e3 * (time.perf_counter() - began))
        yield _figure(f"a new schedule of {name}, the {known} one, ms (goal: 1)", times_ms, len(schedule.rows[1]))


def _figure(name: str, samples: list[float], actions: int) -> Figure:
    value, labels = statistics.median(samples), {"actions": str(actions)}
    return Figure(name=name, source="measured", value=value, samples=tuple(samples), labels=labels)


def _by_executor(work: _Layers) -> Callable[[], object]:
    cells, edges = [], {}
    for microbatch in range(MICROBATCHES):
        forward = [f"{chunk}F{microbatch}" for chunk in range(LAYERS)]
        backward = [f"{chunk}B{microbatch}" for chunk in reversed(range(LAYERS))]
        cells += forward + backward
        for way in (forward, backward):
            edges.update({f"{source}>{target}": 1 for source, target in pairwise(way)})
    schedule = PipelineSchedule(
        plan="layers", num_microbatches=MICROBATCHES, rank_of=(0,), chunks=("layer",) * LAYERS, rows=(tuple(cells),),
        edges=edges,
    )  # fmt: skip
    executor = Executor(InProcess(1).transports[0])
    return lambda: executor.run(schedule, work)


def _by_torch() -> Callable[[], object]:
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining.schedules import _Action, _PipelineScheduleRuntime

    work, cpu = _Layers(), torch.device("cpu")
    made = torch.zeros(ROWS, WIDTH, requires_grad=True)
    stages = [
        PipelineStage(layer, chunk, LAYERS, cpu, input_args=(made if chunk else made.detach(),), output_args=(made,))
        for chunk, layer in enumerate(work.layers)
    ]
    runtime = _PipelineScheduleRuntime(
        stages, MICROBATCHES, loss_fn=lambda made, target: (made * target).sum(), scale_grads=False
    )
    actions = [
        _Action.from_str(f"{chunk}{phase}{microbatch}")
        for microbatch in range(MICROBATCHES)
        for phase, order in (("F", range(LAYERS)), ("B", reversed(range(LAYERS))))
        for chunk in order
    ]
    runtime._prepare_schedule_with_comms({0: actions}, format="compute_comms")
    whole = torch.cat(work.inputs)
    return lambda: runtime.step(whole, target=whole)


def _bare() -> Callable[[], object]:
    work = _Layers()
    names = {
        (kind, chunk, microbatch): TaskName(chunk, kind, microbatch)
        for kind in (ActionKind.FORWARD, ActionKind.BACKWARD)
        for chunk in range(LAYERS)
        for microbatch in range(MICROBATCHES)
    }

    def run() -> None:
        for microbatch in range(MICROBATCHES):
            given: Mapping[TaskName, Tensors] = {}
            for chunk in range(LAYERS):
                task = names[ActionKind.FORWARD, chunk, microbatch]
                given = {task: work.forward(task, given)}
            given = {}
            for chunk in reversed(range(LAYERS)):
                given = work.backward(names[ActionKind.BACKWARD, chunk, microbatch], given)

    return run
