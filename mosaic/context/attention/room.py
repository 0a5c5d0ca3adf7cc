"""Whether a device has room for what is fetched, which does not shrink with the number of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from mosaic.errors import InfeasibleError

if TYPE_CHECKING:
    from mosaic.context.attention.attend import Attend


def fetched_bytes(attend: Attend, k: torch.Tensor, v: torch.Tensor, *, backward: bool) -> int:
    """Returns the most that fetched groups of heads take: two of keys and values, and of a backward pass two sums."""
    exact = torch.promote_types(k.dtype, torch.float32).itemsize
    tokens = attend.fetched_blocks * attend.plan.blocks.block
    numbers = k.shape[0] * attend.heads * tokens * (k.shape[-1] + v.shape[-1])
    return numbers * (2 * k.element_size() + (2 * exact if backward else 0))


def check_room(attend: Attend, k: torch.Tensor, v: torch.Tensor) -> None:
    """Checks that what is fetched fits what is free on the device.

    Raises:
        InfeasibleError: It does not.
    """
    is_trained = torch.is_grad_enabled() and (k.requires_grad or v.requires_grad)
    needed, free = fetched_bytes(attend, k, v, backward=is_trained), free_bytes(attend.device)
    if needed > free:
        fewer = "" if attend.heads == 1 else f"fetch fewer heads together than heads={attend.heads}, "
        raise InfeasibleError(
            f"fetched keys and values of {attend.heads} heads take {needed} bytes and {attend.device} has {free} free",
            reasons=[
                f"{attend.fetched_blocks} blocks are fetched, on any number of ranks: {fewer}use exchange='needed', "
                "shorter sequences, or split heads over tensor-parallel ranks"
            ],
        )


def free_bytes(device: torch.device) -> int:
    """Returns what is free: of a CUDA device what torch may still take, of a host what its kernel says."""
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + cached
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
