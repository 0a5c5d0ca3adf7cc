"""How far the analytic model is off on modules that calibration has not seen, before and after it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from bench.cost.calibration import LEAST_MEASUREMENTS, Measurement, calibrate, measurements_of
from bench.cost.figures import absent, mean_figure
from bench.cost.ground import Ground
from bench.record import Figure
from mosaic.cost.analytic import count_module
from mosaic.cost.roofline import phase_ms
from mosaic.hardware import Hardware
from mosaic.profile import Profile

BEFORE = "analytic error before calibration, held-out modules"
AFTER = "analytic error after calibration, held-out modules"
PAPER_BEFORE, PAPER_AFTER = "0.10, of a whole step on 64 GPUs", "0.024, of a whole step on 64 GPUs"
"""PipeWeaver section 6.4: the paper's own figures, of other models on other hardware."""


def measure_analytic(ground: Ground) -> Iterator[Figure]:
    """Calibrates on every other module and judges the rest by later measurements; then the other way round."""
    hardware = ground.hardware
    if hardware is None:
        yield from absent(
            (BEFORE, AFTER),
            f"no description in the catalogue fits {ground.bench.device.name}, {ground.num_slots} {ground.unit}",
        )
        return
    before: list[float] = []
    after: list[float] = []
    freedoms: list[str] = []
    for half in (0, 1):
        fit = _measurements(ground, ground.profile, ground.names[half::2])
        held = _measurements(ground, ground.later, ground.names[1 - half :: 2])
        if len(fit) < LEAST_MEASUREMENTS:
            yield from absent((BEFORE, AFTER), f"{len(fit)} measurements to fit; it takes {LEAST_MEASUREMENTS}")
            return
        before += errors(hardware, held)
        calibrated = calibrate(hardware, fit)
        after += errors(calibrated.hardware, held)
        freedoms.append(calibrated.freedom)
    labels = {"is": "factor by which a predicted time is off, less one", "description": hardware.name}
    yield mean_figure(BEFORE, before, source="measured", labels=labels | {"PipeWeaver reports": PAPER_BEFORE})
    labels |= {"changed": ", ".join(freedoms), "PipeWeaver reports": PAPER_AFTER}
    yield mean_figure(AFTER, after, source="measured", labels=labels)


def errors(hardware: Hardware, held: Sequence[Measurement]) -> list[float]:
    """Returns by what factor each predicted time is off, less one."""
    found = []
    for one in held:
        predicted = phase_ms(one.counts, hardware, one.quota * hardware.sms_per_slot)
        found.append(math.exp(abs(math.log(predicted / one.measured_ms))) - 1)
    return found


def _measurements(ground: Ground, profile: Profile, names: Sequence[str]) -> tuple[Measurement, ...]:
    """What a profile measured of the named modules at degree 1."""
    kind = ground.bench.device.kind
    subjects = [subject for subject in ground.finding.subjects if subject.name in names]
    counts = {s.name: {1: count_module(s.module, s.args, s.kwargs, target=kind)} for s in subjects}
    return measurements_of(profile, counts)
