"""Calibration: factors behind made-up times are found, and real times on this host are told better than before."""

from __future__ import annotations

import dataclasses
import math
import statistics
import time

import pytest
import torch
from bench.cost.calibration import NOTHING, Calibrated, Measurement, calibrate, measurements_of
from torch import nn

from mosaic.cost.analytic import count_module
from mosaic.cost.counts import ModuleCounts, PhaseCounts
from mosaic.cost.roofline import phase_ms
from mosaic.errors import InvalidPlanError, InvalidProfileError
from mosaic.hardware import Hardware, find_hardware
from mosaic.profile import Phase
from tests.analytic_cases import pod_counts
from tests.planning_cases import profile_of

H100 = find_hardware("h100-80g")


@pytest.fixture(scope="module")
def counts() -> dict[str, dict[int, ModuleCounts]]:
    return pod_counts()


TRUE = dataclasses.replace(
    H100,
    launch_us=2.5,
    sm_gb_per_s=40.0,
    efficiency=dataclasses.replace(H100.efficiency, matmul=0.55, attention=0.3, memory=0.9),
)


def made_measurements(counts, hardware: Hardware, noise: float = 0.0) -> list[Measurement]:
    found = []
    for name, by_degree in counts.items():
        for degree, counted in by_degree.items():
            for phase in Phase:
                for quota in (1, 4, 16):
                    operators = counted.phase(phase)
                    if not operators.operators:
                        continue
                    sign = 1 if len(found) % 2 else -1
                    ms = phase_ms(operators, hardware, quota * hardware.sms_per_slot) * (1 + sign * noise)
                    label = f"{name} {phase} {degree}"
                    found.append(Measurement(name=label, counts=operators, quota=quota, measured_ms=ms))
    return found


def test_calibration_finds_the_factors_behind_times(counts):
    found = calibrate(H100, made_measurements(counts, TRUE))
    assert found.error_before > 0.2
    assert found.error_after < 0.01
    assert found.error_held_out < 0.01
    assert found.is_better
    assert found.hardware.efficiency.matmul == pytest.approx(0.55, rel=0.05)
    assert found.hardware.efficiency.attention == pytest.approx(0.3, rel=0.05)
    assert found.hardware.launch_us == pytest.approx(2.5, rel=0.05)
    assert found.hardware.sm_gb_per_s == pytest.approx(40.0, rel=0.05)
    assert "calibrated on" in found.hardware.source


def test_calibration_stands_noise_and_an_outlier(counts):
    measurements = made_measurements(counts, TRUE, noise=0.03)
    measurements[5] = dataclasses.replace(measurements[5], measured_ms=50 * measurements[5].measured_ms)
    found = calibrate(H100, measurements)
    assert found.hardware.efficiency.matmul == pytest.approx(0.55, rel=0.15)
    assert found.error_after < found.error_before


def test_what_nothing_depends_on_stays(counts):
    found = calibrate(H100, made_measurements(counts, TRUE))
    assert "conv" not in found.fitted
    assert found.hardware.efficiency.conv == H100.efficiency.conv
    assert found.hardware.efficiency.network == H100.efficiency.network
    assert {"matmul", "attention", "memory", "launch_us", "sm_gb_per_s"} == set(found.fitted)


def test_a_description_that_fits_is_left_alone(counts):
    found = calibrate(H100, made_measurements(counts, H100))
    assert found.error_before == pytest.approx(0.0, abs=1e-9)
    assert found.error_after <= found.error_before + 1e-9


def test_modules_that_contradict_each_other_change_nothing(counts):
    """One module is four times as fast as described, the next four times as slow: no factor tells of a third."""
    operators = counts["fusion"][1].forward
    measurements = [
        Measurement(
            name=f"{module} {quota}",
            module=module,
            counts=operators,
            quota=quota,
            measured_ms=factor * phase_ms(operators, H100, quota * H100.sms_per_slot),
        )
        for module, factor in zip("abcdef", (4.0, 0.25) * 3, strict=True)
        for quota in (1, 2, 4, 8, 16)
    ]
    found = calibrate(H100, measurements)
    assert found.freedom == NOTHING
    assert found.hardware == H100
    assert found.fitted == ()
    assert not found.is_better
    assert found.error_held_out == found.error_before == found.error_after


def test_a_device_that_is_slower_in_everything_takes_one_speed(counts):
    slow = [
        dataclasses.replace(one, measured_ms=3 * one.measured_ms, module=one.name.split()[0])
        for one in made_measurements(counts, H100, noise=0.05)
    ]
    found = calibrate(H100, slow)
    assert found.freedom != NOTHING
    assert found.is_better
    assert found.error_before == pytest.approx(2.0, abs=0.2)
    assert found.error_held_out < 0.15


def test_a_module_is_left_out_whole_and_weighs_the_same_however_often_it_was_measured(counts):
    measurements = [
        dataclasses.replace(one, module=one.name.split()[0]) for one in made_measurements(counts, TRUE, noise=0.02)
    ]
    wrong = [dataclasses.replace(one, measured_ms=5 * one.measured_ms) for one in measurements if one.quota == 4][:1]
    often = [dataclasses.replace(wrong[0], name=f"again {i}") for i in range(60)]
    few, many = calibrate(H100, measurements), calibrate(H100, [*measurements, *often])
    assert few.hardware.efficiency.matmul == pytest.approx(many.hardware.efficiency.matmul, rel=0.6)


def test_too_few_measurements_are_refused(counts):
    with pytest.raises(ValueError, match="needs at least 6 measurements, there are 5"):
        calibrate(H100, made_measurements(counts, TRUE)[:5])


def test_measurements_that_cannot_be_are_refused(counts):
    operators = counts["fusion"][1].forward
    for wrong in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match=f"measured_ms={wrong}"):
            Measurement(name="x", counts=operators, quota=1, measured_ms=wrong)
    with pytest.raises(ValueError, match="0 operators"):
        Measurement(name="x", counts=PhaseCounts(), quota=1, measured_ms=1.0)
    measurements = made_measurements(counts, TRUE)
    with pytest.raises(InvalidPlanError, match="quota of 99 slots"):
        calibrate(H100, [*measurements, dataclasses.replace(measurements[0], quota=99)])


def test_a_profile_calibrates_the_modules_that_were_counted(counts):
    profile = profile_of({"image": lambda degree, quota: 10.0 / quota}, num_slots=16)
    measurements = measurements_of(profile, counts)
    assert {measurement.name for measurement in measurements} == {"image forward", "image backward"}
    found = calibrate(H100, measurements)
    assert found.error_after <= found.error_before
    with pytest.raises(InvalidProfileError, match="measured none of video"):
        measurements_of(profile, {"video": counts["image"]})


def test_real_kernels_calibrate_this_host():
    found = calibrate(find_hardware("host"), tuple(measured_here()))
    assert isinstance(found, Calibrated)
    assert found.error_after <= found.error_before
    assert found.num_measurements == 8


def measured_here():
    modules = {
        "matmul": (nn.Linear(256, 256), torch.randn(64, 256, requires_grad=True)),
        "mlp": (nn.Sequential(nn.Linear(64, 256), nn.GELU()), torch.randn(64, 64, requires_grad=True)),
        "conv": (nn.Conv2d(4, 8, 3), torch.randn(4, 4, 16, 16, requires_grad=True)),
        "norm": (nn.LayerNorm(256), torch.randn(128, 256, requires_grad=True)),
    }
    for name, (module, given) in modules.items():
        counted = count_module(module, (given,), target="host")
        times: dict[Phase, list[float]] = {phase: [] for phase in Phase}
        for _ in range(5):
            start = time.perf_counter()
            output = module(given)
            middle = time.perf_counter()
            output.backward(torch.ones_like(output))
            end = time.perf_counter()
            times[Phase.FORWARD].append((middle - start) * 1e3)
            times[Phase.BACKWARD].append((end - middle) * 1e3)
        for phase in Phase:
            yield Measurement(
                name=name, counts=counted.phase(phase), quota=1, measured_ms=statistics.median(times[phase])
            )
