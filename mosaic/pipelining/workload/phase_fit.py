"""Times of a module's layers, as a line through measured times: counted times alone are inaccurate on a given machine.

Small pieces cost more than their share: launches, and the addition of gradients to those of whole weights, do not
depend on the number of rows. So a layer has a constant time beside the part that grows with its data.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from mosaic.pipelining.workload.layers import Layer


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseFit:
    """One phase of a module's layers; by default as counted."""

    scale: float = 1.0
    """Measured over counted time."""
    layer_ms: float = 0.0
    """Constant time of each layer."""
    first_ms: float = 0.0
    """Further time of the first layer, for the steps before the layers."""
    last_ms: float = 0.0
    """Further time of the last layer, for the steps behind them, such as a loss."""

    def slower(self, by: float) -> PhaseFit:
        """Returns the line of a module that takes ``by`` times as long."""
        return PhaseFit(
            scale=self.scale * by, layer_ms=self.layer_ms * by, first_ms=self.first_ms * by, last_ms=self.last_ms * by
        )

    def ms(self, counted_ms: float, at: int, count: int) -> float:
        """Returns the time of layer ``at`` of ``count``."""
        ends_ms = (0.0 if at else self.first_ms) + (self.last_ms if at == count - 1 else 0.0)
        return self.scale * counted_ms + self.layer_ms + ends_ms


_AS_COUNTED = PhaseFit()


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleFit:
    """All phases of a module's layers."""

    forward: PhaseFit = _AS_COUNTED
    """Forward."""
    backward: PhaseFit = _AS_COUNTED
    """Backward for inputs."""
    weights: PhaseFit = _AS_COUNTED
    """Backward for weights."""

    def slower(self, by: float) -> ModuleFit:
        """Returns the lines of a module that takes ``by`` times as long."""
        return ModuleFit(
            forward=self.forward.slower(by), backward=self.backward.slower(by), weights=self.weights.slower(by)
        )

    def layers(self, counted: tuple[Layer, ...]) -> tuple[Layer, ...]:
        """Returns all layers of the module with fitted times; recomputation scales as forward."""
        if self == AS_COUNTED:
            return counted
        return tuple(self._layer(layer, at, len(counted)) for at, layer in enumerate(counted))

    def _layer(self, layer: Layer, at: int, count: int) -> Layer:
        forward_ms = self.forward.ms(layer.forward_ms, at, count)
        again = forward_ms / layer.forward_ms if layer.forward_ms else 1.0
        return replace(
            layer,
            forward_ms=forward_ms,
            backward_ms=self.backward.ms(layer.backward_ms, at, count),
            weights_ms=self.weights.ms(layer.weights_ms, at, count),
            strategies=tuple(
                replace(
                    strategy,
                    extra_forward_ms=strategy.extra_forward_ms * again,
                    extra_backward_ms=strategy.extra_backward_ms * again,
                )
                for strategy in layer.strategies
            ),
        )


AS_COUNTED = ModuleFit()
"""No measurement."""
