"""A trace of what this rank did, on rank 0's clock."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from mosaic.rank_trace import RankSpan, RankTrace
from mosaic.ranks.world.progress import THE_LOOP
from mosaic.ranks.world.world import World
from mosaic.timeline import Span

_ROUNDS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockOffset:
    """The difference of rank 0's ``time.perf_counter_ns`` to this rank's."""

    offset_ns: int
    error_ns: int
    """Its largest error: half the time of the fastest message there and back."""


def measure_clock(group: dist.ProcessGroup) -> ClockOffset:
    """Asks rank 0 for its time, as all ranks of a group on CPUs do at once; the fastest of five answers counts."""
    rank, size = group.rank(), group.size()
    if rank == 0:
        for other in range(1, size):
            for _ in range(_ROUNDS):
                group.recv([torch.zeros(1)], other, 0).wait()
                group.send([torch.tensor([time.perf_counter_ns()])], other, 0).wait()
        return ClockOffset(offset_ns=0, error_ns=0)
    offsets = []
    for _ in range(_ROUNDS):
        answer = torch.zeros(1, dtype=torch.int64)
        asked = time.perf_counter_ns()
        group.send([torch.zeros(1)], 0, 0).wait()
        group.recv([answer], 0, 0).wait()
        heard = time.perf_counter_ns()
        offsets.append(ClockOffset(offset_ns=int(answer) - (asked + heard) // 2, error_ns=(heard - asked) // 2))
    return min(offsets, key=lambda one: one.error_ns)


def computed_spans(spans: Iterable[Span], origin_ns: int) -> list[RankSpan]:
    """Returns what a rank computed, on its own clock."""
    return [
        RankSpan(
            kind="compute",
            module=span.module,
            phase=span.phase,
            step=span.step,
            start_us=origin_ns / 1e3 + span.start_ms * 1e3,
            end_us=origin_ns / 1e3 + span.end_ms * 1e3,
        )
        for span in spans
    ]


def trace_of(computed: Iterable[RankSpan], world: World) -> RankTrace:
    """Returns this rank's trace; every rank asks, since clocks are compared."""
    with world.progress.waiting(THE_LOOP, "agreement"):
        clock = measure_clock(world.agreements)
    shift_us = clock.offset_ns / 1e3
    shifted = [replace(span, start_us=span.start_us + shift_us, end_us=span.end_us + shift_us) for span in computed]
    waited = [
        RankSpan(
            kind="wait",
            module=wait.module,
            phase=wait.phase,
            step=wait.step,
            start_us=wait.start_ns / 1e3 + shift_us,
            end_us=wait.end_ns / 1e3 + shift_us,
        )
        for wait in world.progress.waits
        if wait.phase != "agreement"  # of no step: starts, norms, checkpoints
    ]
    return RankTrace(
        run=world.run,
        rank=world.rank,
        num_ranks=world.size,
        host=world.me.host,
        clock_offset_us=shift_us,
        clock_error_us=clock.error_ns / 1e3,
        spans=tuple(sorted(shifted + waited, key=lambda span: span.start_us)),
    )
