"""A colocated model as torch's functions and frameworks have to know it, where the handle cannot be imported."""

from __future__ import annotations

from typing import Protocol

from torch import nn

from mosaic.ranks.world.world import World


class ReducedModel(Protocol):
    """A model whose gradients Mosaic reduces over ranks."""

    world: World
    """The ranks."""
    _model: nn.Module

    @property
    def active(self) -> bool:
        """Whether Mosaic still reduces its gradients."""

    @property
    def _divided(self) -> frozenset[int]:
        """Ids of the parameters that some rank does not hold."""

    @property
    def _counted_here(self) -> dict[int, bool]:
        """For the id of each parameter of the model, whether this rank counts it."""
