"""The layers of each forward with its backward, with their strategies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from mosaic.graph import Part
from mosaic.pipelining.costs import PairKey, on_lane
from mosaic.pipelining.partition.backward import Gradients, gradients_of
from mosaic.pipelining.partition.partition import Chunk, Partition
from mosaic.pipelining.partition.sizes import even_pieces
from mosaic.pipelining.workload.layers import Layer, LayeredModule, PipelineModel, Strategy
from mosaic.pipelining.workload.microbatch import Microbatch

_KEEPS_NOTHING = Strategy(name="keep", kept_bytes=0)
_SKIPPED = Layer(forward_ms=0.0, backward_ms=0.0, weights_ms=0.0, strategies=(_KEEPS_NOTHING,))


def pair_layers(
    model: PipelineModel, partition: Partition, microbatches: Sequence[Microbatch]
) -> Mapping[PairKey, tuple[Layer, ...]]:
    """Returns the layers of each pair with a backward, in the order of ``Strategies``.

    A layer without a backward keeps nothing, and a skipped one does nothing: both have one strategy. The added time of
    strategies scales with a lane's share.
    """
    finder = _Finder(modules={module.name: module for module in model.modules})
    gradients: dict[frozenset[str], Mapping[str, Gradients]] = {}
    by_pair: dict[PairKey, tuple[Layer, ...]] = {}
    for index, microbatch in enumerate(microbatches):
        units = {name: count for name, module in finder.modules.items() if (count := module.units(microbatch))}
        present = frozenset(units)
        own = gradients.setdefault(present, gradients_of(model, present))
        for place, chunk in enumerate(partition.chunks):
            name = next((part.module for part in chunk.parts if part.module in own), None)
            if name is None or not any(_has_backward(part, own) for part in chunk.parts):
                continue
            for piece, count in enumerate(even_pieces(units[name], partition.sizes.get(name, units[name]))):
                counts = {**units, name: count}
                by_pair[place, index, piece] = finder.layers(place, chunk, own, microbatch, counts)
    return by_pair


def _has_backward(part: Part, gradients: Mapping[str, Gradients]) -> bool:
    own = gradients.get(part.module)
    return own is not None and any(own.any_of(layer) for layer in range(part.first, part.end))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Finder:
    """Layers of chunks, those of equal pieces once."""

    modules: Mapping[str, LayeredModule]
    known: dict[object, tuple[Layer, ...]] = field(default_factory=dict)

    def layers(
        self,
        place: int,
        chunk: Chunk,
        gradients: Mapping[str, Gradients],
        microbatch: Microbatch,
        units: Mapping[str, int],
    ) -> tuple[Layer, ...]:
        key = place, microbatch, *(units.get(part.module) for part in chunk.parts)
        if key not in self.known:
            self.known[key] = tuple(
                layer for part in chunk.parts for layer in self._of_part(chunk, part, gradients, microbatch, units)
            )
        return self.known[key]

    def _of_part(
        self,
        chunk: Chunk,
        part: Part,
        gradients: Mapping[str, Gradients],
        microbatch: Microbatch,
        units: Mapping[str, int],
    ) -> list[Layer]:
        if part.module not in gradients:
            return [_SKIPPED] * part.count
        own = gradients[part.module]
        module, slower = on_lane(self.modules[part.module], chunk.share)
        layers = module.layers(microbatch, units[part.module])[part.first : part.end]
        return [
            replace(layer, strategies=tuple(_slowed(strategy, slower) for strategy in layer.strategies))
            if own.any_of(at)
            else replace(layer, strategies=(_KEEPS_NOTHING,))
            for at, layer in enumerate(layers, part.first)
        ]


def _slowed(strategy: Strategy, slower: float) -> Strategy:
    return replace(
        strategy,
        extra_forward_ms=strategy.extra_forward_ms * slower,
        extra_backward_ms=strategy.extra_backward_ms * slower,
    )
