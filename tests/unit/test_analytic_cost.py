"""The analytic cost model before the solver, and its calibration."""

from __future__ import annotations

import dataclasses
import math
import statistics
import time

import pytest
import torch
from torch import nn

from mosaic.artifact import load, save
from mosaic.cost.analytic import count_degrees, count_module
from mosaic.cost.analytic_cost import AnalyticCost
from mosaic.cost.calibration import Calibrated, Measurement, calibrate, measurements_of
from mosaic.cost.counts import ModuleCounts, PhaseCounts
from mosaic.cost.interference import MeasuredInterference
from mosaic.cost.roofline import phase_ms
from mosaic.errors import InfeasibleError, InvalidPlanError, InvalidProfileError
from mosaic.hardware import Hardware, find_cluster, find_hardware
from mosaic.profile import Phase
from mosaic.solver import solve
from tests.planning_cases import graph_of, pair, profile_of

H100 = find_hardware("h100-80g")
POD = find_cluster("h100-80g", 32)


def encoder(width: int, layers: int) -> nn.Module:
    layer = nn.TransformerEncoderLayer(width, 8, 4 * width, batch_first=True)
    return nn.TransformerEncoder(layer, layers, enable_nested_tensor=False).bfloat16()


@pytest.fixture(scope="module")
def counts() -> dict[str, dict[int, ModuleCounts]]:
    with torch.device("meta"):
        modules = {
            "image": (encoder(512, 2), torch.empty(64, 196, 512)),
            "audio": (encoder(256, 1), torch.empty(64, 300, 256)),
            "text": (encoder(256, 1).requires_grad_(False), torch.empty(64, 64, 256)),
            "fusion": (nn.Linear(512, 512).bfloat16(), torch.empty(64, 512, requires_grad=True)),
        }
        return {
            name: count_degrees(module, (given.bfloat16(),), degrees=(1, 2, 8, 32))
            for name, (module, given) in modules.items()
        }


@pytest.fixture
def cost(counts) -> AnalyticCost:
    return AnalyticCost(counts, POD)


GRAPH = graph_of(["image", "audio", "text", "fusion"], [("image", "fusion"), ("audio", "fusion"), ("text", "fusion")])


def test_thirty_two_gpus_are_planned_without_one(cost):
    plan = solve(GRAPH, cost, H100.device(), num_devices=POD.num_devices)
    plan.check_covers(GRAPH)
    assert plan.num_devices == 32
    assert plan.profile is None
    assert 0 < plan.predicted_ms <= plan.sequential_ms
    assert cost.source == "predicted"


def test_one_device_is_planned_at_degree_one(counts):
    cost = AnalyticCost(counts, H100)
    assert cost.degrees("image") == (1,)
    plan = solve(GRAPH, cost, H100.device())
    assert {placement.degree for placement in plan.placements} == {1}


def test_degrees_above_the_cluster_are_not_offered(counts):
    assert AnalyticCost(counts, find_cluster("h100-80g", 8)).degrees("image") == (1, 2, 8)
    assert AnalyticCost(counts, POD).degrees("image") == (1, 2, 8, 32)


def test_a_module_that_does_not_fit_is_named(counts):
    small = dataclasses.replace(H100, memory_bytes=10**6)
    with pytest.raises(InfeasibleError, match="image"):
        solve(GRAPH, AnalyticCost(counts, small), small.device())


def test_gradients_are_reduced_in_backward_over_the_slowest_link(cost, counts):
    alone = cost.time_ms("image", Phase.BACKWARD, 1, 16)
    assert cost.communication_ms("image", 1) == 0
    assert alone == pytest.approx(phase_ms(counts["image"][1].backward, H100, 128))
    sent = cost.communication_ms("image", 8)
    assert sent == POD.all_reduce_ms(counts["image"][8].memory.gradient_bytes, 8) > 0
    assert cost.time_ms("image", Phase.BACKWARD, 8, 16) == pytest.approx(
        phase_ms(counts["image"][8].backward, H100, 128) + sent
    )
    assert cost.communication_ms("image", 32) > sent  # between nodes
    assert cost.communication_ms("text", 8) == 0  # frozen


def test_a_frozen_module_has_no_backward(cost):
    assert cost.time_ms("text", Phase.BACKWARD, 1, 4) == 0.0
    assert cost.bandwidth("text", Phase.BACKWARD, 1, 4) == 0.0


def test_memory_includes_the_lane(cost, counts):
    assert cost.memory_bytes("image", 2) == counts["image"][2].memory.total_bytes + H100.lane_bytes
    assert cost.memory_bytes("image", 8) < cost.memory_bytes("image", 1)


def test_neighbours_are_the_interference_models_matter(counts):
    slow = MeasuredInterference([pair("image", "audio", 1.5, phase=Phase.FORWARD, quota=8, beside_quota=8)])
    cost = AnalyticCost(counts, POD, interference=slow)
    alone = cost.time_ms("image", Phase.FORWARD, 1, 8)
    assert cost.placed_ms("image", Phase.FORWARD, 1, 8) == alone
    assert cost.placed_ms("image", Phase.FORWARD, 1, 8, beside=[("audio", 8)]) == pytest.approx(1.5 * alone)


def test_what_was_not_counted_is_refused(cost):
    with pytest.raises(InvalidProfileError, match=r"no module 'video'.*it knows image, audio, text, fusion"):
        cost.time_ms("video", Phase.FORWARD, 1, 1)
    with pytest.raises(ValueError, match="counted at degrees 1, 2, 8, 32, not at 3"):
        cost.memory_bytes("image", 3)
    with pytest.raises(ValueError, match="a quota of 17 slots of h100-80g is not possible; use 1 to 16"):
        cost.time_ms("image", Phase.FORWARD, 1, 17)
    with pytest.raises(ValueError, match="no counts of image"):
        AnalyticCost({"image": {}}, POD)


def test_unknown_arithmetic_is_reported(counts):
    strange = dataclasses.replace(counts["fusion"][1], uncounted=("my.op",))
    assert AnalyticCost(counts, POD).uncounted == {}
    assert AnalyticCost({"fusion": {1: strange}}, POD).uncounted == {"fusion": ("my.op",)}


def test_a_plan_needs_only_the_file_of_counts(counts, tmp_path):
    save(counts["image"][8], tmp_path / "image.json")
    again = load(ModuleCounts, tmp_path / "image.json")
    assert AnalyticCost({"image": {8: again}}, POD).time_ms("image", Phase.FORWARD, 8, 4) == AnalyticCost(
        counts, POD
    ).time_ms("image", Phase.FORWARD, 8, 4)


def test_the_fingerprint_follows_the_description(counts, cost):
    other = AnalyticCost(counts, find_cluster("h200", 32))
    assert cost.fingerprint == AnalyticCost(counts, POD).fingerprint != other.fingerprint


# Calibration.

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
    assert found.error_after < found.error_before
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
