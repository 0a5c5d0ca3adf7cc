"""Disk space of checkpoints: estimate, check, and removal of old ones.

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
"""Allowance for data other than tensors (names, settings, ``extra``), and again for each 100 tensors."""


def room_needed(
    model: nn.Module, optimizer: OneOrSeveral[Optimizer] = None, companions: Mapping[str, nn.Module] | None = None
) -> int:
    """Estimates the bytes of a checkpoint of all ranks, also before the first step.

    An optimizer without state makes it on tensors without memory; if it cannot, the estimate is two numbers for each
    number of a parameter.
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
    """Returns the tensors of an optimizer's state, present or future, for parameters that train."""
    tensors = []
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
                tensors += [value for value in state.values() if hasattr(value, "nbytes")]
    return tensors


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
    """Checks the disk space for checkpoints before a run begins.

    Args:
        folder: The run's checkpoints; existing ones count.
        checkpoint_bytes: Bytes of one checkpoint; see ``room_needed``.
        count: Number at once: those that stay, one being written, and one to spare.
        more_bytes: Bytes of other files that will be written to this disk.

    Raises:
        NoRoomError: The disk has less space; the message has both sizes and a remedy.
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
            "checkpoints, or choose a folder on another disk"
        )


def make_room(folder: Path) -> tuple[Checkpoint, ...]:
    """Removes all checkpoints except the newest intact one, and remains of killed saves.

    Call it after a save ran into a full disk, while no save is in progress. If none is intact, all stay.

    Returns:
        The removed checkpoints.
    """
    complete = checkpoints_in(folder)
    whole = next((checkpoint for checkpoint in complete if not damage_of(checkpoint.path)), None)
    others = [checkpoint for checkpoint in complete if whole is not None and checkpoint != whole]
    drop(folder, others)
    left = checkpoints_in(folder)
    return tuple(checkpoint for checkpoint in others if checkpoint not in left)


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.1f} MiB"
