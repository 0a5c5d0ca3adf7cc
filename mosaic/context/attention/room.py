"""Memory of fetched keys and values, which does not shrink with the number of ranks."""

from __future__ import annotations

from pathlib import Path

import torch

from mosaic.errors import InfeasibleError


def fetched_bytes(k: torch.Tensor, v: torch.Tensor, *, heads: int, tokens: int, backward: bool) -> int:
    """Returns the peak bytes of fetched groups of heads: two of keys and values, and two sums in a backward pass."""
    exact = torch.promote_types(k.dtype, torch.float32).itemsize
    numbers = k.shape[0] * heads * tokens * (k.shape[-1] + v.shape[-1])
    return numbers * (2 * k.element_size() + (2 * exact if backward else 0))


def check_room(k: torch.Tensor, v: torch.Tensor, *, heads: int, tokens: int, device: torch.device) -> None:
    """Checks that fetched tensors fit the free memory of the device.

    Args:
        k: Keys of this rank.
        v: Values of this rank.
        heads: Heads of keys and values fetched together.
        tokens: Fetched places of all ranks.
        device: Their device.

    Raises:
        InfeasibleError: They do not fit.
    """
    is_trained = torch.is_grad_enabled() and (k.requires_grad or v.requires_grad)
    needed, free = fetched_bytes(k, v, heads=heads, tokens=tokens, backward=is_trained), free_bytes(device)
    if needed > free:
        fewer = "" if heads == 1 else f"fetch fewer heads together than heads={heads}, "
        raise InfeasibleError(
            f"fetched keys and values of {heads} heads take {needed} bytes and {device} has {free} free",
            reasons=[
                f"{tokens} tokens are fetched, on any number of ranks: {fewer}use exchange='needed', shorter "
                "sequences, or split heads over tensor-parallel ranks"
            ],
        )


def free_bytes(device: torch.device) -> int:
    """Returns the free bytes: on a CUDA device those that torch can still allocate, on a host ``MemAvailable``."""
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + cached
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
