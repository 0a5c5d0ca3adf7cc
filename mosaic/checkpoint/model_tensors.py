"""The tensors of a model by name: each once, though two parts may share it, and on ranks that do not have it, too."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from mosaic.errors import InvalidCheckpointError, UnsupportedModelError


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelTensors:
    """What a model's ``state_dict`` is made of."""

    tensors: dict[str, torch.Tensor]
    """The model's own tensors by their first name; on the meta device where this rank does not have them."""
    names: dict[str, str]
    """Every key of the ``state_dict``, and the first name of its tensor."""

    @staticmethod
    def of(model: nn.Module) -> ModelTensors:
        """Reads them off a model, without a copy.

        Raises:
            UnsupportedModelError: A key is no tensor of the model itself, so that nothing can be loaded into it.
        """
        own = {id(tensor) for tensor in model.parameters()}
        own |= {id(tensor) for tensor in model.buffers()}
        first: dict[int, str] = {}
        tensors: dict[str, torch.Tensor] = {}
        names: dict[str, str] = {}
        for name, tensor in model.state_dict(keep_vars=True).items():
            if id(tensor) not in own:
                raise UnsupportedModelError(
                    f"state_dict() has {name!r}, a {type(tensor).__name__} that is neither a parameter nor a buffer of "
                    "the model (a hook or get_extra_state made it); keep it in a buffer, or in extra={...}"
                )
            names[name] = first.setdefault(id(tensor), name)
            tensors.setdefault(names[name], tensor)
        return ModelTensors(tensors=tensors, names=names)

    @property
    def tied(self) -> dict[str, str]:
        """The keys whose tensor has another name, too."""
        return {name: first for name, first in self.names.items() if name != first}

    @property
    def here(self) -> dict[str, torch.Tensor]:
        """Those that this rank has, cut from autograd."""
        return {name: tensor.detach() for name, tensor in self.tensors.items() if not tensor.is_meta}


def raise_other_model(path: Path, differing: Sequence[str]) -> None:
    """Raises InvalidCheckpointError if a file differs from a model in something; names the first few."""
    if differing:
        more = f"; and {len(differing) - 8} more" if len(differing) > 8 else ""
        raise InvalidCheckpointError(
            f"{path} is of another model: {'; '.join(differing[:8])}{more}; build the model that was saved"
        )
