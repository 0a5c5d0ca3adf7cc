"""A whole model on every rank again, from the ranks that have its parts."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from mosaic.ranks.meeting.progress import THE_LOOP
from mosaic.ranks.meeting.world import World
from mosaic.ranks.parameters.ownership import take_back, tensors_of


def gather_model(model: nn.Module, world: World) -> None:
    """Gives every rank all of a model's tensors; every rank calls it. Parameters stay the same objects.

    Each tensor comes from the first rank that has it.
    """
    told = world.tell([name for name, tensor in tensors_of(model) if not tensor.is_meta])
    holders = {name: rank for rank, names in reversed(list(enumerate(told))) for name in names}

    def whole(name: str, tensor: torch.Tensor) -> torch.Tensor:
        found = torch.empty_like(tensor, device=world.device) if tensor.is_meta else tensor.detach().clone()
        with world.progress.waiting(THE_LOOP, "agreement"):
            dist.broadcast(found, src=holders[name], group=world.carrier_of(found))
        return found

    take_back(model, whole)
