"""How much of its partition and of the memory's bandwidth a module uses: counters over a load that does not pause."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

from mosaic.backends.base import Lane, Mark
from mosaic.device import Device
from mosaic.profile import Phase
from mosaic.profiler.machine.counters import LEAST_SECONDS, Counters, Utilisation
from mosaic.profiler.phase_call import prepare_phase
from mosaic.profiler.subject import Subject

_BATCH_MS = 40.0
_MOST_IN_BATCH = 500


def measure_utilisation(
    subject: Subject,
    lane: Lane,
    phase: Phase,
    counters: Counters,
    device: Device,
    *,
    call_ms: float,
    seconds: float = LEAST_SECONDS,
) -> Utilisation | None:
    """Repeats one phase of a module on a lane, alone on the device, and returns what the counters saw.

    Args:
        subject: The module.
        lane: Where.
        phase: Forward, or backward over one forward's graph.
        counters: Of the GPU that the lane is on.
        device: The same GPU, for the number of its SMs.
        call_ms: About how long one repetition takes.
        seconds: Length of the window.

    Returns:
        Shares of the lane's SMs and of the device's bandwidth; None for a module without that phase.
    """
    call = lane.submit(partial(prepare_phase, subject, phase)).wait()
    if call is None:
        return None
    calls = max(1, min(_MOST_IN_BATCH, math.ceil(_BATCH_MS / max(1e-3, call_ms))))

    def launch() -> Callable[[], None]:
        ticket = lane.submit(partial(_batch, lane, call, calls))

        def finish() -> None:
            start, end = ticket.wait()
            start.ms_until(end)

        return finish

    # One batch is always queued behind the one that runs: the device never waits for the calling thread.
    running = launch()
    with counters.window(seconds) as window:
        while not window.is_long_enough:
            behind = launch()
            running()
            running = behind
    running()
    total = device.num_slots * device.sms_per_slot + device.remainder_sms
    granted: int = getattr(lane, "num_sms", None) or len(lane.slots) * device.sms_per_slot
    return window.found.on_partition(granted, total) if window.found is not None else None


def _batch(lane: Lane, call: Callable[[], object], calls: int) -> tuple[Mark, Mark]:
    start = lane.mark()
    for _ in range(calls):
        call()
    return start, lane.mark()
