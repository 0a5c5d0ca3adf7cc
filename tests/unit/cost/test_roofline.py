"""Times of single operators on described devices, by hand."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest

from mosaic.cost.counts import Operator, OperatorKind, PhaseCounts
from mosaic.cost.roofline import operator_ms, phase_ms
from mosaic.hardware import Efficiency, find_hardware

PERFECT = dataclasses.replace(
    find_hardware("h100-80g"),
    launch_us=0.0,
    kernel_us=0.0,
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
    assert phase_ms(phase, hardware, 132) == pytest.approx(run_line(4.0, [work_us + 1] * 100))


def test_products_of_usual_lengths_reach_what_was_published():
    # 8192 x 8192 x k in float16 on an H800: 628 and 705 TF at k = 1024 and 2048 (tilelang, benchmark/matmul/README.md)
    product = operator(OperatorKind.MATMUL, dtype="float16", flops=2 * 8192 * 8192 * 2048)
    assert 628 <= product.flops / operator_ms(product, find_hardware("h800"), 132) / 1e9 <= 705
