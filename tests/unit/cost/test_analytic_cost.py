"""The analytic cost model of counted modules."""

from __future__ import annotations

import dataclasses

import pytest
from analytic_cases import pod_counts

from mosaic.cost.analytic_cost import AnalyticCost
from mosaic.cost.communication import gradient_sum
from mosaic.cost.counts import Operator, OperatorKind
from mosaic.cost.interference import NoInterference
from mosaic.cost.roofline import operator_ms, phase_ms
from mosaic.hardware import find_cluster, find_hardware
from mosaic.profile import Phase

H100 = find_hardware("h100-80g")
POD = find_cluster("h100-80g", 32)


def test_gradients_are_reduced_in_backward():
    counts = pod_counts()
    cost = AnalyticCost(counts, POD)
    alone = cost.time_ms("image", Phase.BACKWARD, 1, 16)
    assert cost.communication_ms("image", 1) == 0
    assert alone == pytest.approx(phase_ms(counts["image"][1].backward, H100, 128))
    sent = cost.communication_ms("image", 8)
    assert sent == gradient_sum(counts["image"][8].memory.gradient_bytes, 8, POD).time_ms > 0
    assert cost.time_ms("image", Phase.BACKWARD, 8, 16) == pytest.approx(
        phase_ms(counts["image"][8].backward, H100, 128) + sent
    )
    assert cost.communication_ms("image", 32) > sent  # between nodes
    assert cost.communication_ms("text", 8) == 0  # frozen


def test_contention_for_memory_is_assumed_unless_it_is_switched_off():
    counts = pod_counts()
    hungry = dataclasses.replace(H100, memory_gb_per_s=300.0, sm_gb_per_s=4.0, launch_us=0.0)
    alone = AnalyticCost(counts, hungry, interference=NoInterference())
    assumed = AnalyticCost(counts, hungry)
    own, other = (assumed.bandwidth(name, Phase.FORWARD, 8) for name in ("image", "audio"))
    time_ms = alone.time_ms("image", Phase.FORWARD, 1, 8)
    beside = [("audio", 8)]
    assert alone.placed_ms("image", Phase.FORWARD, 1, 8, beside=beside) == time_ms
    slower = assumed.placed_ms("image", Phase.FORWARD, 1, 8, beside=beside) / time_ms
    # Between what only traffic that meets would cost and what standing still would.
    assert slower == pytest.approx(1 + (own * other * other) ** 0.5)
    assert 1 + own * other < slower < 1 + other


def test_products_of_usual_lengths_reach_what_was_published():
    # 8192 x 8192 x k in float16 on an H800: 628 and 705 TF at k = 1024 and 2048 (tilelang, benchmark/matmul/README.md)
    flops = 2 * 8192 * 8192 * 2048
    product = Operator(
        name="aten.mm", kind=OperatorKind.MATMUL, dtype="float16", flops=flops, read_bytes=0, written_bytes=0
    )
    assert 628 <= flops / operator_ms(product, find_hardware("h800"), 132) / 1e9 <= 705
