"""Device memory that a lane costs before any module runs on it.

torch's allocator keeps a cache of its own for each stream. Up to torch 2.14 cuBLAS has a workspace for each pair of
handle and stream (32 MiB on Hopper), with one handle in the thread that launches forward and another in autograd's.
Since 2.15 a product takes its workspace from the stream's cache and gives it back, unless
``TORCH_CUBLAS_WORKSPACE_CACHE`` is 1. A plan on many lanes pays all of it for each, which a model of memory that only
counts tensors does not see.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

_ROWS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneMemory:
    """Memory that first products on one lane left behind."""

    slots: tuple[int, ...]
    """Slots of the lane."""
    reserved_bytes: int
    """Growth of what torch's allocator holds, with no tensor left: the stream's cache and workspaces."""
    device_bytes: int
    """Loss of free memory on the device, by the driver; wrong by what other processes took or gave meanwhile."""


def run_first_products(device: torch.device) -> None:
    """Multiplies small matrices forward and backward, so that libraries set themselves up on the current stream."""
    given = torch.ones(_ROWS, _ROWS, device=device)
    weight = torch.ones(_ROWS, _ROWS, device=device, requires_grad=True)
    bias = torch.ones(_ROWS, device=device, requires_grad=True)
    nn.functional.linear(given @ weight, weight, bias).sum().backward()
