"""Whether a stage can gain by lanes: what its modules take to launch and to run, and a rule of which lever matters.

One thread launches everything. With c the time to launch a module and g its time on the whole device, a plain stream
takes the greater of all launches and all work. On lanes a module begins when those before it have been launched, and
takes the greater of its own launches and its work on its part of the device, s times as long. Of two equal modules that
is max(2 c, 2 g) against c + max(c, s g): lanes gain where c < (2 - s) g. Otherwise launches have to go, by graphs.

What the rule does not know: work before and after the stage, the barrier of a loss between forward and backward, and
what modules cost each other in memory bandwidth.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Literal

from bench.gpu.bench import Bench
from bench.gpu.tables import number
from bench.record import Figure, missing_figure
from mosaic.backends.base import Lane, Lanes
from mosaic.errors import BackendUnavailableError, UnsupportedModelError
from mosaic.profiler import Subject, batch_of, hold_back, split_batch

Lever = Literal["lanes", "graphs", "neither"]

MAX_REPEATS = 3
LONG_MS = 100.0
"""Work that takes longer is timed once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleTimes:
    """One module's forward and backward."""

    name: str
    """Which module."""
    launch_ms: float
    """c: how long the host takes to launch them, without waiting for the device."""
    device_ms: float
    """g: how long the whole device takes for them when everything has been launched."""
    slowdown: float
    """s: how much longer they take on the module's part of the device."""


Stage = Sequence[ModuleTimes]
"""Modules that run side by side, in the order in which they are launched."""


def plain_ms(stage: Stage) -> float:
    """Returns how long modules take on one stream."""
    return max(sum(each.launch_ms for each in stage), sum(each.device_ms for each in stage))


def lanes_ms(stage: Stage) -> float:
    """Returns how long modules take on lanes of their own."""
    launched, end = 0.0, 0.0
    for each in stage:
        end = max(end, launched + max(each.launch_ms, each.slowdown * each.device_ms))
        launched += each.launch_ms
    return end


def lever_of(stages: Sequence[Stage]) -> Lever:
    """Returns what makes stages faster: lanes as they are, lanes once nothing has to be launched, or neither."""
    if sum(map(lanes_ms, stages)) < sum(map(plain_ms, stages)):
        return "lanes"
    alone = sum(max(each.slowdown * each.device_ms for each in stage) for stage in stages)
    return "graphs" if alone < sum(each.device_ms for stage in stages for each in stage) else "neither"


def measure_rule(
    stages: Sequence[Sequence[tuple[Subject, int]]], bench: Bench, *, step_ms: float, until_s: float
) -> Iterator[Figure]:
    """Measures c, g and s of the modules of stages, and yields what the rule predicts of them; says so as a verdict.

    Args:
        stages: Modules that run side by side, in the order in which they are launched, each with its slots.
        bench: Where.
        step_ms: The plain step, of which the stages are a part.
        until_s: When to leave the rest out, by the time that the bench has used.
    """
    whole = bench.device.slots
    alone: dict[str, tuple[float, float]] = {}
    with _whole_device(bench) as lanes:
        for subject, _ in chain(*stages):
            if bench.budget.used_s > until_s:
                yield missing_figure("device_ms", "no time was left", {"module": subject.name})
                return
            launch_ms = _launch_ms(subject, lanes.lane(whole), bench)
            device_ms = _device_ms(subject, lanes.lane(whole), launch_ms, bench)
            alone[subject.name] = launch_ms, device_ms
            yield Figure(name="launch_ms", source="measured", value=launch_ms, labels={"module": subject.name})
            yield Figure(name="device_ms", source="measured", value=device_ms, labels={"module": subject.name})
    measured: list[list[ModuleTimes]] = []
    with bench.backend.open_lanes([whole[:quota] for _, quota in chain(*stages)]) as lanes:
        for stage in stages:
            measured.append([])
            for subject, quota in stage:
                labels = {"module": subject.name, "quota": str(quota)}
                if bench.budget.used_s > until_s:
                    yield missing_figure("slowdown", "no time was left", labels)
                    return
                launch_ms, device_ms = alone[subject.name]
                slowdown = _device_ms(subject, lanes.lane(whole[:quota]), launch_ms, bench) / device_ms
                yield Figure(name="slowdown", source="measured", value=slowdown, labels=labels)
                times = ModuleTimes(name=subject.name, launch_ms=launch_ms, device_ms=device_ms, slowdown=slowdown)
                measured[-1].append(times)
    yield from predictions_of(measured, step_ms)
    bench.verdict = sentence_of(measured, step_ms)


def predicted_speedup(stages: Sequence[Stage], step_ms: float) -> float | None:
    """Returns what a whole step gains, whose other parts stay as they are; None if it is shorter than its stages."""
    plain, lanes = sum(map(plain_ms, stages)), sum(map(lanes_ms, stages))
    return step_ms / (step_ms - plain + lanes) if step_ms >= plain else None


def predictions_of(stages: Sequence[Stage], step_ms: float) -> Iterator[Figure]:
    """Yields what the rule says of the stages alone, and of the whole step."""
    labels = {"modules": " ; ".join(" | ".join(each.name for each in stage) for stage in stages)}
    yield Figure(name="rule_plain_ms", source="predicted", value=sum(map(plain_ms, stages)), labels=labels)
    yield Figure(name="rule_lanes_ms", source="predicted", value=sum(map(lanes_ms, stages)), labels=labels)
    speedup = predicted_speedup(stages, step_ms)
    if speedup is None:
        reason = "the plain step is shorter than its modules apart"
        yield missing_figure("rule_speedup", reason, labels, source="predicted")
    else:
        yield Figure(name="rule_speedup", source="predicted", value=speedup, labels=labels)


def sentence_of(stages: Sequence[Stage], step_ms: float) -> str:
    """Says c, g and s, which lever matters, and what is predicted."""
    said = {
        "lanes": "lanes gain",
        "graphs": "launches take too long for lanes to gain, graphs may",
        "neither": "neither lanes nor graphs gain, since parts of the device are too slow",
    }
    every = list(chain(*stages))
    launch = " + ".join(number(each.launch_ms) for each in every)
    device = " + ".join(number(each.device_ms) for each in every)
    slowdown = ", ".join(number(each.slowdown) for each in every)
    speedup = predicted_speedup(stages, step_ms)
    predicted = "" if speedup is None else f", {number(speedup)}x predicted"
    return f"c {launch} ms, g {device} ms, s {slowdown}: by the rule of thumb {said[lever_of(stages)]}{predicted}"


def _whole_device(bench: Bench) -> Lanes:
    """Opens a plain stream with every SM, or where there are none a lane with every slot."""
    try:
        return bench.backend.open_plain_lanes([bench.device.slots])
    except BackendUnavailableError:
        return bench.backend.open_lanes([bench.device.slots])


def _step(subject: Subject) -> None:
    subject.backward(subject.forward())


def _launch_ms(subject: Subject, lane: Lane, bench: Bench) -> float:
    """Times the host alone, phase by phase and of one sample: behind a full queue it would wait for the device."""
    with contextlib.suppress(UnsupportedModelError):  # launches are as many for all samples
        subject = split_batch(subject, batch_of(subject, "cut to one sample"))
    found = []
    for _ in range(MAX_REPEATS + 1):
        bench.synchronize()
        start = time.perf_counter()
        forward = lane.submit(subject.forward)
        launched = time.perf_counter() - start
        outputs = forward.wait()
        bench.synchronize()
        start = time.perf_counter()
        backward = lane.submit(partial(subject.backward, outputs))
        launched += time.perf_counter() - start
        backward.wait()
        found.append(launched * 1e3)
    bench.synchronize()
    return statistics.median(found[1:])  # libraries choose their kernels in the first


def _device_ms(subject: Subject, lane: Lane, launch_ms: float, bench: Bench) -> float:
    """Times the device alone: nothing starts before all of it has been launched, as far as the queue is long."""
    work = partial(_step, subject)
    lane.submit(work).wait()  # a lane takes memory of its own at first
    found: list[float] = []
    while not found or (len(found) < MAX_REPEATS and found[0] < LONG_MS):
        bench.synchronize()
        hold_back(bench.torch_device, 2 * launch_ms + 1)
        ticket = lane.submit(work)
        ticket.wait()
        bench.synchronize()
        start_ns, end_ns = ticket.interval_ns
        found.append(max(1e-6, (end_ns - start_ns) / 1e6))
    return statistics.median(found)
