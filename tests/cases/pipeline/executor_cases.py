"""Steps at random, lowered, and work whose every value is a number that depends on all that went into it."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from pipeline_cases import Plain, chain, cut_in_pieces, images
from pipeline_oracle import natural

from bench.papers.data_sets import Microbatch
from mosaic.backends.host import HostBackend
from mosaic.pipelining.cuts import partition_by
from mosaic.pipelining.layers import Feed, PipelineModel
from mosaic.pipelining.partition import Request
from mosaic.pipelining.schedule import PipelineSchedule, TaskName, lower
from mosaic.pipelining.task_graph import task_graph, training_chunks
from mosaic.pipelining.tasks import ActionKind, Orders, TaskGraph
from mosaic.ranks.pipeline.executor import Edge, LaunchMode, OnThreads, RankTask
from mosaic.ranks.pipeline.transport import Tensors, TensorSpec, Transport

METHODS = ("separated", "mixed-time", "mixed-v", "parallel", "colocated")
PRIME = 2**31 - 1


def mix(*values: object) -> int:
    """A number that any change of any value changes."""
    found = 7
    for value in values:
        found = (found * 1_000_003 + (value if isinstance(value, int) else mix(*map(ord, str(value))))) % PRIME
    return found


def size_of(edge: Edge) -> int:
    """Elements of what an edge carries: some tasks hand all targets one tensor."""
    return 1 + mix(edge.source if is_for_all(edge.source) else edge) % 5


def is_for_all(source: TaskName) -> bool:
    return source.kind is ActionKind.FORWARD and mix(source) % 2 == 0


def carried(edge: Edge, made: int) -> tuple[int, ...]:
    """The numbers that an edge carries, of a task that made ``made``."""
    return (mix(made, 0 if is_for_all(edge.source) else edge),) * size_of(edge)


def model(chance: random.Random) -> PipelineModel:
    """Up to two encoders before a text model; any layers frozen."""

    def module(name: str, counts: str) -> Plain:
        layers = range(chance.randint(2, 5))
        return Plain(
            name=name,
            unit_ms=tuple(chance.choice([0.25, 1.0, 3.0]) for _ in layers),
            trains=tuple(chance.random() < 0.7 for _ in layers),
            counts=counts,
        )

    names = [pair for pair in (("vision", "images"), ("audio", "audio_s")) if chance.random() < 0.7]
    return PipelineModel(
        modules=(*(module(*pair) for pair in names), module("text", "all")),
        feeds=tuple(Feed(source=name, target="text") for name, _ in names),
    )


def order(graph: TaskGraph, chance: random.Random) -> Orders:
    """Any order that can run: at each point any task whose waits are over."""
    missing = [0] * len(graph.tasks)
    targets: defaultdict[int, list[int]] = defaultdict(list)
    for wait in graph.waits:
        missing[wait.target] += 1
        targets[wait.source].append(wait.target)
    ready = [task for task, count in enumerate(missing) if not count]
    rows: list[list[int]] = [[] for _ in graph.rank_of]
    while ready:
        task = ready.pop(chance.randrange(len(ready)))
        rows[graph.tasks[task].row].append(task)
        for target in targets[task]:
            missing[target] -= 1
            if not missing[target]:
                ready.append(target)
    return tuple(map(tuple, rows))


@dataclass(frozen=True, kw_only=True)
class Step:
    """One step of a model, lowered, and its tasks."""

    schedule: PipelineSchedule
    graph: TaskGraph

    @property
    def num_ranks(self) -> int:
        return self.graph.num_ranks


def step(seed: int, *, num_ranks: int | None = None) -> Step:
    """A random order of a random step of a random model, cut at random."""
    chance = random.Random(seed)
    while True:
        ranks = num_ranks or chance.randint(1, 4)
        drawn, name = model(chance), chance.choice(METHODS)
        step = tuple(
            Microbatch(text_tokens=9, images=chance.randint(0, 4), audio_s=chance.choice([0.0, 1.0, 3.0]))
            for _ in range(chance.randint(1, 4))
        )
        sizes = {module.name: chance.randint(1, 4) for module in drawn.modules if module.name != "text"}
        try:
            request = Request(model=drawn, num_ranks=ranks, microbatches=step, slots_per_rank=4)
            partition = cut_in_pieces(name, request, sizes)
        except ValueError:  # too few layers for so many ranks
            continue
        if partition.num_ranks == ranks:
            break
    graph = task_graph(drawn, partition, step)
    training = set(training_chunks(drawn, partition))
    return Step(schedule=lower(partition, graph, order(graph, chance), training=training), graph=graph)


def on_lanes(transport: Transport, schedule: PipelineSchedule) -> LaunchMode:
    """A thread for each lane of a rank, on slots that need not be cores."""
    slots = [(slot,) for slot in range(schedule.rank_of.count(transport.rank))]
    lanes = HostBackend(len(slots), num_threads=1).open_lanes(slots)
    return OnThreads(lanes, [lanes.lane(one) for one in slots])


def chain_step(num_ranks: int, microbatches: int = 4) -> Step:
    """One chunk a rank, each microbatch through all of them, forwards first."""
    drawn, step = chain(num_ranks), images(*[1] * microbatches)
    partition = partition_by("mixed-time", Request(model=drawn, num_ranks=num_ranks, microbatches=step))
    graph = task_graph(drawn, partition, step)
    forward_first = tuple(
        tuple(sorted(row, key=lambda task: graph.tasks[task].kind is ActionKind.BACKWARD)) for row in natural(graph)
    )
    return Step(schedule=lower(partition, graph, forward_first, training=range(num_ranks)), graph=graph)


def evaluated(graph: TaskGraph) -> dict[TaskName, int]:
    """Returns the result of each task, by a walk of the graph that knows no ranks and no schedule."""
    inputs = defaultdict(list)
    for wait in graph.waits:
        inputs[wait.target].append(wait.source)
    names = [TaskName.of(task) for task in graph.tasks]
    made: dict[int, int] = {}

    def make(index: int) -> int:
        if index not in made:
            name, values = names[index], []
            for source in inputs[index]:
                value = make(source)
                is_data = names[source].kind is name.kind
                values += [(str(names[source]), carried(Edge(names[source], name), value))] if is_data else []
            made[index] = mix(name, *own(name, {names[one]: make(one) for one in inputs[index]}), *values)
        return made[index]

    return {name: make(index) for index, name in enumerate(names)}


def own(name: TaskName, made: Mapping[TaskName, int]) -> tuple[int, ...]:
    """Returns the inputs of a task from other phases of its own chunk and piece: backward takes from forward."""
    return () if name.kind is ActionKind.FORWARD else (made[name.forward],)


@dataclass(kw_only=True)
class NumberWork:
    """Work that makes numbers; of one rank."""

    kept: dict[TaskName, int] = field(default_factory=dict)
    made: dict[TaskName, int] = field(default_factory=dict)
    reduced: dict[int, tuple[TaskName, ...]] = field(default_factory=dict)

    def forward(self, task: RankTask, inputs: Mapping[TaskName, Tensors]) -> dict[TaskName, Tensors]:
        sent = self._make(task, inputs)
        self.kept[task.name] = self.made[task.name]
        return sent

    def backward(self, task: RankTask, gradients: Mapping[TaskName, Tensors]) -> dict[TaskName, Tensors]:
        assert task.name.forward in self.kept
        return self._make(task, gradients)

    def free(self, task: TaskName) -> None:
        del self.kept[task]

    def reduce(self, chunk: int) -> None:
        assert chunk not in self.reduced
        self.reduced[chunk] = tuple(sorted((name for name in tuple(self.made) if name.chunk == chunk), key=str))

    def specs(self, edge: Edge) -> tuple[TensorSpec, ...]:
        return (TensorSpec((size_of(edge),), torch.int64),)

    def _make(self, task: RankTask, given: Mapping[TaskName, Tensors]) -> dict[TaskName, Tensors]:
        name = task.name
        assert name not in self.made
        values = [(str(source), tuple(tensors[0].tolist())) for source, tensors in given.items()]
        self.made[name] = mix(name, *own(name, self.made), *values)
        edges = {target: Edge(name, target) for target in task.targets}
        return {target: (torch.tensor(carried(edge, self.made[name])),) for target, edge in edges.items()}


def no_caption() -> None:
    raise ValueError("no such caption")
