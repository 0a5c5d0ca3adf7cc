"""A trace of what this rank did, on rank 0's clock."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import replace
from typing import Literal

import torch
import torch.distributed as dist

from mosaic.rank_trace import RankSpan, RankTrace
from mosaic.ranks.world.progress import THE_LOOP, Wait
from mosaic.ranks.world.world import World
from mosaic.timeline import Span

_ROUNDS = 5


def computed_spans(spans: Iterable[Span]) -> list[RankSpan]:
    """Returns what a rank computed, on its own clock."""
    return [_span("compute", span, span.start_ms * 1e3, span.end_ms * 1e3) for span in spans]


def trace_of(computed: Iterable[RankSpan], world: World) -> RankTrace:
    """Returns this rank's trace; every rank calls it, since clocks are compared."""
    with world.progress.waiting(THE_LOOP, "agreement"):
        offset_ns, error_ns = _measure_clock(world.agreements)
    waited = [
        _span("wait", wait, wait.start_ns / 1e3, wait.end_ns / 1e3)
        for wait in world.progress.waits
        if wait.phase != "agreement"  # of no step: starts, norms, checkpoints
    ]
    shift_us = offset_ns / 1e3
    spans = [
        replace(span, start_us=span.start_us + shift_us, end_us=span.end_us + shift_us) for span in (*computed, *waited)
    ]
    return RankTrace(
        run=world.run,
        rank=world.rank,
        num_ranks=world.size,
        host=world.me.host,
        clock_offset_us=shift_us,
        clock_error_us=error_ns / 1e3,
        spans=tuple(sorted(spans, key=lambda span: span.start_us)),
    )


def _span(kind: Literal["compute", "wait"], work: Span | Wait, start_us: float, end_us: float) -> RankSpan:
    return RankSpan(kind=kind, module=work.module, phase=work.phase, step=work.step, start_us=start_us, end_us=end_us)


def _measure_clock(group: dist.ProcessGroup) -> tuple[int, int]:
    """Returns rank 0's ``time.perf_counter_ns`` minus this rank's, and the largest error: half of a message's way.

    All ranks of a group on CPUs ask rank 0 at once; the fastest of five answers counts.
    """
    if group.rank() == 0:
        for other in range(1, group.size()):
            for _ in range(_ROUNDS):
                group.recv([torch.zeros(1)], other, 0).wait()
                group.send([torch.tensor([time.perf_counter_ns()])], other, 0).wait()
        return 0, 0
    answers = []
    for _ in range(_ROUNDS):
        answer = torch.zeros(1, dtype=torch.int64)
        sent = time.perf_counter_ns()
        group.send([torch.zeros(1)], 0, 0).wait()
        group.recv([answer], 0, 0).wait()
        received = time.perf_counter_ns()
        answers.append((int(answer) - (sent + received) // 2, (received - sent) // 2))
    return min(answers, key=lambda clock: clock[1])
