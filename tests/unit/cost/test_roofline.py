"""Times of single operators on described devices, by hand."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest

from mosaic.cost.counts import Gemm, Operator, OperatorKind, PhaseCounts, merge_equal
from mosaic.cost.roofline import clocks_of, operator_ms, phase_bandwidth, phase_ms, wave_factor
from mosaic.hardware import Efficiency, find_hardware

PERFECT = dataclasses.replace(
    find_hardware("h100-80g"),
    launch_us=0.0,
    kernel_us=0.0,
    ramp_k=0.0,
    efficiency=Efficiency(matmul=1.0, attention=1.0, conv=1.0, memory=1.0, network=1.0),
)


def operator(kind: OperatorKind = OperatorKind.MEMORY, **changes) -> Operator:
    figures = {"name": "aten.x", "kind": kind, "dtype": "bfloat16", "flops": 0, "read_bytes": 0, "written_bytes": 0}
    return Operator(**(figures | changes))


def test_arithmetic_runs_at_the_peak_of_its_dtype():
    product = operator(OperatorKind.MATMUL, flops=989_400_000_000)
    assert operator_ms(product, PERFECT, 132) == pytest.approx(1.0)
    assert operator_ms(product, PERFECT, 66) == pytest.approx(2.0)
    single = dataclasses.replace(product, dtype="float32")
    assert operator_ms(single, PERFECT, 132) == pytest.approx(989.4 / 66.9)


def test_convolutions_in_single_precision_use_tf32():
    conv = operator(OperatorKind.CONV, flops=494_700_000_000, dtype="float32")
    assert operator_ms(conv, PERFECT, 132) == pytest.approx(1.0)


def test_traffic_runs_at_the_bandwidth_until_few_sms_are_left():
    copy = operator(read_bytes=1_675_000_000, written_bytes=1_675_000_000)
    assert operator_ms(copy, PERFECT, 132) == pytest.approx(1.0)
    assert operator_ms(copy, PERFECT, 66) == pytest.approx(1.0, rel=0.01)
    assert operator_ms(copy, PERFECT, 8) == pytest.approx(3350 / (8 * PERFECT.sm_gb_per_s))


def test_the_slowest_part_counts_and_beginning_kernels_comes_on_top():
    both = operator(OperatorKind.MATMUL, flops=989_400_000_000, read_bytes=6_700_000_000, kernels=2)
    hardware = dataclasses.replace(PERFECT, kernel_us=5.0)
    assert operator_ms(both, hardware, 132) == pytest.approx(2.0 + 0.01)


def run_line(launch_us: float, works_us: Sequence[float]) -> float:
    """The end of the last kernel where each is launched after the one before, and begins after that one has ended."""
    end = 0.0
    for place, work_us in enumerate(works_us, 1):
        end = max(end, place * launch_us) + work_us
    return end / 1e3


def copies(microseconds: float, count: int) -> Operator:
    """Copies that take so long each on a perfect device."""
    return operator(read_bytes=round(3_350_000 * microseconds), calls=count)


@pytest.mark.parametrize("work_us", [1.0, 5.0, 30.0])
def test_a_gpu_works_while_the_host_launches_and_a_kernel_waits_for_both(work_us: float):
    hardware = dataclasses.replace(PERFECT, launch_us=4.0, kernel_us=1.0)
    phase = PhaseCounts(operators=(copies(work_us, 100),))
    clocks = clocks_of(phase, hardware, 132)
    assert clocks.total_ms == pytest.approx(run_line(4.0, [work_us + 1] * 100))
    assert clocks.total_ms == phase_ms(phase, hardware, 132)
    waits = max(0.0, 0.4 - clocks.device_ms)
    assert clocks.launch_share == pytest.approx((waits + 0.1) / clocks.total_ms, abs=0.06)


def test_kernels_of_several_lengths_end_as_in_a_line_where_layers_repeat():
    layer = (3.0, 40.0, 6.0, 2.0, 25.0, 4.0)
    for launch_us in (2.0, 8.0, 13.0, 20.0):
        hardware = dataclasses.replace(PERFECT, launch_us=launch_us)
        phase = PhaseCounts(operators=tuple(copies(work_us, 24) for work_us in layer))
        assert phase_ms(phase, hardware, 132) == pytest.approx(run_line(launch_us, layer * 24), rel=0.05)


def test_in_a_graph_launches_are_nearly_free():
    h100 = find_hardware("h100-80g")
    phase = PhaseCounts(operators=(copies(0.5, 1000),))
    eager, replayed = (clocks_of(phase, hardware, 132) for hardware in (h100, h100.replaying()))
    assert eager.total_ms == pytest.approx(5.0, rel=0.01)  # of one core
    assert replayed.total_ms == pytest.approx(1000 * (0.5 / 0.8 + 1.3) / 1e3, rel=0.01)
    assert eager.launch_share > 0.85


def test_on_the_host_an_operator_is_called_and_then_works():
    host = dataclasses.replace(find_hardware("host"), launch_us=5.0)
    phase = PhaseCounts(operators=(copies(100, 10),))
    clocks = clocks_of(phase, host, host.num_sms)
    assert clocks.total_ms == pytest.approx(0.05 + clocks.device_ms)


PUBLISHED_TFLOPS = {256: 386, 512: 520, 1024: 628, 2048: 705, 4096: 736, 8192: 758, 16384: 766}
"""Products of 8192 x 8192 x k in float16 on an H800: tilelang, benchmark/matmul/README.md."""


@pytest.mark.parametrize("k", PUBLISHED_TFLOPS)
def test_products_with_short_sums_reach_what_was_published(k: int):
    flops = 2 * 8192 * 8192 * k
    product = operator(
        OperatorKind.MATMUL, dtype="float16", flops=flops, gemm=Gemm(m=8192, n=8192, k=k), written_bytes=2 * 8192 * 8192
    )
    reached = flops / operator_ms(product, find_hardware("h800"), 132) / 1e9
    assert reached == pytest.approx(PUBLISHED_TFLOPS[k], rel=0.07)


def test_a_slower_dtype_loses_less_to_short_sums():
    h100 = find_hardware("h100-80g")
    assert h100.ramp_of("bfloat16") == h100.ramp_k
    assert h100.ramp_of("float32") == pytest.approx(h100.ramp_k * 66.9 / 989.4)
    short = Gemm(m=128 * 132, n=128, k=270)
    assert wave_factor(short, 132, 270) == pytest.approx(2.0)
    assert wave_factor(short, 132, 27) == pytest.approx(1.1)


def test_efficiencies_divide_their_part():
    hardware = dataclasses.replace(PERFECT, efficiency=dataclasses.replace(PERFECT.efficiency, matmul=0.5))
    assert operator_ms(operator(OperatorKind.MATMUL, flops=989_400_000_000), hardware, 132) == pytest.approx(2.0)
    assert operator_ms(operator(read_bytes=3_350_000_000), hardware, 132) == pytest.approx(1.0)


def test_an_operator_that_sends_needs_a_link():
    sends = operator(OperatorKind.NETWORK, network_bytes=10**9)
    assert operator_ms(sends, PERFECT, 132, network_gb_per_s=50.0) == pytest.approx(20.0)
    with pytest.raises(ValueError, match=r"aten.x sends 1000000000 bytes to other devices; give a link"):
        operator_ms(sends, PERFECT, 132)


def test_whole_waves_cost_nothing_and_one_tile_more_costs_a_wave():
    whole = Gemm(m=128 * 132, n=128, k=128)
    assert wave_factor(whole, 132) == 1.0
    one_more = Gemm(m=128 * 133, n=128, k=128)
    assert 1.0 < wave_factor(one_more, 132) <= 2 * 132 / 133
    assert wave_factor(one_more, 133) == 1.0


def test_a_small_product_cannot_use_many_sms():
    small = Gemm(m=128, n=128, k=64)
    product = operator(OperatorKind.MATMUL, flops=2 * 128 * 128 * 64, gemm=small)
    # 16 tiles of 32x32 at most
    assert operator_ms(product, PERFECT, 128) == pytest.approx(operator_ms(product, PERFECT, 16))


def test_a_long_sum_is_split_over_sms():
    assert wave_factor(Gemm(m=128, n=128, k=8192), 128) < wave_factor(Gemm(m=128, n=128, k=64), 128)


def test_cores_of_a_host_share_products_evenly():
    host = dataclasses.replace(find_hardware("host"), launch_us=0.0, num_sms=4)
    product = operator(OperatorKind.MATMUL, flops=10**9, gemm=Gemm(m=1, n=1, k=1))
    assert operator_ms(product, host, 2) == pytest.approx(2 * operator_ms(product, host, 4))


def test_bandwidth_is_a_share_of_the_device():
    copy = PhaseCounts(operators=(operator(read_bytes=3_350_000_000),))
    assert phase_bandwidth(copy, PERFECT, 132) == pytest.approx(1.0)
    assert phase_bandwidth(copy, PERFECT, 8) == pytest.approx(8 * PERFECT.sm_gb_per_s / 3350)
    product = PhaseCounts(operators=(operator(OperatorKind.MATMUL, flops=10**12, read_bytes=10**6),))
    assert 0 < phase_bandwidth(product, PERFECT, 132) < 0.01
    assert phase_bandwidth(PhaseCounts(), PERFECT, 132) == 0.0


def test_equal_operators_are_put_together():
    one, other = operator(), operator(flops=1)
    merged = merge_equal((one, other, one))
    assert [(entry.flops, entry.calls) for entry in merged] == [(0, 2), (1, 1)]
