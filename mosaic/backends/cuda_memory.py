"""What a lane costs in device memory before any module runs on it.

torch's allocator keeps a cache of its own for each stream, and cuBLAS a workspace for each pair of handle and stream
(32 MiB on Hopper), with one handle in the thread that launches forward and another in autograd's. A plan on many
lanes pays all of it for each, which a model of memory that only counts tensors does not see.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

from mosaic.backends.streams.lanes import StreamLanes
from mosaic.device import FORBID_EXTRA

_ROWS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneMemory:
    """What first products on one lane left behind."""

    __pydantic_config__: ClassVar[dict[str, str]] = FORBID_EXTRA

    slots: tuple[int, ...]
    """Slots of the lane."""
    reserved_bytes: int
    """Growth of what torch's allocator holds, with no tensor left: the stream's cache and workspaces."""
    device_bytes: int
    """Loss of free memory on the device, by the driver; wrong by what other processes took or gave meanwhile."""


def measure_lane_memory(lanes: StreamLanes) -> tuple[LaneMemory, ...]:
    """Runs small products forward and backward on each lane and measures what stays behind.

    Gives all cached memory and all workspaces back first, so it is not for a loop; they are made anew when needed.

    Args:
        lanes: With no work of anybody on them.

    Returns:
        One entry a lane, in the order in which they were opened.
    """
    api = lanes.api
    api.synchronize()
    api.release_workspaces()
    api.empty_cache()
    found = []
    for lane in lanes:
        reserved, free = api.reserved_bytes(), api.free_bytes()
        lane.launch(lambda: _products(api.device), timed=False)
        api.synchronize()
        found.append(
            LaneMemory(
                slots=lane.slots,
                reserved_bytes=max(0, api.reserved_bytes() - reserved),
                device_bytes=max(0, free - api.free_bytes()),
            )
        )
    return tuple(found)


def _products(device: torch.device) -> None:
    given = torch.ones(_ROWS, _ROWS, device=device)
    weight = torch.ones(_ROWS, _ROWS, device=device, requires_grad=True)
    bias = torch.ones(_ROWS, device=device, requires_grad=True)
    nn.functional.linear(given @ weight, weight, bias).sum().backward()
