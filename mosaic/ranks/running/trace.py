"""What this rank did, on rank 0's clock."""

from __future__ import annotations

from collections.abc import Iterable

from mosaic.rank_trace import RankSpan, RankTrace
from mosaic.ranks.meeting.world import World
from mosaic.timeline import Span


def trace_of(spans: Iterable[Span], origin_ns: int, world: World) -> RankTrace:
    """Returns this rank's trace; every rank asks, since clocks are compared.

    Args:
        spans: What it computed, in milliseconds since
        origin_ns: this time of ``time.perf_counter_ns``.
        world: The ranks.
    """
    clock = world.clock()
    shift_us = clock.offset_ns / 1e3
    computed = [
        RankSpan(
            kind="compute",
            module=span.module,
            phase=span.phase,
            step=span.step,
            start_us=origin_ns / 1e3 + span.start_ms * 1e3 + shift_us,
            end_us=origin_ns / 1e3 + span.end_ms * 1e3 + shift_us,
        )
        for span in spans
    ]
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
        spans=tuple(sorted(computed + waited, key=lambda span: span.start_us)),
    )
