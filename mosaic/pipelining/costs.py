"""Costs of one chunk with one piece of a microbatch: nanoseconds and bytes of each phase."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from mosaic.pipelining.partition.backward import Gradients, layer_ms, strategy_of
from mosaic.pipelining.partition.partition import Chunk
from mosaic.pipelining.workload.layers import Layer, LayeredModule, Strategy
from mosaic.pipelining.workload.microbatch import Microbatch

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
