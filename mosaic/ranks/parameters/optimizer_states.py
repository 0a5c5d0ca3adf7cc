"""Optimizer state that follows its parameters: when modules move to other ranks, those ranks take the steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from mosaic.errors import MosaicError
from mosaic.ranks.parameters.tied import Members
from mosaic.ranks.world.world import World


def move_states(
    optimizers: Sequence[Optimizer], before: Mapping[int, Members], after: Mapping[int, Members], world: World
) -> int:
    """Gives ranks the state of parameters that are new to them, and drops that of parameters that they gave up.

    Every rank calls it, with optimizers of the same parameters in the same order. One parameter's state at a time goes
    from the first rank that has it to all of them, through host memory.

    Returns:
        The number of parameters whose states were moved.

    Raises:
        MosaicError: The ranks' optimizers have different numbers of parameters.
    """
    own = [
        (optimizer, parameter)
        for optimizer in optimizers
        for group in optimizer.param_groups
        for parameter in group["params"]
    ]
    counts = world.all_gather(len(own))
    if len(set(counts)) > 1:
        each = ", ".join(f"rank {rank}: {count}" for rank, count in enumerate(counts))
        raise MosaicError(f"the ranks' optimizers have different numbers of parameters ({each}); make them alike")
    num_moved = 0
    for optimizer, parameter in own:
        had, holds = before.get(id(parameter), ()), after.get(id(parameter), ())
        if had and not set(holds) <= set(had):
            state = world.broadcast(_on_host(optimizer.state.get(parameter)) if world.rank == had[0] else None, had[0])
            num_moved += state is not None
            if state is not None and world.rank in holds and world.rank not in had:
                optimizer.state[parameter] = pytree.tree_map_only(_Moved, lambda moved: moved.on(world.device), state)
        if id(parameter) in after and world.rank not in holds:
            optimizer.state.pop(parameter, None)
    return num_moved


class _Moved:
    """A tensor on its way, which was in host memory or on its rank's device."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor, self.is_on_device = tensor.detach().cpu(), tensor.device.type != "cpu"

    def on(self, device: torch.device) -> torch.Tensor:
        return self.tensor.to(device) if self.is_on_device else self.tensor


def _on_host(state: Any) -> Any:
    return pytree.tree_map_only(torch.Tensor, _Moved, state)
