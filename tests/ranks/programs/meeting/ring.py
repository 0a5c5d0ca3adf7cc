"""The links of a few ranks, as the profiler measures them; each is called on every rank of a gloo group."""

from __future__ import annotations

import torch
import torch.distributed as dist

from mosaic.profiler import measure_ring, measure_route


def measured(rank: int, size: int) -> list[float]:
    """Returns latency and bandwidth of a ring, and of rows' way to one rank."""
    device = torch.device("cpu")
    ring, route = measure_ring(device), measure_route(device, group=dist.group.WORLD)
    return [ring.latency_us, ring.gb_per_s, route.latency_us, route.gb_per_s]
