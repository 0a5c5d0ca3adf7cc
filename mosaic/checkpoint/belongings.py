"""The state of a run: its model, and the optimizers, schedulers and other objects beside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer

from mosaic.checkpoint.manifest import COMPANION, MODEL
from mosaic.checkpoint.model_tensors import ModelTensors

T = TypeVar("T")
OneOrSeveral: TypeAlias = T | Sequence[T] | Mapping[str, T] | None
"""One, or several in a fixed order or by name, or none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Belongings:
    """The objects that a run saves and loads."""

    model: nn.Module
    """The model, of which this rank may have a part."""
    optimizer: OneOrSeveral[Optimizer] = None
    """Saved by parameter name."""
    scheduler: OneOrSeveral[Any] = None
    """Anything with a ``state_dict()`` of plain data, the same on every rank."""
    scaler: Any = None
    """A ``torch.amp.GradScaler``, or anything with a ``state_dict()`` of plain data, the same on every rank."""
    companions: Mapping[str, nn.Module] | None = None
    """Modules beside the model, saved whole, such as an average of its weights."""
    generators: Mapping[str, torch.Generator] | None = None
    """Random generators of the loop; each rank saves its own."""

    @property
    def optimizers(self) -> dict[str, Optimizer]:
        """The optimizers by name; a single one has the name ``""``."""
        return _named(self.optimizer, "optimizer")

    @property
    def schedulers(self) -> dict[str, Any]:
        """The schedulers by name; a single one has the name ``""``."""
        return _named(self.scheduler, "scheduler")

    def modules(self) -> dict[str, ModelTensors]:
        """Returns the tensors of the model and its companions, by the prefix of their names in a checkpoint."""
        companions = _named(self.companions or {}, "companions")
        companion_tensors = {f"{COMPANION}{name}/": ModelTensors.of(module) for name, module in companions.items()}
        return {MODEL: ModelTensors.of(self.model), **companion_tensors}


def _named(objects: Any, argument: str) -> dict[str, Any]:
    if objects is None:
        return {}
    if isinstance(objects, Sequence):
        return {str(index): each for index, each in enumerate(objects)}
    if not isinstance(objects, Mapping):
        return {"": objects}
    for name in objects:
        if not isinstance(name, str) or not name or "/" in name:
            raise ValueError(f"{name!r} cannot be a name in {argument}=; use a text that is not empty and has no '/'")
    return dict(objects)
