"""Sizes of sub-microbatches: the smallest that is nearly as efficient as the best (PipeWeaver, section 5)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from mosaic.pipelining.workload.layers import LayeredModule, PipelineModel
from mosaic.pipelining.workload.microbatch import Microbatch

MIN_EFFICIENCY = 0.95
"""Of the best efficiency, that the smallest size keeps."""


def even_pieces(units: int, size: int) -> tuple[int, ...]:
    """Returns the units of each piece: as few pieces of at most ``size`` as there can be, equal but for one unit."""
    count = -(-units // size)
    return tuple(units // count + (index < units % count) for index in range(count)) if count else ()


def smallest_efficient(module: LayeredModule, microbatch: Microbatch, min_efficiency: float = MIN_EFFICIENCY) -> int:
    """Returns the fewest units a piece that keep 95 % of the best units per time of any size that the microbatch has.

    The time is that of all phases of all layers, whatever trains; the paper measures, here it is what the layers say.
    """
    units = module.units(microbatch)
    rates = []
    for size in range(1, units + 1):
        layers = module.layers(microbatch, size)
        time_ms = math.fsum(layer.forward_ms + layer.backward_ms + layer.weights_ms for layer in layers)
        rates.append(size / time_ms if time_ms > 0 else math.inf)
    return next((size for size, rate in enumerate(rates, 1) if rate >= min_efficiency * max(rates)), 1)


def efficient_sizes(model: PipelineModel, microbatches: Sequence[Microbatch]) -> Mapping[str, int]:
    """Returns the size for each module that cuts any microbatch, by the microbatch in which it has the most units."""
    sizes: dict[str, int] = {}
    for module in model.modules:
        largest = max(microbatches, key=module.units)
        if module.units(largest) > 1:
            sizes[module.name] = smallest_efficient(module, largest)
    return sizes
