"""Weights of other ranks: what stands for them here, and the whole model on every rank again."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from mosaic.parts.weights import swappable
from mosaic.ranks.parameters.elsewhere import Elsewhere, Home
from mosaic.ranks.parameters.ownership import take_back, tensors_of
from mosaic.ranks.world.progress import THE_LOOP
from mosaic.ranks.world.world import World

_REMEDY = (
    "pipe.save(), pipe.export() and pipe.digest(), called on every rank, have the whole model's, and "
    "pipe.remove() brings them here. A sum over parameters in a loss is the optimizer's weight_decay"
)


def stand_for_others(model: nn.Module, world: World) -> None:
    """Puts stand-ins in the places of tensors that are on other ranks: who reads or pickles one gets an error.

    Parameters stay the same objects; every rank calls it.
    """
    held = _held(model, world)
    with swappable(model):
        for name, tensor in tensors_of(model):
            if not tensor.is_meta:
                continue
            home = Home(name=name, ranks=held[name], remedy=_REMEDY)
            if isinstance(tensor, nn.Parameter):
                torch.utils.swap_tensors(tensor, Elsewhere.of(tensor, home, is_parameter=True))
            else:
                prefix, _, short = name.rpartition(".")
                model.get_submodule(prefix)._buffers[short] = Elsewhere.of(tensor, home)


def gather_model(model: nn.Module, world: World) -> None:
    """Gives every rank all of a model's tensors; every rank calls it. Parameters stay the same objects.

    Each tensor comes from the first rank that has it.
    """
    held = _held(model, world)

    def whole(name: str, tensor: torch.Tensor) -> torch.Tensor:
        found = torch.empty_like(tensor, device=world.device) if tensor.is_meta else tensor.detach().clone()
        with world.progress.waiting(THE_LOOP, "agreement"):
            dist.broadcast(found, src=held[name][0], group=world.carrier_of(found))
        return found

    take_back(model, whole)


def _held(model: nn.Module, world: World) -> dict[str, tuple[int, ...]]:
    """Returns for each tensor the ranks that have its values."""
    told = world.all_gather([name for name, tensor in tensors_of(model) if not tensor.is_meta])
    held: dict[str, tuple[int, ...]] = {}
    for rank, names in enumerate(told):
        for name in names:
            held[name] = (*held.get(name, ()), rank)
    return held
