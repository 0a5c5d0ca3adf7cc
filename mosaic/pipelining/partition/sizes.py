"""Sizes of sub-microbatches: the smallest that is nearly as efficient as the best (PipeWeaver, section 5)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from mosaic.pipelining.workload.layers import LayeredModule, PipelineModel
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
