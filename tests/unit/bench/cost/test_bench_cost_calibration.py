"""Calibration: factors behind made-up times are found on some modules, chosen on others and judged by the rest."""

from __future__ import annotations

import dataclasses

import pytest
from analytic_cases import pod_counts

from bench.cost.calibration import (
    FREEDOMS,
    CountedTime,
    calibrate,
    calibration_figures,
    calibration_names,
    errors,
)
from mosaic.cost.counts import ModuleCounts
from mosaic.cost.roofline import phase_ms
from mosaic.hardware import Hardware, find_hardware
from mosaic.profile import Phase

H100 = find_hardware("h100-80g")
TRUE = dataclasses.replace(
    H100,
    launch_us=8.0,
    kernel_us=3.5,
    sm_gb_per_s=40.0,
    efficiency=dataclasses.replace(H100.efficiency, matmul=0.55, attention=0.3, memory=0.9),
)
DESCRIBED, ONE_SPEED, EVERY = FREEDOMS


@pytest.fixture(scope="module")
def counts() -> dict[str, dict[int, ModuleCounts]]:
    return pod_counts()


def times_of(counts, hardware: Hardware, quotas=(1, 4, 16), factor: float = 1.0) -> list[CountedTime]:
    found = []
    for by_degree in counts.values():
        for counted in by_degree.values():
            for phase in Phase:
                operators = counted.phase(phase)
                for quota in quotas if operators.operators else ():
                    num_sms = quota * hardware.sms_per_slot
                    ms = factor * phase_ms(operators, hardware, num_sms)
                    found.append(CountedTime(counts=operators, num_sms=num_sms, measured_ms=ms))
    return found


def test_calibration_finds_the_factors_behind_times_at_other_quotas(counts):
    found = calibrate(H100, times_of(counts, TRUE), EVERY)
    assert found.efficiency.matmul == pytest.approx(0.55, rel=0.05)
    assert found.launch_us == pytest.approx(8.0, rel=0.05)
    assert found.kernel_us == pytest.approx(3.5, rel=0.05)
    assert found.efficiency.network == H100.efficiency.network
    assert max(errors(found, times_of(counts, TRUE, quotas=(2, 8)))) < 0.02
    assert calibrate(H100, times_of(counts, TRUE), DESCRIBED) == H100


def test_one_speed_moves_everything_alike(counts):
    found = calibrate(H100, times_of(counts, H100, factor=1.25), ONE_SPEED)
    assert found.launch_us == pytest.approx(1.25 * H100.launch_us, rel=0.01)
    assert max(errors(found, times_of(counts, H100, factor=1.25))) < 0.01


def test_the_set_to_choose_by_decides_and_the_last_set_judges(counts):
    fit, judge = times_of(counts, TRUE), times_of(counts, TRUE, quotas=(2,))
    *_, chosen = calibration_figures(H100, (fit, times_of(counts, H100, quotas=(8,)), judge), source="simulated")
    assert chosen.name == calibration_names()[-1]
    assert chosen.labels["freedom"] == DESCRIBED
    *_, freest, chosen = calibration_figures(H100, (fit, fit, judge), source="simulated")
    assert (chosen.labels["freedom"], chosen.value) == (EVERY, freest.value)
