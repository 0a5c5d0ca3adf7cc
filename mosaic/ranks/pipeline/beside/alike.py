"""Microbatches of a step, which all ranks are to have alike."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from mosaic.artifact import fingerprint
from mosaic.errors import InvalidScheduleError, ModuleContractError
from mosaic.parts.pass_through import Door
from mosaic.ranks.pipeline.context.sequences import masks_of
from mosaic.ranks.pipeline.transports.distributed import DistributedTransport

_COMPARED = ("shapes", "values", "masks")

Microbatches = Sequence[Mapping[str, Any]]
"""As keyword arguments of the model."""


def check_alike(
    microbatches: Microbatches, own: Microbatches, shapes: Sequence[str], transport: DistributedTransport
) -> None:
    """Compares a step's microbatches on all ranks, which call it together.

    Args:
        microbatches: As they were given; on GPUs their values are not compared.
        own: As this rank takes them, with the plans of shared sequences.
        shapes: Names of their shapes.
        transport: To all ranks.

    Raises:
        InvalidScheduleError: A rank has others, on all ranks; names it.
    """
    leaves = [leaf for one in microbatches for leaf in pytree.tree_flatten_with_path(dict(one))[0]]
    values = fingerprint([(str(path), _value(leaf)) for path, leaf in leaves])
    mine = json.dumps((fingerprint(tuple(shapes)), values, fingerprint(masks_of(own))))
    told = [json.loads(one) for one in transport.tell_all(mine)]
    for rank, other in enumerate(told):
        if other != told[0]:
            what = next(name for name, one, first in zip(_COMPARED, other, told[0], strict=True) if one != first)
            raise InvalidScheduleError(
                f"microbatches of rank {rank} have other {what} than rank 0's; give all ranks the same microbatches"
            )


def trained_in(microbatch: Mapping[str, Any]) -> list[str]:
    """Returns the names of arguments with tensors that require a gradient."""
    leaves = pytree.tree_leaves_with_path(dict(microbatch))
    return [pytree.keystr(path) for path, leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]


def _value(leaf: Any) -> Any:
    """Returns what has to be the same of something in a microbatch; None for what is on GPUs, or no plain value."""
    if isinstance(leaf, Tensor):
        return torch.hash_tensor(leaf).view(torch.int64).item() if leaf.device.type == "cpu" else None
    return leaf if isinstance(leaf, str | int | float | None) else None


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
