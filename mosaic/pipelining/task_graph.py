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
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from mosaic.hardware import Cluster, Link, Message
from mosaic.pipelining.layers import Layer, Microbatch, PipelineModel, Strategy, scaled_layer
from mosaic.pipelining.partition import (
    Chunk,
    InputGradients,
    Partition,
    even_pieces,
    input_gradients,
    layer_ms,
    sources_of,
    strategy_of,
)
from mosaic.pipelining.rank_hardware import RankHardware
from mosaic.pipelining.tasks import ActionKind, PairKey, Task, TaskGraph, Wait

MAX_TASKS = 2_000_000

Strategies = str | Mapping[PairKey, tuple[int, ...]]
"""One name for all layers that have it; or the strategy index of each layer of a pair, by default the first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSpace:
    """The ranks of a pipeline: devices, memory and network.

    Raises:
        ValueError: ``devices_per_rank`` is below 1, or the limit is negative.
    """

    network: Link | Cluster | None = None
    """Network between ranks; None: messages take no time. In a cluster, rank r is the r-th ``devices_per_rank``
    devices, which send to those of another rank at the same time."""
    devices_per_rank: int | tuple[int, ...] = 1
    """Devices of one rank: tensor times context parallel; a number for each rank where they differ."""
    limit_bytes: int = 0
    """Memory of each of a rank's devices; 0: no limit."""

    def __post_init__(self) -> None:
        counts = self.devices_per_rank
        if (counts if isinstance(counts, int) else min(counts)) < 1 or self.limit_bytes < 0:
            raise ValueError(
                f"devices_per_rank={self.devices_per_rank}, limit_bytes={self.limit_bytes}; a rank has a device at "
                "least, and a limit is 0 (none) or more bytes"
            )

    def devices_of(self, rank: int) -> range:
        counts = self.devices_per_rank
        if isinstance(counts, int):
            return range(rank * counts, (rank + 1) * counts)
        first = sum(counts[:rank])
        return range(first, first + counts[rank])


def task_graph(
    model: PipelineModel,
    partition: Partition,
    microbatches: Sequence[Microbatch],
    space: RankSpace | None = None,
    *,
    strategies: Strategies = "keep",
    weights_apart: bool = False,
) -> TaskGraph:
    """Returns the tasks of a step.

    Backward for weights may be a task of its own (``weights_apart``), which then frees the kept activations.

    Raises:
        ValueError: ``microbatches`` is empty, the partition is of another model, a time or a number of bytes is
            negative, or the step has more than ``MAX_TASKS`` tasks.
    """
    if not microbatches:
        raise ValueError("no microbatches; a step has at least one")
    partition.check_covers(model)
    space = space or RankSpace()
    builder = _StepBuilder(model, partition, space, strategies, weights_apart=weights_apart)
    for index, microbatch in enumerate(microbatches):
        builder.add(index, microbatch)
    state_bytes = {module.name: module.state_bytes for module in model.modules}
    base_bytes = [0] * partition.num_ranks
    for chunk in partition.chunks:
        base_bytes[chunk.rank] += sum(state_bytes[part.module](part.first, part.count) for part in chunk.parts)
    return TaskGraph(
        tasks=tuple(builder.tasks),
        waits=tuple(builder.waits),
        rank_of=tuple(builder.rank_of),
        base_bytes=tuple(base_bytes),
        limit_bytes=(space.limit_bytes,) * partition.num_ranks if space.limit_bytes else (),
        layers=builder.layers,
    )


def training_chunks(model: PipelineModel, partition: Partition) -> tuple[int, ...]:
    """Returns the chunks with trained weights, whose gradients are reduced."""
    trains = {module.name: module.trains for module in model.modules}
    return tuple(
        index
        for index, chunk in enumerate(partition.chunks)
        if any(any(trains[part.module][part.first : part.end]) for part in chunk.parts)
    )


_KEEPS_NOTHING = (Strategy(name="keep", kept_bytes=0),)
_SKIPPED = Layer(forward_ms=0.0, backward_ms=0.0, weights_ms=0.0, strategies=_KEEPS_NOTHING)

LayerMemory = tuple[int, int, int]
"""Bytes of a layer: kept by its strategy, kept by ``keep``, and its workspace."""


def workspace_bytes(layers: Sequence[LayerMemory]) -> int:
    """Returns the bytes of a chunk above its kept ones, while forward or backward runs.

    A layer has all its activations while it runs, in either phase, beside the kept ones of earlier layers.
    """
    peak = before = 0
    for kept_bytes, whole, works in layers:
        peak = max(peak, before + max(kept_bytes, whole) + works)
        before += kept_bytes
    return max(0, peak - before)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Costs:
    forward_ns: int
    backward_ns: int
    """Backward for inputs, including the time of strategies."""
    weights_ns: int
    kept_bytes: int
    """From the start of forward to the end of backward; 0 without one."""
    workspace_bytes: int
    """While forward or backward runs, above the kept bytes; see ``workspace_bytes``."""
    remade_bytes: int
    """The part that backward recomputes and holds until the end of backward for weights, if that is apart."""
    has_backward: bool
    has_weights: bool
    layers: tuple[Layer, ...]
    """The layers, of which those without a backward keep nothing and skipped ones do nothing."""


def _chosen(layer: Layer, chosen: str | tuple[int, ...], place: int) -> Strategy:
    if isinstance(chosen, str):
        return strategy_of(layer, chosen)
    return layer.strategies[chosen[place] if place < len(chosen) else 0]


_Place = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Flow:
    """Dataflow through the chunks of microbatches with the same modules."""

    gradients: InputGradients
    modules: dict[int, tuple[str, ...]]
    """Modules that each working chunk runs, in the order of chunks."""
    feeds: Mapping[int, tuple[tuple[int, str], ...]]
    """Chunks that feed each of them, each with the module of the output."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pass:
    index: int
    microbatch: Microbatch
    flow: _Flow
    pieces: Mapping[str, tuple[int, ...]]
    """Units of each module's pieces."""
    groups: dict[str, int] = field(default_factory=dict)
    """Group of each module; a chunk of several modules belongs to the last one's."""
    costs: dict[_Place, _Costs] = field(default_factory=dict)
    forward: dict[_Place, int] = field(default_factory=dict)

    def units(self, chunk: int) -> tuple[int, ...]:
        return self.pieces[self.flow.modules[chunk][0]]


class _StepBuilder:
    def __init__(
        self,
        model: PipelineModel,
        partition: Partition,
        space: RankSpace,
        strategies: Strategies,
        *,
        weights_apart: bool,
    ) -> None:
        self.model, self.partition, self.space, self.weights_apart = model, partition, space, weights_apart
        self.modules = {module.name: module for module in model.modules}
        self.strategies = strategies
        self._known_costs: dict[object, _Costs] = {}
        self._known_layers: dict[object, tuple[Layer, ...]] = {}
        self.row_of = [partition.rows.index(chunk.row) for chunk in partition.chunks]
        self.rank_of = [rank for rank, _ in partition.rows]
        self.tasks: list[Task] = []
        self.waits: list[Wait] = []
        self.layers: dict[PairKey, tuple[Layer, ...]] = {}
        self._groups = itertools.count()
        self._flows: dict[frozenset[str], _Flow] = {}
        self._lags_ns: dict[tuple[int, int, int], int] = {}

    def add(self, index: int, microbatch: Microbatch) -> None:
        units = {name: module.units(microbatch) for name, module in self.modules.items()}
        if not any(units.values()):
            raise ValueError(f"microbatch {index} passes through no module: {microbatch}; leave it out")
        sizes = self.partition.sizes
        current = _Pass(
            index=index,
            microbatch=microbatch,
            flow=self._flow(frozenset(name for name, count in units.items() if count)),
            pieces={name: even_pieces(count, sizes.get(name, count)) for name, count in units.items() if count},
        )
        self._add_forward(current)
        self._add_backward(current)
        if len(self.tasks) > MAX_TASKS:
            raise ValueError(
                f"{len(self.tasks)} tasks by microbatch {index}; a step has at most {MAX_TASKS}: use larger "
                "sub-microbatches, or fewer chunks"
            )

    def _add_forward(self, current: _Pass) -> None:
        for chunk, names in current.flow.modules.items():
            for piece, count in enumerate(current.units(chunk)):
                pair = chunk, current.index, piece
                gradients = current.flow.gradients
                cost = self._costs(self.partition.chunks[chunk], gradients, current.microbatch, count, pair)
                current.costs[chunk, piece] = cost
                if cost.has_backward:
                    self.layers[pair] = cost.layers
                works = cost.workspace_bytes
                at = chunk, piece
                task = self._task(current, ActionKind.FORWARD, at, cost.forward_ns, cost.kept_bytes + works, works)
                current.forward[at] = task
                for source, size in self._inputs(current, chunk, piece, names):
                    self._wait(current.forward[source], task, size)

    def _costs(
        self, chunk: Chunk, gradients: InputGradients, microbatch: Microbatch, units: int, pair: PairKey
    ) -> _Costs:
        """Returns the costs of a chunk with a piece of ``units``; ``gradients`` has the modules that do not skip it."""
        chosen = self.strategies if isinstance(self.strategies, str) else self.strategies.get(pair, ())
        key = (id(gradients), pair[0], microbatch, units, chosen)
        if key not in self._known_costs:
            self._known_costs[key] = self._count(chunk, gradients, microbatch, units, chosen)
        return self._known_costs[key]

    def _count(
        self,
        chunk: Chunk,
        gradients: InputGradients,
        microbatch: Microbatch,
        units: int,
        chosen: str | tuple[int, ...],
    ) -> _Costs:
        layers: list[Layer] = []
        times: list[tuple[float, float, float]] = []
        memory: list[LayerMemory] = []
        has_backward = has_weights = False
        for part in chunk.parts:
            if part.module not in gradients:
                layers += [_SKIPPED] * part.count
                continue
            # a chunk of several modules runs whole microbatches: all units of each module
            count = units if len(chunk.parts) == 1 else self.modules[part.module].units(microbatch)
            of_module = self._layers(part.module, chunk.share, microbatch, count)
            for at in range(part.first, part.end):
                layer, inputs = of_module[at], gradients[part.module][at]
                weights = self.modules[part.module].trains[at]
                if not inputs and not weights:
                    layer = replace(layer, strategies=_KEEPS_NOTHING)
                strategy = _chosen(layer, chosen, len(layers))
                times.append(layer_ms(layer, strategy, inputs=inputs, weights=weights))
                works = layer.workspace_bytes + strategy.workspace_bytes
                memory.append((strategy.kept_bytes, layer.strategies[0].kept_bytes, works))
                layers.append(layer)
                has_backward |= inputs or weights
                has_weights |= weights
        forward, backward, weights_ns = (round(math.fsum(phase) * 1e6) for phase in zip(*times, strict=True))
        # recomputed activations stay until the end of backward for weights, if that is apart
        remade = sum(max(0, whole - kept) for kept, whole, _ in memory) if self.weights_apart else 0
        works = remade + max(own for *_, own in memory) if self.weights_apart else workspace_bytes(memory)
        return _Costs(
            forward_ns=forward,
            backward_ns=backward,
            weights_ns=weights_ns,
            kept_bytes=sum(kept_bytes for kept_bytes, _, _ in memory),
            workspace_bytes=works,
            remade_bytes=remade,
            has_backward=has_backward,
            has_weights=has_weights,
            layers=tuple(layers),
        )

    def _layers(self, name: str, share: float, microbatch: Microbatch, units: int) -> tuple[Layer, ...]:
        """Returns a module's layers on a share of its rank, whose speed is in proportion to the share."""
        key = name, share, microbatch, units
        if key not in self._known_layers:
            layers = self.modules[name].layers(microbatch, units)
            self._known_layers[key] = tuple(scaled_layer(layer, 1 / share, 1) for layer in layers)
        return self._known_layers[key]

    def _add_backward(self, current: _Pass) -> None:
        gradients: dict[_Place, list[tuple[int, int]]] = {}
        for chunk, names in reversed(current.flow.modules.items()):
            for piece in reversed(range(len(current.units(chunk)))):
                at = chunk, piece
                cost = current.costs[at]
                if not cost.has_backward:
                    continue
                is_apart = self.weights_apart and cost.has_weights
                time_ns = cost.backward_ns + (0 if is_apart else cost.weights_ns)
                works = cost.workspace_bytes
                left = works - cost.remade_bytes  # recomputed activations stay until the weights have their gradients
                frees = left if is_apart else works + cost.kept_bytes
                task = self._task(current, ActionKind.BACKWARD, at, time_ns, works, frees)
                self._wait(current.forward[at], task, 0)
                for source, size in gradients.get(at, ()):
                    self._wait(source, task, size)
                for fed, size in self._inputs(current, chunk, piece, names):
                    if current.costs[fed].has_backward:
                        gradients.setdefault(fed, []).append((task, size))
                if is_apart:
                    frees = works + cost.kept_bytes
                    apart = self._task(current, ActionKind.WEIGHTS, at, cost.weights_ns, left, frees)
                    self._wait(task, apart, 0)

    def _inputs(self, current: _Pass, chunk: int, piece: int, names: Sequence[str]) -> Iterable[tuple[_Place, int]]:
        """Returns the source and the bytes, summed over modules, of each input of a chunk's piece."""
        sizes = Counter[_Place]()
        for source, name in current.flow.feeds[chunk]:
            module, units = self.modules[name], current.pieces[name]
            if name in names:  # within a module, each piece by itself
                sizes[source, piece] += module.boundary_bytes(current.microbatch, units[piece])
                continue
            for at, count in enumerate(units):
                sizes[source, at] += module.output_bytes(current.microbatch, count) // len(current.units(chunk))
        return sizes.items()

    def _task(self, current: _Pass, kind: ActionKind, at: _Place, time_ns: int, takes: int, frees: int) -> int:
        chunk, piece = at
        names = current.flow.modules[chunk]
        parts = self.partition.chunks[chunk].parts
        if names[-1] not in current.groups:
            current.groups[names[-1]] = next(self._groups)
        task = Task(
            row=self.row_of[chunk],
            kind=kind,
            parts=parts if len(names) == len(parts) else tuple(part for part in parts if part.module in names),
            microbatch=current.index,
            piece=piece,
            chunk=chunk,
            time_ns=time_ns,
            group=current.groups[names[-1]],
            takes_bytes=takes,
            frees_bytes=frees,
        )
        self.tasks.append(task)
        return len(self.tasks) - 1

    def _wait(self, source: int, target: int, num_bytes: int) -> None:
        ranks = self.rank_of[self.tasks[source].row], self.rank_of[self.tasks[target].row]
        lag_ns = self._lag_ns(*ranks, num_bytes)
        self.waits.append(Wait(source=source, target=target, lag_ns=lag_ns, num_bytes=num_bytes))

    def _lag_ns(self, source: int, target: int, num_bytes: int) -> int:
        network = self.space.network
        if network is None or source == target:
            return 0
        key = source, target, num_bytes
        if key not in self._lags_ns:
            senders = self.space.devices_of(source)
            messages = [
                Message(source=senders[at % len(senders)], target=receiver, num_bytes=num_bytes)
                for at, receiver in enumerate(self.space.devices_of(target))
            ]
            self._lags_ns[key] = round(network.exchange_ms(messages) * 1e6)
        return self._lags_ns[key]

    def _flow(self, present: frozenset[str]) -> _Flow:
        if present in self._flows:
            return self._flows[present]
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
        self._flows[present] = _Flow(gradients=input_gradients(self.model, present), modules=modules, feeds=feeds)
        return self._flows[present]


GRADIENT_BYTES = 4
"""Bytes of a parameter's gradient."""


def gradient_sums_ms(machine: RankHardware, model: PipelineModel, partition: Partition) -> float:
    """Returns the time of the largest rank's all-reduce of gradients over its data and context ranks."""
    modules = {module.name: module for module in model.modules}
    trained = [0] * partition.num_ranks
    for chunk in partition.chunks:
        for part in chunk.parts:
            module = modules[part.module]
            own = (at for at in range(part.first, part.end) if module.trains[at])
            trained[chunk.rank] += sum(module.num_parameters(at, 1) for at in own)
    sum_bytes = GRADIENT_BYTES * max(trained) // machine.degrees.tensor
    return 2 * machine.gather_ns(sum_bytes, "data") / 1e6
