"""Row routing between gloo ranks: measured, and predicted from ``colocate``'s measurements at other sizes."""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch
import torch.distributed as dist

from bench.record import Figure, median_figure
from mosaic.cost.communication import route_ms
from mosaic.profiler import measure_route
from mosaic.ranks.rows.routing import RowRouting


def links(rank: int, size: int) -> Iterator[Figure]:
    """Rows from all ranks to the first one, at three sizes."""
    route = measure_route(torch.device("cpu"), group=dist.group.WORLD)
    for num_bytes in (2**16, 2**20, 2**24):
        rows = 64
        routing = RowRouting(held=(rows,) * size, members=(0,))
        sent = torch.zeros(rows, num_bytes // (4 * rows * size))
        received = sent.new_empty((sum(routing.receives(rank)), *sent.shape[1:]))
        samples = []
        for _ in range(8):
            dist.barrier()
            began = time.perf_counter()
            dist.all_to_all_single(received, sent, list(routing.receives(rank)), list(routing.sends(rank)))
            samples.append((time.perf_counter() - began) * 1e3)
        times = torch.tensor(samples[1:], dtype=torch.float64)
        dist.all_reduce(times, dist.ReduceOp.MAX)
        of = f"rows of {num_bytes // 1024} KiB from {size} ranks to one"
        predicted = route_ms(num_bytes, size, 1, route)
        yield median_figure(f"{of}, ms", times.tolist())
        yield Figure(name=f"{of}, predicted, ms", source="predicted", value=predicted)
