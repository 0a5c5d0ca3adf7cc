"""How far counted operators and a device's description are off, as described and with factors fitted to measured times.

Factors of the description (efficiencies, what host and device take for each kernel, what an SM draws) are fitted to
some modules; others choose how many factors may move; the rest judges. PipeWeaver reports 10 % before calibration and
2.4 % after it (section 6.4), of whole steps on 64 GPUs.

An *error* here is the factor by which a prediction is off, less one: exp(|log(predicted / measured)|) - 1. Where errors
are small it is the relative error; unlike that, it does not favour predictions that are too short.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import numpy as np

from bench.cost.estimates import Vector, absent, damped, mean_figure
from bench.cost.ground import Ground
from bench.record import Figure, Source
from mosaic.cost.counts import PhaseCounts
from mosaic.cost.roofline import phase_ms
from mosaic.hardware import Hardware
from mosaic.profile import Profile

_FACTORS = ("matmul", "attention", "conv", "memory", "launch_us", "kernel_us", "sm_gb_per_s")
_SPEED = np.array([-1.0, -1.0, -1.0, -1.0, 1.0, 1.0, 0.0])
"""How all factors move where everything is slower."""
_FAR = math.log(100.0)
_MAX_EFFICIENCY = 2.0
"""The most that a description may say: peaks of data sheets are passed by a little, not by more."""
CHOSEN = "the freedom chosen on other modules"


@dataclass(frozen=True, slots=True, kw_only=True)
class CountedTime:
    """One measured time of counted operators."""

    counts: PhaseCounts
    """Its operators; without any that send to other devices."""
    num_sms: int
    """SMs it ran on."""
    measured_ms: float
    """Time in milliseconds."""


def _scaled(hardware: Hardware, logs: Vector) -> Hardware:
    """Returns a description with its factors multiplied; peaks are not touched."""
    by = dict(zip(_FACTORS, np.exp(logs).tolist(), strict=True))
    reached = hardware.efficiency
    kinds = {kind: min(_MAX_EFFICIENCY, getattr(reached, kind) * by[kind]) for kind in _FACTORS[:4]}
    efficiency = replace(reached, **kinds)
    return replace(
        hardware,
        efficiency=efficiency,
        launch_us=hardware.launch_us * by["launch_us"],
        kernel_us=hardware.kernel_us * by["kernel_us"],
        sm_gb_per_s=hardware.sm_gb_per_s * by["sm_gb_per_s"],
    )


def _no_move(_: Vector) -> Vector:
    return np.zeros(len(_FACTORS))


FREEDOMS: Mapping[str, tuple[int, Callable[[Vector], Vector]]] = MappingProxyType(
    {
        "as described (0 coefficients)": (0, _no_move),
        "one speed for everything (1)": (1, lambda moved: moved[0] * _SPEED),
        "every factor (7)": (len(_FACTORS), lambda moved: moved),
    }
)
"""What may move: how many numbers, and the logarithms of the factors that they come to."""


def calibrate(hardware: Hardware, times: Sequence[CountedTime], freedom: str) -> Hardware:
    """Returns a description with factors fitted to measured times: least squares of log(predicted / measured)."""
    count, moves = FREEDOMS[freedom]
    if count == 0:
        return hardware

    def residuals(moved: Vector) -> Vector:
        other = _scaled(hardware, moves(moved))
        return np.array([_log_ratio(other, one) for one in times])

    zero = np.zeros(count)
    moved, _ = damped(residuals, zero, zero - _FAR, zero + _FAR)
    return _scaled(hardware, moves(moved))


def errors(hardware: Hardware, held: Sequence[CountedTime]) -> list[float]:
    """Returns by what factor each predicted time is off, less one."""
    return [math.exp(abs(_log_ratio(hardware, one))) - 1 for one in held]


def _log_ratio(hardware: Hardware, one: CountedTime) -> float:
    return math.log(phase_ms(one.counts, hardware, one.num_sms) / one.measured_ms)


def calibration_names(head: str = "") -> tuple[str, ...]:
    """Returns the names of the figures."""
    return tuple(f"{head}analytic error on other modules, {words}" for words in (*FREEDOMS, CHOSEN))


def calibration_figures(
    hardware: Hardware, sets: Sequence[Sequence[CountedTime]], *, source: Source, head: str = ""
) -> Iterator[Figure]:
    """Fits on the first of three sets, chooses by the second, and judges every freedom and the chosen by the third."""
    fit, choose, judge = sets
    found = {words: calibrate(hardware, fit, words) for words in FREEDOMS}
    chosen = min(found, key=lambda words: statistics.fmean(errors(found[words], choose)))
    for name, words in zip(calibration_names(head), (*FREEDOMS, chosen), strict=True):
        labels = {"freedom": words, "fitted to": f"{len(fit)} times", "description": hardware.name}
        yield mean_figure(name, errors(found[words], judge), source=source, labels=labels)


def measure_calibration(ground: Ground) -> Iterator[Figure]:
    """Calibrates the catalogue's description of this device; every third module fits, chooses, judges."""
    hardware = ground.hardware
    if hardware is None:
        why = f"no description in the catalogue fits {ground.bench.device.name}, {ground.num_slots} {ground.unit}"
        yield from absent(calibration_names(), why)
        return
    profiles = (ground.profile, ground.profile, ground.later)
    sets = [_times_of(ground, hardware, profile, ground.names[at::3]) for at, profile in enumerate(profiles)]
    if not all(sets):
        yield from absent(calibration_names(), "fewer than three modules were counted and measured")
        return
    yield from calibration_figures(hardware, sets, source="measured")


def _times_of(ground: Ground, hardware: Hardware, profile: Profile, names: Sequence[str]) -> list[CountedTime]:
    """What a profile measured of the named modules at degree 1."""
    counts = ground.counts
    return [
        CountedTime(
            counts=counts[sample.module].phase(sample.phase),
            num_sms=sample.quota * hardware.sms_per_slot,
            measured_ms=sample.median_ms,
        )
        for sample in profile.samples
        if sample.module in names
        and sample.degree == 1
        and sample.times_ms
        and sample.median_ms > 0
        and counts[sample.module].phase(sample.phase).operators
    ]
