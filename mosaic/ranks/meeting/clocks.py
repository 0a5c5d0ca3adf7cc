"""How far this rank's clock is from rank 0's."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
import torch.distributed as dist

_ROUNDS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockOffset:
    """What to add to ``time.perf_counter_ns`` here to have rank 0's."""

    offset_ns: int
    error_ns: int
    """How far it may be off: half the time of the fastest message there and back."""


def measure_clock(group: dist.ProcessGroup) -> ClockOffset:
    """Asks rank 0 for its time, as all ranks of a group on CPUs do at once; the fastest of five answers counts."""
    rank, size = group.rank(), group.size()
    if rank == 0:
        for other in range(1, size):
            for _ in range(_ROUNDS):
                group.recv([torch.zeros(1)], other, 0).wait()
                group.send([torch.tensor([time.perf_counter_ns()])], other, 0).wait()
        return ClockOffset(offset_ns=0, error_ns=0)
    found = []
    for _ in range(_ROUNDS):
        answer = torch.zeros(1, dtype=torch.int64)
        asked = time.perf_counter_ns()
        group.send([torch.zeros(1)], 0, 0).wait()
        group.recv([answer], 0, 0).wait()
        heard = time.perf_counter_ns()
        found.append(ClockOffset(offset_ns=int(answer) - (asked + heard) // 2, error_ns=(heard - asked) // 2))
    return min(found, key=lambda one: one.error_ns)
