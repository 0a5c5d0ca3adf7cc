"""Times of a layer's phases by the trained weights (Cornstarch, section 4.2), from the layers' own times.

A layer computes gradients for its weights if they train, and for its inputs if anything before it trains: earlier
layers of its module, or of a module whose data reach it. Without gradients it has no backward, and recomputes nothing.
This depends on the microbatch: a frozen backbone behind a trained projector has no backward with text alone.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from mosaic.pipelining.workload.layers import Layer, PipelineModel, Strategy


@dataclass(frozen=True, slots=True, kw_only=True)
class Gradients:
    """Gradients that the layers of one module compute."""

    inputs: tuple[bool, ...]
    """True for each layer that computes gradients for its inputs."""
    weights: tuple[bool, ...]
    """True for each layer that computes gradients for its weights."""

    def any_of(self, layer: int) -> bool:
        """Returns True if a layer has a backward."""
        return self.inputs[layer] or self.weights[layer]


def sources_of(model: PipelineModel, present: Collection[str]) -> Mapping[str, tuple[str, ...]]:
    """Returns the modules of ``present`` that feed each of them, directly or through skipped ones."""
    through: dict[str, tuple[str, ...]] = {}
    for module in model.modules:
        sources: dict[str, None] = {}
        for feed in model.feeds:
            if feed.target == module.name:
                sources |= dict.fromkeys((feed.source,) if feed.source in present else through[feed.source])
        through[module.name] = tuple(sources)
    return {name: through[name] for name in through if name in present}


def gradients_of(model: PipelineModel, present: Collection[str]) -> Mapping[str, Gradients]:
    """Returns the gradients that each module computes in a microbatch of the modules ``present``."""
    sources = sources_of(model, present)
    gradients: dict[str, Gradients] = {}
    trains_behind: dict[str, bool] = {}
    for module in model.modules:
        if module.name not in present:
            continue
        trains_before = any(trains_behind[source] for source in sources[module.name])
        inputs = []
        for trains in module.trains:
            inputs.append(trains_before)
            trains_before |= trains
        trains_behind[module.name] = trains_before
        gradients[module.name] = Gradients(inputs=tuple(inputs), weights=tuple(module.trains))
    return gradients


def strategy_of(layer: Layer, name: str) -> Strategy:
    """Returns a layer's strategy of that name, or its first, which keeps."""
    return next((strategy for strategy in layer.strategies if strategy.name == name), layer.strategies[0])


def layer_ms(layer: Layer, strategy: Strategy, *, inputs: bool, weights: bool) -> tuple[float, float, float]:
    """Returns the times of forward and of backward for inputs, with the strategy, and of backward for weights."""
    if not inputs and not weights:
        return layer.forward_ms, 0.0, 0.0
    return (
        layer.forward_ms + strategy.extra_forward_ms,
        (layer.backward_ms if inputs else 0.0) + strategy.extra_backward_ms,
        layer.weights_ms if weights else 0.0,
    )
