"""The tasks of one step of a partitioned model: each chunk with each piece of each microbatch in each phase.

One microbatch of two images that are two pieces for ``v``, one for ``t``, each on its own rank::

    v    F0.0  F0.1              B0.1  B0.0
    t                F0.0  B0.0

A module processes its part of a microbatch in pieces; a module without a part is skipped, and its successors wait for
its predecessors. Every piece of a module waits for every piece of the modules that feed it, and sends each an equal
share of its output. A piece of a module that feeds nothing has its own loss.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, runtime_checkable

from mosaic.hardware.cluster import Cluster
from mosaic.hardware.link import Link, Message
from mosaic.pipelining.compiled import ActionKind
from mosaic.pipelining.costs import CostCounter, Costs, Strategies
from mosaic.pipelining.partition.backward import Gradients, gradients_of, sources_of
from mosaic.pipelining.partition.partition import Partition
from mosaic.pipelining.partition.request import even_pieces
from mosaic.pipelining.plan import NO_HOST_TIMES, HostTimes
from mosaic.pipelining.tasks import Task, TaskGraph, Wait
from mosaic.pipelining.workload.layers import LayeredModule, PipelineModel
from mosaic.pipelining.workload.microbatch import Microbatch

MAX_TASKS = 2_000_000
"""Most tasks of a step."""

_Place = tuple[int, int]
"""Chunk and piece."""


def task_graph(
    model: PipelineModel,
    partition: Partition,
    microbatches: Sequence[Microbatch],
    *,
    network: Link | Cluster | None = None,
    devices_per_rank: int = 1,
    strategies: Strategies = "keep",
    weights_apart: bool = False,
    limit_bytes: Sequence[int] = (),
    host: HostTimes = NO_HOST_TIMES,
) -> TaskGraph:
    """Returns the tasks of a step.

    Args:
        model: The model.
        partition: Its chunks on ranks.
        microbatches: Microbatches of the step, in the order of group numbers.
        network: Network between ranks; None: messages take no time. In a cluster, rank r is the r-th
            ``devices_per_rank`` devices, which send to those of another rank at the same time.
        devices_per_rank: Devices of one rank: tensor times context parallel.
        strategies: Activation strategies.
        weights_apart: True if backward for weights is a task of its own, which then frees the kept activations.
        limit_bytes: Memory of each rank, 0 for no limit.
        host: Host time of tasks and messages.

    Raises:
        ValueError: ``microbatches`` is empty, the partition is of another model, a time or a number of bytes is
            negative or not finite, a strategy does not exist, or the step has more than ``MAX_TASKS`` tasks.
    """
    if not microbatches:
        raise ValueError("no microbatches; a step has at least one")
    partition.check_covers(model)
    if limit_bytes and len(limit_bytes) != partition.num_ranks:
        raise ValueError(f"limit_bytes has {len(limit_bytes)} ranks; the partition has {partition.num_ranks}")
    rows = partition.rows
    build = _Build(
        model=model,
        partition=partition,
        row_of=[rows.index(chunk.row) for chunk in partition.chunks],
        rank_of=[rank for rank, _ in rows],
        links=_Links(network=network, devices_per_rank=devices_per_rank),
        counter=CostCounter(
            modules={module.name: module for module in model.modules},
            strategies=strategies,
            weights_apart=weights_apart,
        ),
        weights_apart=weights_apart,
        host=host,
    )
    for index, microbatch in enumerate(microbatches):
        build.add(index, microbatch)
    return TaskGraph(
        tasks=build.finish(),
        waits=tuple(build.waits),
        rank_of=tuple(build.rank_of),
        base_bytes=base_bytes(model, partition),
        limit_bytes=tuple(limit_bytes),
    )


def base_bytes(model: PipelineModel, partition: Partition) -> tuple[int, ...]:
    """Returns the constant bytes of each rank: weights, and gradients and optimizer state of trained layers."""
    modules = {module.name: module for module in model.modules}
    num_bytes = [0] * partition.num_ranks
    for chunk in partition.chunks:
        num_bytes[chunk.rank] += sum(modules[part.module].state_bytes(part.first, part.count) for part in chunk.parts)
    return tuple(num_bytes)


def training_chunks(model: PipelineModel, partition: Partition) -> tuple[int, ...]:
    """Returns the chunks with trained weights, whose gradients are reduced."""
    trains = {module.name: module.trains for module in model.modules}
    return tuple(
        index
        for index, chunk in enumerate(partition.chunks)
        if any(any(trains[part.module][part.first : part.end]) for part in chunk.parts)
    )


@runtime_checkable
class KnowsOutput(Protocol):
    """A module whose output differs in size from the tensors between its layers."""

    def output_bytes(self, microbatch: Microbatch, units: int) -> int:
        """Returns the bytes that leave one rank."""


def _output_bytes(module: LayeredModule, microbatch: Microbatch, units: int) -> int:
    if isinstance(module, KnowsOutput):
        return module.output_bytes(microbatch, units)
    return module.boundary_bytes(microbatch, units)


@dataclass(frozen=True, kw_only=True)
class _Links:
    """Times of messages between ranks, each computed once."""

    network: Link | Cluster | None
    devices_per_rank: int
    known: dict[tuple[int, int, int], int] = field(default_factory=dict)

    def lag_ns(self, source: int, target: int, num_bytes: int) -> int:
        if self.network is None or source == target:
            return 0
        key = source, target, num_bytes
        if key not in self.known:
            per = self.devices_per_rank
            messages = [
                Message(source=source * per + at, target=target * per + at, num_bytes=num_bytes) for at in range(per)
            ]
            self.known[key] = round(self.network.exchange_ms(messages) * 1e6)
        return self.known[key]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Flow:
    """Dataflow through the chunks of microbatches with the same modules."""

    gradients: Mapping[str, Gradients]
    modules: dict[int, tuple[str, ...]]
    """Modules that each working chunk runs, in the order of chunks."""
    feeds: Mapping[int, tuple[tuple[int, str], ...]]
    """Chunks that feed each of them, each with the module of the output."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pass:
    """State of one microbatch."""

    index: int
    microbatch: Microbatch
    flow: _Flow
    pieces: Mapping[str, tuple[int, ...]]
    """Units of each module's pieces."""
    groups: dict[str, int] = field(default_factory=dict)
    """Group of each module; a chunk of several modules belongs to the last one's."""
    costs: dict[_Place, Costs] = field(default_factory=dict)
    forward: dict[_Place, int] = field(default_factory=dict)

    def units(self, chunk: int) -> tuple[int, ...]:
        """Returns the units of the chunk's pieces."""
        return self.pieces[self.flow.modules[chunk][0]]


@dataclass(frozen=True, kw_only=True)
class _Build:
    """A task graph under construction, microbatch after microbatch."""

    model: PipelineModel
    partition: Partition
    row_of: Sequence[int]
    """Row of each chunk."""
    rank_of: Sequence[int]
    """Rank of each row."""
    links: _Links
    counter: CostCounter
    weights_apart: bool
    host: HostTimes
    tasks: list[Task] = field(default_factory=list)
    waits: list[Wait] = field(default_factory=list)
    posts: Counter[int] = field(default_factory=Counter)
    """Number of messages of each task."""
    flows: dict[frozenset[str], _Flow] = field(default_factory=dict)
    numbers: Iterator[int] = field(default_factory=itertools.count)
    """Numbers of groups."""

    def add(self, index: int, microbatch: Microbatch) -> None:
        """Adds the tasks of one microbatch: its forwards in the order of chunks, then its backwards in reverse."""
        units = {name: module.units(microbatch) for name, module in self.counter.modules.items()}
        present = {name: count for name, count in units.items() if count}
        if not present:
            raise ValueError(
                f"microbatch {index}, {microbatch}, passes through no module; leave it out, or give it some modality"
            )
        passed = _Pass(
            index=index,
            microbatch=microbatch,
            flow=self._flow(frozenset(present)),
            pieces={name: even_pieces(count, self.partition.sizes.get(name, count)) for name, count in present.items()},
        )
        self._add_forward(passed)
        self._add_backward(passed)
        if len(self.tasks) > MAX_TASKS:
            raise ValueError(
                f"{len(self.tasks)} tasks by microbatch {index}; a step has at most {MAX_TASKS}: use larger "
                "sub-microbatches, or fewer chunks"
            )

    def finish(self) -> tuple[Task, ...]:
        """Returns all tasks, with the time to post their messages."""
        for task in self.posts if self.host.post_ns else ():
            time_ns = self.tasks[task].time_ns + self.posts[task] * self.host.post_ns
            self.tasks[task] = replace(self.tasks[task], time_ns=time_ns)
        return tuple(self.tasks)

    def _add_forward(self, passed: _Pass) -> None:
        for chunk, names in passed.flow.modules.items():
            for piece, count in enumerate(passed.units(chunk)):
                pair = chunk, passed.index, piece
                own = self.partition.chunks[chunk]
                cost = self.counter.costs(own, passed.flow.gradients, passed.microbatch, count, pair)
                passed.costs[chunk, piece] = cost
                works = cost.workspace_bytes
                takes = cost.kept_bytes + works
                task = self._task(passed, ActionKind.FORWARD, (chunk, piece), cost.forward_ns, takes, works)
                passed.forward[chunk, piece] = task
                for source, size in self._inputs(passed, chunk, piece, names):
                    self._wait(passed.forward[source], task, size)

    def _add_backward(self, passed: _Pass) -> None:
        gradients: dict[_Place, list[tuple[int, int]]] = {}
        for chunk, names in reversed(passed.flow.modules.items()):
            for piece in reversed(range(len(passed.units(chunk)))):
                cost = passed.costs[chunk, piece]
                if not cost.has_backward:
                    continue
                is_apart = self.weights_apart and cost.has_weights
                time_ns = cost.backward_ns + (0 if is_apart else cost.weights_ns)
                at = chunk, piece
                works = cost.workspace_bytes
                left = works - cost.remade_bytes  # recomputed activations stay until the weights have their gradients
                frees = left if is_apart else works + cost.kept_bytes
                task = self._task(passed, ActionKind.BACKWARD, at, time_ns, works, frees)
                self._wait(passed.forward[at], task, 0)
                for source, size in gradients.get(at, ()):
                    self._wait(source, task, size)
                for fed, size in self._inputs(passed, chunk, piece, names):
                    if passed.costs[fed].has_backward:
                        gradients.setdefault(fed, []).append((task, size))
                if is_apart:
                    frees = works + cost.kept_bytes
                    apart = self._task(passed, ActionKind.WEIGHTS, at, cost.weights_ns, left, frees)
                    self._wait(task, apart, 0)

    def _inputs(self, passed: _Pass, chunk: int, piece: int, names: Sequence[str]) -> Iterable[tuple[_Place, int]]:
        """Returns the source and the bytes, summed over modules, of each input of a chunk's piece."""
        sizes: dict[_Place, int] = {}
        for source, name in passed.flow.feeds[chunk]:
            module = self.counter.modules[name]
            units = passed.pieces[name]
            if name in names:  # within a module, each piece by itself
                sent = [(piece, module.boundary_bytes(passed.microbatch, units[piece]))]
            else:
                share = len(passed.units(chunk))
                sent = [(at, _output_bytes(module, passed.microbatch, own) // share) for at, own in enumerate(units)]
            for at, size in sent:
                sizes[source, at] = sizes.get((source, at), 0) + size
        return sizes.items()

    def _task(self, passed: _Pass, kind: ActionKind, at: _Place, time_ns: int, takes: int, frees: int) -> int:
        chunk, piece = at
        names = passed.flow.modules[chunk]
        parts = self.partition.chunks[chunk].parts
        if names[-1] not in passed.groups:
            passed.groups[names[-1]] = next(self.numbers)
        task = Task(
            row=self.row_of[chunk],
            kind=kind,
            parts=parts if len(names) == len(parts) else tuple(part for part in parts if part.module in names),
            microbatch=passed.index,
            piece=piece,
            chunk=chunk,
            time_ns=time_ns + (self.host.task_ns if kind is ActionKind.FORWARD else 0),
            group=passed.groups[names[-1]],
            takes_bytes=takes,
            frees_bytes=frees,
        )
        self.tasks.append(task)
        return len(self.tasks) - 1

    def _wait(self, source: int, target: int, num_bytes: int) -> None:
        ranks, tasks = self.rank_of, self.tasks
        ends = ranks[tasks[source].row], ranks[tasks[target].row]
        lag_ns = self.links.lag_ns(*ends, num_bytes)
        if num_bytes and ends[0] != ends[1]:
            lag_ns += self.host.message_ns
            self.posts.update((source, target))
        self.waits.append(Wait(source=source, target=target, lag_ns=lag_ns, num_bytes=num_bytes))

    def _flow(self, present: frozenset[str]) -> _Flow:
        if present in self.flows:
            return self.flows[present]
        last: dict[str, int] = {}
        sources = sources_of(self.model, present)
        modules: dict[int, tuple[str, ...]] = {}
        feeds: dict[int, tuple[tuple[int, str], ...]] = {}
        for index, chunk in enumerate(self.partition.chunks):
            names = tuple(part.module for part in chunk.parts if part.module in present)
            inputs = []
            for name in names:
                before = (name,) if name in last else sources[name]
                inputs += [(last[source], source) for source in before if last[source] != index]
                last[name] = index
            if names:
                modules[index], feeds[index] = names, tuple(dict.fromkeys(inputs))
        self.flows[present] = _Flow(gradients=gradients_of(self.model, present), modules=modules, feeds=feeds)
        return self.flows[present]
