"""Room on the disk: how much a checkpoint takes, whether it is there, and how to get some.

The functions on folders need no torch.
"""

from __future__ import annotations

import copy
import shutil
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mosaic.checkpoint.folder import Checkpoint, checkpoints_in, damage_of, drop
from mosaic.errors import NoRoomError

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.optim import Optimizer

    from mosaic.checkpoint.belongings import Belongings, OneOrSeveral

_BYTES_BESIDE = 1 << 16
"""Allowed for what is no tensor, and again for each 100 tensors: names, settings, the loop's own."""


def room_needed(
    model: nn.Module, optimizer: OneOrSeveral[Optimizer] = None, companions: Mapping[str, nn.Module] | None = None
) -> int:
    """Estimates the bytes of a checkpoint of all ranks, before the first step, too.

    An optimizer that has no state of a parameter yet makes it on tensors without memory; one that cannot is taken to
    keep two numbers for each of the parameter's.
    """
    from mosaic.checkpoint.belongings import Belongings

    return bytes_of_all(Belongings(model=model, optimizer=optimizer, companions=companions))


def bytes_of_all(belongings: Belongings) -> int:
    """Estimates the bytes of a checkpoint; see ``room_needed``."""
    tensors = [tensor for module in belongings.modules().values() for tensor in module.tensors.values()]
    for each in belongings.optimizers.values():
        tensors += _state_of(getattr(each, "optimizer", each))
    return sum(tensor.nbytes for tensor in tensors) + _BYTES_BESIDE * (2 + len(tensors) // 100)


def _state_of(optimizer: Optimizer) -> list[torch.Tensor]:
    """Returns the tensors that an optimizer keeps, or will keep, of its parameters that train."""
    found = []
    for group in optimizer.param_groups:
        alike: dict[Any, dict[str, Any]] = {}  # a large model has thousands of parameters of a dozen shapes
        for parameter in group["params"]:
            if parameter.requires_grad:
                state = optimizer.state.get(parameter)
                if not state:
                    kind = parameter.shape, parameter.dtype
                    if kind not in alike:
                        alike[kind] = _state_to_be(optimizer, group, parameter)
                    state = alike[kind]
                found += [value for value in state.values() if hasattr(value, "nbytes")]
    return found


def _state_to_be(optimizer: Optimizer, group: Mapping[str, Any], parameter: torch.Tensor) -> dict[str, Any]:
    import torch

    stand_in = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta").requires_grad_()
    stand_in.grad = torch.empty_like(stand_in)
    twin = copy.copy(optimizer)  # without hooks
    twin.state = defaultdict(dict)
    twin.param_groups = [{**group, "fused": False, "foreach": False, "params": [stand_in]}]
    try:
        type(optimizer).step(twin)
    except Exception:  # of any kind: some read values
        return {"a": stand_in, "b": stand_in}
    return dict(twin.state[stand_in])


def check_room(folder: Path, *, checkpoint_bytes: int, count: int, more_bytes: int = 0) -> None:
    """Checks that there is room for checkpoints before a run begins.

    Args:
        folder: The run's checkpoints; those that are there count.
        checkpoint_bytes: Of one; see ``room_needed``.
        count: How many there will be at once: those that are kept, one that is being written, and one to spare.
        more_bytes: What else will be written to this disk.

    Raises:
        NoRoomError: There is less; says how much is free, how much is needed, and what to do.
    """
    there = folder.absolute()
    while not there.exists():
        there = there.parent
    free = shutil.disk_usage(there).free
    num_new = max(0, count - len(checkpoints_in(folder)))
    needed = num_new * checkpoint_bytes + more_bytes
    if free < needed:
        raise NoRoomError(
            f"the disk of {folder} has {_size(free)} free and {_size(needed)} are needed: {num_new} checkpoints of "
            f"{_size(checkpoint_bytes)} and {_size(more_bytes)} beside; free {_size(needed - free)}, keep fewer "
            "checkpoints, or give a folder on another disk"
        )


def make_room(folder: Path) -> tuple[Checkpoint, ...]:
    """Removes all checkpoints but the newest that is whole, and what killed saves have left.

    Called when a save met a full disk and nothing is being written. Where none is whole, all stay.

    Returns:
        Those that were removed.
    """
    complete = checkpoints_in(folder)
    whole = next((found for found in complete if not damage_of(found.path)), None)
    others = [found for found in complete if whole is not None and found != whole]
    drop(folder, others)
    left = checkpoints_in(folder)
    return tuple(found for found in others if found not in left)


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.1f} MiB"
