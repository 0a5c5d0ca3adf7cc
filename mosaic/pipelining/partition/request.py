"""The request for a partition, and the times of layers that it balances."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mosaic.pipelining.partition.backward import gradients_of, layer_ms, sources_of, strategy_of
from mosaic.pipelining.workload.layers import Layer, LayeredModule, PipelineModel
from mosaic.pipelining.workload.microbatch import Microbatch

MIN_EFFICIENCY = 0.95
"""Share of the best efficiency that a size must reach."""


def even_pieces(units: int, size: int) -> tuple[int, ...]:
    """Returns the units of the fewest pieces of at most ``size``, equal up to one unit."""
    count = -(-units // size)
    return tuple(units // count + (index < units % count) for index in range(count)) if count else ()


def smallest_efficient(module: LayeredModule, microbatch: Microbatch, min_efficiency: float = MIN_EFFICIENCY) -> int:
    """Returns the smallest size of a piece with 95 % of the best throughput of any size in the microbatch.

    The time covers all phases of all layers, frozen or not; the paper measures it, here it comes from the layers.
    """
    units = module.units(microbatch)
    rates = []
    for size in range(1, units + 1):
        layers = module.layers(microbatch, size)
        time_ms = math.fsum(layer.forward_ms + layer.backward_ms + layer.weights_ms for layer in layers)
        rates.append(size / time_ms if time_ms > 0 else math.inf)
    return next((size for size, rate in enumerate(rates, 1) if rate >= min_efficiency * max(rates)), 1)


def efficient_sizes(model: PipelineModel, microbatches: Sequence[Microbatch]) -> Mapping[str, int]:
    """Returns the size for each module with several units in a microbatch, by its largest microbatch."""
    sizes: dict[str, int] = {}
    for module in model.modules:
        largest = max(microbatches, key=module.units)
        if module.units(largest) > 1:
            sizes[module.name] = smallest_efficient(module, largest)
    return sizes


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A model, its ranks, and representative microbatches.

    Raises:
        ValueError: A number of ranks, chunks, slots or microbatches is 0, or no microbatch reaches a module.
    """

    model: PipelineModel
    num_ranks: int
    """Pipeline ranks."""
    microbatches: Sequence[Microbatch]
    """Representative ones; times are their means."""
    chunks_per_rank: int = 1
    """Chunks of each rank, for mixed partitions."""
    frozen_aware: bool = True
    """True to count backward by the trained weights; False: as twice forward everywhere."""
    strategy: str = "keep"
    """Assumed activation strategy of layers with a backward."""
    slots_per_rank: int = 1
    """Slots of each rank's device, for its lanes."""
    sizes: Mapping[str, int] | None = None
    """Sizes of sub-microbatches of separated partitions; None: the smallest efficient ones."""

    def __post_init__(self) -> None:
        if min(self.num_ranks, self.chunks_per_rank, self.slots_per_rank) < 1:
            raise ValueError(
                f"num_ranks={self.num_ranks}, chunks_per_rank={self.chunks_per_rank}, "
                f"slots_per_rank={self.slots_per_rank}; a pipeline has at least one each"
            )
        if not self.microbatches:
            raise ValueError("no microbatches were given; a partition is made for at least one")
        if not any(module.units(each) for module in self.model.modules for each in self.microbatches):
            raise ValueError("no microbatch passes through any module; give microbatches with some modality")

    def piece_sizes(self) -> Mapping[str, int]:
        """Returns the sizes of sub-microbatches: ``sizes``, or the smallest efficient ones."""
        return efficient_sizes(self.model, self.microbatches) if self.sizes is None else self.sizes


def layer_times(request: Request, *, sizes: Mapping[str, int] | None = None) -> Mapping[str, tuple[float, ...]]:
    """Returns the mean times of each module's layers over all pieces, in milliseconds for all phases.

    Without ``sizes``, pieces are whole microbatches, and those that skip the module count as 0.
    """
    sums = {module.name: [0.0] * len(module.trains) for module in request.model.modules}
    counts = dict.fromkeys(sums, 0)
    for microbatch in request.microbatches:
        present = {module.name for module in request.model.modules if module.units(microbatch)}
        gradients = gradients_of(request.model, present)
        for module in request.model.modules:
            units = module.units(microbatch)
            pieces = even_pieces(units, (sizes or {}).get(module.name, max(units, 1)))
            counts[module.name] += max(len(pieces), sizes is None)
            for piece in pieces:
                own = gradients[module.name]
                for index, layer in enumerate(_layers(module, microbatch, piece)):
                    sums[module.name][index] += _time_ms(
                        request, layer, inputs=own.inputs[index], weights=own.weights[index]
                    )
    return {name: tuple(total / max(counts[name], 1) for total in sums[name]) for name in sums}


def backbone_of(model: PipelineModel) -> str:
    """Returns the module that all others feed or read; an encoder, as a source, does not count.

    Of several, such as a projector, the backbone and a decoder in a row, it has the most parameters.
    """
    sources = sources_of(model, {module.name for module in model.modules})
    before: dict[str, set[str]] = {}
    for name, feeding in sources.items():
        before[name] = set(feeding).union(*(before[source] for source in feeding))
    sizes = {module.name: module.num_parameters(0, len(module.trains)) for module in model.modules}
    joints = [
        name
        for name in sources
        if before[name] and all(other in before[name] or name in before[other] for other in sources if other != name)
    ]
    return max(reversed(joints or tuple(sources)), key=lambda name: sizes[name])


def _layers(module: LayeredModule, microbatch: Microbatch, units: int) -> tuple[Layer, ...]:
    layers = module.layers(microbatch, units)
    if len(layers) != len(module.trains):
        raise ValueError(
            f"{module.name!r} gives {len(layers)} layers and says of {len(module.trains)} whether they train"
        )
    return layers


def _time_ms(request: Request, layer: Layer, *, inputs: bool, weights: bool) -> float:
    strategy = strategy_of(layer, request.strategy)
    if request.frozen_aware:
        return math.fsum(layer_ms(layer, strategy, inputs=inputs, weights=weights))
    return 3 * layer.forward_ms + strategy.extra_forward_ms + strategy.extra_backward_ms
