"""Costs of one chunk with one piece of a microbatch: nanoseconds and bytes of each phase.

The ranks of a pipeline for its planner: devices, memory and network.

The tasks of one step of a partitioned model: each chunk with each piece of each microbatch in each phase.

One microbatch of two images that are two pieces for ``v``, one for ``t``, each on its own rank::

    v    F0.0  F0.1              B0.1  B0.0
    t                F0.0  B0.0

A module processes its part of a microbatch in pieces; a module without a part is skipped, and its successors wait for
its predecessors. Every piece of a module waits for every piece of the modules that feed it, and sends each an equal
share of its output. A piece of a module that feeds nothing has its own loss.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, runtime_checkable

from mosaic.hardware import Cluster, Link, Message
from mosaic.pipelining.layers import Layer, LayeredModule, Microbatch, PipelineModel, Strategy
from mosaic.pipelining.partition import (
    Chunk,
    Gradients,
    Partition,
    Request,
    even_pieces,
    gradients_of,
    layer_ms,
    sources_of,
    strategy_of,
)
from mosaic.pipelining.rank_hardware import Collective, RankHardware
from mosaic.pipelining.tasks import ActionKind, Task, TaskGraph, Wait


@dataclass(frozen=True, slots=True, kw_only=True)
class HostTimes:
    """Host time of one task or message, beside layers and the network.

    Raises:
        ValueError: A time is negative.
    """

    task_ns: int = 0
    """Time of a forward beside its layers: the model's own Python around them."""
    post_ns: int = 0
    """Time of a task for each message that it sends or receives."""
    message_ns: int = 0
    """Latency of a message beside the network's."""

    def __post_init__(self) -> None:
        if min(self.task_ns, self.post_ns, self.message_ns) < 0:
            raise ValueError(f"{self}; use 0 or more nanoseconds")


NO_HOST_TIMES = HostTimes()


PairKey = tuple[int, int, int]
"""A forward and its backward: chunk, microbatch, piece."""

Strategies = str | Mapping[PairKey, tuple[int, ...]]
"""One name for all layers that have it; or the strategy index of each layer of a pair, by default the first."""


@runtime_checkable
class Shareable(Protocol):
    """A module with times of its layers on a share of a rank."""

    def on_share(self, share: float) -> LayeredModule:
        """Returns the module on a share of its ranks' SMs."""


def on_lane(module: LayeredModule, share: float) -> tuple[LayeredModule, float]:
    """Returns a module on a lane, and its slowdown: in proportion to the share if it is not ``Shareable``."""
    if share == 1:
        return module, 1.0
    return (module.on_share(share), 1.0) if isinstance(module, Shareable) else (module, 1 / share)


LayerMemory = tuple[int, int, int]
"""Bytes of a layer: kept by its strategy, kept by ``keep``, and its workspace."""


def workspace_bytes(layers: Sequence[LayerMemory], *, weights_apart: bool) -> int:
    """Returns the bytes of a chunk above its kept ones, while forward or backward runs.

    A layer has all its activations while it runs, in either phase, beside the kept ones of earlier layers. Recomputed
    activations stay until the end of backward for weights, if that is apart.
    """
    if weights_apart:
        return remade_bytes(layers) + max((works for _, _, works in layers), default=0)
    peak = before = 0
    for kept_bytes, whole, works in layers:
        peak = max(peak, before + max(kept_bytes, whole) + works)
        before += kept_bytes
    return peak - before if peak > before else 0


def remade_bytes(layers: Sequence[LayerMemory]) -> int:
    """Returns the bytes that backward recomputes."""
    return sum(max(0, whole - kept_bytes) for kept_bytes, whole, _ in layers)


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Costs of one chunk with one piece."""

    forward_ns: int
    """Forward."""
    backward_ns: int
    """Backward for inputs, including the time of strategies."""
    weights_ns: int
    """Backward for weights."""
    kept_bytes: int
    """From the start of forward to the end of backward; 0 without one."""
    workspace_bytes: int
    """While forward or backward runs, above the kept bytes; see ``workspace_bytes``."""
    remade_bytes: int
    """The part that backward recomputes and holds until the end of backward for weights, if that is apart."""
    has_backward: bool
    """True if any of its layers computes gradients."""
    has_weights: bool
    """True if any of its layers trains."""


@dataclass(frozen=True, kw_only=True)
class CostCounter:
    """Counts costs, equal ones once."""

    modules: Mapping[str, LayeredModule]
    """By name."""
    strategies: Strategies
    """Activation strategies."""
    weights_apart: bool = False
    """True if backward for weights is a task of its own."""
    known: dict[object, Costs] = field(default_factory=dict)
    """Counted costs."""
    layers: dict[object, tuple[Layer, ...]] = field(default_factory=dict)
    """Layers of modules."""

    def costs(
        self, chunk: Chunk, gradients: Mapping[str, Gradients], microbatch: Microbatch, units: int, pair: PairKey
    ) -> Costs:
        """Returns the costs of a chunk with a piece of ``units``; ``gradients`` has the modules that do not skip it."""
        chosen = self.strategies if isinstance(self.strategies, str) else self.strategies.get(pair, ())
        key = (id(gradients), pair[0], microbatch, units, chosen)
        if key not in self.known:
            self.known[key] = self._count(chunk, gradients, microbatch, units, chosen)
        return self.known[key]

    def _count(
        self,
        chunk: Chunk,
        gradients: Mapping[str, Gradients],
        microbatch: Microbatch,
        units: int,
        chosen: str | tuple[int, ...],
    ) -> Costs:
        times: list[tuple[float, ...]] = []
        memory: list[LayerMemory] = []
        has_backward = has_weights = False
        place = 0
        for part in chunk.parts:
            place += part.count
            if part.module not in gradients:
                continue
            own = gradients[part.module]
            # a chunk of several modules runs whole microbatches: all units of each module
            count = units if len(chunk.parts) == 1 else self.modules[part.module].units(microbatch)
            layers, slower = self._layers(part.module, chunk.share, microbatch, count)
            for at, layer in enumerate(layers[part.first : part.end]):
                index = part.first + at
                strategy = _chosen(layer, chosen, place - part.count + at, part.module)
                times_ms = layer_ms(layer, strategy, inputs=own.inputs[index], weights=own.weights[index])
                times.append(tuple(time * slower for time in times_ms))
                kept_and_whole = strategy.kept_bytes, layer.strategies[0].kept_bytes
                memory.append((*(kept_and_whole if own.any_of(index) else (0, 0)), layer.workspace_bytes))
                has_backward |= own.any_of(index)
                has_weights |= own.weights[index]
        if (least := min(map(min, memory))) < 0:
            raise ValueError(f"{chunk}: a layer keeps or works in {least} bytes; use 0 or more")
        forward, backward, weights = (_whole_ns(phase, chunk) for phase in zip(*times, strict=True))
        return Costs(
            forward_ns=forward,
            backward_ns=backward,
            weights_ns=weights,
            kept_bytes=sum(layer[0] for layer in memory),
            workspace_bytes=workspace_bytes(memory, weights_apart=self.weights_apart),
            remade_bytes=remade_bytes(memory) if self.weights_apart else 0,
            has_backward=has_backward,
            has_weights=has_weights,
        )

    def _layers(self, name: str, share: float, microbatch: Microbatch, units: int) -> tuple[tuple[Layer, ...], float]:
        module, slower = on_lane(self.modules[name], share)
        key = name, share, microbatch, units
        if key not in self.layers:
            self.layers[key] = module.layers(microbatch, units)
        return self.layers[key], slower


def _chosen(layer: Layer, chosen: str | tuple[int, ...], place: int, module: str) -> Strategy:
    if isinstance(chosen, str):
        return strategy_of(layer, chosen)
    index = chosen[place] if place < len(chosen) else 0
    if not 0 <= index < len(layer.strategies):
        raise ValueError(f"strategy {index} for a layer of {module!r}, which has {len(layer.strategies)}; count from 0")
    return layer.strategies[index]


def _whole_ns(times_ms: tuple[float, ...], chunk: Chunk) -> int:
    invalid = next((time for time in times_ms if not 0 <= time < math.inf), None)  # also catches NaN
    if invalid is not None:
        raise ValueError(f"a layer of {chunk} takes {invalid} ms; a time is finite, 0 or more")
    return round(math.fsum(times_ms) * 1e6)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSpace:
    """Ranks of the planner.

    Raises:
        ValueError: ``devices_per_rank`` is below 1, or the limit is negative.
    """

    network: Link | Cluster | None = None
    """Network between ranks; None: messages take no time."""
    devices_per_rank: int = 1
    """Devices of one rank: tensor times context parallel."""
    limit_bytes: int = 0
    """Memory of each of a rank's devices; 0: no limit."""
    host: HostTimes = NO_HOST_TIMES
    """Host time of tasks and messages."""

    def __post_init__(self) -> None:
        if self.devices_per_rank < 1 or self.limit_bytes < 0:
            raise ValueError(
                f"devices_per_rank={self.devices_per_rank}, limit_bytes={self.limit_bytes}; a rank has a device at "
                "least, and a limit is 0 (none) or more bytes"
            )

    def tasks(
        self,
        request: Request,
        partition: Partition,
        microbatches: Sequence[Microbatch],
        *,
        strategies: Strategies = "keep",
        weights_apart: bool = False,
    ) -> TaskGraph:
        """Returns the tasks of a step on these ranks; see ``task_graph``."""
        return task_graph(
            request.model,
            partition,
            microbatches,
            network=self.network,
            devices_per_rank=self.devices_per_rank,
            strategies=strategies,
            weights_apart=weights_apart,
            host=self.host,
            limit_bytes=(self.limit_bytes,) * partition.num_ranks if self.limit_bytes else (),
        )


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
