"""Optimizer state that follows its parameters: when modules move to other ranks, those ranks take the steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from mosaic.checkpoint.plain_data import from_plain, to_plain
from mosaic.checkpoint.tensor_file import TensorSpec, dtype_of
from mosaic.errors import MosaicError
from mosaic.ranks.parameters.tied import Members
from mosaic.ranks.world.progress import THE_LOOP
from mosaic.ranks.world.world import World


def move_states(
    optimizers: Sequence[Optimizer], before: Mapping[int, Members], after: Mapping[int, Members], world: World
) -> int:
    """Gives ranks the state of parameters that are new to them, and drops that of parameters that they gave up.

    Every rank calls it, with optimizers of the same parameters in the same order. One tensor at a time goes from the
    first rank that has it to all of them.

    Args:
        optimizers: Those that step the model's parameters.
        before: The ranks that held each parameter, by its id; of those that are not in it, nothing is moved.
        after: The ranks that hold it now.
        world: The ranks.

    Returns:
        How many parameters' states were moved.

    Raises:
        MosaicError: The ranks' optimizers have different numbers of parameters.
        TypeError: An optimizer keeps something that is no plain data; names it.
    """
    own = [
        (optimizer, parameter)
        for optimizer in optimizers
        for group in optimizer.param_groups
        for parameter in group["params"]
    ]
    moves = {
        place: before[id(parameter)][0]
        for place, (_, parameter) in enumerate(own)
        if id(parameter) in before and not set(after.get(id(parameter), ())) <= set(before[id(parameter)])
    }
    tensors: dict[str, torch.Tensor] = {}
    described = world.run_on_all(lambda: _described(own, [p for p in moves if moves[p] == world.rank], tensors))
    told = world.all_gather((len(own), described))
    if len({count for count, _ in told}) > 1:
        each = ", ".join(f"rank {rank}: {count}" for rank, (count, _) in enumerate(told))
        raise MosaicError(f"the ranks' optimizers have different numbers of parameters ({each}); make them alike")
    num_moved = 0
    for place, source in moves.items():
        optimizer, parameter = own[place]
        state, specs = told[source][1].get(place, (None, {}))
        if state is None:
            continue
        num_moved += 1
        found = {key: _brought(tensors.get(key), spec, source, world) for key, spec in specs.items()}
        if world.rank in after[id(parameter)] and world.rank not in before[id(parameter)]:
            optimizer.state[parameter] = from_plain(state, found.__getitem__)
    for optimizer, parameter in own:
        if world.rank not in after.get(id(parameter), (world.rank,)):
            optimizer.state.pop(parameter, None)
    return num_moved


_Spec = tuple[str, tuple[int, ...], bool]
"""A tensor's dtype, shape, and whether it is in host memory."""


def _described(
    own: Sequence[tuple[Optimizer, torch.Tensor]], places: Sequence[int], tensors: dict[str, torch.Tensor]
) -> dict[int, tuple[Any, dict[str, _Spec]]]:
    """Returns what this rank has to give, with keys in the place of tensors, which go into ``tensors``."""
    found = {}
    for place in places:
        optimizer, parameter = own[place]
        if parameter not in optimizer.state:
            continue
        specs: dict[str, _Spec] = {}

        def keep(tensor: torch.Tensor, where: str, specs: dict[str, _Spec] = specs) -> str:
            tensors[where] = tensor.detach()
            spec = TensorSpec.of(where, tensor)
            specs[where] = spec.dtype, spec.shape, tensor.device.type == "cpu"
            return where

        state = to_plain(dict(optimizer.state[parameter]), f"the optimizer's state of parameter {place}", keep)
        found[place] = state, specs
    return found


def _brought(tensor: torch.Tensor | None, spec: _Spec, source: int, world: World) -> torch.Tensor:
    dtype, shape, on_cpu = spec
    if tensor is None:
        device = torch.device("cpu") if on_cpu else world.device
        tensor = torch.empty(shape, dtype=dtype_of(dtype), device=device)
    tensor = tensor.contiguous()
    with world.progress.waiting(THE_LOOP, "agreement"):
        dist.broadcast(tensor, src=source, group=world.carrier_of(tensor))
    return tensor
