"""Calls of a model by the loop itself, whose layers are on other ranks: they are refused with the way out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from mosaic.errors import ModuleContractError
from mosaic.parts.pass_through import Door


@dataclass(frozen=True, slots=True)
class PlainCalls:
    """A hook before a model's forward; copies of the model have it, too."""

    layer: str
    """Name of a module that chunks stand in for while they run."""

    def __call__(self, model: nn.Module, args: Any) -> None:
        """Raises ModuleContractError, unless a chunk calls the model, or all weights are here."""
        if isinstance(model.get_submodule(self.layer).__dict__.get("forward"), Door):
            return
        away = [name for name, one in model.named_parameters() if one.is_meta]
        if away:
            raise ModuleContractError(
                f"{away[0]} and {len(away) - 1} more weights are on other ranks, so that {type(model).__name__} cannot "
                "be called here; pipe.step() trains, pipe.evaluate() gives losses without gradients, and "
                "pipe.remove(), on every rank, gives the whole model back"
            )
