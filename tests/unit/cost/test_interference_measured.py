"""Interference from measured pairs, and the cost model that carries it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from planning_cases import flat, pair, profile_of

from mosaic.cost import CostModel, MeasuredInterference
from mosaic.graph import ModuleGraph, ModuleNode
from mosaic.profile import ModuleMemory, Phase

F, B = Phase.FORWARD, Phase.BACKWARD


def extra_share(measured: MeasuredInterference, module: str, beside: list[tuple[str, int]], quota: int = 1) -> float:
    return measured.extra_ms(module, F, quota=quota, alone_ms=1.0, beside=beside)


def test_a_measured_pair_loses_its_share_in_its_phase_only() -> None:
    measured = MeasuredInterference([pair("a", "b", 1.5, phase=F), pair("a", "b", 1.1, phase=B)])
    assert measured.extra_ms("a", F, quota=1, alone_ms=4.0, beside=[("b", 1)]) == pytest.approx(2.0)
    assert measured.extra_ms("a", B, quota=1, alone_ms=4.0, beside=[("b", 1)]) == pytest.approx(0.4)


def test_an_unmeasured_pair_takes_the_median_of_its_phase() -> None:
    pairs = [pair("a", "b", 1.2, phase=F), pair("b", "a", 1.4, phase=F), pair("a", "b", 1.0, phase=B)]
    assert extra_share(MeasuredInterference(pairs), "b", [("c", 1)]) == pytest.approx(0.3)


def test_cost_model_counts_resident_kept_and_peak_memory() -> None:
    base = profile_of(
        {"m": flat(1)},
        num_slots=1,
        memory=[ModuleMemory(module="m", resident_bytes=1000, activation_bytes=100, lane_bytes=7)],
    )
    peaks = {F: 130, B: 50}
    profile = replace(base, samples=tuple(replace(s, peak_bytes=peaks[s.phase]) for s in base.samples))
    assert CostModel.from_profile(profile).memory_bytes("m", 1) == 1000 + 7 + 100 + 50


def test_a_frozen_module_without_backward_samples_takes_no_time_there() -> None:
    base = profile_of({"m": flat(2)}, num_slots=1)
    forward_only = tuple(s for s in base.samples if s.phase is F)
    frozen = ModuleGraph(modules=(ModuleNode(name="m", trainable=False),))
    cost = CostModel.from_profile(replace(base, graph=frozen, samples=forward_only))
    assert cost.time_ms("m", B, 1, 1) == 0.0
    assert cost.quotas("m") == (1,)
