"""How long a layer's phases take with what trains: Cornstarch, section 4.2, by the layers' own times.

A layer computes gradients for its weights where they train, and for its inputs where anything before it trains: earlier
layers of its module, or of a module whose data reach it. Where it computes none it has no backward, and recomputes
nothing. What counts is what a microbatch has: a frozen backbone behind a trained projector has no backward with text
alone.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from mosaic.pipelining.workload.layers import Layer, PipelineModel, Strategy


@dataclass(frozen=True, slots=True, kw_only=True)
class Gradients:
    """Which gradients the layers of one module compute."""

    inputs: tuple[bool, ...]
    """For each layer whether it computes those for its inputs."""
    weights: tuple[bool, ...]
    """For each layer whether it computes those for its weights."""

    def any_of(self, layer: int) -> bool:
        """Returns whether a layer computes any: whether it has a backward."""
        return self.inputs[layer] or self.weights[layer]


def sources_of(model: PipelineModel, present: Collection[str]) -> Mapping[str, tuple[str, ...]]:
    """Returns for each module of ``present`` the ones of ``present`` that feed it, directly or through skipped ones."""
    through: dict[str, tuple[str, ...]] = {}
    for module in model.modules:
        found: dict[str, None] = {}
        for feed in model.feeds:
            if feed.target == module.name:
                found |= dict.fromkeys((feed.source,) if feed.source in present else through[feed.source])
        through[module.name] = tuple(found)
    return {name: through[name] for name in through if name in present}


def gradients_of(model: PipelineModel, present: Collection[str]) -> Mapping[str, Gradients]:
    """Returns which gradients each module computes in a microbatch that passes through the modules ``present``."""
    sources = sources_of(model, present)
    found: dict[str, Gradients] = {}
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
        found[module.name] = Gradients(inputs=tuple(inputs), weights=tuple(module.trains))
    return found


def strategy_of(layer: Layer, name: str) -> Strategy:
    """Returns a layer's strategy of that name, or the first, which keeps, where it has none of that name."""
    return next((one for one in layer.strategies if one.name == name), layer.strategies[0])


def layer_ms(layer: Layer, strategy: Strategy, *, inputs: bool, weights: bool) -> tuple[float, float, float]:
    """Returns the time of forward, of backward for inputs with what the strategy adds, and of backward for weights."""
    if not inputs and not weights:
        return layer.forward_ms, 0.0, 0.0
    return (
        layer.forward_ms + strategy.extra_forward_ms,
        (layer.backward_ms if inputs else 0.0) + strategy.extra_backward_ms,
        layer.weights_ms if weights else 0.0,
    )
