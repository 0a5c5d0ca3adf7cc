"""Calibration: factors behind made-up times are found, and nothing changes where none tells of other modules."""

from __future__ import annotations

import dataclasses

import pytest

from bench.cost.calibration import NOTHING, CountedTime, calibrate, measurements_of
from mosaic.cost.counts import ModuleCounts
from mosaic.cost.roofline import phase_ms
from mosaic.hardware import Hardware, find_hardware
from mosaic.profile import Phase
from tests.analytic_cases import pod_counts
from tests.planning_cases import profile_of

H100 = find_hardware("h100-80g")
TRUE = dataclasses.replace(
    H100,
    launch_us=8.0,
    kernel_us=3.5,
    sm_gb_per_s=40.0,
    efficiency=dataclasses.replace(H100.efficiency, matmul=0.55, attention=0.3, memory=0.9),
)


@pytest.fixture(scope="module")
def counts() -> dict[str, dict[int, ModuleCounts]]:
    return pod_counts()


def made_measurements(counts, hardware: Hardware, noise: float = 0.0, *, whole: bool = False) -> list[CountedTime]:
    """Times of all modules, degrees and phases; each phase and degree is a module unless they are ``whole``."""
    found: list[CountedTime] = []
    for name, by_degree in counts.items():
        for degree, counted in by_degree.items():
            for phase in Phase:
                for quota in (1, 4, 16):
                    operators = counted.phase(phase)
                    if not operators.operators:
                        continue
                    sign = 1 if len(found) % 2 else -1
                    ms = phase_ms(operators, hardware, quota * hardware.sms_per_slot) * (1 + sign * noise)
                    module = name if whole else f"{name} {phase} {degree}"
                    found.append(CountedTime(module=module, counts=operators, quota=quota, measured_ms=ms))
    return found


def test_calibration_finds_the_factors_behind_times_and_leaves_the_others(counts):
    found = calibrate(H100, made_measurements(counts, TRUE))
    assert found.error_before > 0.2
    assert found.error_held_out < 0.01
    assert found.hardware.efficiency.matmul == pytest.approx(0.55, rel=0.05)
    assert found.hardware.efficiency.attention == pytest.approx(0.3, rel=0.05)
    assert found.hardware.launch_us == pytest.approx(8.0, rel=0.05)
    assert found.hardware.kernel_us == pytest.approx(3.5, rel=0.05)
    assert found.untold == ("conv",)
    assert found.hardware.sm_gb_per_s == pytest.approx(40.0, rel=0.05)
    assert found.hardware.efficiency.conv == H100.efficiency.conv
    assert found.hardware.efficiency.network == H100.efficiency.network
    assert "calibrated on" in found.hardware.source


@pytest.mark.parametrize(
    ("degree", "quota", "untold"), [(32, 16, "kernel_us"), (1, 1, "launch_us")], ids=["host-bound", "gpu-bound"]
)
def test_of_two_clocks_the_one_that_never_paces_is_named_and_stays_as_described(counts, degree, quota, untold):
    measurements = [
        CountedTime(
            module=name,
            counts=(operators := counts[name][degree].phase(phase)),
            quota=quota,
            measured_ms=phase_ms(operators, TRUE, quota * H100.sms_per_slot),
        )
        for name in ("image", "audio")
        for phase in Phase
        for _ in range(2)
    ]
    found = calibrate(H100, measurements)
    assert untold in found.untold
    assert getattr(found.hardware, untold) == pytest.approx(getattr(H100, untold))
    if untold == "kernel_us":
        assert found.hardware.launch_us == pytest.approx(TRUE.launch_us, rel=0.05)


def test_calibration_stands_noise_and_an_outlier(counts):
    measurements = made_measurements(counts, TRUE, noise=0.03)
    measurements[5] = dataclasses.replace(measurements[5], measured_ms=50 * measurements[5].measured_ms)
    found = calibrate(H100, measurements)
    assert found.hardware.efficiency.matmul == pytest.approx(0.55, rel=0.15)
    assert found.error_held_out < found.error_before


def test_modules_that_contradict_each_other_or_fit_already_change_nothing(counts):
    """One module is four times as fast as described, the next four times as slow: no factor tells of a third."""
    assert calibrate(H100, made_measurements(counts, H100)).error_before == pytest.approx(0.0, abs=1e-9)
    operators = counts["fusion"][1].forward
    measurements = [
        CountedTime(
            module=module,
            counts=operators,
            quota=quota,
            measured_ms=factor * phase_ms(operators, H100, quota * H100.sms_per_slot),
        )
        for module, factor in zip("abcdef", (4.0, 0.25) * 3, strict=True)
        for quota in (1, 2, 4, 8, 16)
    ]
    found = calibrate(H100, measurements)
    assert (found.freedom, found.hardware) == (NOTHING, H100)
    assert found.error_held_out == found.error_before


def test_a_profile_calibrates_the_modules_that_were_counted_and_too_few_measurements_are_refused(counts):
    profile = profile_of({"image": lambda degree, quota: 10.0 / quota}, num_slots=16)
    measurements = measurements_of(profile, {name: of[1] for name, of in counts.items()})
    assert {(one.module, one.quota) for one in measurements} == {("image", quota) for quota in range(1, 17)}
    assert calibrate(H100, measurements).error_held_out < 1
    with pytest.raises(ValueError, match="needs at least 6 measurements, there are 5"):
        calibrate(H100, measurements[:5])
